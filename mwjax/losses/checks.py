"""Refuse, before a step runs, edges that no loss can be formed from."""

from __future__ import annotations

import numpy as np

from mwjax.losses.errors import LossError
from mwjax.losses.total import LossConfig
from mwjax.tree.rows import Edges


def check_edges(edges: Edges, config: LossConfig, *, vocabulary: int | None = None) -> None:
    """Raise LossError for the first active edge that ``config`` cannot use; numpy, on the host, once per batch built.

    Refused: a weight or temperature that is not finite, a temperature not above 0, a target outside the vocabulary,
    and for policy gradients an advantage that is not finite, no behaviour log-prob (neither ``old_logprob`` nor
    ``rollout_logprob``), or no reference log-prob while the KL coefficient is not 0.
    """
    active = np.asarray(edges.weight) != 0
    temperature, target = np.asarray(edges.temperature), np.asarray(edges.target)
    _refuse(edges, active & ~np.isfinite(edges.weight), "weight is not finite", "check the aggregation weights")
    _refuse(
        edges, active & ~((temperature > 0) & np.isfinite(temperature)), "temperature is not above 0",
        "score greedy samples with raw log-probs at temperature 1",
    )  # fmt: skip
    if vocabulary is not None:
        outside = (target < 0) | (target >= vocabulary)
        _refuse(
            edges, active & outside, f"target is outside the vocabulary of {vocabulary}", "use the model's tokenizer"
        )
    if config.task == "sft":
        return
    policy = config.policy_gradient
    _refuse(edges, active & ~np.isfinite(edges.advantage), "advantage is missing", "compute advantages before packing")
    unknown = np.isnan(edges.old_logprob) & np.isnan(edges.rollout_logprob)
    _refuse(
        edges, active & unknown, "behaviour log-prob is missing",
        "record log-probs at decode time, or score the exact views with the old policy first",
    )  # fmt: skip
    if policy.kl_coefficient != 0.0:
        _refuse(
            edges, active & np.isnan(edges.ref_logprob), "reference log-prob is missing",
            "score the rows with the reference policy, or set kl_coefficient to 0",
        )  # fmt: skip


def _refuse(edges: Edges, bad: np.ndarray, reason: str, remedy: str) -> None:
    if not bad.any():
        return
    first = tuple(int(i[0]) for i in np.nonzero(bad))
    rollout, turn, index = (int(np.asarray(a)[first]) for a in (edges.rollout, edges.turn, edges.index))
    raise LossError(
        f"rollout number {rollout} of the mini-batch, turn {turn}, completion token {index}: {reason} "
        f"({int(bad.sum())} such edges of {bad.size}); {remedy}"
    )
