"""Equality of rollouts by value: the dataclasses hold arrays, so ``==`` compares identity."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import numpy as np

from mwjax.rollouts.record import Edit, Rollout, Turn


def rollouts_equal(a: Rollout, b: Rollout) -> bool:
    """True if both say the same: ids equal, log-probs equal to the bit, meta equal as JSON."""
    return (
        (a.id, a.group, a.reward) == (b.id, b.group, b.reward)
        and len(a.turns) == len(b.turns)
        and len(a.edits) == len(b.edits)
        and all(map(_same, a.turns, b.turns))
        and all(map(_same, a.edits, b.edits))
        and json.dumps(a.meta, sort_keys=True) == json.dumps(b.meta, sort_keys=True)
    )


def _same(a: Turn | Edit, b: Turn | Edit) -> bool:
    return all(_same_entry(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))


def _same_entry(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        kind = np.float64 if "f" in (a.dtype.kind, b.dtype.kind) else np.int64
        return a.shape == b.shape and a.astype(kind).tobytes() == b.astype(kind).tobytes()
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return False
    return a == b
