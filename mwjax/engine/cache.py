"""Where converted and downloaded models are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The folder for derived files: ``$MWJAX_CACHE``, else ``$XDG_CACHE_HOME/mwjax``, else ``~/.cache/mwjax``."""
    if chosen := os.environ.get("MWJAX_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mwjax"
