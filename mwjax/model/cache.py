"""Incremental decoding with a key-value cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mwjax.model.attention import attend as attend_tree
from mwjax.model.config import ModelConfig
from mwjax.model.decoder import Params, run_layers

# Up to this many new tokens attend to the cache in one dense product; more of them (a prompt) go blockwise.
DENSE_TOKENS = 16


class Cache(NamedTuple):
    """Keys and values [L, B, length, Hkv, D]. Slot p holds the token at position p; what lies beyond a sequence's
    newest position is never seen, so sequences of one batch may have any lengths."""

    key: jax.Array
    value: jax.Array


def init_cache(config: ModelConfig, batch: int, length: int, dtype: Any = jnp.float32) -> Cache:
    """An empty cache for ``batch`` sequences of up to ``length`` tokens."""
    shape = (config.layers, batch, length, config.key_value_heads, config.head_dim)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def decode_step(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    cache: Cache,
    *,
    dtype: Any = jnp.float32,
    scan: bool = True,
) -> tuple[jax.Array, Cache]:
    """Run new tokens against the cache and store their keys and values: a whole prompt, part of one, or single tokens.

    Args:
      tokens: int32 [B, S].
      positions: int32 [B, S], position of each token in its sequence, which is also its cache slot: a token sees the
        slots up to its own, so every earlier slot must have been written. Negative marks padding, which is neither
        stored nor seen and whose hidden states mean nothing. Writing a slot again replaces it: to go back to a prefix,
        continue from its end.
      cache: as from `init_cache` or the step before.

    Returns:
      (hidden states [B, S, width] after the final norm, the new cache). Hidden states are NaN where a position does not
      fit into the cache, which under jit cannot be an error.
    """
    length = cache.key.shape[2]
    slots = jnp.where(positions < 0, length, positions)  # out of range: dropped by the scatter
    rows = jnp.arange(tokens.shape[0])[:, None]
    visible_until = jnp.full((tokens.shape[0], length), length, jnp.int32)
    backend = "oracle" if tokens.shape[1] <= DENSE_TOKENS else "blockwise"

    def attend(
        query: jax.Array, key: jax.Array, value: jax.Array, cache: Cache, layer: jax.Array
    ) -> tuple[jax.Array, Cache]:
        # The whole cache is carried through the layers and written in place: as a scanned input it would be copied.
        cache = Cache(
            cache.key.at[layer, rows, slots].set(key.astype(cache.key.dtype), mode="drop"),
            cache.value.at[layer, rows, slots].set(value.astype(cache.value.dtype), mode="drop"),
        )
        keys, values = cache.key[layer].astype(query.dtype), cache.value[layer].astype(query.dtype)
        mixed = attend_tree(query, keys, values, visible_until, query_index=positions, backend=backend)
        return mixed, cache

    hidden, cache, _ = run_layers(
        params, config, tokens, jnp.maximum(positions, 0), attend, cache, dtype=dtype, scan=scan
    )
    return jnp.where((positions >= length)[..., None], jnp.nan, hidden), cache
