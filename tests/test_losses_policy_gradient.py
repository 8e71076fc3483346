"""The GRPO family against independent numpy float64, edge by edge, and what must hold exactly."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mwjax.losses.logprobs import EdgeScores
from mwjax.losses.metrics import finalise, join, score_metrics
from mwjax.losses.policy_gradient import PolicyGradientConfig, edge_log_ratio, policy_gradient_loss, unit_means
from mwjax.losses.recipes import RECIPES
from mwjax.losses.sft import sft_loss
from mwjax.tree.rows import Edges
from tests.random_edges import random_edges


def random_scores(seed, edges):
    rng = np.random.default_rng(seed + 2000)
    return EdgeScores(rng.uniform(-6, -1, edges.parent.shape), rng.uniform(0.1, 3, edges.parent.shape))


def behaviour(edges, i):
    return edges.rollout_logprob[i] if np.isnan(edges.old_logprob[i]) else edges.old_logprob[i]


def unit(edges, i, config):
    return (edges.rollout[i], edges.view[i]) if config.unit == "view" else edges.rollout[i]


def reference_loss(scores, edges, config):
    """The formulas of the papers, one edge at a time."""
    active = [i for i in np.ndindex(edges.weight.shape) if edges.weight[i] != 0]
    log_ratios = {i: scores.logprob[i] - behaviour(edges, i) for i in active}
    total = 0.0
    for i in active:
        log_ratio, advantage = log_ratios[i], edges.advantage[i]
        if config.algorithm == "gspo":
            log_ratio = np.mean([log_ratios[j] for j in active if unit(edges, j, config) == unit(edges, i, config)])
        ratio = np.exp(log_ratio)
        clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
        if config.algorithm == "cispo":
            objective = clipped * advantage * scores.logprob[i]
        else:
            objective = min(ratio * advantage, clipped * advantage)
            if config.dual_clip is not None and advantage < 0:
                objective = max(objective, config.dual_clip * advantage)
        d = edges.ref_logprob[i] - scores.logprob[i]
        kl = {"k1": -d, "k2": d * d / 2, "k3": np.exp(d) - d - 1}[config.kl_estimator]
        loss = -objective + config.kl_coefficient * kl - config.entropy_coefficient * scores.entropy[i]
        total += edges.weight[i] * loss
    return total


@cache
def compiled(config):
    def loss(logprob, entropy, edges):
        return policy_gradient_loss(EdgeScores(logprob, entropy), edges, config)

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))


CONFIGS = [
    PolicyGradientConfig(),
    PolicyGradientConfig("dapo", clip_low=0.1, clip_high=0.2, dual_clip=3.0, kl_estimator="k2", kl_coefficient=0.1),
    PolicyGradientConfig("dr_grpo", kl_estimator="k1", kl_coefficient=0.5, entropy_coefficient=0.01),
    PolicyGradientConfig("gspo", clip_low=0.4, clip_high=0.4, kl_coefficient=0.0),
    PolicyGradientConfig("gspo", clip_low=0.4, clip_high=0.4, unit="view", dual_clip=2.0),
    PolicyGradientConfig("cispo", clip_low=1.0, clip_high=0.5),
]


@given(seed=st.integers(0, 10_000), config=st.sampled_from(CONFIGS))
def test_values_match_the_formulas(seed, config):
    edges = random_edges(seed)
    scores = random_scores(seed, edges)
    with jax.enable_x64(True):
        (value, _), _ = compiled(config)(*scores, edges)
    assert float(value) == pytest.approx(reference_loss(scores, edges, config), rel=1e-10)


@pytest.mark.parametrize("config", [c for c in CONFIGS if c.algorithm in ("grpo", "dapo", "dr_grpo")])
def test_gradients_match_finite_differences(config):
    edges = random_edges(11)
    scores = random_scores(11, edges)
    step = 1e-6
    with jax.enable_x64(True):
        _, (gradient, entropy_gradient) = compiled(config)(*scores, edges)
        for i in np.ndindex(edges.weight.shape):
            up, down = (scores.logprob.copy() for _ in range(2))
            up[i] += step
            down[i] -= step
            slope = (
                reference_loss(scores._replace(logprob=up), edges, config)
                - reference_loss(scores._replace(logprob=down), edges, config)
            ) / (2 * step)
            assert gradient[i] == pytest.approx(slope, rel=1e-6, abs=1e-8)
    np.testing.assert_allclose(entropy_gradient, -config.entropy_coefficient * edges.weight)


def test_gspo_gradient_is_the_sequence_ratio_s_own():
    """With 1/|o| weights, the token form's gradient is that of GSPO's sum over units of min(s A, clip(s) A)."""
    edges = random_edges(7)
    scores = random_scores(7, edges)
    active = edges.weight != 0
    count = {r: (active & (edges.rollout == r)).sum() for r in range(3)}
    advantages = [1.5, -0.7, 0.4]
    edges = edges._replace(
        weight=np.where(active, 1 / np.vectorize(count.get)(edges.rollout), 0.0),
        advantage=np.where(active, np.choose(edges.rollout, advantages), np.nan),
        old_logprob=np.where(active, scores.logprob + np.random.default_rng(0).normal(0, 0.3, active.shape), np.nan),
    )
    config = PolicyGradientConfig("gspo", clip_low=0.05, clip_high=0.05, kl_coefficient=0.0)

    def sequences(logprob):
        total = 0.0
        for rollout, advantage in enumerate(advantages):
            chosen = active & (edges.rollout == rollout)
            ratio = jnp.exp(jnp.where(chosen, logprob - jnp.nan_to_num(edges.old_logprob), 0.0).sum() / chosen.sum())
            total -= jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.95, 1.05) * advantage)
        return total

    with jax.enable_x64(True):
        (value, _), (gradient, _) = compiled(config)(*scores, edges)
        want, slope = jax.value_and_grad(sequences)(jnp.asarray(scores.logprob))
    assert float(value) == pytest.approx(float(want), rel=1e-12)
    np.testing.assert_allclose(gradient, slope, rtol=1e-10, atol=1e-13)


@given(seed=st.integers(0, 10_000), by_view=st.booleans(), rows=st.sampled_from([1, 3]))
def test_unit_means(seed, by_view, rows):
    edges = random_edges(seed, rows=rows)
    edges = edges._replace(rollout=edges.rollout * 1_000_003)  # ids need not be small
    values, mask = np.random.default_rng(seed).normal(size=edges.weight.shape), edges.weight != 0
    got = compiled_means(np.where(mask, values, np.nan), mask, edges.rollout, edges.view if by_view else None)
    for i in np.ndindex(values.shape):
        same = mask & (edges.rollout == edges.rollout[i]) & ((edges.view == edges.view[i]) | (not by_view))
        assert got[i] == pytest.approx(values[same].mean() if mask[i] else 0.0, rel=1e-5, abs=1e-6)


compiled_means = jax.jit(unit_means)


def test_gspo_units_may_be_split_over_micro_batches_with_ratios_from_outside():
    edges = random_edges(5)
    scores = random_scores(5, edges)
    config = PolicyGradientConfig("gspo", clip_low=0.2, clip_high=0.2)
    with jax.enable_x64(True):
        (whole, _), (gradient, _) = compiled(config)(*scores, edges)
        means = unit_means(edge_log_ratio(jnp.asarray(scores.logprob), edges), edges.weight != 0, edges.rollout)
        parts = []
        for row in (0, 1):
            part = jax.tree.map(lambda a, row=row: a[row : row + 1], edges)

            def loss(logprob, row=row, part=part):
                entropy = scores.entropy[row : row + 1]
                ratio = means[row : row + 1]
                return policy_gradient_loss(EdgeScores(logprob, entropy), part, config, unit_log_ratio=ratio)[0]

            parts.append(jax.value_and_grad(loss)(jnp.asarray(scores.logprob[row : row + 1])))
    assert float(whole) == pytest.approx(sum(float(value) for value, _ in parts), rel=1e-12)
    np.testing.assert_allclose(gradient, np.concatenate([g for _, g in parts]), rtol=1e-12)


def one_edge(advantage, log_ratio, **fields):
    """A single edge of weight 1 with behaviour log-prob -2: its scores and edges."""
    ones, zeros = np.ones((1, 1)), np.zeros((1, 1), np.int32)
    edges = Edges(zeros, zeros, ones, ones * advantage, ones * -2, ones * np.nan, ones * np.nan, ones, *[zeros] * 4)
    return EdgeScores(ones * (log_ratio - 2.0), ones), edges._replace(**fields)


@pytest.mark.parametrize(
    "advantage, ratio, loss, slope, clipped",
    [
        (2.0, 1.0, -2.0, -2.0, None),  # ratio 1: the policy gradient itself
        (2.0, 1.25, -2.5, -2.5, None),  # inside
        (2.0, 1.5, -2.56, 0.0, "high"),  # held at 1.28
        (2.0, 0.5, -1.0, -1.0, None),  # low, but the advantage asks for more
        (-2.0, 0.5, 1.6, 0.0, "low"),  # held at 0.8
        (-2.0, 1.5, 3.0, 3.0, None),  # high, but the advantage asks for less
        (-2.0, 2.9, 5.8, 5.8, None),  # not yet dual
        (-2.0, 5.0, 6.0, 0.0, "dual"),  # held at 3
    ],
)
def test_clips_by_hand(advantage, ratio, loss, slope, clipped):
    config = PolicyGradientConfig(dual_clip=3.0, kl_coefficient=0.0)
    with jax.enable_x64(True):
        scores, edges = one_edge(advantage, np.log(ratio))
        (value, metrics), (gradient, _) = compiled(config)(*scores, edges)
    assert float(value) == pytest.approx(loss)
    assert float(gradient[0, 0]) == pytest.approx(slope)
    for side in ("low", "high", "dual"):
        assert float(metrics.sums[f"clipped_{side}"]) == (side == clipped)


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "dapo", "gspo", "cispo"])
def test_at_ratio_one_the_gradient_is_minus_advantage_times_weight(algorithm):
    edges = random_edges(9)
    scores = random_scores(9, edges)
    edges = edges._replace(old_logprob=np.where(edges.weight != 0, scores.logprob, np.nan))
    with jax.enable_x64(True):
        _, (gradient, _) = compiled(PolicyGradientConfig(algorithm, kl_coefficient=0.0))(*scores, edges)
    want = np.where(edges.weight != 0, -np.nan_to_num(edges.advantage) * edges.weight, 0.0)
    np.testing.assert_allclose(gradient, want, rtol=1e-14)


@pytest.mark.parametrize("config", CONFIGS)
def test_masked_edges_are_silent_whatever_they_hold(config):
    """Also where the score itself is NaN: ratio exactly 1, gradient exactly 0, and the others as if alone."""
    edges = random_edges(13)
    scores = random_scores(13, edges)
    masked = edges.weight == 0
    assert masked.any() and np.isnan(edges.advantage[masked]).all()
    spoiled = EdgeScores(np.where(masked, np.nan, scores.logprob), np.where(masked, np.nan, scores.entropy))
    clean = jax.tree.map(lambda a: np.where(masked, np.float32(-1), a) if a.dtype.kind == "f" else a, edges)
    clean = clean._replace(weight=edges.weight)
    with jax.enable_x64(True):
        got, want = compiled(config)(*spoiled, edges), compiled(config)(*scores, clean)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    for gradient in got[1]:
        assert (np.asarray(gradient)[masked] == 0).all()
    ratio = np.exp(edge_log_ratio(jnp.asarray(spoiled.logprob), edges))
    assert (ratio[masked] == 1.0).all() and np.isfinite(ratio).all()


def test_unknown_behaviour_is_on_policy_and_unknown_reference_unpenalised_and_both_are_counted():
    config = PolicyGradientConfig(kl_coefficient=0.5)
    scores, edges = one_edge(2.0, 0.3, rollout_logprob=np.full((1, 1), np.nan))
    (value, metrics), (gradient, _) = compiled(config)(*scores, edges)
    assert (float(value), float(gradient[0, 0])) == (-2.0, -2.0)
    report = finalise(join(metrics, score_metrics(scores_as_arrays(scores), edges)))
    assert (report["behaviour_unknown"], report["reference_unknown"], report["reference_k3"]) == (1.0, 1.0, None)


def scores_as_arrays(scores):
    return EdgeScores(*map(jnp.asarray, scores))


def test_enormous_ratios_stay_finite_in_float32_while_metrics_stay_raw():
    for advantage, log_ratio in ((-1.0, 200.0), (1.0, 200.0), (-1.0, -200.0), (1.0, -200.0)):
        scores, edges = one_edge(advantage, log_ratio, ref_logprob=np.full((1, 1), 150.0))
        scores, edges = jax.tree.map(lambda a: a.astype(np.float32) if a.dtype.kind == "f" else a, (scores, edges))
        (value, metrics), (gradient, _) = compiled(PolicyGradientConfig())(*scores, edges)
        assert np.isfinite(value) and np.isfinite(gradient).all()
        raw = metrics.sums["ratio"]
        assert float(raw) == np.exp(np.float32(log_ratio)) if log_ratio < 0 else np.isinf(raw)


def test_sft_is_the_weighted_negative_log_likelihood_and_ignores_masked_edges():
    edges = random_edges(1)
    scores = random_scores(1, edges)
    masked = edges.weight == 0
    with jax.enable_x64(True):
        spoiled = np.where(masked, np.nan, scores.logprob)
        value, gradient = jax.value_and_grad(lambda logprob: sft_loss(EdgeScores(logprob, logprob), edges))(spoiled)
    assert float(value) == pytest.approx(-(edges.weight * scores.logprob)[~masked].sum())
    np.testing.assert_array_equal(gradient, np.where(masked, 0.0, -edges.weight))


def test_bad_configs_say_what_to_do():
    for fields, message in (
        ({"algorithm": "ppo"}, "algorithm must be one of grpo, dr_grpo, dapo, gspo, cispo; got 'ppo'"),
        ({"kl_estimator": "k4"}, "kl_estimator must be one of k1, k2, k3"),
        ({"unit": "turn"}, "unit must be one of rollout, view"),
        ({"clip_low": 1.5}, "clip_low"),
        ({"dual_clip": 0.5}, "dual_clip must be larger than 1"),
        ({"algorithm": "cispo", "dual_clip": 3.0}, "does not apply to cispo"),
    ):
        with pytest.raises(ValueError, match=message):
            PolicyGradientConfig(**fields)


def test_recipes_hold_what_the_papers_say():
    assert RECIPES["memorywalker"].policy_gradient == PolicyGradientConfig(
        "grpo", clip_low=0.2, clip_high=0.28, kl_coefficient=0.001, kl_estimator="k3", entropy_coefficient=0.0
    )
    memagent = RECIPES["memagent"]
    assert (memagent.advantage, memagent.aggregation) == ("dr_grpo", "token_mean_global")
    assert replace(memagent.policy_gradient, algorithm="grpo") == PolicyGradientConfig(clip_high=0.2, dual_clip=3.0)
