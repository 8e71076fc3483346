"""Dense attention with an explicit mask. Holds T x S scores: for tests, and for the few rows of a decoding step."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, visible_until: jax.Array, query_index: jax.Array
) -> jax.Array:
    """Arguments and result as `mwjax.model.attention.attend`, with ``query_index`` given."""
    batch, rows, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    query, key, value = (x.astype(dtype) for x in (query, key, value))
    query = query.reshape(batch, rows, kv_heads, heads // kv_heads, head_dim)
    index = jnp.arange(key.shape[1])
    visible = (index <= query_index[:, :, None]) & (query_index[:, :, None] < visible_until[:, None, :])
    scores = jnp.einsum("btkgd,bskd->bkgts", query, key) * head_dim**-0.5
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(dtype).min)
    weights = jax.nn.softmax(scores, axis=-1, where=visible[:, None, None])
    return jnp.einsum("bkgts,bskd->btkgd", weights, value).reshape(batch, rows, heads, head_dim)
