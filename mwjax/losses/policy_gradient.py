"""Policy-gradient surrogates of the GRPO family: one function, one frozen config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from mwjax.losses.logprobs import EdgeScores
from mwjax.losses.masking import active, behaviour_logprob, only, weighted_sum
from mwjax.losses.metrics import Metrics, join, ratio_metrics, reference_metrics
from mwjax.tree.rows import Edges

Algorithm = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo"]
Estimator = Literal["k1", "k2", "k3"]
Unit = Literal["rollout", "view"]

# Log-ratios are cut here before exp() inside surrogates only, so that no float32 overflows. Beyond it, which is a ratio
# of 5e8, an edge has no gradient. Metrics see the raw log-ratios.
LARGEST_LOG_RATIO = 20.0


@dataclass(frozen=True)
class PolicyGradientConfig:
    """Which surrogate, and its coefficients. The defaults are MemoryWalker's (section 5 of its settings).

    algorithm: ``grpo``, ``dr_grpo`` and ``dapo`` share PPO's clipped per-token surrogate and differ in advantages,
        weights and clip (see `recipes`); ``gspo`` takes the ratio of a whole unit (GSPO, arXiv:2507.18071); ``cispo``
        weights the log-prob with the clipped ratio under a stop-gradient (MiniMax-M1, arXiv:2506.13585).
    clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
    dual_clip: for negative advantages the ratio is cut at this value (Ye et al. 2020, arXiv:1912.09729); None is off.
    kl_coefficient, kl_estimator: penalty against the reference, per token; k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1
        (the "low-variance" one) with d = log p_ref - log p.
    entropy_coefficient: weight of the entropy bonus.
    unit: what a ``gspo`` ratio is the geometric mean over: the tokens of a rollout, or of one branch view of it.
    """

    algorithm: Algorithm = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    kl_coefficient: float = 0.001
    kl_estimator: Estimator = "k3"
    entropy_coefficient: float = 0.0
    unit: Unit = "rollout"

    def __post_init__(self) -> None:
        for name, allowed in (("algorithm", Algorithm), ("kl_estimator", Estimator), ("unit", Unit)):
            if getattr(self, name) not in get_args(allowed):
                raise ValueError(f"{name} must be one of {', '.join(get_args(allowed))}; got {getattr(self, name)!r}")
        if not 0.0 <= self.clip_low <= 1.0 or self.clip_high < 0.0:
            raise ValueError(
                f"clip_low must be in [0, 1] and clip_high not negative; got {self.clip_low}, {self.clip_high}"
            )
        if self.dual_clip is not None and self.dual_clip <= 1.0:
            raise ValueError(
                f"dual_clip must be larger than 1 (3.0 is usual), or null to switch it off; got {self.dual_clip}"
            )
        if self.dual_clip is not None and self.algorithm == "cispo":
            raise ValueError("dual_clip does not apply to cispo, whose clipped ratio has no gradient; set it to null")


def policy_gradient_loss(
    scores: EdgeScores, edges: Edges, config: PolicyGradientConfig, *, unit_log_ratio: jax.Array | None = None
) -> tuple[jax.Array, Metrics]:
    """The numerator ``sum of weight x (-surrogate + KL penalty - entropy bonus)`` over active edges, and metric sums.

    scores and edges [B, E]; the caller divides once by the global denominator. Ratios are against `behaviour_logprob`;
    an edge with no known behaviour log-prob counts as exactly on-policy (ratio 1, gradient kept) and in the metric
    ``behaviour_unknown``; one without a reference log-prob gets no KL penalty and counts in ``reference_unknown``
    (`checks.check_edges` refuses both before a run). A masked edge has ratio exactly 1 and gradient exactly 0.

    gspo: a unit's tokens must all lie in this batch (and on this device inside ``shard_map``); otherwise compute
    ``unit_log_ratio`` [B, E], every edge's mean raw log-ratio over its unit, beforehand with `edge_log_ratio` and
    `unit_means` over all of them. Values are the unit's; the gradient goes straight through to each token's own
    log-prob, as in GSPO-token, which with ``sequence_mean`` weights is GSPO's gradient.
    """
    mask = active(edges)
    log_ratio, behaviour_known = _log_ratio(scores.logprob, edges, mask)
    if config.algorithm == "gspo":
        if unit_log_ratio is None:
            view = edges.view if config.unit == "view" else None
            unit_log_ratio = unit_means(log_ratio, mask, edges.rollout, view)
        # Zero in value, the token's own log-prob in gradient.
        straight_through = log_ratio - jax.lax.stop_gradient(log_ratio)
        log_ratio = only(mask, jax.lax.stop_gradient(unit_log_ratio)) + straight_through
    ratio = jnp.exp(jnp.minimum(log_ratio, LARGEST_LOG_RATIO))
    advantage = only(mask, edges.advantage)
    surrogate, clipped = _surrogate(ratio, advantage, only(mask, scores.logprob), config)
    loss = -surrogate

    reference_known = mask & ~jnp.isnan(jnp.asarray(edges.ref_logprob))
    to_reference = only(reference_known, edges.ref_logprob) - only(reference_known, scores.logprob)
    if config.kl_coefficient != 0.0:
        loss = loss + config.kl_coefficient * kl_estimate(to_reference, config.kl_estimator)
    if config.entropy_coefficient != 0.0:
        loss = loss - config.entropy_coefficient * only(mask, scores.entropy)

    unknown = (mask & ~behaviour_known).sum().astype(loss.dtype)
    metrics = join(
        ratio_metrics(mask, jnp.exp(log_ratio), clipped),
        reference_metrics(reference_known, to_reference),
        Metrics({"behaviour_unknown": unknown}, {}),
    )
    return weighted_sum(mask, edges.weight, loss), metrics


def edge_log_ratio(logprob: jax.Array, edges: Edges) -> jax.Array:
    """Raw log-ratio policy / behaviour [B, E]: exactly 0 for masked edges and for unknown behaviour log-probs."""
    return _log_ratio(logprob, edges, active(edges))[0]


def _log_ratio(logprob: jax.Array, edges: Edges, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    behaviour = behaviour_logprob(edges)
    known = mask & ~jnp.isnan(behaviour)
    logprob = only(mask, logprob)
    return logprob - jnp.where(known, behaviour, jax.lax.stop_gradient(logprob)), known


def _surrogate(
    ratio: jax.Array, advantage: jax.Array, logprob: jax.Array, config: PolicyGradientConfig
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The objective to maximise per edge, and which edges each clip holds."""
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
    never = jnp.zeros(ratio.shape, bool)
    if config.algorithm == "cispo":
        weight = jax.lax.stop_gradient(jnp.clip(ratio, low, high))
        return weight * advantage * logprob, {"low": ratio < low, "high": ratio > high, "dual": never}
    # min(ratio A, clip(ratio) A), written by cases: the clip holds only where it makes the objective smaller.
    held = {
        "low": (advantage < 0) & (ratio < low),
        "high": (advantage > 0) & (ratio > high),
        "dual": never if config.dual_clip is None else (advantage < 0) & (ratio > config.dual_clip),
    }
    ratio = jnp.where(held["low"], low, jnp.where(held["high"], high, ratio))
    if config.dual_clip is not None:
        ratio = jnp.where(held["dual"], config.dual_clip, ratio)
    return ratio * advantage, held


