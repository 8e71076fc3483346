"""Edge log-probs and entropies against the definition, in value, gradient and memory."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mwjax.losses.logprobs import edge_logprobs
from mwjax.losses.vocabulary import chunk_rows
from tests.random_edges import dense_scores, random_edges, random_states


def dense(hidden, unembedding, parent, target, temperature):
    """The same in dense jax, positions x vocabulary, differentiated by jax itself."""
    logits = jnp.take_along_axis(hidden, parent[..., None], axis=1) @ unembedding.T / temperature[..., None]
    log_p = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(log_p, target[..., None], -1)[..., 0], -(jnp.exp(log_p) * log_p).sum(-1)


@cache
def compiled(chunk):
    return jax.jit(partial(edge_logprobs, vocab_chunk=chunk))


@cache
def compiled_gradients(score):
    """Gradients of sum(a logprob + b entropy); compiled once, the examples differ in values only."""

    def total(hidden, unembedding, a, b, *fields):
        logprob, entropy = score(hidden, unembedding, *fields)
        return (a * logprob + b * entropy).sum()

    return jax.jit(jax.grad(total, (0, 1)))


@given(seed=st.integers(0, 1000), chunk=st.sampled_from([1, 5, 12, 36, 50, None]))
def test_values_match_the_definition(seed, chunk):
    edges, (hidden, unembedding) = random_edges(seed), random_states(seed)
    temperature = np.nan_to_num(edges.temperature, nan=1.0)
    with jax.enable_x64(True):
        scores = compiled(chunk)(hidden, unembedding, edges.parent, edges.target, temperature)
    logprob, entropy = dense_scores(hidden, unembedding, edges)
    np.testing.assert_allclose(scores.logprob, logprob, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(scores.entropy, entropy, rtol=1e-12, atol=1e-13)


@given(seed=st.integers(0, 1000), chunk=st.sampled_from([1, 8, 37, None]))
def test_gradients_match_dense_float64(seed, chunk):
    edges, (hidden, unembedding) = random_edges(seed), random_states(seed)
    temperature = np.nan_to_num(edges.temperature, nan=1.0)
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(2, *edges.parent.shape))
    arguments = (hidden, unembedding, a, b, edges.parent, edges.target, temperature)
    with jax.enable_x64(True):
        got = compiled_gradients(compiled(chunk))(*arguments)
        want = compiled_gradients(dense)(*arguments)
    for g, w in zip(got, want):
        np.testing.assert_allclose(g, w, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 2e-6), (jnp.bfloat16, 2e-6)])
def test_low_precision_inputs_give_float32_results(dtype, tolerance):
    edges, (hidden, unembedding) = random_edges(3), random_states(3)
    low = [jnp.asarray(a, dtype) for a in (hidden, unembedding)]
    temperature = np.nan_to_num(edges.temperature, nan=1.0).astype(np.float32)
    scores = edge_logprobs(*low, edges.parent, edges.target, temperature, vocab_chunk=8)
    assert scores.logprob.dtype == scores.entropy.dtype == jnp.float32
    logprob, entropy = dense_scores(*[np.asarray(a, np.float64) for a in low], edges)
    np.testing.assert_allclose(scores.logprob, logprob, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(scores.entropy, entropy, rtol=1e-5, atol=1e-5)
    gradients = jax.grad(
        lambda *a: edge_logprobs(*a, edges.parent, edges.target, temperature, vocab_chunk=8).logprob.sum(), (0, 1)
    )(*low)
    assert [g.dtype for g in gradients] == [dtype, dtype]


def test_extreme_logits_stay_finite():
    hidden, unembedding = jnp.array([[[1000.0], [-1000.0]]]), jnp.arange(10.0)[:, None]
    zero = jnp.zeros((1, 1), jnp.int32)
    for vocab_chunk in (3, 10):
        for parent, target in ((zero, zero + 9), (zero + 1, zero)):
            scores = edge_logprobs(hidden, unembedding, parent, target, jnp.ones((1, 1)), vocab_chunk=vocab_chunk)
            assert float(scores.logprob[0, 0]) == 0.0 and float(scores.entropy[0, 0]) == 0.0
        scores = edge_logprobs(hidden, unembedding, zero, zero, jnp.ones((1, 1)), vocab_chunk=vocab_chunk)
        assert float(scores.logprob[0, 0]) == -9000.0


def test_an_edge_without_cotangent_gives_exactly_nothing():
    """Its hidden state is NaN, and still every gradient equals the one without that edge."""
    edges, (hidden, unembedding) = random_edges(5, rows=1), random_states(5, rows=1)
    hidden[0, 0] = np.nan
    parent = np.where(edges.parent == 0, 1, edges.parent)
    spoiled = parent.copy()
    spoiled[0, 4] = 0
    chosen = np.arange(12) != 4

    def gradients(parent):
        def total(hidden, unembedding):
            scores = edge_logprobs(hidden, unembedding, parent, edges.target, jnp.ones(parent.shape), vocab_chunk=8)
            return jnp.where(chosen, scores.logprob + scores.entropy, 0.0).sum()

        return jax.grad(total, (0, 1))(jnp.asarray(hidden, jnp.float32), jnp.asarray(unembedding, jnp.float32))

    clean, dirty = gradients(parent), gradients(spoiled)
    assert all(np.isfinite(g).all() for g in dirty)
    for c, d in zip(clean, dirty):
        np.testing.assert_array_equal(c, d)


def largest_intermediate(function, *args):
    """The most elements of any array in the jaxpr, sub-jaxprs included."""
    largest = 0

    def visit(jaxpr):
        nonlocal largest
        for equation in jaxpr.eqns:
            largest = max([largest, *(v.aval.size for v in equation.outvars)])
            for parameter in equation.params.values():
                for inner in jax.tree.leaves(parameter, is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")):
                    if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                        visit(getattr(inner, "jaxpr", inner))

    visit(jax.make_jaxpr(function)(*args).jaxpr)
    return largest


def test_edges_times_vocabulary_is_never_materialised():
    """E = 96, V = 1,003 (a prime): with chunks of 64 nothing is larger than the larger of E x 64 and V x D."""
    rng = np.random.default_rng(0)
    hidden, unembedding = jnp.asarray(rng.normal(size=(2, 20, 4))), jnp.asarray(rng.normal(size=(1003, 4)))
    parent, target = rng.integers(0, 20, (2, 48)), rng.integers(0, 1003, (2, 48))

    def total(score):
        def loss(hidden, unembedding):
            logprob, entropy = score(hidden, unembedding, parent, target, jnp.ones((2, 48)))
            return (logprob + 0.1 * entropy).sum()

        return jax.value_and_grad(loss, (0, 1))

    chunked = total(lambda *a: edge_logprobs(*a, vocab_chunk=64))
    assert largest_intermediate(chunked, hidden, unembedding) == 96 * 64
    assert largest_intermediate(total(dense), hidden, unembedding) == 96 * 1003
    memory = [
        jax.jit(f).lower(hidden, unembedding).compile().memory_analysis().temp_size_in_bytes
        for f in (chunked, total(dense))
    ]
    assert memory[0] < memory[1] / 3


def test_default_chunk():
    assert chunk_rows(151_936, 4_096, None) == 9_496  # 16 equal chunks
    assert chunk_rows(128_256, 4_096, None) == 9_162  # 14 chunks, the last overlaps by 12 rows
    assert chunk_rows(512, 10**6, None) == 512
    assert 2_048 // 2 < chunk_rows(151_936, 65_536, None) <= 2_048
    assert chunk_rows(100, 4, 1_000) == 100
    with pytest.raises(ValueError, match="vocab_chunk"):
        chunk_rows(100, 4, 0)


def test_no_edges():
    hidden, unembedding = random_states(0)
    nothing = np.zeros((2, 0), np.int32)
    scores = edge_logprobs(jnp.asarray(hidden), jnp.asarray(unembedding), nothing, nothing, nothing.astype(np.float32))
    assert scores.logprob.shape == scores.entropy.shape == (2, 0)
