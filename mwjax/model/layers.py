"""The decoder's modules. Parameters are declared here, nowhere else; `mwjax.model.decoder` uses them functionally."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from mwjax.model.config import ModelConfig
from mwjax.model.experts import MixtureOfExperts, Routing
from mwjax.model.parameters import Declaration, parameter
from mwjax.model.rope import rotate

Rotations = tuple[jax.Array, jax.Array]
# (queries [B, T, Hq, D], keys [B, T, Hkv, D], values [B, T, Hkv, D]) -> (mixed values [B, T, Hq, D], anything)
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]


class Norm(nnx.Module):
    """Root-mean-square norm (Zhang and Sennrich, arXiv:1910.07467) over the last axis, in float32 or wider."""

    def __init__(self, config: ModelConfig, axis: str, file_name: str):
        self.epsilon = config.norm_epsilon
        self.scale = parameter(config, axis, file_name, axis, "ones")

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        return (wide * self.scale[...]).astype(x.dtype)


class Adapter(nnx.Module):
    """Low-rank adapter of a matrix: x -> alpha / rank * (x A) B, in the dtype of x. The product A B is never formed."""

    def __init__(self, config: ModelConfig, declaration: Declaration):
        assert config.lora is not None
        sizes = config.axis_sizes()
        self.scale = config.lora.scale
        self.a, self.b = (
            nnx.LoRAParam(jnp.zeros(factor.shape(sizes)), declaration=factor) for factor in declaration.adapters()
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        a, b = self.a[...].astype(x.dtype), self.b[...].astype(x.dtype)
        return self.scale * jnp.tensordot(jnp.tensordot(x, a, a.ndim - 1), b, 1)


def add_adapters(block: nnx.Module, config: ModelConfig) -> None:
    """Gives a block an `Adapter` ``<name>_lora`` for each of its matrices that ``config.lora`` targets."""
    for name in config.lora.targets if config.lora else ():
        if hasattr(block, name):
            setattr(block, f"{name}_lora", Adapter(config, getattr(block, name).declaration))


def adapted(block: nnx.Module, name: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """``y``, what the block's matrix ``name`` makes of ``x``, plus what its adapter adds, if it has one."""
    adapter: Adapter | None = getattr(block, f"{name}_lora", None)
    return y if adapter is None else y + adapter(x)


class Attention(nnx.Module):
    """Grouped-query attention; what is visible is decided by the ``attend`` it is called with."""

    def __init__(self, config: ModelConfig):
        project = "self_attn.{}_proj.{}"
        self.query = parameter(
            config, "embed heads head_dim", project.format("q", "weight"), "heads+head_dim embed", "embed"
        )
        self.key = parameter(
            config, "embed kv_heads head_dim", project.format("k", "weight"), "kv_heads+head_dim embed", "embed"
        )
        self.value = parameter(
            config, "embed kv_heads head_dim", project.format("v", "weight"), "kv_heads+head_dim embed", "embed"
        )
        self.output = parameter(
            config, "heads head_dim embed", project.format("o", "weight"), "embed heads+head_dim", "heads head_dim"
        )
        if config.query_key_value_bias:
            self.query_bias = parameter(
                config, "heads head_dim", project.format("q", "bias"), "heads+head_dim", "zeros"
            )
            self.key_bias = parameter(
                config, "kv_heads head_dim", project.format("k", "bias"), "kv_heads+head_dim", "zeros"
            )
            self.value_bias = parameter(
                config, "kv_heads head_dim", project.format("v", "bias"), "kv_heads+head_dim", "zeros"
            )
        if config.query_key_norm:
            self.query_norm = Norm(config, "head_dim", "self_attn.q_norm.weight")
            self.key_norm = Norm(config, "head_dim", "self_attn.k_norm.weight")
        add_adapters(self, config)
        self.has_bias = config.query_key_value_bias
        self.has_norm = config.query_key_norm

    def __call__(self, x: jax.Array, rotations: Rotations, attend: Attend) -> tuple[jax.Array, Any]:
        """x [B, T, width] -> (the block's output [B, T, width], whatever ``attend`` returned beside it)."""
        query, key, value = (
            adapted(self, name, x, jnp.einsum("btw,whd->bthd", x, getattr(self, name)[...].astype(x.dtype)))
            for name in ("query", "key", "value")
        )
        if self.has_bias:
            query = query + self.query_bias[...].astype(x.dtype)
            key = key + self.key_bias[...].astype(x.dtype)
            value = value + self.value_bias[...].astype(x.dtype)
        if self.has_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        mixed, extra = attend(rotate(query, *rotations), rotate(key, *rotations), value)
        output = jnp.einsum("bthd,hdw->btw", mixed, self.output[...].astype(x.dtype))
        return adapted(self, "output", mixed, output), extra


class FeedForward(nnx.Module):
    """SwiGLU (Shazeer, arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig):
        self.gate = parameter(config, "embed mlp", "mlp.gate_proj.weight", "mlp embed", "embed")
        self.up = parameter(config, "embed mlp", "mlp.up_proj.weight", "mlp embed", "embed")
        self.down = parameter(config, "mlp embed", "mlp.down_proj.weight", "embed mlp", "mlp")
        add_adapters(self, config)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate = adapted(self, "gate", x, x @ self.gate[...].astype(x.dtype))
        up = adapted(self, "up", x, x @ self.up[...].astype(x.dtype))
        gated = jax.nn.silu(gate) * up
        return adapted(self, "down", gated, gated @ self.down[...].astype(x.dtype))


class Layer(nnx.Module):
    """One pre-norm decoder layer."""

    def __init__(self, config: ModelConfig):
        self.attention_norm = Norm(config, "embed", "input_layernorm.weight")
        self.attention = Attention(config)
        self.feed_forward_norm = Norm(config, "embed", "post_attention_layernorm.weight")
        self.feed_forward = FeedForward(config) if config.experts is None else MixtureOfExperts(config)

    def __call__(
        self,
        x: jax.Array,
        rotations: Rotations,
        attend: Attend,
        weight: jax.Array | None = None,
        mesh: Mesh | None = None,
    ) -> tuple[jax.Array, Any, Routing | None]:
        """x [B, T, width] -> (the same after the layer, whatever ``attend`` returned beside its values, what
        `MixtureOfExperts` returns beside its own for ``weight`` [B, T])."""
        mixed, extra = self.attention(self.attention_norm(x), rotations, attend)
        x = x + mixed
        normed = self.feed_forward_norm(x)
        if isinstance(self.feed_forward, FeedForward):
            return x + self.feed_forward(normed), extra, None
        added, routing = self.feed_forward(normed, weight, mesh)
        return x + added, extra, routing


class Decoder(nnx.Module):
    """Embedding, layers (one `Layer` whose parameters carry a leading axis of the layer number), norm, unembedding."""

    def __init__(self, config: ModelConfig):
        self.embedding = parameter(config, "vocab embed", "model.embed_tokens.weight", "vocab embed", "embed")
        self.layers = nnx.vmap(lambda: Layer(config), axis_size=config.layers)()
        self.norm = Norm(config, "embed", "model.norm.weight")
        if not config.tied:
            self.unembedding = parameter(config, "vocab embed", "lm_head.weight", "vocab embed", "embed")
