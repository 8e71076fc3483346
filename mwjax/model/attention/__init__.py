"""Attention over packed trees: query row i sees key j exactly when ``j <= i < visible_until[j]``."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from mwjax.model.attention import blockwise, oracle

BACKENDS: dict[str, Callable[..., jax.Array]] = {"blockwise": blockwise.attend, "oracle": oracle.attend}


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visible_until: jax.Array,
    *,
    query_index: jax.Array | None = None,
    backend: str,
) -> jax.Array:
    """Softmax attention, scaled by ``head_dim ** -0.5``, under the tree mask.

    Args:
      query: [B, T, Hq, D].
      key, value: [B, S, Hkv, D]; Hq is a multiple of Hkv, query head h reads key head ``h // (Hq // Hkv)``.
      visible_until: int32 [B, S], end of each key's subtree.
      query_index: int32 [B, T], the index of every query row on the key axis; ``arange(T)`` when None (then T == S). A
        negative index sees nothing.
      backend: "blockwise" (any device; memory linear in T) or "oracle" (dense: T x S scores, for tests).

    Returns:
      [B, T, Hq, D] in the query's dtype; softmax and sums are float32 (float64 for float64 inputs). A row that sees no
      key is exactly 0.

    Raises:
      ValueError: unknown backend, or shapes that do not fit.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown attention backend {backend!r}; available: {', '.join(sorted(BACKENDS))}")
    batch, rows, heads, head_dim = query.shape
    if key.shape != value.shape or key.shape[0] != batch or key.shape[3] != head_dim or heads % key.shape[2]:
        raise ValueError(f"attention shapes do not fit: query {query.shape}, key {key.shape}, value {value.shape}")
    if visible_until.shape != key.shape[:2]:
        raise ValueError(f"visible_until must be {key.shape[:2]} like the keys, got {visible_until.shape}")
    if query_index is None:
        if rows != key.shape[1]:
            raise ValueError(f"query_index is needed where queries ({rows}) and keys ({key.shape[1]}) differ in number")
        query_index = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32), (batch, rows))
    if query_index.shape != (batch, rows):
        raise ValueError(f"query_index must be {(batch, rows)} like the queries, got {query_index.shape}")
    return BACKENDS[backend](query, key, value, visible_until, query_index).astype(query.dtype)
