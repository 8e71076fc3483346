"""Metric sums against numpy, their combination, and N/A where nothing was measured."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mwjax.losses.logprobs import EdgeScores
from mwjax.losses.metrics import combine, finalise, join, sdcc_metrics
from mwjax.losses.metrics import score_metrics as eager_score_metrics
from mwjax.losses.policy_gradient import PolicyGradientConfig, policy_gradient_loss
from mwjax.tree.rows import Pairs
from tests.random_edges import random_edges
from tests.test_losses_policy_gradient import behaviour, random_scores

score_metrics = jax.jit(eager_score_metrics)


@jax.jit
def all_metrics(scores, edges):
    metrics = policy_gradient_loss(scores, edges, PolicyGradientConfig(clip_low=0.1, dual_clip=2.0))[1]
    return join(eager_score_metrics(scores, edges), metrics)


def measured(seed):
    """Random edges of which some active ones lack the rollout's log-prob."""
    edges = random_edges(seed)
    scores = random_scores(seed, edges)
    rollout = edges.rollout_logprob.copy()
    rollout[:, 1:4] = np.nan
    return EdgeScores(*map(np.asarray, scores)), edges._replace(rollout_logprob=rollout, old_logprob=edges.ref_logprob)


def test_every_score_metric_against_numpy():
    with jax.enable_x64(True):
        scores, edges = measured(0)
        report = finalise(score_metrics(scores, edges))
    active = edges.weight != 0
    known = active & ~np.isnan(edges.rollout_logprob)
    assert 0 < known.sum() < active.sum() < active.size
    train, rollout = scores.logprob[known], edges.rollout_logprob[known]
    d = train - rollout
    want = {
        "loss_tokens": active.sum(),
        "entropy": scores.entropy[active].mean(),
        "rollout_unknown": active.sum() - known.sum(),
        "logdiff_mean": np.abs(d).mean(),
        "logdiff_max_token": np.abs(d).max(),
        "logdiff_signed_mean": d.mean(),
        "mismatch_k1": -d.mean(),
        "mismatch_k3": (np.exp(d) - d - 1).mean(),
        "mismatch_ess": np.exp(d).sum() ** 2 / (d.size * np.exp(2 * d).sum()),
        "perplexity_train": np.exp(-train.mean()),
        "perplexity_rollout": np.exp(-rollout.mean()),
        "perplexity_gap": np.exp(-train.mean()) - np.exp(-rollout.mean()),
    }
    assert report == pytest.approx(want, rel=1e-12)


def test_every_ratio_metric_against_numpy():
    with jax.enable_x64(True):
        scores, edges = measured(1)
        report = finalise(all_metrics(scores, edges))
    active = np.argwhere(edges.weight != 0)
    ratio = np.exp([scores.logprob[i] - behaviour(edges, i) for i in map(tuple, active)])
    advantage = edges.advantage[edges.weight != 0]
    d = (edges.ref_logprob - scores.logprob)[edges.weight != 0]
    want = {
        "behaviour_unknown": 0,
        "ratio_mean": ratio.mean(),
        "ratio_ess": ratio.sum() ** 2 / (ratio.size * (ratio**2).sum()),
        "clip_fraction_low": ((advantage < 0) & (ratio < 0.9)).mean(),
        "clip_fraction_high": ((advantage > 0) & (ratio > 1.28)).mean(),
        "clip_fraction_dual": ((advantage < 0) & (ratio > 2.0)).mean(),
        "reference_unknown": 0,
        "reference_k1": -d.mean(),
        "reference_k3": (np.exp(d) - d - 1).mean(),
    }
    assert all(want[f"clip_fraction_{side}"] > 0 for side in ("low", "high", "dual"))
    assert {name: report[name] for name in want} == pytest.approx(want, rel=1e-12)


