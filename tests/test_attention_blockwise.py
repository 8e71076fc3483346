"""Blockwise attention against the dense oracle, the oracle against a loop over ancestors, which blocks are visited."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mwjax.model import attend
from mwjax.model.attention import blockwise, oracle
from tests.benchmarks.attention import chain_of_views
from tests.random_tries import Trie, random_trie


def random_inputs(seed, batch, rows, keys, heads, kv_heads, head_dim, dtype=np.float32):
    rng = np.random.default_rng(seed)
    shapes = [(batch, rows, heads, head_dim), (batch, keys, kv_heads, head_dim), (batch, keys, kv_heads, head_dim)]
    query, key, value = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    return query, key, value, jnp.asarray(rng.standard_normal(shapes[0]), dtype)


def tries(seed, batch, length):
    rng = np.random.default_rng(seed)
    return [random_trie(rng, length, fork=float(rng.uniform(0, 0.3))) for _ in range(batch)]


def ends(rows: list[Trie]) -> jax.Array:
    return jnp.asarray(np.stack([row.visible_until for row in rows]))


@partial(jax.jit, static_argnames=("backend", "block"))
def value_and_gradients(
    query, key, value, cotangent, visible_until, query_index=None, *, backend="blockwise", block=16
):
    """The output and its gradients with respect to query, key and value."""
    if query_index is None:
        query_index = jnp.broadcast_to(jnp.arange(query.shape[1]), query.shape[:2])
    function = oracle.attend if backend == "oracle" else partial(blockwise.attend, block=block)
    output, pull = jax.vjp(lambda q, k, v: function(q, k, v, visible_until, query_index), query, key, value)
    return (output, *pull(cotangent))


def assert_close(actual, expected, tolerance):
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1.0, float(abs(b).max())))


def test_oracle_is_attention_over_the_ancestors():
    with jax.enable_x64(True):
        (row,) = tries(0, 1, 40)
        query, key, value, _ = random_inputs(1, 1, 40, 40, 4, 2, 6, np.float64)
        actual = np.asarray(attend(query, key, value, ends([row]), backend="oracle"))
        for node in range(40):
            seen = row.ancestors(node)
            for head in range(4):
                scores = np.asarray(key)[0, seen, head // 2] @ np.asarray(query)[0, node, head] / np.sqrt(6)
                weights = np.exp(scores - scores.max())
                expected = weights @ np.asarray(value)[0, seen, head // 2] / weights.sum()
                np.testing.assert_allclose(actual[0, node, head], expected, rtol=1e-12)


# Shapes are few, since each compiles; trees are many.
@pytest.mark.parametrize(
    ("batch", "length", "block", "heads", "kv_heads"),
    [(2, 90, 16, 4, 2), (1, 33, 256, 3, 1), (1, 7, 1, 2, 2)],
)
def test_agrees_with_the_oracle_in_values_and_gradients(batch, length, block, heads, kv_heads):
    for dtype, tolerance in ((np.float32, 1e-5), (np.float64, 1e-10)):
        with jax.enable_x64(dtype is np.float64):
            for seed in range(10):
                arguments = (
                    *random_inputs(seed, batch, length, length, heads, kv_heads, 8, dtype),
                    ends(tries(seed, batch, length)),
                )
                expected = value_and_gradients(*arguments, backend="oracle")
                assert_close(value_and_gradients(*arguments, block=block), expected, tolerance)


@settings(max_examples=3)
@given(seed=st.integers(0, 10**6), length=st.integers(2, 60), block=st.integers(2, 70))
def test_agrees_with_the_oracle_for_any_length_and_block(seed, length, block):
    arguments = *random_inputs(seed, 1, length, length, 2, 1, 4), ends(tries(seed, 1, length))
    assert_close(value_and_gradients(*arguments, block=block), value_and_gradients(*arguments, backend="oracle"), 1e-5)


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_subset_of_the_queries_in_any_order(shuffled):
    """Context parallelism gives a device some rows of the queries: the same values, and gradients that add up."""
    keys = 60
    for seed in range(5):
        rng = np.random.default_rng(seed)
        end = ends(tries(seed, 1, keys))
        query, key, value, cotangent = random_inputs(seed, 1, keys, keys, 4, 2, 8)
        expected = value_and_gradients(query, key, value, cotangent, end, backend="oracle")
        chosen = rng.permutation(keys) if shuffled else np.arange(keys)
        sums = [jnp.zeros_like(key), jnp.zeros_like(value)]
        for part in (chosen[:20], chosen[20:]):
            index = jnp.asarray(part[None], jnp.int32)
            output, query_gradient, *rest = value_and_gradients(
                query[:, part], key, value, cotangent[:, part], end, index
            )
            assert_close((output, query_gradient), (expected[0][:, part], expected[1][:, part]), 1e-5)
            sums = [total + gradient for total, gradient in zip(sums, rest)]
        assert_close(sums, expected[2:], 1e-5)


def test_an_excluded_key_has_exactly_zero_weight():
    """Huge scores and values of keys a row may not see change nothing, in the same block or in another."""
    (row,) = tries(5, 1, 48)
    query, key, value, cotangent = random_inputs(5, 1, 48, 48, 2, 1, 8)
    node = 30
    hidden = jnp.asarray(~row.visible()[node])[None, :, None, None]
    only = cotangent * (jnp.arange(48) == node)[None, :, None, None]
    plain = value_and_gradients(query, key, value, only, ends([row]))
    loud = value_and_gradients(
        query, jnp.where(hidden, 1e3 * key, key), jnp.where(hidden, 1e15 * value, value), only, ends([row])
    )
    np.testing.assert_array_equal(plain[0][0, node], loud[0][0, node])
    for quiet_gradient, loud_gradient in zip(plain[1:], loud[1:]):
        np.testing.assert_array_equal(quiet_gradient, loud_gradient)
    for gradient in plain[2:]:
        assert not np.any(np.where(hidden, gradient, 0))


@pytest.mark.parametrize("backend", ["oracle", "blockwise"])
def test_a_row_that_sees_nothing_is_zero_without_gradient(backend):
    query, key, value, cotangent = random_inputs(0, 1, 3, 4, 2, 2, 4)
    index = jnp.asarray([[2, -1, 0]])
    output, query_gradient, *rest = value_and_gradients(
        query, key, value, cotangent, jnp.full((1, 4), 4), index, backend=backend
    )
    assert not np.any(output[0, 1]) and not np.any(query_gradient[0, 1])
    assert all(np.isfinite(x).all() for x in (output, query_gradient, *rest))


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 6), blocks=st.sampled_from([(4, 4), (8, 2), (2, 8), (16, 16)]))
def test_visited_blocks_against_brute_force(seed, count, blocks):
    """A pair of blocks with something visible is visited; contiguous queries whose range no key reaches are not."""
    (row,) = tries(seed, 1, 96)
    index = np.arange(96, dtype=np.int32)
    visited = np.asarray(blockwise.visited_blocks(jnp.asarray(row.visible_until), jnp.asarray(index), blocks))
    mask = row.visible().reshape(len(index) // blocks[0], blocks[0], -1, blocks[1])
    assert not np.any(mask.any(axis=(1, 3)) & ~visited)
    for i, j in np.ndindex(visited.shape):
        queries, keys = np.arange(i * blocks[0], (i + 1) * blocks[0]), np.arange(j * blocks[1], (j + 1) * blocks[1])
        # the rule of the design's notes: empty when the keys start after the queries or all end before them
        empty = keys[0] > queries[-1] or row.visible_until[keys].max() <= queries[0]
        assert visited[i, j] == (not empty)


@pytest.mark.parametrize("seed", range(3))
def test_the_kernel_touches_exactly_the_visited_blocks(seed):
    """NaN in one block of values reaches every row of the query blocks that visit it and no other; NaN in one block of
    the output's gradient reaches every key of the key blocks it visits and no other."""
    block, count = 8, 6
    row = random_trie(np.random.default_rng(seed), block * count, fork=0.2, root=0.05)
    query, key, value, cotangent = random_inputs(seed, 1, block * count, block * count, 2, 1, 4)
    index = jnp.arange(block * count)
    visited = np.asarray(blockwise.visited_blocks(jnp.asarray(row.visible_until), index, (block, block)))
    assert visited.sum() < count * (count + 1) / 2  # fewer than a causal mask would visit
    run = partial(value_and_gradients, visible_until=ends([row]), block=block)
    for poisoned in range(count):
        where = slice(poisoned * block, (poisoned + 1) * block)
        output = run(query, key, value.at[:, where].set(jnp.nan), cotangent)[0]
        np.testing.assert_array_equal(np.isnan(output).all(axis=(0, 2, 3)), np.repeat(visited[:, poisoned], block))
        np.testing.assert_array_equal(np.isnan(output).any(axis=(0, 2, 3)), np.repeat(visited[:, poisoned], block))
        value_gradient = run(query, key, value, cotangent.at[:, where].set(jnp.nan))[3]
        np.testing.assert_array_equal(np.isnan(value_gradient).any(axis=(0, 2, 3)), np.repeat(visited[poisoned], block))


