"""The SDCC term against the definition of KL, its ramp, and what must be exactly 0."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mwjax.losses.sdcc import lambda_at, sdcc_kl
from mwjax.losses.total import LossConfig, Teacher, batch_loss
from mwjax.tree.rows import Pairs
from tests.random_edges import random_edges, random_states
from tests.test_losses_logprobs import largest_intermediate


def random_pairs(seed, rows=2, count=6, tokens=9, teacher_tokens=11):
    rng = np.random.default_rng(seed)
    weight = (rng.random((rows, count)) < 0.7).astype(np.float32)
    weight[0, 0] = 1
    return Pairs(rng.integers(0, tokens, weight.shape), rng.integers(0, teacher_tokens, weight.shape), weight)


def dense_kl(student_hidden, teacher_hidden, student_unembedding, teacher_unembedding, pairs):
    rows = np.arange(pairs.weight.shape[0])[:, None]
    log_s = jax.nn.log_softmax(student_hidden[rows, pairs.student] @ student_unembedding.T)
    log_t = jax.nn.log_softmax(teacher_hidden[rows, pairs.teacher] @ teacher_unembedding.T)
    log_t = jax.lax.stop_gradient(log_t)
    return (jnp.exp(log_t) * (log_t - log_s)).sum(-1) * (pairs.weight != 0)


@cache
def compiled(chunk):
    """Gradients of sum(weight x KL) and the KLs; compiled once, the examples differ in values only."""
    kl_of = dense_kl if chunk == "dense" else partial(sdcc_kl, vocab_chunk=chunk)

    def total(student, teacher, ws, wt, pairs, weight):
        kl = kl_of(student, teacher, ws, wt, pairs)
        return (weight * kl).sum(), kl

    return jax.jit(jax.grad(total, (0, 1, 2, 3), has_aux=True))


@given(seed=st.integers(0, 1000), chunk=st.sampled_from([1, 8, 36, None]))
def test_kl_and_its_gradient_match_dense_float64(seed, chunk):
    pairs, (student, ws) = random_pairs(seed), random_states(seed)
    teacher, wt = random_states(seed + 1, tokens=11, width=3)
    weight = np.random.default_rng(seed).normal(size=pairs.weight.shape) * pairs.weight
    with jax.enable_x64(True):
        got, value = compiled(chunk)(student, teacher, ws, wt, pairs, weight)
        want, expected = compiled("dense")(student, teacher, ws, wt, pairs, weight)
    np.testing.assert_allclose(value, expected, rtol=1e-10, atol=1e-12)
    for g, w in zip(got, want):
        np.testing.assert_allclose(g, w, rtol=1e-10, atol=1e-12)
    assert not np.any(got[1]) and not np.any(got[3])  # the teacher gets no gradient


def test_equal_distributions_have_kl_exactly_zero():
    pairs, (hidden, unembedding) = random_pairs(0), random_states(0)
    pairs = pairs._replace(teacher=pairs.student)
    arrays = [jnp.asarray(a, jnp.float32) for a in (hidden, unembedding)]
    value, gradients = jax.value_and_grad(
        lambda h, w: sdcc_kl(h, arrays[0], w, arrays[1], pairs, vocab_chunk=8).sum(), (0, 1)
    )(*arrays)
    assert float(value) == 0.0
    assert not any(np.any(g) for g in gradients)


def test_without_pairs_everything_is_exactly_zero_even_beside_nan():
    (student, ws), (teacher, wt) = random_states(0), random_states(1)
    student[:, 0], teacher[:, 0] = np.nan, np.nan
    padding = Pairs(np.zeros((2, 4), np.int32), np.zeros((2, 4), np.int32), np.zeros((2, 4), np.float32))
    none = Pairs(*(a[:, :0] for a in padding))
    for pairs in (padding, none):
        value, gradients = jax.value_and_grad(
            lambda h, t, w, wt, pairs=pairs: sdcc_kl(h, t, w, wt, pairs).sum(), (0, 1, 2, 3)
        )(*(jnp.asarray(a, jnp.float32) for a in (student, teacher, ws, wt)))
        assert float(value) == 0.0
        assert not any(np.any(g) for g in gradients)


def test_pairs_times_vocabulary_is_never_materialised():
    rng = np.random.default_rng(0)
    hidden, unembedding = jnp.asarray(rng.normal(size=(1, 20, 4))), jnp.asarray(rng.normal(size=(1003, 4)))
    pairs = Pairs(rng.integers(0, 20, (1, 96)), rng.integers(0, 20, (1, 96)), np.ones((1, 96), np.float32))
    function = jax.grad(lambda h, w: sdcc_kl(h, hidden, w, unembedding, pairs, vocab_chunk=64).sum(), (0, 1))
    assert largest_intermediate(function, hidden, unembedding) == 96 * 64


def test_vocabularies_must_agree():
    pairs, (hidden, unembedding) = random_pairs(0), random_states(0)
    with pytest.raises(ValueError, match="share one vocabulary; got 36 and 37"):
        sdcc_kl(
            jnp.asarray(hidden), jnp.asarray(hidden), jnp.asarray(unembedding), jnp.asarray(unembedding[:-1]), pairs
        )


def test_lambda_ramps_to_its_peak_over_a_fifth_of_the_steps_and_stays():
    assert [lambda_at(step, 100) for step in (0, 5, 10, 20, 21, 99)] == [0.0, 0.025, 0.05, 0.1, 0.1, 0.1]
    assert lambda_at(1, 10, peak=0.4, ramp=0.5) == pytest.approx(0.08)
    assert lambda_at(0, 100, ramp=0.0) == 0.1
    assert lambda_at(0, 100, peak=0.0) == 0.0
    for bad in ({"ramp": 1.5}, {"peak": -0.1}):
        with pytest.raises(ValueError, match=r"ramp|negative"):
            lambda_at(0, 10, **bad)


def sdcc_inputs(seed):
    edges, pairs, (hidden, unembedding) = random_edges(seed), random_pairs(seed), random_states(seed)
    teacher = jnp.asarray(random_states(seed + 1, tokens=11)[0])
    return jnp.asarray(hidden), jnp.asarray(unembedding), edges, teacher, pairs


def test_the_term_is_added_unnormalised_with_its_metrics():
    config = LossConfig(vocab_chunk=8)
    with jax.enable_x64(True):
        hidden, unembedding, edges, teacher, pairs = sdcc_inputs(3)
        loss = jax.jit(batch_loss, static_argnums=3)
        plain, _ = loss(hidden, unembedding, edges, config)
        term = {"teacher": Teacher(teacher, unembedding, pairs), "sdcc_lambda": 0.1}
        both, metrics = loss(hidden, unembedding, edges, config, **term)
        kl = np.asarray(dense_kl(hidden, teacher, unembedding, unembedding, pairs))
    assert float(both - plain) == pytest.approx(0.1 * kl.sum(), rel=1e-12)
    assert float(metrics.sums["sdcc_kl"]) == pytest.approx(kl.sum())
    assert float(metrics.sums["diverging_leaves"]) == (pairs.weight != 0).sum()
    assert float(metrics.sums["pinsker"]) == pytest.approx(np.sqrt(kl / 2).sum())
    assert float(metrics.maxima["pinsker_max"]) == pytest.approx(np.sqrt(kl.max() / 2))
    assert float(metrics.maxima["sdcc_kl_max"]) == pytest.approx(kl.max())


def test_lambda_zero_is_the_plain_loss_bit_for_bit_even_beside_a_nan_teacher():
    config = LossConfig(vocab_chunk=8)
    hidden, unembedding, edges, teacher, pairs = sdcc_inputs(4)
    spoiled = Teacher(teacher * np.nan, unembedding, pairs)

    def step(**more):
        return jax.jit(jax.value_and_grad(lambda h, w: batch_loss(h, w, edges, config, **more)[0], (0, 1)))

    plain = jax.make_jaxpr(step())(hidden, unembedding)
    static = jax.make_jaxpr(step(teacher=spoiled, sdcc_lambda=0.0))(hidden, unembedding)
    assert str(plain) == str(static)  # a static branch: the same computation
    want = step()(hidden, unembedding)
    for value in (0.0, jnp.float32(0.0)):
        got = step(teacher=spoiled, sdcc_lambda=value)(hidden, unembedding)
        jax.tree.map(np.testing.assert_array_equal, got, want)


def test_without_diverging_leaves_the_loss_is_the_task_loss():
    config = LossConfig(vocab_chunk=8)
    hidden, unembedding, edges, teacher, pairs = sdcc_inputs(5)
    nothing = Teacher(teacher, unembedding, pairs._replace(weight=np.zeros_like(pairs.weight)))

    def step(**more):
        loss = jax.value_and_grad(lambda h, w: batch_loss(h, w, edges, config, **more)[0], (0, 1))
        return jax.jit(loss)(hidden, unembedding)

    jax.tree.map(np.testing.assert_array_equal, step(teacher=nothing, sdcc_lambda=0.1), step())
