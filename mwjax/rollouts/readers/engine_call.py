"""One call of an engine with its token ids, as logs of calls have it: what ``chains`` makes rollouts of."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from mwjax.rollouts.readers.reader import DEFAULT_SAMPLING
from mwjax.rollouts.readers.said import Asked, Said
from mwjax.rollouts.record import Sampling


@dataclass(frozen=True, eq=False)
class Call:
    """prompt_ids, completion_ids: int32; logprobs: float64 or None, as in a Turn.

    ``record``: number of its record in the file, and ``line`` the line of it, both from 1. ``time``: when it began;
    calls are ordered by it, then by record. ``identity``: equal for two records of one response, None where a log does
    not tell. ``asked`` and ``answer`` are None where the log has no messages. ``cut_off``: the answer broke off before
    its end, so the harness did not act on it.
    """

    record: int
    line: int
    prompt_ids: np.ndarray
    completion_ids: np.ndarray
    logprobs: np.ndarray | None = None
    sampling: Sampling = DEFAULT_SAMPLING
    finish_reason: str | None = None
    policy_version: int | None = None
    time: float = 0.0
    identity: Hashable = None
    asked: Asked | None = None
    answer: Said | None = None
    cut_off: bool = False
    trainable: bool = True
