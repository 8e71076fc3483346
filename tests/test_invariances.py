"""Packed equals LogitTree, in loss and every gradient leaf; the union mask does not, and where it does."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mwjax import model, rollouts
from mwjax.losses.logprobs import edge_logprobs
from mwjax.tree import RowShape, build, collate, fragments, pack
from tests.random_rollouts import simulate

CASES = Path(__file__).parent / "cases"
VOCABULARY = 40


def tiny(layers=2, family="qwen3", dtype=jnp.float64):
    config = model.small_config(VOCABULARY, layers=layers, width=16, heads=4, key_value_heads=2, family=family)
    return config, model.init(config, jax.random.key(0), dtype)


@functools.partial(jax.jit, static_argnames=("config", "dtype"))
@jax.value_and_grad
def loss(params, config, rows, dtype):
    """A ratio-weighted objective, so that weight, advantage and rollout log-prob of every edge matter."""
    edges = rows.edges
    hidden = model.forward(params, config, rows.tokens, rows.positions, rows.visible_until, dtype=dtype)
    scores = edge_logprobs(hidden, model.unembedding(params, config), edges.parent, edges.target, edges.temperature)
    ratio = jnp.exp(scores.logprob - jnp.nan_to_num(edges.rollout_logprob))
    return (edges.weight * (edges.advantage * ratio - scores.logprob + 0.1 * scores.entropy)).sum()


def rows_of(trees, method, length=1024, order=None):
    """All rows of some rollouts; with the default length they are one row, so that most tests share one compilation."""
    paired = method == "sdcc"
    shape = RowShape(length, length, length * paired, length * paired)
    made = fragments(trees, method, shape)
    if order is not None:
        made = [made[k] for k in order.permutation(len(made))]
    packed = pack([fragment.needs for fragment in made], shape)
    rows = collate(made, packed, shape, len(packed) + (order is not None)).rows
    advantages = np.random.default_rng(5).normal(size=len(trees)).astype(np.float32)
    rows.edges.advantage[:] = advantages[rows.edges.rollout]
    return rows


def loss_and_gradient(rows, *, dtype=jnp.float64, **kind):
    with jax.enable_x64(dtype == jnp.float64):
        config, params = tiny(dtype=dtype, **kind)
        return loss(params, config=config, rows=rows, dtype=dtype)


def assert_same(left, right, tolerance):
    assert float(left[0]) == pytest.approx(float(right[0]), rel=tolerance)
    for one, other in zip(jax.tree.leaves(left[1]), jax.tree.leaves(right[1]), strict=True):
        scale = np.abs(np.asarray(other)).max()
        assert np.abs(np.asarray(one) - np.asarray(other)).max() <= tolerance * scale


def group(first_seed, white_box=True):
    made = [simulate(first_seed + k, vocabulary=VOCABULARY, edits=white_box, name=f"r{k}").rollout for k in range(3)]
    shared = rollouts.Turn(np.arange(12, dtype=np.int32), np.array([1, 2, 3], np.int32), -np.ones(3))
    twice = rollouts.Rollout("twice", (shared, shared))  # one path, two sampled events
    return [build(rollout) for rollout in [*made, twice]]


@pytest.mark.parametrize("seed", [0, 30, 60])
def test_packed_equals_logittree_in_float64(seed):
    trees = group(seed, white_box=seed != 30)
    views = loss_and_gradient(rows_of(trees, "logittree"))
    assert_same(loss_and_gradient(rows_of(trees, "packed")), views, 1e-10)


def test_for_any_row_size_order_and_padding():
    trees = group(100)
    want = loss_and_gradient(rows_of(trees, "logittree"))
    longest = max(len(view.ids) for tree in trees for view in tree.views)
    rng = np.random.default_rng(0)
    for length in (longest, 2 * longest + 3):
        assert_same(loss_and_gradient(rows_of(trees, "packed", length, rng)), want, 1e-10)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_for_every_family(family):
    trees = group(200)
    views = loss_and_gradient(rows_of(trees, "logittree"), family=family)
    assert_same(loss_and_gradient(rows_of(trees, "packed"), family=family), views, 1e-10)


def test_in_float32_gradients_point_the_same_way():
    trees = group(300)
    _, views = loss_and_gradient(rows_of(trees, "logittree"), dtype=jnp.float32)
    _, packed = loss_and_gradient(rows_of(trees, "packed"), dtype=jnp.float32)
    flat = [np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(g)]) for g in (views, packed)]
    cosine = flat[0] @ flat[1] / np.linalg.norm(flat[0]) / np.linalg.norm(flat[1])
    assert cosine > 1 - 1e-6


def test_without_junctions_every_method_has_the_same_loss():
    tree = in_small_vocabulary("no_compression.json")
    want = loss_and_gradient(rows_of([tree], "logittree"))
    for method in ("packed", "naive_compressed", "naive_full", "union", "sdcc"):
        assert_same(loss_and_gradient(rows_of([tree], method)), want, 1e-10)


forward = jax.jit(model.forward, static_argnames=("config", "dtype"))


def token_logprobs(tree, method, layers):
    """{(turn, index): log-prob} under one method's rows."""
    with jax.enable_x64(True):
        config, params = tiny(layers)
        rows = rows_of([tree], method, 128)
        edges = rows.edges
        hidden = forward(params, config, rows.tokens, rows.positions, rows.visible_until, dtype=jnp.float64)
        scores = edge_logprobs(hidden, model.unembedding(params, config), edges.parent, edges.target, edges.temperature)
        found = np.asarray(scores.logprob)
    real = edges.weight > 0
    return dict(zip(zip(edges.turn[real].tolist(), edges.index[real].tolist()), found[real].tolist()))


