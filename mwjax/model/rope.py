"""Rotary position embedding, half-rotation form (Su et al., arXiv:2104.09864, as Llama and Qwen lay it out)."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from mwjax.model.config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """Radians per position of every dimension pair, float64 [head_dim // 2]."""
    frequencies = config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    if config.rope_scaling is None:
        return frequencies
    if config.rope_scaling.kind == "linear":
        return frequencies / config.rope_scaling.factor
    return _llama3(frequencies, config.rope_scaling)


def _llama3(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Divide slow frequencies by ``factor``, keep fast ones, interpolate between (Llama 3.1's published rule)."""
    turns = scaling.original_length * frequencies / (2 * math.pi)  # turns within the original context length
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def rotations(config: ModelConfig, positions: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of every angle: positions int32 [B, T] -> two arrays [B, T, 1, head_dim // 2] of ``dtype``."""
    angles = positions[..., None, None].astype(dtype) * jnp.asarray(inverse_frequencies(config), dtype)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    """Rotate x [B, T, heads, head_dim]; dimension i pairs with i + head_dim // 2. Result in x's dtype."""
    first, second = jnp.split(x.astype(cosine.dtype), 2, axis=-1)
    rotated = (first * cosine - second * sine, second * cosine + first * sine)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