def test_a_chain_of_views_visits_fewer_blocks_than_a_causal_row():
    end = jnp.asarray(chain_of_views(2048, multiple=256))
    visited = blockwise.visited_blocks(end, jnp.arange(len(end)), (256, 256))
    assert visited.shape == (21, 21) and visited.sum() == 157 < 21 * 22 / 2


def test_blocks_of_padding_and_of_nobody_are_skipped():
    visible_until = jnp.asarray([4, 4, 4, 4, 0, 0, 0, 0])
    visited = blockwise.visited_blocks(visible_until, jnp.asarray([0, 1, 2, 3, -1, -1, -1, -1]), (4, 4))
    np.testing.assert_array_equal(visited, [[True, False], [False, False]])


def test_bfloat16_inputs_accumulate_in_float32():
    rows = tries(2, 2, 60)
    query, key, value, cotangent = random_inputs(2, 2, 60, 60, 4, 2, 16)
    low = [x.astype(jnp.bfloat16) for x in (query, key, value, cotangent)]
    exact = value_and_gradients(*(x.astype(jnp.float32) for x in low), ends(rows), backend="oracle")
    actual = value_and_gradients(*low, ends(rows))
    for a, b in zip(actual, exact):
        assert a.dtype == jnp.bfloat16
        error = np.linalg.norm(a.astype(jnp.float32) - b) / np.linalg.norm(b)
        assert error < 6e-3  # one or two roundings of 2^-9