def test_metrics_of_micro_batches_combine_into_those_of_the_whole():
    with jax.enable_x64(True):
        scores, edges = measured(2)
        parts = [all_metrics(*jax.tree.map(lambda a, row=row: a[row : row + 1], (scores, edges))) for row in (0, 1)]
        combined, whole = finalise(combine(*parts)), finalise(all_metrics(scores, edges))
    assert combined == pytest.approx(whole, rel=1e-12)
    assert combined["logdiff_max_token"] == max(float(p.maxima["logdiff_max_token"]) for p in parts)


def test_unknown_rollout_log_probs_are_not_zero_drift():
    scores, edges = measured(3)
    report = finalise(score_metrics(scores, edges._replace(rollout_logprob=np.full(edges.weight.shape, np.nan))))
    assert report["rollout_unknown"] == report["loss_tokens"] > 0
    for name in ("logdiff_mean", "logdiff_max_token", "logdiff_signed_mean", "mismatch_k1", "mismatch_k3"):
        assert report[name] is None
    for name in ("mismatch_ess", "perplexity_train", "perplexity_rollout", "perplexity_gap"):
        assert report[name] is None
    assert report["entropy"] is not None


def test_a_batch_without_loss_tokens_has_no_means():
    scores, edges = measured(4)
    report = finalise(all_metrics(scores, edges._replace(weight=np.zeros_like(edges.weight))))
    assert report["loss_tokens"] == 0
    assert {name for name, value in report.items() if value is not None} == {
        "loss_tokens", "rollout_unknown", "behaviour_unknown", "reference_unknown",
    }  # fmt: skip


def test_equal_log_probs_drift_by_exactly_nothing():
    scores, edges = measured(5)
    same = scores.logprob.astype(np.float32)
    edges = edges._replace(rollout_logprob=same, weight=np.ones_like(same))
    report = finalise(score_metrics(EdgeScores(same, same), edges))
    assert report["logdiff_mean"] == report["logdiff_max_token"] == report["mismatch_k3"] == 0.0
    assert report["perplexity_gap"] == 0.0 and report["mismatch_ess"] == 1.0


def test_drift_is_never_clamped():
    """A log-ratio of 60 in float32: k3 is e^60; its squared weight overflows, which leaves an effective size of 0."""
    _, edges = measured(6)
    ones = np.ones(edges.weight.shape, np.float32)
    edges = edges._replace(weight=ones, rollout_logprob=-61 * ones)
    report = finalise(score_metrics(EdgeScores(-1 * ones, ones), edges))
    assert report["logdiff_mean"] == 60.0
    assert report["mismatch_k3"] == pytest.approx(np.exp(60.0), rel=1e-5)
    assert report["mismatch_ess"] == 0.0


def test_sdcc_metrics():
    kl = jnp.array([[0.5, 0.02, 9.0], [-1e-8, 9.0, 9.0]])
    pairs = Pairs(np.zeros((2, 3), int), np.zeros((2, 3), int), np.array([[1.0, 1, 0], [1, 0, 0]]))
    _, edges = measured(7)
    base = score_metrics(EdgeScores(*random_scores(7, edges)), edges)
    report = finalise(join(base, sdcc_metrics(kl, pairs)))
    assert report["diverging_leaves"] == 3
    assert report["sdcc_kl_sum"] == pytest.approx(0.52)
    assert report["sdcc_kl_mean"] == pytest.approx(0.52 / 3)
    assert report["sdcc_kl_max"] == pytest.approx(0.5)
    assert report["pinsker_mean"] == pytest.approx((0.5 + 0.1) / 3)
    assert report["pinsker_max"] == pytest.approx(0.5)
    nothing = pairs._replace(weight=np.zeros((2, 3)))
    report = finalise(join(base, sdcc_metrics(kl, nothing)))
    assert report["sdcc_kl_sum"] == 0.0 and report["diverging_leaves"] == 0
    assert report["sdcc_kl_mean"] is report["sdcc_kl_max"] is report["pinsker_mean"] is report["pinsker_max"] is None


def test_metrics_carry_no_gradient():
    scores, edges = measured(8)

    def total(logprob):
        return sum(jax.tree.leaves(all_metrics(EdgeScores(logprob, scores.entropy), edges)))

    assert not np.any(jax.grad(total)(jnp.asarray(scores.logprob)))
