"""``metrics.jsonl``, one JSON object per optimiser step, and ``evaluation.jsonl``, one per evaluation. A resumed run
drops what lies beyond its checkpoint."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from mwjax.rollouts.storage import is_local
from mwjax.train import whole_file

FILE = "metrics.jsonl"
EVALUATION = "evaluation.jsonl"
PAUSE = 30.0  # seconds between two writes of a file that cannot grow


class Kept:
    """The rows of a run, a list that it adds to, and their file. A local file grows with every row. An object in a
    bucket cannot (gcsfs empties one that is opened to append): it is written anew, now and then."""

    def __init__(self, run_dir: epath.PathLike, rows: Sequence[Mapping[str, Any]], file: str = FILE) -> None:
        self._run_dir, self._rows, self._file = run_dir, rows, file
        self._behind, self._written = False, time.monotonic()

    def added(self) -> None:
        """The last of the rows is new."""
        if is_local(self._run_dir):
            append(self._run_dir, self._rows[-1], self._file)
            return
        self._behind = True
        if time.monotonic() - self._written > PAUSE:
            self.keep()

    def keep(self) -> None:
        """Returns when all rows are in the file."""
        if self._behind:
            write(self._run_dir, self._rows, self._file)
            self._behind, self._written = False, time.monotonic()


def append(run_dir: epath.PathLike, row: Mapping[str, Any], file: str = FILE) -> None:
    """Adds one row to a local file. Numbers JSON cannot write (NaN, infinity) become null. Raises OSError with the
    file's name."""
    path = epath.Path(run_dir) / file
    try:
        with path.open("a") as out:
            out.write(_line(row))
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error  # of a full disk


def write(run_dir: epath.PathLike, rows: Sequence[Mapping[str, Any]], file: str = FILE) -> None:
    """Puts ``rows`` in place of all there are, at once."""
    whole_file.write(epath.Path(run_dir) / file, "".join(map(_line, rows)))


def read(run_dir: epath.PathLike, file: str = FILE, until: int | None = None) -> list[dict[str, Any]]:
    """All rows, or those of steps up to ``until``; a last line that a killed run left half written is not one."""
    path = epath.Path(run_dir) / file
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return [row for row in rows if until is None or row["step"] <= until]


def scores(rows: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Step -> loss, of the rows that have one: a step's training loss, or the loss on held-out rollouts of the weights
    after it. Lower is better. Of evaluations, those of the newest one's rollouts: losses on others do not compare."""
    held_out = rows[-1].get("contents") if rows else None
    return {row["step"]: row["loss"] for row in rows if row.get("loss") is not None and row.get("contents") == held_out}


def truncate(run_dir: epath.PathLike, step: int, file: str = FILE) -> None:
    """Keeps the rows of steps up to ``step``: what followed is about to be computed again."""
    if (epath.Path(run_dir) / file).exists():
        write(run_dir, read(run_dir, file, step), file)


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps({key: _finite(value) for key, value in row.items()}) + "\n"


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
