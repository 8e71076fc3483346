"""Metrics as sums and maxima that add up over micro-batches and devices and are finalised once.

Every estimate is on raw, unclamped log-ratios. What was never measured is None, not 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mwjax.losses.logprobs import EdgeScores
from mwjax.losses.masking import active, only
from mwjax.model.experts import Routing
from mwjax.tree.rows import Edges, Pairs

ROUTER = ("router_load", "router_probability")


class Metrics(NamedTuple):
    """Scalars by name: ``sums`` combine by addition, ``maxima`` by maximum (an empty maximum is 0). Of mixtures of
    experts also the sums `ROUTER`, [layers, experts]."""

    sums: dict[str, jax.Array]
    maxima: dict[str, jax.Array]


def join(*parts: Metrics) -> Metrics:
    """Put metrics of different names side by side."""
    sums: dict[str, jax.Array] = {}
    maxima: dict[str, jax.Array] = {}
    for part in parts:
        sums |= part.sums
        maxima |= part.maxima
    return Metrics(sums, maxima)


def combine(first: Metrics, second: Metrics) -> Metrics:
    """The metrics of two micro-batches taken together; both must hold the same names."""
    return Metrics(
        {name: first.sums[name] + second.sums[name] for name in first.sums | second.sums},
        {name: jnp.maximum(first.maxima[name], second.maxima[name]) for name in first.maxima | second.maxima},
    )


def score_metrics(scores: EdgeScores, edges: Edges) -> Metrics:
    """What every task reports: loss tokens (active edges), entropy, and the drift between training and rollout.

    With d = log p_train - log p_rollout over active edges whose rollout log-prob is known: |d| (logdiff), its maximum,
    d, the estimators k1 = -d and k3 = exp(d) - d - 1 of KL(rollout || train), and the importance weights exp(d).
    """
    mask = active(edges)
    rollout = jnp.asarray(edges.rollout_logprob)
    known = mask & ~jnp.isnan(rollout)
    rollout = only(known, rollout)
    train = only(known, scores.logprob)
    d = train - rollout
    entropy = only(mask, scores.entropy)
    sums = {
        "loss_tokens": mask.sum(),
        "entropy": entropy.sum(),
        "rollout_known": known.sum(),
        "logdiff": jnp.abs(d).sum(),
        "logdiff_signed": d.sum(),
        "mismatch_k3": only(known, jnp.expm1(d) - d).sum(),
        "mismatch_ratio": only(known, jnp.exp(d)).sum(),
        "mismatch_ratio_squared": only(known, jnp.exp(2 * d)).sum(),
        "train_nll": -train.sum(),
        "rollout_nll": -rollout.sum(),
    }
    return _detached(Metrics(sums, {"logdiff_max_token": jnp.abs(d).max(initial=0.0)}), scores.logprob.dtype)


def ratio_metrics(mask: jax.Array, ratio: jax.Array, clipped: Mapping[str, jax.Array]) -> Metrics:
    """Importance ratios policy / behaviour over ``mask`` [B, E], and how many edges each clip holds (bool [B, E])."""
    sums = {
        "ratio": only(mask, ratio).sum(),
        "ratio_squared": only(mask, ratio**2).sum(),
        **{f"clipped_{name}": (mask & flag).sum() for name, flag in clipped.items()},
    }
    return _detached(Metrics(sums, {}), ratio.dtype)


def reference_metrics(known: jax.Array, log_ratio: jax.Array) -> Metrics:
    """``log_ratio`` [B, E] = log p_ref - log p_policy over ``known`` edges, as k1 and k3 of KL(policy || reference)."""
    d = only(known, log_ratio)
    sums = {"reference_known": known.sum(), "reference_k1": -d.sum(), "reference_k3": (jnp.expm1(d) - d).sum()}
    return _detached(Metrics(sums, {}), log_ratio.dtype)


def sdcc_metrics(kl: jax.Array, pairs: Pairs) -> Metrics:
    """KL [B, P] of the diverging leaves (weight not 0), and Pinsker's bound sqrt(KL / 2) on the total variation."""
    leaf = jnp.asarray(pairs.weight) != 0
    kl = only(leaf, kl)
    bound = jnp.sqrt(jnp.maximum(kl, 0.0) / 2)  # rounding can leave a KL of 0 just below it
    sums = {"diverging_leaves": leaf.sum(), "sdcc_kl": kl.sum(), "pinsker": bound.sum()}
    return _detached(
        Metrics(sums, {"sdcc_kl_max": kl.max(initial=0.0), "pinsker_max": bound.max(initial=0.0)}), kl.dtype
    )


def router_metrics(routing: Routing) -> Metrics:
    """What the routers of a mixture of experts did with the tokens."""
    return _detached(Metrics(dict(zip(ROUTER, routing)), {}), routing.load.dtype)


def _detached(metrics: Metrics, dtype: jnp.dtype) -> Metrics:
    return jax.tree.map(lambda a: jax.lax.stop_gradient(a).astype(dtype), metrics)


