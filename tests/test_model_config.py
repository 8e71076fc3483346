"""config.json in and out."""

from __future__ import annotations

import dataclasses
import json
import math

import jax
import numpy as np
import pytest

from mwjax import model
from mwjax.model import ModelConfig, UnsupportedModelError
from mwjax.model.config import RopeScaling
from mwjax.model.rope import inverse_frequencies

QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN2_5_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}


def test_reads_the_published_configurations():
    qwen3 = ModelConfig.from_hf(QWEN3_0_6B)
    assert (qwen3.family, qwen3.head_dim, qwen3.heads, qwen3.key_value_heads) == ("qwen3", 128, 16, 8)
    assert qwen3.query_key_norm and not qwen3.query_key_value_bias and qwen3.tied and qwen3.rope_theta == 1e6
    count = sum(math.prod(leaf.shape) for leaf in _leaves(qwen3))
    assert count == 596_049_920  # the published size of Qwen3-0.6B
    qwen2 = ModelConfig.from_hf(QWEN2_5_7B)
    assert qwen2.head_dim == 128 and qwen2.query_key_value_bias and not qwen2.query_key_norm and not qwen2.tied
    assert sum(math.prod(leaf.shape) for leaf in _leaves(qwen2)) == 7_615_616_512  # the published size


def _leaves(config):
    return jax.tree.leaves(model.abstract_params(config))


@pytest.mark.parametrize("values", [QWEN3_0_6B, QWEN2_5_7B])
def test_round_trip_through_json(values):
    config = ModelConfig.from_hf(values)
    written = json.loads(json.dumps(config.to_hf()))
    assert ModelConfig.from_hf(written) == config
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 1e6
    assert hash(config) == hash(ModelConfig.from_hf(written))


def test_rope_parameters_of_transformers_5_alone_and_beside_the_old_fields():
    old = {key: value for key, value in QWEN3_0_6B.items() if key not in ("rope_theta", "rope_scaling")}
    new = {**old, "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}}
    assert ModelConfig.from_hf(new) == ModelConfig.from_hf(QWEN3_0_6B)
    assert ModelConfig.from_hf({**QWEN3_0_6B, **new}) == ModelConfig.from_hf(QWEN3_0_6B)
    with pytest.raises(UnsupportedModelError, match="rope_theta and rope_parameters disagree"):
        ModelConfig.from_hf({**new, "rope_theta": 5000})
    assert ModelConfig.from_hf(old).rope_theta == 10000  # transformers' default


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"rope_type": "linear", "factor": 4.0}, RopeScaling("linear", 4.0)),
        ({"type": "linear", "factor": 4.0}, RopeScaling("linear", 4.0)),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            RopeScaling("llama3", 8.0, 1.0, 4.0, 8192),
        ),
    ],
)
def test_rope_scaling(scaling, expected):
    config = ModelConfig.from_hf({**QWEN3_0_6B, "rope_scaling": scaling})
    assert config.rope_scaling == expected
    assert ModelConfig.from_hf(config.to_hf()) == config
    parameters = {"rope_theta": 1000000, **scaling}
    assert ModelConfig.from_hf({**QWEN3_0_6B, "rope_scaling": None, "rope_parameters": parameters}) == config
    with pytest.raises(UnsupportedModelError, match="rope_scaling and rope_parameters disagree"):
        ModelConfig.from_hf(
            {**QWEN3_0_6B, "rope_scaling": scaling, "rope_parameters": {"rope_type": "linear", "factor": 3.0}}
        )


def test_llama3_frequencies_keep_the_fast_and_slow_down_the_slow():
    plain = ModelConfig.from_hf({**QWEN3_0_6B, "rope_theta": 500000.0})
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    scaled = ModelConfig.from_hf({**QWEN3_0_6B, "rope_theta": 500000.0, "rope_scaling": scaling})
    base, changed = inverse_frequencies(plain), inverse_frequencies(scaled)
    wavelength = 2 * np.pi / base
    np.testing.assert_array_equal(changed[wavelength < 8192 / 4], base[wavelength < 8192 / 4])
    np.testing.assert_array_equal(changed[wavelength > 8192], base[wavelength > 8192] / 8)
    between = (wavelength > 8192 / 4) & (wavelength < 8192)
    assert between.any() and np.all((changed[between] < base[between]) & (changed[between] > base[between] / 8))


def test_small_config():
    config = model.small_config(100, 3, 48, family="llama", heads=6, key_value_heads=3)
    assert (config.layers, config.width, config.head_dim, config.feed_forward_width) == (3, 48, 8, 144)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GptOssForCausalLM"]}, "supported: Qwen3ForCausalLM, Qwen3MoeForCausalLM"),
        ({"architectures": None, "model_type": "gpt2"}, "model_type 'gpt2' is not supported; supported: Qwen3"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' is not supported; supported: default, linear"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "'llama3' lacks the field 'low_freq_factor'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"num_key_value_heads": 5}, "must be a multiple"),
        ({"head_dim": 7}, "must be even"),
        ({"vocab_size": 0}, "field 'vocab_size' must be a positive integer"),
        ({"hidden_size": "wide", "head_dim": None}, "'hidden_size' must be a positive integer, got 'wide'"),
        ({"vocab_size": "many"}, "field 'vocab_size' must be a positive integer"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(change, message):
    with pytest.raises(UnsupportedModelError, match=message):
        ModelConfig.from_hf({**QWEN3_0_6B, **change})


MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step 2 is not supported"),
        ({"mlp_only_layers": [0, 3]}, r"mlp_only_layers \[0, 3\] are not supported"),
        ({"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size"),
        ({"num_experts": None}, "field 'num_experts' is missing"),
        ({"moe_intermediate_size": 0}, "'moe_intermediate_size' must be a positive integer"),
        ({"num_experts_per_tok": 17}, "17 experts per token, but there are 16"),
        ({"num_local_experts": 8}, "num_experts and num_local_experts disagree"),
    ],
)
def test_mixtures_of_experts_that_would_be_computed_wrongly_are_refused(change, message):
    with pytest.raises(UnsupportedModelError, match=message):
        ModelConfig.from_hf({**QWEN3_0_6B, **MOE, **change})


def test_mixtures_of_experts():
    config = ModelConfig.from_hf({**QWEN3_0_6B, **MOE, "norm_topk_prob": True, "decoder_sparse_step": 1})
    assert config.experts == model.Experts(count=16, per_token=4, width=32, normalised=True)
    assert ModelConfig.from_hf(config.to_hf()) == config
    renamed = {**QWEN3_0_6B, **MOE, "norm_topk_prob": True, "num_experts": None, "num_local_experts": 16}
    assert ModelConfig.from_hf(renamed) == config
    assert not ModelConfig.from_hf({**QWEN3_0_6B, **MOE}).experts.normalised  # transformers' default
    with pytest.raises(UnsupportedModelError, match="family qwen3_moe needs experts"):
        dataclasses.replace(config, experts=None)
    with pytest.raises(UnsupportedModelError, match=r"adapters of experts .* \(gate, up, down\).* query, key, value"):
        dataclasses.replace(config, lora=model.LoRA(4, 8.0))
    dataclasses.replace(config, lora=model.LoRA(4, 8.0, ("query", "output")))


def test_all_problems_are_listed_together():
    with pytest.raises(UnsupportedModelError) as caught:
        ModelConfig.from_hf({"architectures": ["LlamaForCausalLM"], "hidden_act": "relu", "mlp_bias": True})
    for word in ("hidden_act", "mlp_bias", "'vocab_size' is missing", "'hidden_size' is missing"):
        assert word in str(caught.value)