def in_small_vocabulary(name):
    case = json.loads((CASES / name).read_text())
    rollout = rollouts.from_json(case["rollouts"][0])
    turns = tuple(
        dataclasses.replace(t, prompt_ids=t.prompt_ids % VOCABULARY, completion_ids=t.completion_ids % VOCABULARY)
        for t in rollout.turns
    )
    return build(dataclasses.replace(rollout, turns=turns))


def largest_difference(tree, layers):
    exact, union = token_logprobs(tree, "logittree", layers), token_logprobs(tree, "union", layers)
    assert exact.keys() == union.keys()
    return max(abs(exact[token] - union[token]) for token in exact)


def test_the_union_mask_leaks_the_evicted_span_through_survivors():
    """MemoryWalker states that its 4D mask over the physical union equals LogitTree. Two layers show that it does not:
    a survivor's keys were computed while the evicted span was visible. Before the first eviction nothing can leak."""
    tree = in_small_vocabulary("running_example.json")
    exact, union = token_logprobs(tree, "logittree", 2), token_logprobs(tree, "union", 2)
    assert max(abs(exact[0, k] - union[0, k]) for k in range(7)) < 1e-12
    assert min(abs(exact[turn, 0] - union[turn, 0]) for turn in (1, 2, 3)) > 1e-4


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_the_union_mask_is_right_where_only_suffixes_are_evicted(layers):
    """tests/cases/three_levels: every edit cuts the end of the live view, read at the last live token."""
    assert largest_difference(in_small_vocabulary("three_levels.json"), layers) < 1e-12


def test_with_one_layer_what_is_left_of_the_union_error_is_the_position():
    """One layer cannot leak: survivors' keys are those of their tokens. With positions per row the error is gone."""
    tree = in_small_vocabulary("running_example.json")
    assert largest_difference(tree, 1) > 1e-4
    with jax.enable_x64(True):
        config, params = tiny(1)
        exact = token_logprobs(tree, "logittree", 1)
        rows = rows_of([tree], "union", 128)
        for k in np.flatnonzero(rows.edges.weight[0]):
            parent = rows.edges.parent[0, k]
            seen = np.flatnonzero(rows.visible_until[0, : parent + 1] > parent)
            positions = np.zeros_like(rows.positions)
            positions[0, seen] = np.arange(len(seen))  # gap-free for this one row
            hidden = forward(params, config, rows.tokens, positions, rows.visible_until, dtype=jnp.float64)
            logits = hidden[0, parent] @ model.unembedding(params, config).T
            found = jax.nn.log_softmax(logits)[rows.edges.target[0, k]]
            token = int(rows.edges.turn[0, k]), int(rows.edges.index[0, k])
            assert abs(float(found) - exact[token]) < 1e-12
