"""Published decoders by name, so that a plan needs neither weights nor a download."""

from __future__ import annotations

from typing import Any

from mwjax import model

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
_QWEN25: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 152064,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
_QWEN3_MOE: dict[str, Any] = {
    **_QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
_LONG = {"rope_theta": 5e6, "max_position_embeddings": 262144}


def _sized(common: dict[str, Any], width: int, inner: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    return {**common, **sizes, "num_attention_heads": heads, **more}


_QWEN3_4B = _sized(_QWEN3, 2560, 9728, 36, 32, tie_word_embeddings=True)
# What their config.json on the Hugging Face hub says, as far as it changes the decoder.
PRESETS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-0.6B": _sized(_QWEN3, 1024, 3072, 28, 16, tie_word_embeddings=True),
    "Qwen/Qwen3-1.7B": _sized(_QWEN3, 2048, 6144, 28, 16, tie_word_embeddings=True),
    "Qwen/Qwen3-4B": _QWEN3_4B,
    "Qwen/Qwen3-4B-Instruct-2507": {**_QWEN3_4B, **_LONG},
    "Qwen/Qwen3-4B-Thinking-2507": {**_QWEN3_4B, **_LONG},
    "Qwen/Qwen3-8B": _sized(_QWEN3, 4096, 12288, 36, 32),
    "Qwen/Qwen3-14B": _sized(_QWEN3, 5120, 17408, 40, 40),
    "Qwen/Qwen3-32B": _sized(_QWEN3, 5120, 25600, 64, 64),
    "Qwen/Qwen3-30B-A3B": _sized(_QWEN3_MOE, 2048, 6144, 48, 32),
    "Qwen/Qwen2.5-3B": _sized(
        _QWEN25, 2048, 11008, 36, 16, num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True
    ),
    "Qwen/Qwen2.5-7B": _sized(_QWEN25, 3584, 18944, 28, 28, num_key_value_heads=4),
    "Qwen/Qwen2.5-14B": _sized(_QWEN25, 5120, 13824, 48, 40, num_key_value_heads=8, rms_norm_eps=1e-5),
}

DECODERS = {name: model.ModelConfig.from_hf(values) for name, values in PRESETS.items()}
