"""The whole loss of a batch: what it does not depend on, and what it refuses."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mwjax.losses.checks import check_edges
from mwjax.losses.errors import LossError
from mwjax.losses.metrics import combine, finalise
from mwjax.losses.policy_gradient import PolicyGradientConfig
from mwjax.losses.total import LossConfig, Teacher, batch_loss
from mwjax.tree.rows import Edges, Pairs
from tests.random_edges import dense_scores, random_edges, random_states

CONFIGS = [
    LossConfig("sft", vocab_chunk=8),
    LossConfig(policy_gradient=PolicyGradientConfig(kl_coefficient=0.1, entropy_coefficient=0.1), vocab_chunk=8),
    LossConfig(policy_gradient=PolicyGradientConfig("gspo", clip_low=0.5), vocab_chunk=8),
]


@cache
def compiled(config):
    """Numerator, metrics and gradients by hidden states and unembedding, with an SDCC term of weight 0.1."""

    def loss(hidden, unembedding, edges, teacher, pairs):
        frozen = Teacher(teacher, unembedding, pairs)
        return batch_loss(hidden, unembedding, edges, config, teacher=frozen, sdcc_lambda=0.1)

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))


def one_row(seed):
    """One row of edges, its states, and one row of a teacher with four pairs."""
    rng = np.random.default_rng(seed)
    edges, (hidden, unembedding) = random_edges(seed, rows=1), random_states(seed, rows=1)
    teacher = rng.normal(size=(1, 6, 5))
    weight = np.array([[1.0, 1, 0, 1] + [0.0] * 8])
    return hidden, unembedding, edges, teacher, Pairs(*rng.integers(0, 6, (2, 1, 12)), weight)


def split(array, where, rows):
    """Row 0 of ``array`` dealt over ``rows`` rows of equal length, padded with zeros."""
    out = np.zeros((rows, array.shape[1]), array.dtype)
    for row in range(rows):
        kept = array[0, where == row]
        out[row, : kept.size] = kept
    return out


@settings(max_examples=12)
@given(seed=st.integers(0, 1000), config=st.sampled_from(CONFIGS))
def test_splitting_edges_over_rows_or_micro_batches_changes_nothing(seed, config):
    hidden, unembedding, edges, teacher, pairs = one_row(seed)
    where = np.random.default_rng(seed).integers(0, 3, edges.weight.shape[1])
    many = jax.tree.map(lambda a: split(a, where, 3), (edges, pairs))
    copies = [np.repeat(a, 3, axis=0) for a in (hidden, teacher)]
    with jax.enable_x64(True):
        (value, metrics), (by_hidden, by_unembedding) = compiled(config)(hidden, unembedding, edges, teacher, pairs)
        (again, more), (rows, same) = compiled(config)(copies[0], unembedding, many[0], copies[1], many[1])
        assert float(again) == pytest.approx(float(value), rel=1e-10)
        np.testing.assert_allclose(rows.sum(0), by_hidden[0], rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(same, by_unembedding, rtol=1e-10, atol=1e-12)
        assert finalise(more) == pytest.approx(finalise(metrics), rel=1e-10)
        if config.policy_gradient.algorithm == "gspo":
            return  # its units would be cut: see the test with ratios from outside
        parts = [jax.tree.map(lambda a, row=row: a[row : row + 1], many) for row in range(3)]
        results = [compiled(config)(hidden, unembedding, *part[:1], teacher, part[1]) for part in parts]
        total = combine(combine(results[0][0][1], results[1][0][1]), results[2][0][1])
    assert sum(float(r[0][0]) for r in results) == pytest.approx(float(value), rel=1e-10)
    np.testing.assert_allclose(sum(np.asarray(r[1][0]) for r in results), by_hidden, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(sum(np.asarray(r[1][1]) for r in results), by_unembedding, rtol=1e-10, atol=1e-12)
    assert finalise(total) == pytest.approx(finalise(metrics), rel=1e-10)


def test_sft_over_edges_is_the_shifted_label_loss_of_a_plain_sequence():
    rng = np.random.default_rng(0)
    hidden, unembedding = random_states(0, rows=1, tokens=20)
    tokens = rng.integers(0, 37, 20)
    mask = rng.random(19) < 0.6  # of the predicted tokens 1 .. 19
    shape, n = (1, 19), np.full((1, 19), np.nan)
    ids = np.zeros(shape, np.int32)
    edges = Edges(
        np.arange(19, dtype=np.int32)[None], tokens[None, 1:], mask[None].astype(float), n, n, n, n, np.ones(shape),
        ids, ids, ids, ids,
    )  # fmt: skip

    def shifted(hidden, unembedding):
        log_p = jax.nn.log_softmax(hidden[0, :-1] @ unembedding.T)
        return -(mask * log_p[np.arange(19), tokens[1:]]).sum()

    with jax.enable_x64(True):
        arrays = jnp.asarray(hidden), jnp.asarray(unembedding)
        config = LossConfig("sft", vocab_chunk=8)
        got = jax.jit(jax.value_and_grad(lambda h, w: batch_loss(h, w, edges, config)[0], (0, 1)))(*arrays)
        want = jax.jit(jax.value_and_grad(shifted, (0, 1)))(*arrays)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-10, atol=1e-13), got, want)


def test_one_path_sampled_twice_is_two_edges_or_one_of_weight_two():
    hidden, unembedding, edges, _, _ = one_row(3)
    twice = jax.tree.map(lambda a: np.repeat(a[:, :1], 2, axis=1), edges)
    merged = jax.tree.map(lambda a: a[:, :1], edges)._replace(weight=2 * edges.weight[:, :1])
    with jax.enable_x64(True):
        values = [
            float(jax.jit(batch_loss, static_argnums=3)(hidden, unembedding, e, CONFIGS[0])[0]) for e in (twice, merged)
        ]
    assert values[0] == pytest.approx(values[1], rel=1e-12)


@pytest.mark.parametrize("config", CONFIGS)
def test_masked_edges_change_nothing_at_all(config):
    """Bit for bit: value, metrics and gradients with the masked edges (NaN in every field) and with blank ones."""
    hidden, unembedding, edges, teacher, pairs = one_row(4)
    masked = edges.weight == 0
    assert masked.any() and np.isnan(edges.temperature[masked]).all()
    hidden[0, 8] = np.nan
    parent = np.where(masked, 8, np.minimum(edges.parent, 7))  # their hidden state is NaN, too
    blank = jax.tree.map(lambda a: np.where(masked, np.zeros_like(a), a), edges._replace(parent=parent))
    with jax.enable_x64(True):
        spoiled = compiled(config)(hidden, unembedding, edges._replace(parent=parent), teacher, pairs)
        clean = compiled(config)(np.nan_to_num(hidden), unembedding, blank, teacher, pairs)
    jax.tree.map(np.testing.assert_array_equal, spoiled, clean)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(spoiled))


def test_float32_by_default_and_the_loss_is_the_formula():
    hidden, unembedding, edges, _, _ = one_row(6)
    arrays = jnp.asarray(hidden, jnp.float32), jnp.asarray(unembedding, jnp.float32)
    value, metrics = jax.jit(batch_loss, static_argnums=3)(*arrays, edges, CONFIGS[0])
    assert value.dtype == jnp.float32 and {a.dtype for a in jax.tree.leaves(metrics)} == {jnp.dtype("float32")}
    logprob, _ = dense_scores(hidden, unembedding, edges)
    assert float(value) == pytest.approx(-(edges.weight * logprob).sum(), rel=1e-5)


def test_check_edges_names_the_token_the_reason_and_the_remedy():
    good = random_edges(8)
    config = LossConfig()
    check_edges(good, config, vocabulary=37)
    where = (1, 0)
    good = good._replace(rollout=np.full_like(good.rollout, 2), turn=np.full_like(good.turn, 1))

    def spoil(**fields):
        edges = jax.tree.map(np.copy, good)
        for name, value in fields.items():
            getattr(edges, name)[where] = value
        return edges

    nan = np.nan
    for edges, message in (
        (spoil(advantage=nan), "rollout number 2 of the mini-batch, turn 1, completion token 0: advantage is missing"),
        (spoil(rollout_logprob=nan, old_logprob=nan), "behaviour log-prob is missing .* record log-probs at decode"),
        (spoil(ref_logprob=nan), "reference log-prob is missing .* set kl_coefficient to 0"),
        (spoil(temperature=0.0), "temperature is not above 0"),
        (spoil(weight=nan), "weight is not finite"),
        (spoil(target=37), "target is outside the vocabulary of 37 \\(1 such edges of 24\\)"),
    ):
        with pytest.raises(LossError, match=message):
            check_edges(edges, config, vocabulary=37)
    check_edges(spoil(advantage=nan, ref_logprob=nan), LossConfig("sft"))
    check_edges(spoil(ref_logprob=nan), LossConfig(policy_gradient=PolicyGradientConfig(kl_coefficient=0.0)))


def test_unknown_task():
    with pytest.raises(ValueError, match="task must be sft or policy_gradient; got 'dpo'"):
        LossConfig("dpo")
