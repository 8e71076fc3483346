"""Incremental decoding equals the full forward pass."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mwjax import model

LENGTHS = np.array([30, 17, 5])


@pytest.fixture(scope="module", params=["qwen3", "qwen2"])
def setting(request):
    config = model.small_config(41, 3, 32, family=request.param)
    params = model.init(config, jax.random.key(0))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 41, (3, 30)))
    full = model.forward(params, config, tokens, jnp.tile(jnp.arange(30), (3, 1)), jnp.full((3, 30), 30))
    return config, params, np.asarray(tokens), np.asarray(full), jax.jit(partial(model.decode_step, config=config))


def check(setting, pieces, cache_length=32):
    """``pieces``: arrays of positions [3, S], negative for padding, that together cover every sequence in order."""
    config, params, tokens, full, step = setting
    cache = model.init_cache(config, 3, cache_length)
    seen = np.zeros((3, 30), bool)
    for positions in pieces:
        inputs = np.take_along_axis(tokens, np.maximum(positions, 0), axis=1)
        hidden, cache = step(params, tokens=jnp.asarray(inputs), positions=jnp.asarray(positions), cache=cache)
        for row, column in np.argwhere(positions >= 0):
            position = positions[row, column]
            np.testing.assert_allclose(hidden[row, column], full[row, position], rtol=1e-5, atol=1e-5)
            seen[row, position] = True
    np.testing.assert_array_equal(seen, np.arange(30) < LENGTHS[:, None])


def test_a_whole_prompt_padded_on_the_right(setting):
    positions = np.tile(np.arange(30), (3, 1))
    check(setting, [np.where(positions < LENGTHS[:, None], positions, -1)])


def test_a_whole_prompt_padded_on_the_left(setting):
    check(setting, [np.maximum(np.arange(30) - (30 - LENGTHS[:, None]), -1)])


def test_a_prompt_then_single_tokens_with_sequences_that_end_early(setting):
    prompt = np.tile(np.arange(20), (3, 1))
    starts = np.array([12, 16, 1])
    pieces = [np.where(prompt < starts[:, None], prompt, -1)]
    for count in range(18):
        position = starts + count
        pieces.append(np.where(position < LENGTHS, position, -1)[:, None])
    check(setting, pieces)


def test_a_prompt_in_chunks(setting):
    positions = np.tile(np.arange(30), (3, 1))
    positions = np.where(positions < LENGTHS[:, None], positions, -1)
    check(setting, [positions[:, :5], positions[:, 5:24], positions[:, 24:]])


def test_going_back_to_a_prefix_forgets_what_followed(setting):
    config, params, tokens, full, step = setting
    other = (tokens + 7) % 41
    all_positions = np.tile(np.arange(30), (3, 1))
    cache = step(params, tokens=other, positions=all_positions, cache=model.init_cache(config, 3, 32))[1]
    hidden, cache = step(params, tokens=tokens[:, :20], positions=all_positions[:, :20], cache=cache)
    np.testing.assert_allclose(hidden, full[:, :20], rtol=1e-5, atol=1e-5)
    hidden, _ = step(params, tokens=tokens[:, 20:21], positions=all_positions[:, 20:21], cache=cache)
    np.testing.assert_allclose(hidden, full[:, 20:21], rtol=1e-5, atol=1e-5)


def test_a_position_outside_the_cache_gives_nan_and_padding_leaves_the_cache_alone(setting):
    config, params, tokens, _, step = setting
    empty = model.init_cache(config, 3, 8)
    positions = np.array([[8], [-1], [7]])
    hidden, cache = step(params, tokens=tokens[:, :1], positions=positions, cache=empty)
    assert np.isnan(hidden[0]).all() and np.isfinite(hidden[1:]).all()
    written = np.asarray(cache.key != 0).any(axis=(0, 3, 4))
    np.testing.assert_array_equal(np.argwhere(written), [[2, 7]])


def test_without_scan_and_in_bfloat16(setting):
    config, params, tokens, full, _ = setting
    positions = jnp.tile(jnp.arange(30), (3, 1))
    unrolled = jax.jit(partial(model.decode_step, config=config, scan=False))
    plain = unrolled(params, tokens=tokens, positions=positions, cache=model.init_cache(config, 3, 32))[0]
    np.testing.assert_allclose(plain, full, rtol=1e-5, atol=1e-5)
    cache = model.init_cache(config, 3, 32, jnp.bfloat16)
    half = jax.jit(partial(model.decode_step, config=config, dtype=jnp.bfloat16))
    low, cache = half(params, tokens=tokens, positions=positions, cache=cache)
    assert low.dtype == cache.key.dtype == jnp.bfloat16
    assert np.linalg.norm(low.astype(jnp.float32) - full) / np.linalg.norm(full) < 0.03
