"""Files that a killed run leaves either as they were or as they should be, never half written."""

from __future__ import annotations

import jax
from etils import epath


def write(path: epath.PathLike, text: str) -> None:
    """Puts ``text`` where ``path`` is in one step. Several processes may do so at once."""
    target = epath.Path(path)
    fresh = target.with_name(f"{target.name}.tmp{jax.process_index() or ''}")
    fresh.write_text(text)
    fresh.replace(target)
