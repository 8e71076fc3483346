"""What the recorder says while it works."""

from __future__ import annotations

import contextlib
import sys


def tell(text: str) -> None:
    """A line on stderr. Nobody may listen any more: that is no reason to stop recording."""
    with contextlib.suppress(OSError, ValueError):
        print(f"mwjax: {text}", file=sys.stderr, flush=True)
