"""logdiff against log-probs computed one generation prefix at a time."""

from __future__ import annotations

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mwjax import model
from mwjax.audit.logdiff import logdiff, row_shape, shift
from mwjax.rollouts import Rollout
from mwjax.tree import METHODS, Tree, build
from tests.random_rollouts import simulate

CONFIG = model.small_config(40, layers=2, width=32, heads=4, key_value_heads=2)


@cache
def params() -> dict[str, object]:
    return jax.jit(model.init, static_argnums=0)(CONFIG, jax.random.key(3))


@cache
def all_logprobs(ids: tuple[int, ...]) -> np.ndarray:
    """log p(every token | ids[:k + 1]) for every k, with dense attention: [T, V]."""
    tokens = np.zeros((1, 96), np.int32)
    tokens[0, : len(ids)] = ids
    return np.asarray(dense(params(), tokens))


@jax.jit
def dense(params: dict[str, object], tokens: jax.Array) -> jax.Array:
    positions = jnp.arange(96, dtype=jnp.int32)[None]
    hidden = model.forward(params, CONFIG, tokens, positions, jnp.full_like(positions, 96), attention="oracle")
    return jax.nn.log_softmax(hidden[0] @ model.unembedding(params, CONFIG).T)


def sampled_by_the_model(rollout: Rollout) -> Rollout:
    """The rollout with the log-probs an exact engine would have recorded."""
    turns = []
    for turn in rollout.turns:
        prompt, completion = turn.prompt_ids.tolist(), turn.completion_ids.tolist()
        rows = all_logprobs((*prompt, *completion))
        values = [rows[len(prompt) + k - 1, token] for k, token in enumerate(completion)]
        turns.append(dataclasses.replace(turn, logprobs=np.array(values, np.float64)))
    return dataclasses.replace(rollout, turns=tuple(turns))


@cache
def trees() -> list[Tree]:
    return [build(sampled_by_the_model(simulate(seed, turns=7, name=f"r{seed}").rollout)) for seed in range(10)]


@pytest.mark.parametrize("method", ["packed", "logittree"])
def test_exact_methods_read_what_the_engine_recorded(method: str) -> None:
    found = logdiff(CONFIG, params(), trees(), method)
    assert found.tokens == sum(int(tree.sampled.trainable.sum()) for tree in trees()) > 50
    assert found.max_token is not None and found.max_token < 1e-5


def test_compressed_walk_is_read_under_its_own_prefixes() -> None:
    shape = row_shape(trees(), METHODS)
    exact = logdiff(CONFIG, params(), trees(), "packed", shape=shape)
    found = logdiff(CONFIG, params(), trees(), "naive_compressed", shape=shape)
    expected, recorded, leaves = [], [], []
    for tree in trees():
        walk, sampled = tree.compressed, tree.sampled
        assert walk is not None
        rows = all_logprobs(tuple(walk.ids.tolist()))
        for k in np.flatnonzero(sampled.surviving & (sampled.compressed > 0)):
            expected.append(rows[sampled.compressed[k] - 1, sampled.token[k]])
            logprobs = tree.rollout.turns[sampled.turn[k]].logprobs
            assert logprobs is not None
            recorded.append(logprobs[sampled.index[k]])
            leaves.append(sampled.diverging[k])
    difference = np.array(expected) - np.array(recorded)
    np.testing.assert_allclose(found.trained, expected, atol=1e-5)
    assert found.mean == pytest.approx(np.abs(difference).mean(), abs=1e-5)
    assert found.max_token == pytest.approx(np.abs(difference).max(), abs=1e-5)
    assert found.signed_mean == pytest.approx(difference.mean(), abs=1e-5)
    assert found.mean is not None and found.mean > 0.05
    change = shift(exact, found, trees())
    assert change.tokens == sum(leaves) > 10
    assert change.mean == pytest.approx(difference[np.array(leaves)].mean(), abs=1e-5)


def test_sdcc_is_read_from_its_student() -> None:
    student = logdiff(CONFIG, params(), trees(), "sdcc")
    compressed = logdiff(CONFIG, params(), trees(), "naive_compressed")
    np.testing.assert_array_equal(student.trained, compressed.trained)


def test_no_prefix_changes_without_edits() -> None:
    rollout = simulate(11, turns=2, edits=True).rollout
    plain = dataclasses.replace(rollout, turns=rollout.turns[:1], edits=())
    tree = build(sampled_by_the_model(plain))
    exact = logdiff(CONFIG, params(), [tree], "packed")
    for method in ("naive_compressed", "naive_full"):
        found = logdiff(CONFIG, params(), [tree], method)
        assert shift(exact, found, [tree]).mean is None
        assert found.max_token is None or found.max_token < 1e-5


def test_another_models_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="outside the model's vocabulary of 4"):
        logdiff(model.small_config(4), None, trees(), "packed")


def test_tokens_without_recorded_logprobs_are_left_out() -> None:
    rollout = trees()[0].rollout
    turns = tuple(dataclasses.replace(turn, logprobs=None) for turn in rollout.turns)
    found = logdiff(CONFIG, params(), [build(dataclasses.replace(rollout, turns=turns))], "packed")
    assert found.tokens == 0 and found.mean is None and found.max_token is None and len(found.trained)
