"""The published models we claim to read: their config.json gives exactly the published number of parameters.

Where a model is published in shards, the number is half the ``total_size`` of its model.safetensors.index.json (the
weights are bfloat16), less the copy of the embedding that the index of Qwen3-1.7B counts as lm_head.
"""

from __future__ import annotations

import math

import jax
import pytest

from mwjax import model
from mwjax.model import ModelConfig
from mwjax.model.config import Experts, RopeScaling

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "model_type": "qwen2",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN3_MOE = {
    **QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
LLAMA3 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
}
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}


def sized(common: dict, width: int, inner: int, layers: int, heads: int, **more: object) -> dict:
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    return {**common, **sizes, "num_attention_heads": heads, **more}


TIED = {"tie_word_embeddings": True}
QWEN3_4B = sized(QWEN3, 2560, 9728, 36, 32, max_window_layers=36, **TIED)
INSTRUCT_2507 = {**QWEN3_4B, "max_position_embeddings": 262144, "rope_theta": 5000000}
LLAMA31_8B = sized(LLAMA3, 4096, 14336, 32, 32, tie_word_embeddings=False)
LLAMA31_8B["rope_scaling"] = {**LLAMA3["rope_scaling"], "factor": 8.0}

PUBLISHED = {
    "Qwen3-0.6B": (sized(QWEN3, 1024, 3072, 28, 16, max_window_layers=28, **TIED), 596_049_920),
    "Qwen3-1.7B": (
        sized(QWEN3, 2048, 6144, 28, 16, max_window_layers=28, **TIED),
        4_063_479_808 // 2 - 151_936 * 2048,
    ),
    "Qwen3-4B": (QWEN3_4B, 8_044_936_192 // 2),
    "Qwen3-4B-Instruct-2507": (INSTRUCT_2507, 8_044_936_192 // 2),
    "Qwen3-4B-Thinking-2507": (INSTRUCT_2507, 8_044_936_192 // 2),
    "Qwen3-8B": (sized(QWEN3, 4096, 12288, 36, 32, max_window_layers=36), 16_381_470_720 // 2),
    "Qwen3-14B": (sized(QWEN3, 5120, 17408, 40, 40, max_window_layers=40), 29_536_614_400 // 2),
    "Qwen3-32B": (sized(QWEN3, 5120, 25600, 64, 64, max_window_layers=64), 65_524_246_528 // 2),
    "Qwen3-30B-A3B": (sized(QWEN3_MOE, 2048, 6144, 48, 32, max_window_layers=48), 61_064_245_248 // 2),
    "Qwen2.5-3B": (
        sized(QWEN25, 2048, 11008, 36, 16, num_key_value_heads=2, max_window_layers=36, vocab_size=151936, **TIED),
        6_171_877_376 // 2,
    ),
    "Qwen2.5-7B": (
        sized(QWEN25, 3584, 18944, 28, 28, num_key_value_heads=4, max_window_layers=28),
        15_231_233_024 // 2,
    ),
    "Qwen2.5-14B": (
        sized(QWEN25, 5120, 13824, 48, 40, num_key_value_heads=8, max_window_layers=48, rms_norm_eps=1e-05),
        29_540_067_328 // 2,
    ),
    "Llama-3.2-1B": (sized(LLAMA3, 2048, 8192, 16, 32, head_dim=64), 1_235_814_400),
    "Llama-3.2-3B": (sized(LLAMA3, 3072, 8192, 28, 24, head_dim=128), 3_212_749_824),
    "Llama-3.1-8B": (LLAMA31_8B, 16_060_522_496 // 2),
    "SmolLM2-135M": (sized(SMOLLM2, 576, 1536, 30, 9, num_key_value_heads=3), 134_515_008),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_number_of_parameters(name):
    values, published = PUBLISHED[name]
    config = ModelConfig.from_hf(values)
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model.abstract_params(config))) == published
    assert ModelConfig.from_hf(config.to_hf()) == config


def test_parameters_that_a_token_meets_in_a_mixture_of_experts():
    """3.3 B of 30.5 B, as published: of the experts 8 of 128."""
    config = ModelConfig.from_hf(PUBLISHED["Qwen3-30B-A3B"][0])
    assert config.experts == Experts(count=128, per_token=8, width=768, normalised=True)
    assert round(PUBLISHED["Qwen3-30B-A3B"][1] / 1e9, 1) == 30.5
    active = model.active_parameters(config)
    assert active == PUBLISHED["Qwen3-30B-A3B"][1] - 48 * 120 * 3 * 2048 * 768
    assert round(active / 1e9, 2) == 3.35
    dense = ModelConfig.from_hf(PUBLISHED["Qwen3-0.6B"][0])
    assert model.active_parameters(dense) == PUBLISHED["Qwen3-0.6B"][1]


def test_what_the_number_does_not_show():
    """Settings that change results but no shape."""

    def read(name: str) -> ModelConfig:
        return ModelConfig.from_hf(PUBLISHED[name][0])

    assert all(read(name).head_dim == 128 for name in PUBLISHED if name.startswith("Qwen"))
    assert {read(name).norm_epsilon for name in PUBLISHED if name.startswith("Qwen3")} == {1e-6}
    assert (read("Qwen2.5-7B").norm_epsilon, read("Qwen2.5-14B").norm_epsilon) == (1e-6, 1e-5)
    assert (read("Qwen3-4B").rope_theta, read("Qwen3-4B-Instruct-2507").rope_theta) == (1e6, 5e6)
    assert (read("Qwen3-4B").context_length, read("Qwen3-4B-Thinking-2507").context_length) == (40960, 262144)
    assert [name for name in PUBLISHED if read(name).tied] == [
        "Qwen3-0.6B",
        "Qwen3-1.7B",
        "Qwen3-4B",
        "Qwen3-4B-Instruct-2507",
        "Qwen3-4B-Thinking-2507",
        "Qwen2.5-3B",
        "Llama-3.2-1B",
        "Llama-3.2-3B",
        "SmolLM2-135M",
    ]
    assert read("Llama-3.1-8B").rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    assert all(read(name).query_key_norm == name.startswith("Qwen3") for name in PUBLISHED)
    assert all(read(name).query_key_value_bias == name.startswith("Qwen2.5") for name in PUBLISHED)
