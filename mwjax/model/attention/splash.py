"""Attention over packed trees by jax's own splash attention, which is given the tree's mask.

It takes a mask as a table of pairs of blocks (empty, partly visible, full) and the bits of the partly visible ones.
Both are computed inside the program, so trees may differ from step to step; the bits cost memory that
`mwjax.model.attention.pallas` does not need.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo
from jax.typing import ArrayLike

from mwjax.model.attention.block_pairs import block_sizes, full_blocks, pad_to_blocks
from mwjax.model.attention.blockwise import OUTPUT_NAME, visited_blocks
from mwjax.model.sharding import host_device
from mwjax.tree import context
from mwjax.tree.rows import Rows

# Partly visible pairs a query block may have on average. Measured with blocks of 512: a causal row has 1, trees of 5 to
# 21 views of up to 131,072 tokens have 2.7 to 5.2 (tests/benchmarks/tpu_attention.py).
PARTIAL_PER_QUERY_BLOCK = 8
BLOCKS = (512,)  # with 1,024 the kernel runs out of vector memory
MASK_BYTES = 2 * PARTIAL_PER_QUERY_BLOCK * BLOCKS[0] * 4  # a token of a row: int32, forward and for keys and values
EMPTY, PARTIAL, WHOLE = 0, 1, 2  # as splash attention numbers them


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visible_until: jax.Array,
    query_index: jax.Array,
    *,
    block: int | None = None,
    partial_blocks: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Arguments and result as `mwjax.model.attention.attend`, with ``query_index`` given. Rows of the batch are
    computed one after another; differentiable once in query, key and value.

    Args:
      query: scaled before the product, hence rounded once more in bfloat16 where ``head_dim ** -0.5`` is no power of 2.
      block: size of the blocks, a multiple of 128; by the length of the row when None.
      partial_blocks: how many partly visible pairs of blocks a row may have, each ``4 * block ** 2`` bytes, since a
        kernel holds bits as int32, and twice in the backward pass; `PARTIAL_PER_QUERY_BLOCK` a query block when None.
        The output of a row that has more (`count_partial_blocks`) is NaN.
      interpret: run in Pallas's interpreter, which works on any device and is slow: for tests.

    Raises:
      ValueError: a row with more pairs of blocks than scalar memory holds.
    """
    rows, keys = query.shape[1], key.shape[1]
    sizes = (block, block) if block else block_sizes(rows, keys, BLOCKS)
    arguments = pad_to_blocks((query, key, value, visible_until, query_index), sizes)
    blocks = arguments[0].shape[1] // sizes[0], arguments[1].shape[1] // sizes[1]
    capacity = min(partial_blocks, blocks[0] * blocks[1]) if partial_blocks else _capacity(*blocks)
    # The kernel keeps its mask for the backward pass. Rebuilding it there instead keeps one row's mask alive, not
    # every row's of every layer; the named output and log-sum-exp are kept, so that the kernel does not run again.
    row = jax.checkpoint(
        partial(_attend_row, sizes, capacity, interpret),
        policy=jax.checkpoint_policies.save_only_these_names(OUTPUT_NAME),
        prevent_cse=False,  # inside a scan
    )
    return jax.lax.map(row, arguments)[:, :rows]


def count_partial_blocks(
    visible_until: ArrayLike, query_index: ArrayLike | None = None, block: int | None = None
) -> tuple[int, int]:
    """Pairs of blocks of one row of which some but not all is visible (what ``partial_blocks`` is for), and how many
    `attend` holds by itself. visible_until: int32 [S]; query_index: int32 [T], None: all queries in order."""
    ends = jnp.asarray(visible_until)
    index = jnp.arange(len(ends), dtype=jnp.int32) if query_index is None else jnp.asarray(query_index)
    rows, keys = len(index), len(ends)
    sizes = (block, block) if block else block_sizes(rows, keys, BLOCKS)
    nothing = [jnp.zeros((1, length, 1, 1)) for length in (rows, keys, keys)]
    *_, ends, index = pad_to_blocks((*nothing, ends[None], index[None]), sizes)
    kinds = _kinds(ends[0], index[0], sizes)
    return int((kinds == PARTIAL).sum()), _capacity(*kinds.shape)


def _capacity(query_blocks: int, key_blocks: int) -> int:
    return min(PARTIAL_PER_QUERY_BLOCK * query_blocks, query_blocks * key_blocks)


def check_masks(rows: Rows, shards: int = 1) -> None:
    """Raises ValueError where a row, or one of the parts it is cut into for context parallelism, has more partly
    visible pairs of blocks than `attend` holds; numpy in, in row order, computed on the host."""
    with jax.default_device(host_device()):
        for ends, index in zip(rows.visible_until, context.order(rows.visible_until, shards)):
            for part in np.split(index, shards):
                found, held = count_partial_blocks(ends, part)
                if found > held:
                    what = "a row" if shards == 1 else f"a part of {len(part)} tokens of a row"
                    raise ValueError(
                        f"{what} of {len(ends)} tokens has {found} partly visible pairs of blocks, and splash "
                        f"attention holds {held}: set model.attention=pallas, which holds any number, or "
                        "data.method=logittree"
                    )


