"""Files that a killed run leaves either as they were or as they should be, never half written."""

from __future__ import annotations

from etils import epath


def write(path: epath.PathLike, text: str) -> None:
    """Puts ``text`` where ``path`` is in one step."""
    target = epath.Path(path)
    fresh = target.with_name(target.name + ".tmp")
    fresh.write_text(text)
    fresh.replace(target)
