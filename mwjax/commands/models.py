"""Names of models on the command line."""

from __future__ import annotations

import os


def model_folder(name: str) -> str:
    """``smollm2`` as the folder it is converted into; anything else as it is."""
    if name != "smollm2" or os.path.isdir(name):
        return name
    from mwjax.engine import load_smollm2

    return str(load_smollm2())
