"""``metrics.jsonl``, one JSON object per optimiser step, and ``evaluation.jsonl``, one per evaluation. A resumed run
drops what lies beyond its checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Literal

from etils import epath

from mwjax.train import whole_file

FILE = "metrics.jsonl"
EVALUATION = "evaluation.jsonl"


def append(run_dir: epath.PathLike, row: Mapping[str, Any], file: str = FILE) -> None:
    """Adds one row. Numbers JSON cannot write (NaN, infinity) become null."""
    with (epath.Path(run_dir) / file).open("a") as out:
        out.write(json.dumps({key: _finite(value) for key, value in row.items()}) + "\n")


def read(run_dir: epath.PathLike, file: str = FILE) -> list[dict[str, Any]]:
    """All rows; a last line that a killed run left half written is not one."""
    path = epath.Path(run_dir) / file
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def scores(run_dir: epath.PathLike, name: Literal["loss", "evaluation_loss"]) -> dict[int, float]:
    """Step -> its training loss, or the loss on held-out rollouts of the weights after it; lower is better."""
    rows = read(run_dir, FILE if name == "loss" else EVALUATION)
    return {row["step"]: row["loss"] for row in rows if row.get("loss") is not None}


def truncate(run_dir: epath.PathLike, step: int, file: str = FILE) -> None:
    """Keeps the rows of steps up to ``step``: what followed is about to be computed again."""
    path = epath.Path(run_dir) / file
    if path.exists():
        kept = [row for row in read(run_dir, file) if row["step"] <= step]
        whole_file.write(path, "".join(json.dumps(row) + "\n" for row in kept))


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
