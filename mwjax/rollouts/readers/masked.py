"""Which of a row's ids were sampled, from a mask."""

from __future__ import annotations

from typing import Any

import numpy as np

from mwjax.rollouts.errors import RecordError
from mwjax.rollouts.fields import described


def sampled_runs(mask: Any, count: int, field: str) -> list[tuple[int, int]]:
    """Half-open runs of sampled ids of a mask of 0 and 1 (or booleans), one entry for each of ``count`` ids.

    Raises RecordError.
    """
    if not isinstance(mask, (list, tuple, np.ndarray)):
        raise RecordError(field, f"is {described(mask)}, must be a list of 0 and 1")
    if len(mask) != count:
        raise RecordError(field, f"has {len(mask)} entries for {count} ids")
    for place, each in enumerate(mask):
        if each not in (0, 1):
            raise RecordError(f"{field}[{place}]", f"is {described(each)}, must be 0 or 1")
    edges = np.flatnonzero(np.diff(np.concatenate([[0], np.asarray(mask, np.int8), [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist()))