def finalise(metrics: Metrics) -> dict[str, float | None]:
    """Means, ratios and maxima from the combined sums; runs on the host, once.

    Keys (present where their part was measured): ``loss_tokens``; ``entropy``; ``rollout_unknown`` (active edges
    without a recorded log-prob); ``logdiff_mean``, ``logdiff_max_token`` (per-token maximum), ``logdiff_signed_mean``;
    ``mismatch_k1``, ``mismatch_k3``, ``mismatch_ess``; ``perplexity_train``, ``perplexity_rollout``,
    ``perplexity_gap`` (their difference); ``ratio_mean``, ``ratio_ess``, ``clip_fraction_low``, ``_high``, ``_dual``,
    ``behaviour_unknown``; ``reference_unknown``, ``reference_k1``, ``reference_k3``; ``sdcc_kl_sum`` (unweighted,
    exactly 0 without diverging leaves), ``sdcc_kl_mean``, ``sdcc_kl_max``, ``pinsker_mean``, ``pinsker_max``,
    ``diverging_leaves``; ``router_auxiliary`` (`losses.load_balance`, unweighted), ``router_load_entropy`` (of the
    tokens over the experts, mean over layers, 1 where they are spread evenly, 0 where all go to one),
    ``router_load_max`` (tokens of the busiest expert of any layer, in multiples of an even share). Effective sample
    sizes are (sum w)^2 / (n sum w^2), from 1/n to 1, and 0 where the squares overflow. A mean over nothing is None.
    """
    sums = {name: float(value) for name, value in metrics.sums.items() if name not in ROUTER}
    maxima = {name: float(value) for name, value in metrics.maxima.items()}
    tokens, known = sums["loss_tokens"], sums["rollout_known"]
    result: dict[str, float | None] = {
        "loss_tokens": tokens,
        "entropy": _mean(sums["entropy"], tokens),
        "rollout_unknown": tokens - known,
        "logdiff_mean": _mean(sums["logdiff"], known),
        "logdiff_max_token": maxima["logdiff_max_token"] if known else None,
        "logdiff_signed_mean": _mean(sums["logdiff_signed"], known),
        "mismatch_k1": _mean(-sums["logdiff_signed"], known),
        "mismatch_k3": _mean(sums["mismatch_k3"], known),
        "mismatch_ess": _sample_size(sums["mismatch_ratio"], sums["mismatch_ratio_squared"], known),
        "perplexity_train": _exp(_mean(sums["train_nll"], known)),
        "perplexity_rollout": _exp(_mean(sums["rollout_nll"], known)),
    }
    train, rollout = result["perplexity_train"], result["perplexity_rollout"]
    result["perplexity_gap"] = None if train is None or rollout is None else train - rollout
    if "ratio" in sums:
        result |= {
            "behaviour_unknown": sums["behaviour_unknown"],
            "ratio_mean": _mean(sums["ratio"], tokens),
            "ratio_ess": _sample_size(sums["ratio"], sums["ratio_squared"], tokens),
            **{f"clip_fraction_{side}": _mean(sums[f"clipped_{side}"], tokens) for side in ("low", "high", "dual")},
            "reference_unknown": tokens - sums["reference_known"],
            "reference_k1": _mean(sums["reference_k1"], sums["reference_known"]),
            "reference_k3": _mean(sums["reference_k3"], sums["reference_known"]),
        }
    if "sdcc_kl" in sums:
        leaves = sums["diverging_leaves"]
        result |= {
            "diverging_leaves": leaves,
            "sdcc_kl_sum": sums["sdcc_kl"],
            "sdcc_kl_mean": _mean(sums["sdcc_kl"], leaves),
            "sdcc_kl_max": maxima["sdcc_kl_max"] if leaves else None,
            "pinsker_mean": _mean(sums["pinsker"], leaves),
            "pinsker_max": maxima["pinsker_max"] if leaves else None,
        }
    if ROUTER[0] in metrics.sums:
        result |= _router(*(np.asarray(metrics.sums[name], np.float64) for name in ROUTER))
    return result


def _router(load: np.ndarray, probability: np.ndarray) -> dict[str, float | None]:
    experts, tokens = load.shape[1], probability.sum()
    if not tokens:
        return dict.fromkeys(("router_auxiliary", "router_load_entropy", "router_load_max"))
    share = load / load.sum(axis=1, keepdims=True)
    entropy = -(share * np.log(share, where=share > 0, out=np.zeros_like(share))).sum(axis=1)
    return {
        "router_auxiliary": float(experts * (load.sum(axis=0) * probability.sum(axis=0)).sum() / tokens**2),
        "router_load_entropy": float(entropy.mean() / math.log(experts)) if experts > 1 else 1.0,
        "router_load_max": float(share.max() * experts),
    }


def _mean(total: float, count: float) -> float | None:
    return total / count if count else None


def _exp(value: float | None) -> float | None:
    return None if value is None else math.exp(value) if value < 709 else math.inf


def _sample_size(total: float, squares: float, count: float) -> float | None:
    if not count:
        return None
    return 0.0 if math.isinf(squares) else total**2 / (count * squares)
