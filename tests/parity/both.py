"""The same small model here and in transformers, run on the same rows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx
from safetensors.numpy import save_file

from mwjax import model
from mwjax.model.layers import Layer
from mwjax.model.rope import rotations
from tests.random_tries import Trie, random_trie
from tests.reference_decoder import random_checkpoint

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SIZES = {
    "vocab_size": 71,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,  # not hidden_size / heads
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 20}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _config(family: str, architecture: str, tied: bool, **more: Any) -> dict[str, Any]:
    names = {"model_type": family, "architectures": [architecture], "tie_word_embeddings": tied}
    return {**SIZES, **names, "rope_theta": 10000.0, "dtype": "float32", **more}


CONFIGS = {
    "qwen3 tied": _config("qwen3", "Qwen3ForCausalLM", True, rope_theta=1e6),
    "qwen3 untied": _config("qwen3", "Qwen3ForCausalLM", False, rms_norm_eps=1e-6),
    "qwen2": _config("qwen2", "Qwen2ForCausalLM", False, rope_theta=1e6),
    "qwen2 tied": _config("qwen2", "Qwen2ForCausalLM", True, num_key_value_heads=1),
    "qwen3_moe": _config("qwen3_moe", "Qwen3MoeForCausalLM", False, rope_theta=1e6, norm_topk_prob=True, **EXPERTS),
    "qwen3_moe tied, not normalised": _config(
        "qwen3_moe", "Qwen3MoeForCausalLM", True, **{**EXPERTS, "num_experts": 5, "num_experts_per_tok": 3}
    ),
    "llama tied": _config("llama", "LlamaForCausalLM", True, num_key_value_heads=3),
    "llama untied": _config("llama", "LlamaForCausalLM", False, num_key_value_heads=6),
    "llama llama3": _config("llama", "LlamaForCausalLM", True, rope_theta=5e5, rope_scaling=LLAMA3),
    "llama linear": _config("llama", "LlamaForCausalLM", False, rope_scaling={"rope_type": "linear", "factor": 4.0}),
}


def write_folder(folder: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """A model folder written by neither: random weights, none at a special value."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_checkpoint(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def load_theirs(folder: Path, **options: Any) -> Any:
    """A transformers model in float32 with plain attention, every tensor of it from the folder."""
    options = {"dtype": torch.float32, "attn_implementation": "eager", **options}
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(report.values()), report
    return theirs.eval()


@dataclass(frozen=True)
class Row:
    """One row of ``length`` tokens: tokens, positions, visible_until int32 [T]; visible bool [T, T]."""

    tokens: np.ndarray
    positions: np.ndarray
    visible_until: np.ndarray
    visible: np.ndarray

    def ours(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        return tuple(jnp.asarray(part)[None] for part in (self.tokens, self.positions, self.visible_until))

    def theirs(self) -> dict[str, torch.Tensor]:
        """The mask as floats: plain attention adds it to the scores, so a boolean one would add 0 and 1."""
        mask = np.where(self.visible, 0.0, np.finfo(np.float32).min).astype(np.float32)
        return {
            "input_ids": torch.tensor(self.tokens[None].astype(np.int64)),
            "position_ids": torch.tensor(self.positions[None].astype(np.int64)),
            "attention_mask": torch.tensor(mask[None, None]),
        }


def causal_row(length: int = 64, seed: int = 0) -> Row:
    tokens = np.random.default_rng(seed).integers(0, SIZES["vocab_size"], length).astype(np.int32)
    steps = np.arange(length, dtype=np.int32)
    return Row(tokens, steps, np.full(length, length, np.int32), steps[None] <= steps[:, None])


def tree_row(length: int = 64, seed: int = 0) -> Row:
    """A packed row of several trees with forks, and padding at its end; a token's position is its depth."""
    rng = np.random.default_rng(seed)
    trie: Trie = random_trie(rng, length, fork=0.15, root=0.04)
    tokens = rng.integers(0, SIZES["vocab_size"], length).astype(np.int32)
    return Row(tokens, trie.position, trie.visible_until, trie.visible())


def run_ours(folder: Path, row: Row) -> tuple[list[np.ndarray], np.ndarray]:
    """Hidden states after the embedding and after every layer, each [T, D], one by one; logits [T, V] by `forward`."""
    config, params = model.load(folder)
    states, logits = _run(config, params, *row.ours())
    return [np.asarray(state[0]) for state in states], np.asarray(logits[0])


@partial(jax.jit, static_argnums=0)
def _run(
    config: model.ModelConfig, params: Any, tokens: jax.Array, positions: jax.Array, visible_until: jax.Array
) -> tuple[list[jax.Array], jax.Array]:
    angles = rotations(config, positions, jnp.float32)

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, None]:
        return model.attend(query, key, value, visible_until, backend="blockwise"), None

    definition = nnx.split(Layer(config))[0]
    states = [params["embedding"][tokens]]
    for number in range(config.layers):
        weights = jax.tree.map(lambda leaf, number=number: leaf[number], params["layers"])
        states.append(nnx.merge(definition, weights)(states[-1], angles, attend)[0])
    hidden = model.forward(params, config, tokens, positions, visible_until)
    return states, hidden @ model.unembedding(params, config).T


def run_theirs(theirs: Any, row: Row) -> tuple[list[np.ndarray], np.ndarray]:
    """The same of transformers, read by hooks: its own list replaces the last layer's output by the normed one."""
    states: list[np.ndarray] = []

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        states.append((output[0] if isinstance(output, tuple) else output)[0].numpy().copy())

    decoder = theirs.model
    hooks = [module.register_forward_hook(keep) for module in (decoder.embed_tokens, *decoder.layers)]
    try:
        with torch.no_grad():
            logits = theirs(**row.theirs(), use_cache=False).logits[0].numpy()
    finally:
        for hook in hooks:
            hook.remove()
    return [state.reshape(len(row.tokens), -1) for state in states], logits