def kl_estimate(to_reference: jax.Array, estimator: Estimator) -> jax.Array:
    """Per-token estimate of KL(policy || reference) from d = log p_ref - log p (Schulman 2020, "Approximating KL")."""
    if estimator == "k1":
        return -to_reference
    if estimator == "k2":
        return to_reference**2 / 2
    d = jnp.minimum(to_reference, LARGEST_LOG_RATIO)
    return jnp.expm1(d) - d


def unit_means(values: jax.Array, mask: jax.Array, rollout: ArrayLike, view: ArrayLike | None = None) -> jax.Array:
    """For every edge, the mean of ``values`` over the active edges of its unit; all [B, E], ids in any order and row.

    A unit is a rollout, or one view of it where ``view`` is given. Edges outside ``mask`` belong to no unit and get 0.
    """
    shape = values.shape
    apart = jnp.iinfo(jnp.int32).max
    flat_mask, values = mask.reshape(-1), only(mask, values).reshape(-1)
    ids = [only(flat_mask, jnp.asarray(a).reshape(-1), apart) for a in (rollout, view) if a is not None]
    order = jnp.lexsort(tuple(reversed(ids)))
    changes = jnp.stack([jnp.diff(a[order], prepend=a[order][:1]) != 0 for a in ids]).any(0)
    unit = jnp.zeros_like(order).at[order].set(jnp.cumsum(changes))
    count = jax.ops.segment_sum(flat_mask.astype(values.dtype), unit, num_segments=unit.size)
    mean = jax.ops.segment_sum(values, unit, num_segments=unit.size) / jnp.maximum(count, 1)
    return only(mask, mean[unit].reshape(shape))
