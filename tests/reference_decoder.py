"""An independent decoder in plain numpy, float64, written from the published descriptions and working on the tensors of
a Hugging Face checkpoint by their names: what `mwjax.model` is compared with. One sequence at a time, loops and all."""

from __future__ import annotations

import math

import numpy as np


def random_checkpoint(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """Tensors of a checkpoint for a ``config.json``'s contents, float32, none of them at a special value."""
    rng = np.random.default_rng(seed)
    d, v = config["hidden_size"], config["vocab_size"]
    h, k, n = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    kind = config["model_type"]

    def matrix(*shape):
        return (rng.standard_normal(shape) / math.sqrt(shape[-1])).astype(np.float32)

    def around(center, size):
        return (center + 0.3 * rng.standard_normal(size)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(v, d), "model.norm.weight": around(1, d)}
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(v, d)
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        for name, rows in (("q", h), ("k", k), ("v", k)):
            tensors[p + f"self_attn.{name}_proj.weight"] = matrix(rows * n, d)
            if kind == "qwen2":
                tensors[p + f"self_attn.{name}_proj.bias"] = around(0, rows * n)
            if kind.startswith("qwen3") and name != "v":
                tensors[p + f"self_attn.{name}_norm.weight"] = around(1, n)
        tensors[p + "self_attn.o_proj.weight"] = matrix(d, h * n)
        if kind == "qwen3_moe":
            tensors[p + "mlp.gate.weight"] = matrix(config["num_experts"], d)
        f, blocks = _blocks(config)
        for block in blocks:
            tensors[p + block + "gate_proj.weight"] = matrix(f, d)
            tensors[p + block + "up_proj.weight"] = matrix(f, d)
            tensors[p + block + "down_proj.weight"] = matrix(d, f)
        tensors[p + "input_layernorm.weight"] = around(1, d)
        tensors[p + "post_attention_layernorm.weight"] = around(1, d)
    return tensors


def _blocks(config: dict) -> tuple[int, list[str]]:
    """Inner width and names of the feed-forward blocks of a layer."""
    if config["model_type"] != "qwen3_moe":
        return config["intermediate_size"], ["mlp."]
    return config["moe_intermediate_size"], [f"mlp.experts.{number}." for number in range(config["num_experts"])]


def reference_forward(config: dict, tensors: dict[str, np.ndarray], tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states after the final norm [T, d] and logits [T, V] of one causal sequence."""
    weights = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    heads, kv_heads, n = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    length = len(tokens)

    def norm(x, weight):
        return weight * x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"])

    def rotate(x, position):
        """x [n]: pair (i, i + n/2) turns by position * theta^(-2i/n)."""
        turned = np.empty_like(x)
        for i in range(n // 2):
            angle = position * frequency(i)
            a, b = x[i], x[i + n // 2]
            turned[i] = a * math.cos(angle) - b * math.sin(angle)
            turned[i + n // 2] = b * math.cos(angle) + a * math.sin(angle)
        return turned

    def frequency(i):
        base = config["rope_theta"] ** (-2 * i / n)
        scaling = config.get("rope_scaling")
        if not scaling:
            return base
        if scaling["rope_type"] == "linear":
            return base / scaling["factor"]
        wavelength = 2 * math.pi / base
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        original = scaling["original_max_position_embeddings"]
        if wavelength < original / high:
            return base
        if wavelength > original / low:
            return base / scaling["factor"]
        smooth = (original / wavelength - low) / (high - low)
        return (1 - smooth) * base / scaling["factor"] + smooth * base

    def chosen(logits):
        """The share every expert has in one token's output."""
        share = np.exp(logits - logits.max())
        share = share / share.sum()
        largest = sorted(range(len(share)), key=lambda e: -share[e])[: config["num_experts_per_tok"]]
        kept = np.array([share[e] if e in largest else 0.0 for e in range(len(share))])
        return kept / kept.sum() if config["norm_topk_prob"] else kept

    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."

        def project(name, rows, y, p=p):
            out = y @ weights[p + f"self_attn.{name}_proj.weight"].T
            if config["model_type"] == "qwen2":
                out = out + weights[p + f"self_attn.{name}_proj.bias"]
            out = out.reshape(length, rows, n)
            if config["model_type"].startswith("qwen3") and name != "v":
                out = norm(out, weights[p + f"self_attn.{name}_norm.weight"])
            return out

        y = norm(x, weights[p + "input_layernorm.weight"])
        query, key, value = project("q", heads, y), project("k", kv_heads, y), project("v", kv_heads, y)
        for t in range(length):
            query[t] = [rotate(head, t) for head in query[t]]
            key[t] = [rotate(head, t) for head in key[t]]
        mixed = np.zeros((length, heads, n))
        for t in range(length):
            for head in range(heads):
                group = head // (heads // kv_heads)
                scores = key[: t + 1, group] @ query[t, head] / math.sqrt(n)
                share = np.exp(scores - scores.max())
                mixed[t, head] = share / share.sum() @ value[: t + 1, group]
        x = x + mixed.reshape(length, heads * n) @ weights[p + "self_attn.o_proj.weight"].T
        y = norm(x, weights[p + "post_attention_layernorm.weight"])
        share = np.ones((length, 1))
        if config["model_type"] == "qwen3_moe":
            share = np.stack([chosen(token @ weights[p + "mlp.gate.weight"].T) for token in y])
        for column, block in zip(share.T, _blocks(config)[1], strict=True):
            gate = y @ weights[p + block + "gate_proj.weight"].T
            inner = gate / (1 + np.exp(-gate)) * (y @ weights[p + block + "up_proj.weight"].T)
            x = x + column[:, None] * (inner @ weights[p + block + "down_proj.weight"].T)
    hidden = norm(x, weights["model.norm.weight"])
    head = weights["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    return hidden, hidden @ head.T
