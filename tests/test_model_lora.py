"""Low-rank adapters: values and gradients from those of the full matrices, merging, and what they declare."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mwjax import model
from tests.random_tries import random_trie

FAMILIES = ("qwen3", "qwen2", "llama")  # tied, tied with biases, untied
BLOCKS = dict.fromkeys(("query", "key", "value", "output"), "attention")
BLOCKS |= dict.fromkeys(("gate", "up", "down"), "feed_forward")
QUICK = {"xla_backend_optimization_level": 0}  # compiling is most of the time these tests take
TRIE = random_trie(np.random.default_rng(0), 30)
ROWS = tuple(
    jnp.asarray(x, jnp.int32)[None]
    for x in (np.random.default_rng(1).integers(0, 53, 30), TRIE.position, TRIE.visible_until)
)


def adapted(family: str = "qwen3", dtype: Any = jnp.float64, **lora: Any) -> tuple[model.ModelConfig, Any]:
    """A decoder whose adapters are all random, B too."""
    config = model.small_config(53, 2, 24, family=family, heads=4, head_dim=6, tied=family != "llama")
    config = dataclasses.replace(config, lora=model.LoRA(**{"rank": 3, "alpha": 6.0, **lora}))
    params = model.init(config, jax.random.key(0), dtype)
    adapters, base = model.split_params(params, model.adapter_names(config))
    noise = jax.tree.map(lambda leaf: leaf + 0.05 * jax.random.normal(jax.random.key(5), leaf.shape, dtype), adapters)
    return config, model.join_params(noise, base)


def plain(config: model.ModelConfig) -> model.ModelConfig:
    return dataclasses.replace(config, lora=None)


def compiled(function: Any, *arguments: Any) -> Any:
    return jax.jit(function, compiler_options=QUICK)(*arguments)


def value_and_grad(params: Any, config: model.ModelConfig, **options: Any) -> Any:
    return compiled(jax.value_and_grad(lambda params: loss(params, config, **options)), params)


def loss(params: Any, config: model.ModelConfig, **options: Any) -> jax.Array:
    hidden = model.forward(params, config, *ROWS, dtype=params["embedding"].dtype, **options)
    return (jnp.sin(hidden @ model.unembedding(params, config).T) * jnp.arange(53)).sum()


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_the_chain_rule_of_the_full_matrices_gradient(family: str) -> None:
    """With W' = W + s A B: dA = s dW' B^T and dB = s A^T dW', per layer, the others as in the merged decoder."""
    with jax.enable_x64(True):
        config, params = adapted(family)
        merged_config, merged = model.merge_adapters(config, params)
        assert merged_config == plain(config)
        value, got = value_and_grad(params, config)
        expected_value, full = value_and_grad(merged, merged_config)
        np.testing.assert_allclose(value, expected_value, rtol=1e-10)
        for target, block in BLOCKS.items():
            factors, dw = params["layers"][block][f"{target}_lora"], full["layers"][block][target]
            a, b = (np.asarray(factors[name]) for name in "ab")
            a2, b2 = a.reshape(2, -1, 3), b.reshape(2, 3, -1)
            dw2 = np.asarray(dw).reshape(2, a2.shape[1], b2.shape[2])
            found = got["layers"][block][f"{target}_lora"]
            scale = 6.0 / 3
            for layer in range(2):
                da, db = scale * dw2[layer] @ b2[layer].T, scale * a2[layer].T @ dw2[layer]
                np.testing.assert_allclose(found["a"][layer].reshape(da.shape), da, rtol=1e-8, atol=1e-9)
                np.testing.assert_allclose(found["b"][layer].reshape(db.shape), db, rtol=1e-8, atol=1e-9)
            np.testing.assert_allclose(got["layers"][block][target], dw, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_weights_are_saved_as_a_plain_model_with_the_same_logits(family: str, tmp_path: Path) -> None:
    config, params = adapted(family, jnp.float32)
    with pytest.raises(model.ModelFilesError, match="merge_adapters"):
        model.save(tmp_path / "out", config, params)
    model.save(tmp_path / "out", *model.merge_adapters(config, params))
    loaded_config, loaded = model.load(tmp_path / "out")
    assert loaded_config == plain(config)

    def logits(params: Any, config: model.ModelConfig) -> jax.Array:
        return compiled(lambda p: model.forward(p, config, *ROWS) @ model.unembedding(p, config).T, params)

    np.testing.assert_allclose(logits(loaded, loaded_config), logits(params, config), rtol=1e-4, atol=1e-5)
    base = model.split_params(params, model.adapter_names(config))[1]
    assert np.abs(logits(loaded, loaded_config) - logits(base, plain(config))).max() > 0.01


def test_merging_bfloat16_weights_rounds_nothing() -> None:
    config, params = adapted(dtype=jnp.float32, targets=("query", "down"))
    adapters, base = model.split_params(params, model.adapter_names(config))
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), base)
    _, merged = model.merge_adapters(config, model.join_params(adapters, low))
    assert merged["layers"]["attention"]["query"].dtype == np.float32
    assert merged["layers"]["attention"]["key"].dtype == jnp.bfloat16
    _, exact = model.merge_adapters(config, params)
    change = exact["layers"]["attention"]["query"] - np.asarray(base["layers"]["attention"]["query"])
    expected = np.asarray(low["layers"]["attention"]["query"], np.float32) + change
    np.testing.assert_allclose(merged["layers"]["attention"]["query"], expected, atol=1e-6)


