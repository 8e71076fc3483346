"""The decoder against an independent numpy implementation, and its switches against each other."""

from __future__ import annotations

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from mwjax import model
from mwjax.model.parameters import Declaration
from tests.random_tries import random_trie
from tests.reference_decoder import random_checkpoint, reference_forward

SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000.0,
    "hidden_act": "silu",
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 10, "norm_topk_prob": True}
ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def hf_config(family: str, tied: bool, **more) -> dict:
    return {
        **SIZES,
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "tie_word_embeddings": tied,
        **more,
    }


def causal(length: int) -> tuple[jax.Array, jax.Array]:
    return jnp.arange(length)[None], jnp.full((1, length), length)


@pytest.mark.parametrize(
    ("family", "tied", "more"),
    [
        ("qwen3", True, {}),
        ("qwen2", False, {}),
        ("llama", True, {}),
        ("llama", False, {"rope_scaling": LLAMA3}),
        ("llama", True, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("qwen3", False, {"head_dim": 6}),  # heads * head_dim differs from hidden_size
        ("qwen3_moe", False, EXPERTS),
        ("qwen3_moe", True, {**EXPERTS, "num_experts_per_tok": 2, "norm_topk_prob": False}),
    ],
)
def test_hidden_states_and_logits_equal_an_independent_implementation(tmp_path, family, tied, more):
    values = hf_config(family, tied, **more)
    tensors = random_checkpoint(values)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(values))
    tokens = np.random.default_rng(1).integers(0, 61, 19).tolist()
    hidden, logits = reference_forward(values, tensors, tokens)
    with jax.enable_x64(True):
        config, params = model.load(tmp_path, dtype=jnp.float64)
        actual = model.forward(params, config, jnp.asarray([tokens]), *causal(19), dtype=jnp.float64)[0]
        np.testing.assert_allclose(actual, hidden, rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(actual @ model.unembedding(params, config).T, logits, rtol=1e-9, atol=1e-11)
    config, params = model.load(tmp_path)
    actual = model.forward(params, config, jnp.asarray([tokens]), *causal(19))[0]
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, hidden, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def packed():
    config = model.small_config(53, 2, 32, tied=False)
    rng = np.random.default_rng(0)
    rows = [random_trie(rng, 40) for _ in range(2)]
    arrays = (
        rng.integers(0, 53, (2, 40)),
        np.stack([r.position for r in rows]),
        np.stack([r.visible_until for r in rows]),
    )
    return config, model.init(config, jax.random.key(0)), tuple(jnp.asarray(x, jnp.int32) for x in arrays)


def loss_and_gradients(packed, **options):
    config, params, rows = packed

    def loss(params):
        return (model.forward(params, config, *rows, **options) ** 2 * jnp.arange(32)).sum()

    return jax.jit(jax.value_and_grad(loss))(params)


@pytest.fixture(scope="module")
def expected(packed):
    return loss_and_gradients(packed)


@pytest.mark.parametrize("options", [{"attention": "oracle"}, {"remat": "full"}, {"remat": "attention", "scan": False}])
def test_backend_scan_and_remat_change_neither_values_nor_gradients(packed, expected, options):
    for a, b in zip(jax.tree.leaves(loss_and_gradients(packed, **options)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(abs(b).max()))


def test_remat_attention_does_not_run_the_attention_again(packed):
    """A dynamic loop is a ``while`` in the program: one forward, one backward; a second forward under full remat."""
    config, params, rows = packed

    def loops(remat):
        program = jax.make_jaxpr(jax.grad(lambda p: model.forward(p, config, *rows, remat=remat).sum()))(params)
        return str(program).count("while[")

    assert (loops("none"), loops("attention"), loops("full")) == (2, 2, 3)


def test_runs_without_jit(packed):
    config, params, rows = packed
    rows = tuple(row[:1, :8] for row in rows)
    expected = model.forward(params, config, *rows)
    with jax.disable_jit():
        actual = model.forward(params, config, *rows, scan=False)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_bfloat16_activations_with_float32_parameters(packed):
    config, params, rows = packed
    exact = model.forward(params, config, *rows)
    low = model.forward(params, config, *rows, dtype=jnp.bfloat16)
    assert low.dtype == jnp.bfloat16
    assert np.linalg.norm(low.astype(jnp.float32) - exact) / np.linalg.norm(exact) < 0.03


def test_a_row_is_only_its_ancestors(packed):
    """Changing a token changes exactly the positions in its subtree."""
    config, params, (tokens, positions, visible_until) = packed
    run = jax.jit(lambda t: model.forward(params, config, t, positions, visible_until))
    before = np.asarray(run(tokens))
    for node in (0, 5, 17):
        after = np.asarray(run(tokens.at[0, node].add(1)))
        changed = (before != after).any(axis=-1)
        expected = np.zeros((2, 40), bool)
        expected[0, node : int(visible_until[0, node])] = True
        np.testing.assert_array_equal(changed, expected)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "qwen2", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_shapes_axes_and_declarations_come_from_one_place(family, tied):
    config = model.small_config(31, 3, 16, family=family, tied=tied, head_dim=6)
    params = model.init(config, jax.random.key(0), jnp.bfloat16)
    abstract = model.abstract_params(config, jnp.bfloat16)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(lambda x: (x.shape, x.dtype), abstract)
    axes = model.logical_axes(config)
    is_axes = {"is_leaf": lambda x: isinstance(x, tuple)}
    sizes = config.axis_sizes()
    shapes = jax.tree.map(lambda names: tuple(sizes[name] for name in names), axes, **is_axes)
    assert shapes == jax.tree.map(lambda x: x.shape, abstract)
    assert axes["layers"]["attention"]["query"] == ("layers", "embed", "heads", "head_dim")
    assert axes["embedding"] == ("vocab", "embed")
    assert ("unembedding" in axes) == (not tied)
    declared = jax.tree.leaves(model.declarations(config), is_leaf=lambda x: isinstance(x, Declaration))
    assert len({d.file_name for d in declared}) == len(declared) == len(jax.tree.leaves(params))


def test_initialisation_is_seeded_scaled_and_different_in_every_layer():
    config = model.small_config(500, 2, 64, family="qwen2")
    params = model.init(config, jax.random.key(3))
    again = jax.jit(lambda key: model.init(config, key))(jax.random.key(3))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), params, again)
    attention = params["layers"]["attention"]
    assert not np.any(attention["query_bias"]) and np.all(params["norm"]["scale"] == 1)
    assert abs(float(attention["query"].std()) - 64**-0.5) < 0.01
    assert abs(float(params["layers"]["feed_forward"]["down"].std()) - 192**-0.5) < 0.01
    assert abs(float(params["embedding"].std()) - 64**-0.5) < 0.01
    assert not np.allclose(attention["query"][0], attention["query"][1])
    assert not np.allclose(attention["query"], model.init(config, jax.random.key(4))["layers"]["attention"]["query"])


def test_unknown_options_name_the_known_ones(packed):
    config, params, rows = packed
    with pytest.raises(ValueError, match="unknown remat 'some'; available: none, attention, full"):
        model.forward(params, config, *rows, remat="some")
    with pytest.raises(ValueError, match="unknown attention backend 'dense'; available: blockwise, oracle"):
        model.forward(params, config, *rows, attention="dense")
