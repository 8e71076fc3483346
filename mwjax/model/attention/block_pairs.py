"""The pairs of a query block and a key block that the TPU kernels compute, and how large those blocks are."""

from __future__ import annotations

import jax
import jax.numpy as jnp

LANES = 128  # blocks are multiples of it: a vector register of a TPU is 8 x 128
BLOCKS = (512, 1024)  # chosen from, the smaller first; no kernel time without a TPU, so these are not tuned
PAIR_LIMIT = 2**17  # pairs are described in the 1 MiB scalar memory of a core: 4 bytes each for pallas, 5 for splash


def block_sizes(rows: int, keys: int, allowed: tuple[int, ...] = BLOCKS) -> tuple[int, int]:
    """Sizes of a query block and of a key block for one row: the first of ``allowed`` with which the pairs are not too
    many, or less for a short row.

    Raises:
      ValueError: more pairs than `PAIR_LIMIT` with the largest blocks. With 1,024 that is above 370,688 tokens
        attending to themselves, with 512 above 185,344.
    """
    for block in allowed:
        sizes = min(block, _rounded_up(rows)), min(block, _rounded_up(keys))
        if -(-rows // sizes[0]) * -(-keys // sizes[1]) <= PAIR_LIMIT:
            return sizes
    raise ValueError(
        f"{rows} queries on {keys} keys are more than {PAIR_LIMIT} pairs of blocks of {allowed[-1]}, which do not fit "
        "the scalar memory of a TPU core: use shorter rows or spread each over more devices"
        + (", or the pallas attention, whose blocks may be larger" if allowed[-1] < BLOCKS[-1] else "")
    )


def _rounded_up(length: int) -> int:
    return -(-length // LANES) * LANES


def full_blocks(visible_until: jax.Array, query_index: jax.Array, blocks: tuple[int, int]) -> jax.Array:
    """Which pairs of blocks are visible throughout, so that no mask is needed; arguments and shape as in
    `mwjax.model.attention.blockwise.visited_blocks`."""
    query_block, key_block = blocks
    last_key = jnp.arange(key_block - 1, visible_until.shape[0], key_block, dtype=jnp.int32)
    first_end = visible_until.reshape(-1, key_block).min(axis=1)
    index = query_index.reshape(-1, query_block)
    return (last_key <= index.min(axis=1)[:, None]) & (index.max(axis=1)[:, None] < first_end)


def pad_to_blocks(
    arguments: tuple[jax.Array, ...], blocks: tuple[int, int]
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """query, key, value, visible_until, query_index as `attend` takes them, lengthened to whole blocks by queries that
    see nothing and keys that nobody sees."""
    query, key, value, visible_until, query_index = arguments
    query_block, key_block = blocks
    return (
        _pad(query, query_block, 0),
        _pad(key, key_block, 0),
        _pad(value, key_block, 0),
        _pad(visible_until, key_block, 0),
        _pad(query_index, query_block, -1),
    )


def _pad(x: jax.Array, block: int, fill: int) -> jax.Array:
    missing = -x.shape[1] % block
    return jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2), constant_values=fill) if missing else x