def test_with_b_zero_the_decoder_is_the_base_bit_for_bit() -> None:
    config, _ = adapted(dtype=jnp.float32)
    params = model.init(config, jax.random.key(7))
    base = model.init(plain(config), jax.random.key(7))
    adapters, rest = model.split_params(params, model.adapter_names(config))
    jax.tree.map(np.testing.assert_array_equal, rest, base)
    np.testing.assert_array_equal(
        compiled(lambda p: model.forward(p, config, *ROWS), params),
        compiled(lambda p: model.forward(p, plain(config), *ROWS), base),
    )
    a, b = (adapters["layers"]["attention"]["output_lora"][name] for name in "ab")
    assert not b.any() and not np.allclose(a[0], a[1])
    assert float(a.std()) == pytest.approx((4 * 6) ** -0.5, rel=0.2)  # variance one over what is summed


@pytest.mark.slow
def test_scan_and_remat_change_nothing() -> None:
    with jax.enable_x64(True):
        config, params = adapted(targets=("query", "value", "output", "up"))
        expected = value_and_grad(params, config)
        got = value_and_grad(params, config, scan=False, remat="full", attention="oracle")
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-7, atol=1e-8), got, expected)


def test_incremental_decoding_adapts_too() -> None:
    with jax.enable_x64(True):
        config, params = adapted(targets=("query", "value", "output", "up"))
        tokens, positions, causal = ROWS[0], jnp.arange(30)[None], jnp.full((1, 30), 30)
        whole = compiled(lambda p: model.forward(p, config, tokens, positions, causal, dtype=jnp.float64), params)

        def in_two_steps(params: Any) -> jax.Array:
            cache = model.init_cache(config, 1, 30, jnp.float64)
            first, cache = model.decode_step(params, config, tokens[:, :20], positions[:, :20], cache, dtype="float64")
            second, _ = model.decode_step(params, config, tokens[:, 20:], positions[:, 20:], cache, dtype="float64")
            return jnp.concatenate([first, second], axis=1)

        np.testing.assert_allclose(compiled(in_two_steps, params), whole, rtol=1e-8, atol=1e-9)


def test_adapters_declare_shapes_axes_and_names_like_all_parameters() -> None:
    config, params = adapted(dtype=jnp.float32, targets=("key", "down"))
    names = model.adapter_names(config)
    assert names == [
        f"layers.{block}.{factor}" for block in ("attention.key_lora", "feed_forward.down_lora") for factor in "ab"
    ]
    axes = model.logical_axes(config)["layers"]
    assert axes["attention"]["key_lora"] == {
        "a": ("layers", "embed", "lora"),
        "b": ("layers", "lora", "kv_heads", "head_dim"),
    }
    assert axes["feed_forward"]["down_lora"] == {"a": ("layers", "mlp", "lora"), "b": ("layers", "lora", "embed")}
    sizes = config.axis_sizes()
    shapes = jax.tree.map(
        lambda some: tuple(sizes[axis] for axis in some),
        model.logical_axes(config),
        is_leaf=lambda x: isinstance(x, tuple),
    )
    assert shapes == jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, model.abstract_params(config))
    assert model.adapter_names(plain(config)) == []
    declared = model.declarations(config)["layers"]["attention"]["key_lora"]
    assert [declared[factor].file_name for factor in "ab"] == [
        f"self_attn.k_proj.lora_{factor}.weight" for factor in "AB"
    ]
    assert declared["b"].file_shape(sizes) == (2 * 6, 3) and declared["a"].file_shape(sizes) == (3, 24)


def test_impossible_adapters_are_refused() -> None:
    with pytest.raises(model.UnsupportedModelError, match="at least 1, got 0"):
        model.LoRA(0, 1.0)
    for targets in ((), ("query", "embedding")):
        with pytest.raises(model.UnsupportedModelError, match="some of query, key, value, output, gate, up, down"):
            model.LoRA(2, 1.0, targets)