def test_works_under_vmap():
    arguments = *random_inputs(3, 3, 40, 40, 2, 1, 8), ends(tries(3, 3, 40))
    one_by_one = jax.vmap(lambda *row: value_and_gradients(*(x[None] for x in row)))(*arguments)
    assert_close([x[:, 0] for x in one_by_one], value_and_gradients(*arguments), 1e-6)


def test_never_holds_rows_times_rows():
    length, heads = 2048, 2
    query = jnp.zeros((1, length, heads, 4))
    key = jnp.zeros((1, length, 1, 4))
    end = jnp.full((1, length), length)
    program = str(
        jax.make_jaxpr(jax.grad(lambda q, k, v: attend(q, k, v, end, backend="blockwise").sum(), argnums=(0, 1, 2)))(
            query, key, key
        )
    )
    sizes = [np.prod([int(n) for n in shape.split(",")]) for shape in re.findall(r"\w\d+\[([\d,]+)\]", program)]
    assert max(sizes) <= max(query.size, heads * blockwise.BLOCK**2) < length**2 / 8


def test_errors_name_what_is_available_and_what_does_not_fit():
    query, key, value, _ = random_inputs(0, 1, 4, 4, 2, 1, 4)
    end = jnp.full((1, 4), 4)
    with pytest.raises(
        ValueError, match="unknown attention backend 'dense'; available: blockwise, oracle, pallas, splash"
    ):
        attend(query, key, value, end, backend="dense")
    with pytest.raises(ValueError, match="visible_until must be"):
        attend(query, key, value, end[:, :3], backend="oracle")
    with pytest.raises(ValueError, match="query_index is needed"):
        attend(query[:, :2], key, value, end, backend="oracle")
    with pytest.raises(ValueError, match="query_index must be"):
        attend(query, key, value, end, query_index=jnp.zeros((1, 3), jnp.int32), backend="oracle")
    with pytest.raises(ValueError, match="shapes do not fit"):
        attend(query, key[..., :2], value, end, backend="oracle")
