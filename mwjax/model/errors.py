"""What is raised when a model's files cannot be used."""

from __future__ import annotations

import os


class ModelFilesError(ValueError):
    """A model folder cannot be read or written. ``problems`` lists everything found wrong, one line each."""

    def __init__(self, folder: os.PathLike[str] | str, problems: list[str]):
        self.problems = problems
        shown = problems[:40] + ([f"... and {len(problems) - 40} more"] if len(problems) > 40 else [])
        super().__init__("\n  ".join([f"model folder {os.fspath(folder)}:", *shown]))