def _kinds(visible_until: jax.Array, query_index: jax.Array, sizes: tuple[int, int]) -> jax.Array:
    """int8 [Nq, Nk]: `EMPTY`, `PARTIAL` or `WHOLE`."""
    visited = visited_blocks(visible_until, query_index, sizes)
    full = full_blocks(visible_until, query_index, sizes)
    return jnp.where(full, WHOLE, jnp.where(visited, PARTIAL, EMPTY)).astype(jnp.int8)


def _attend_row(sizes: tuple[int, int], capacity: int, interpret: bool, row: tuple[jax.Array, ...]) -> jax.Array:
    query, key, value, visible_until, query_index = row
    by_query, overflow = _mask(visible_until, query_index, sizes, capacity, by_key=False)
    by_key, _ = _mask(visible_until, query_index, sizes, capacity, by_key=True)
    query_block, key_block = sizes
    kernel = splash.SplashAttentionKernel(
        by_query,
        by_query,
        by_key,
        block_sizes=splash.BlockSizes(
            block_q=query_block,
            block_kv=key_block,
            block_kv_compute=key_block,
            block_q_dkv=query_block,
            block_kv_dkv=key_block,
            block_kv_dkv_compute=key_block,
            block_q_dq=query_block,
            block_kv_dq=key_block,
        ),
        is_mqa=False,
        save_residuals=False,
        mask_value=splash.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=None,
        residual_checkpoint_name=OUTPUT_NAME,  # of the output and of the log-sum-exp
        mask_function=None,
        interpret=interpret,
    )
    scaled = (query.astype(jnp.float32) * query.shape[2] ** -0.5).astype(query.dtype)
    output: Any = kernel(*(jnp.swapaxes(x, 0, 1) for x in (scaled, key, value)))
    # A row that sees nothing gets the mean of some values from splash, or NaN.
    furthest = jax.lax.cummax(visible_until)
    seen = (query_index >= 0) & (query_index < furthest[jnp.clip(query_index, 0, key.shape[0] - 1)])
    output = jnp.where(seen[:, None, None], jnp.swapaxes(output, 0, 1), 0)
    return jnp.where(overflow, jnp.nan, output)


def _mask(
    visible_until: jax.Array, query_index: jax.Array, sizes: tuple[int, int], capacity: int, *, by_key: bool
) -> tuple[MaskInfo, jax.Array]:
    """The mask of one row as splash attention describes it, in the order in which its forward kernel (or, ``by_key``,
    its kernel for the gradients of key and value) goes through the pairs; and whether ``capacity`` is too small."""
    query_block, key_block = sizes
    kinds = _kinds(visible_until, query_index, sizes)
    if by_key:
        kinds = kinds.T
    order = kinds.reshape(-1)
    partly = order == PARTIAL
    count = partly.sum()
    outer, inner = jnp.divmod(jnp.flatnonzero(partly, size=capacity, fill_value=0), kinds.shape[1])
    queries, keys = (inner, outer) if by_key else (outer, inner)
    index = query_index.reshape(-1, query_block)[queries]
    ends = visible_until.reshape(-1, key_block)[keys]
    positions = keys[:, None] * key_block + jnp.arange(key_block, dtype=jnp.int32)
    if by_key:
        index, positions, ends = index[:, None, :], positions[:, :, None], ends[:, :, None]
    else:
        index, positions, ends = index[:, :, None], positions[:, None, :], ends[:, None, :]
    # What to fetch at an empty pair is what the next pair that is computed needs, so that it is fetched early and once.
    steps = jnp.arange(order.size)
    following = jax.lax.cummin(jnp.where(order != EMPTY, steps, order.size), reverse=True)
    fetched = jnp.where(following < order.size, following, 0) % kinds.shape[1]
    fetched_mask = jnp.clip(jnp.cumsum(partly) - partly, 0, jnp.clip(count - 1, 0, capacity - 1))

    def table(values: jax.Array) -> jax.Array:
        """[1, Nq, Nk], as the kernel holds it in scalar memory: hence the small integers."""
        values = values.reshape(kinds.shape)
        return (values.T if by_key else values)[None]

    info = MaskInfo(
        data_next=table(fetched.astype(jnp.int16)),
        mask_next=table(fetched_mask.astype(jnp.int16 if capacity < 2**15 else jnp.int32)),
        block_mask=table(order),
        partial_mask_blocks=(positions <= index) & (index < ends),
        q_sequence=None,
    )
    return info, count > capacity
