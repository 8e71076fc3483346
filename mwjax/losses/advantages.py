"""Group advantages over rollouts, and the weights and denominator that average token losses. Numpy, on the host."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal, get_args

import numpy as np

from mwjax.losses.errors import LossError

AdvantageKind = Literal["grpo", "dr_grpo", "rloo"]
Aggregation = Literal["token_mean_global", "token_mean_group", "sequence_mean", "constant"]

STD_EPSILON = 1e-6  # added to the standard deviation, as in veRL and slime


def group_advantages(
    rewards: Sequence[float | None] | np.ndarray,
    groups: Sequence[Hashable] | np.ndarray,
    kind: AdvantageKind = "grpo",
    *,
    ids: Sequence[str] | None = None,
) -> np.ndarray:
    """One advantage per rollout from the rewards of its group, float64 [R]: before any spreading over turns or views.

    rewards [R]; groups [R], any hashable labels (rollouts of one prompt share one); ids [R] name rollouts in messages.
    ``grpo``: (r - mean) / (sample standard deviation + 1e-6) (arXiv:2402.03300); ``dr_grpo``: r - mean
    (arXiv:2503.20783; MemAgent); ``rloo``: r - mean of the others (arXiv:2402.14740). A group of one rollout, or of
    equal rewards, gives exactly 0. Raises LossError for a reward that is missing (None, NaN) or infinite.
    """
    if kind not in get_args(AdvantageKind):
        raise LossError(f"advantage must be one of {', '.join(get_args(AdvantageKind))}; got {kind!r}")
    values = np.array([np.nan if r is None else r for r in rewards], np.float64)
    if len(groups) != values.size:
        raise LossError(f"as many groups as rewards are needed; got {len(groups)} and {values.size}")
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        name = f"{ids[bad[0]]!r}" if ids is not None else f"number {bad[0]}"
        raise LossError(
            f"rollout {name} has no usable reward (got {rewards[bad[0]]}), as {bad.size} of {values.size} in this "
            "mini-batch: policy gradients need a finite reward for every rollout. Add it to the record, or drop the "
            "rollout"
        )
    group, count = _numbered(groups)
    mean = np.bincount(group, values, count.size) / count
    low, high = np.full(count.size, np.inf), np.full(count.size, -np.inf)
    np.minimum.at(low, group, values)
    np.maximum.at(high, group, values)
    centred = np.where((low == high)[group], 0.0, values - mean[group])
    others = np.maximum(count - 1, 1)
    if kind == "grpo":
        std = np.sqrt(np.bincount(group, centred**2, count.size) / others)
        return centred / (std[group] + STD_EPSILON)
    if kind == "rloo":
        return centred * (count / others)[group]
    return centred


def edge_weights(
    rollout_of_edge: np.ndarray,
    group_of_rollout: Sequence[Hashable] | np.ndarray,
    kind: Aggregation = "token_mean_global",
    *,
    tokens_per_rollout: int | None = None,
) -> tuple[np.ndarray, float]:
    """Weight of each loss token of a whole mini-batch, float64 [N], and the denominator of the weighted sum.

    rollout_of_edge int [N] indexes group_of_rollout [R]. Pass all edges of the mini-batch, of all devices: the answer
    then depends on no sharding.
    ``token_mean_global``: every token alike, over N. ``token_mean_group``: the mean over groups of a group's token
    mean.
    ``sequence_mean``: the mean over rollouts of a rollout's token mean. ``constant``: every token alike, over
    R x ``tokens_per_rollout`` (Dr.GRPO's constant normaliser). Groups and rollouts without a loss token count in
    ``constant`` only. The denominator is 0 when there is no loss token: skip such a step.
    """
    rollout = np.asarray(rollout_of_edge)
    rollouts = len(group_of_rollout)
    if rollout.size and not 0 <= rollout.min() <= rollout.max() < rollouts:
        raise LossError(f"edges name rollouts {rollout.min()} to {rollout.max()}, but the mini-batch holds {rollouts}")
    if kind == "token_mean_global":
        return np.ones(rollout.size), float(rollout.size)
    if kind == "constant":
        if tokens_per_rollout is None or tokens_per_rollout < 1:
            raise LossError(f"aggregation 'constant' needs tokens_per_rollout of at least 1; got {tokens_per_rollout}")
        return np.ones(rollout.size), float(rollouts * tokens_per_rollout)
    if kind == "sequence_mean":
        unit = rollout
    elif kind == "token_mean_group":
        unit = _numbered(group_of_rollout)[0][rollout]
    else:
        raise LossError(f"aggregation must be one of {', '.join(get_args(Aggregation))}; got {kind!r}")
    count = np.bincount(unit)
    return 1.0 / count[unit], float(np.count_nonzero(count))


def _numbered(labels: Sequence[Hashable] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Labels as numbers in order of first appearance, and how often each occurs."""
    seen: dict[Hashable, int] = {}
    numbers = np.array([seen.setdefault(label, len(seen)) for label in labels], np.intp)
    return numbers, np.bincount(numbers, minlength=len(seen))
