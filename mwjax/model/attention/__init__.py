"""Attention over packed trees: query row i sees key j exactly when ``j <= i < visible_until[j]``."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from mwjax.model.attention import blockwise, oracle, pallas, splash
from mwjax.tree.rows import Rows

BACKENDS: dict[str, Callable[..., jax.Array]] = {
    "blockwise": blockwise.attend,
    "oracle": oracle.attend,
    "pallas": pallas.attend,
    "splash": splash.attend,
}
TPU_ONLY = ("pallas", "splash")
SPLASH_MASK_LIMIT = 2**31  # bytes of the one mask a device holds at a time: rows of 65,536 tokens


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visible_until: jax.Array,
    *,
    query_index: jax.Array | None = None,
    backend: str,
    interpret: bool = False,
) -> jax.Array:
    """Softmax attention, scaled by ``head_dim ** -0.5``, under the tree mask.

    Args:
      query: [B, T, Hq, D].
      key, value: [B, S, Hkv, D]; Hq is a multiple of Hkv, query head h reads key head ``h // (Hq // Hkv)``.
      visible_until: int32 [B, S], end of each key's subtree.
      query_index: int32 [B, T], the index of every query row on the key axis; ``arange(T)`` when None (then T == S). A
        negative index sees nothing.
      backend: "blockwise" (any device; memory linear in T), "pallas" (TPU; our kernel, no memory for the mask),
        "splash" (TPU; jax's own kernel, with the partly visible blocks of the mask in memory) or "oracle" (dense: T x S
        scores, for tests).
      interpret: run a TPU backend in Pallas's interpreter, which works on any device and is slow: for tests.

    Returns:
      [B, T, Hq, D] in the query's dtype; softmax and sums are float32 (float64 for float64 inputs, which the TPU
      backends do not take). A row that sees no key is exactly 0.

    Raises:
      ValueError: unknown backend, or shapes that do not fit. When compiled: a TPU backend on another device.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown attention backend {backend!r}; available: {', '.join(sorted(BACKENDS))}")
    if interpret and backend not in TPU_ONLY:
        raise ValueError(f"interpret is for the TPU backends {' and '.join(TPU_ONLY)}, not for {backend!r}")
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
    options = {"interpret": True} if interpret else {}
    return BACKENDS[backend](query, key, value, visible_until, query_index, **options).astype(query.dtype)


def backend_for(platform: str, length: int) -> str:
    """What attends rows of ``length`` tokens on ``platform`` (``jax.Device.platform``): on TPUs jax's own kernel, the
    conservative choice until both have been timed, where its mask takes little memory; else ours."""
    if platform != "tpu":
        return "blockwise"
    return "splash" if length * splash.MASK_BYTES <= SPLASH_MASK_LIMIT else "pallas"


def check_platform(backend: str, platform: str) -> None:
    """Raises ValueError where ``backend`` does not run on ``platform`` (``jax.Device.platform``)."""
    if backend in TPU_ONLY and platform != "tpu":
        raise ValueError(
            f"the attention backend {backend!r} runs on TPUs only and these devices are {platform}: choose "
            "model.attention=blockwise, which runs anywhere"
        )


def check_rows(backend: str, rows: Rows, shards: int = 1) -> None:
    """Raises ValueError where ``backend`` does not hold the mask of every row (numpy, in row order), each cut into
    ``shards`` for context parallelism: its output would be NaN."""
    if backend == "splash":
        splash.check_masks(rows, shards)
