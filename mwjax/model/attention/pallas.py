"""Attention over packed trees as a TPU kernel: the mask is compared inside, and only visible pairs of blocks run.

Online softmax as in FlashAttention-2 (Dao, arXiv:2307.08691). The grid's length is a traced number: the kernel walks a
flat list of the pairs of blocks in which something is visible, held in scalar memory, one int32 a pair. The forward
pass and the query's gradient walk it query block by query block, the gradients of key and value key block by key
block. What masks a pair is one int32 a key and one a query; nothing of the size of a mask is ever in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mwjax.model.attention.block_pairs import LANES, block_sizes, full_blocks, pad_to_blocks
from mwjax.model.attention.blockwise import LOG_SUM_EXP_NAME, OUTPUT_NAME, visited_blocks

# exp(MASKED - LOWEST) is 0, and so is exp(LOWEST - s) for any score s of a row that sees something.
MASKED, LOWEST = -1e30, -0.5e30
# An entry of a list: query block (14 bits), key block (14 bits), and whether the pair is the first or the last of its
# output block, and visible throughout. Read by shifts and masks: division and remainder do not lower everywhere.
FIRST, LAST, FULL, FLAG_BITS, BLOCK_BITS = 1, 2, 4, 3, 14
LARGE_BLOCK_VMEM = 32 * 2**20  # bytes; blocks of 1,024 in float32 take more than the 16 MiB a kernel gets by itself


class Static(NamedTuple):
    """What the kernels are compiled for."""

    query_block: int
    key_block: int
    interpret: bool


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visible_until: jax.Array,
    query_index: jax.Array,
    *,
    block: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Arguments and result as `mwjax.model.attention.attend`, with ``query_index`` given. Rows of the batch are
    computed one after another; differentiable once in query, key and value.

    Args:
      query, key, value: all float32 or all bfloat16; softmax and sums are float32. The products of float32 inputs have
        the precision of ``jax.default_matmul_precision``, like every other product of the model.
      block: size of the blocks, a multiple of 128 on a TPU; by the length of the row when None.
      interpret: run in Pallas's interpreter, which works on any device and is slow: for tests.

    Raises:
      ValueError: another dtype, or a row with more pairs of blocks than scalar memory holds.
    """
    if {x.dtype for x in (query, key, value)} not in ({jnp.dtype("float32")}, {jnp.dtype("bfloat16")}):
        raise ValueError(
            "the pallas attention takes float32 or bfloat16 alike for query, key and value, got "
            f"{query.dtype}, {key.dtype}, {value.dtype}"
        )
    rows, keys = query.shape[1], key.shape[1]
    sizes = (block, block) if block else block_sizes(rows, keys)
    arguments = pad_to_blocks((query, key, value, visible_until, query_index), sizes)
    return _attend(*arguments, Static(*sizes, interpret))[:, :rows]


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visible_until: jax.Array,
    query_index: jax.Array,
    static: Static,
) -> jax.Array:
    return _forward(query, key, value, visible_until, query_index, static)[0]


def _forward(query, key, value, visible_until, query_index, static):
    arguments = (query, key, value, visible_until, query_index)
    output, log_sum_exp = jax.lax.map(partial(_forward_row, static), arguments)
    # Named here, inside the forward pass of the custom gradient: a policy that keeps both keeps the kernel from
    # running again in the backward pass.
    output = checkpoint_name(output, OUTPUT_NAME)
    log_sum_exp = checkpoint_name(log_sum_exp, LOG_SUM_EXP_NAME)
    return output, (*arguments, output, log_sum_exp)


def _backward(static, saved, gradient):
    gradients = jax.lax.map(partial(_backward_row, static), (*saved, gradient))
    return *gradients, None, None


_attend.defvjp(_forward, _backward)


def block_lists(
    visible_until: jax.Array, query_index: jax.Array, blocks: tuple[int, int]
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """The list by query block and the list by key block of one row: each (entries int32 [Nq * Nk], how many count).

    Every block occurs in its list, with a pair in which nothing is visible if need be: the kernel writes an output
    block at its last pair, and one without a pair would keep what was in memory.
    """
    visited = visited_blocks(visible_until, query_index, blocks)
    full = full_blocks(visible_until, query_index, blocks)
    query_blocks, key_blocks = (jnp.arange(n, dtype=jnp.int32) for n in visited.shape)
    entries = (query_blocks[:, None] << (FLAG_BITS + BLOCK_BITS)) | (key_blocks << FLAG_BITS) | (full * FULL)
    return _ordered(visited, entries), _ordered(visited.T, entries.T)


def _ordered(visited: jax.Array, entries: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Row by row, what is visited, with flags at the first and the last of each row."""
    columns = jnp.arange(visited.shape[1])
    visited = visited | (~visited.any(axis=1, keepdims=True) & (columns == 0))
    first = columns == visited.argmax(axis=1, keepdims=True)
    last = columns[::-1] == visited[:, ::-1].argmax(axis=1, keepdims=True)
    entries = (entries | first * FIRST | last * LAST).astype(jnp.int32)
    chosen = jnp.flatnonzero(visited, size=visited.size, fill_value=0)
    return entries.reshape(-1)[chosen], visited.sum(dtype=jnp.int32)


def _query_block(entry: jax.Array) -> jax.Array:
    return entry >> (FLAG_BITS + BLOCK_BITS)


def _key_block(entry: jax.Array) -> jax.Array:
    return (entry >> FLAG_BITS) & (2**BLOCK_BITS - 1)


def _has(entry: jax.Array, flag: int) -> jax.Array:
    return (entry & flag) != 0


def _specs(static: Static, head_dim: int, heads: Callable[..., tuple[Any, Any]], step: int) -> dict[str, pl.BlockSpec]:
    """What of each array a grid step sees. ``heads`` turns grid indices into (query head, key head); ``step`` is the
    grid axis that walks the list, which comes after the grid indices."""
    query_block, key_block, _ = static

    def at_query(*grid: Any) -> Any:
        return _query_block(grid[-1][grid[step]])

    def at_key(*grid: Any) -> Any:
        return _key_block(grid[-1][grid[step]])

    return {
        "query": pl.BlockSpec((None, query_block, head_dim), lambda *grid: (heads(*grid)[0], at_query(*grid), 0)),
        "key": pl.BlockSpec((None, key_block, head_dim), lambda *grid: (heads(*grid)[1], at_key(*grid), 0)),
        "per query": pl.BlockSpec((None, 1, query_block), lambda *grid: (heads(*grid)[0], 0, at_query(*grid))),
        "index": pl.BlockSpec((1, query_block), lambda *grid: (0, at_query(*grid))),
        "end": pl.BlockSpec((1, key_block), lambda *grid: (0, at_key(*grid))),
    }


def _call(
    kernel: Callable[..., None],
    name: str,
    grid: tuple[Any, ...],
    entries: jax.Array,
    inputs: Sequence[tuple[jax.Array, pl.BlockSpec]],
    outputs: Sequence[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
    scratch: Sequence[tuple[int, int]],
    parallel: int,
    static: Static,
) -> Sequence[jax.Array]:
    """``parallel``: how many leading grid axes may run in any order, on any core."""
    large = max(static.query_block, static.key_block) > 512
    return pl.pallas_call(
        kernel,
        name=name,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=[spec for _, spec in inputs],
            out_specs=[spec for _, spec in outputs],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=[shape for shape, _ in outputs],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=(pltpu.PARALLEL,) * parallel + (pltpu.ARBITRARY,) * (len(grid) - parallel),
            vmem_limit_bytes=LARGE_BLOCK_VMEM if large else None,
        ),
        interpret=static.interpret,
    )(entries, *(array for array, _ in inputs))


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def _column(row: jax.Array) -> jax.Array:
    """[1, n] -> [n, 1], through the eight sublanes a transposition on the TPU takes."""
    return jnp.broadcast_to(row, (8, row.shape[1])).T[:, :1]


def _visible(entry: jax.Array, index: jax.Array, ends: jax.Array, keys_in: int) -> jax.Array:
    """Query indices and ends, one a row and the other a column, -> bool [block, block] with keys along ``keys_in``."""
    length = ends.shape[keys_in]
    shape = (1, length) if keys_in == 1 else (length, 1)
    keys = _key_block(entry) * length + jax.lax.broadcasted_iota(jnp.int32, shape, keys_in)
    return (keys <= index) & (index < ends)


def _heads_first(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, 0, 1)


def _forward_row(static: Static, row: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """Output [T, Hq, D] and log-sum-exp float32 [Hq, 1, T] of one row (0 where nothing is visible)."""
    query, key, value, visible_until, query_index = row
    (rows, query_heads, head_dim), kv_heads = query.shape, key.shape[1]
    group = query_heads // kv_heads
    query_block = static.query_block
    scale = head_dim**-0.5
    (entries, count), _ = block_lists(visible_until, query_index, static[:2])

    def kernel(entries, index, ends, query, key, value, output, log_sum_exp, largest, total, mixed):
        entry = entries[pl.program_id(2)]

        @pl.when(_has(entry, FIRST))
        def _():
            largest[...] = jnp.full_like(largest, LOWEST)
            total[...] = jnp.zeros_like(total)
            mixed[...] = jnp.zeros_like(mixed)

        def add(masked: bool) -> None:
            scores = _dot(query[...], key[...], (1, 1)) * scale  # [query block, key block]
            if masked:
                scores = jnp.where(_visible(entry, _column(index[...]), ends[...], 1), scores, MASKED)
            before = largest[:, :1]
            after = jnp.maximum(before, scores.max(axis=1, keepdims=True))
            weights = jnp.exp(scores - after)
            shrink = jnp.exp(before - after)
            total[...] = jnp.broadcast_to(total[:, :1] * shrink + weights.sum(axis=1, keepdims=True), total.shape)
            mixed[...] = mixed[...] * shrink + _dot(weights.astype(value.dtype), value[...], (1, 0))
            largest[...] = jnp.broadcast_to(after, largest.shape)

        pl.when(_has(entry, FULL))(partial(add, False))
        pl.when(~_has(entry, FULL))(partial(add, True))

        @pl.when(_has(entry, LAST))
        def _():
            seen = total[...] > 0
            sums = jnp.where(seen, total[...], 1)
            output[...] = (mixed[...] / sums[:, :1]).astype(output.dtype)
            log_sum_exp[...] = jnp.where(seen, largest[...] + jnp.log(sums), 0).T[:1]

    specs = _specs(static, head_dim, lambda kv, member, *_: (kv * group + member, kv), step=2)
    query, key, value = (_heads_first(x) for x in (query, key, value))
    output, log_sum_exp = _call(
        kernel,
        "tree_attention_forward",
        (kv_heads, group, count),
        entries,
        [
            (query_index[None], specs["index"]),
            (visible_until[None], specs["end"]),
            (query, specs["query"]),
            (key, specs["key"]),
            (value, specs["key"]),
        ],
        [
            (jax.ShapeDtypeStruct(query.shape, query.dtype), specs["query"]),
            (jax.ShapeDtypeStruct((query_heads, 1, rows), jnp.float32), specs["per query"]),
        ],
        [(query_block, LANES), (query_block, LANES), (query_block, head_dim)],
        parallel=2,
        static=static,
    )
    return _heads_first(output), log_sum_exp


def _backward_row(static: Static, row: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of query, key and value of one row. Both kernels hold their scores as [key block, query block], so that
    what belongs to a query lies along the lanes, as it comes from memory."""
    query, key, value, visible_until, query_index, output, log_sum_exp, gradient = row
    head_dim, kv_heads = query.shape[2], key.shape[1]
    group = query.shape[1] // kv_heads
    query_block, key_block, _ = static
    scale = head_dim**-0.5
    by_query, by_key = block_lists(visible_until, query_index, static[:2])
    delta = (output.astype(jnp.float32) * gradient.astype(jnp.float32)).sum(axis=-1).T[:, None]  # [Hq, 1, T]
    query, key, value, gradient = (_heads_first(x) for x in (query, key, value, gradient))

    def weights_and_gradient(entry, masked, index, ends, query, key, value, gradient, log_sum_exp, delta):
        """The attention weights and the gradient of the scores, both [key block, query block]."""
        weights = jnp.exp(_dot(key[...], query[...], (1, 1)) * scale - log_sum_exp[...])
        if masked:
            weights = jnp.where(_visible(entry, index[...], _column(ends[...]), 0), weights, 0)
        return weights, weights * (_dot(value[...], gradient[...], (1, 1)) - delta[...])

    def query_kernel(entries, *refs):
        *inputs, result, total = refs
        key = inputs[3]
        entry = entries[pl.program_id(2)]

        @pl.when(_has(entry, FIRST))
        def _():
            total[...] = jnp.zeros_like(total)

        def add(masked: bool) -> None:
            _, scores_gradient = weights_and_gradient(entry, masked, *inputs)
            total[...] += _dot(scores_gradient.astype(key.dtype), key[...], (0, 0))

        pl.when(_has(entry, FULL))(partial(add, False))
        pl.when(~_has(entry, FULL))(partial(add, True))

        @pl.when(_has(entry, LAST))
        def _():
            result[...] = (total[...] * scale).astype(result.dtype)

    def key_value_kernel(entries, *refs):
        *inputs, key_result, value_result, key_total, value_total = refs
        query, gradient = inputs[2], inputs[5]
        entry, member = entries[pl.program_id(1)], pl.program_id(2)

        @pl.when(_has(entry, FIRST) & (member == 0))
        def _():
            key_total[...] = jnp.zeros_like(key_total)
            value_total[...] = jnp.zeros_like(value_total)

        def add(masked: bool) -> None:
            weights, scores_gradient = weights_and_gradient(entry, masked, *inputs)
            value_total[...] += _dot(weights.astype(gradient.dtype), gradient[...], (1, 0))
            key_total[...] += _dot(scores_gradient.astype(query.dtype), query[...], (1, 0))

        pl.when(_has(entry, FULL))(partial(add, False))
        pl.when(~_has(entry, FULL))(partial(add, True))

        @pl.when(_has(entry, LAST) & (member == group - 1))
        def _():
            key_result[...] = (key_total[...] * scale).astype(key_result.dtype)
            value_result[...] = value_total[...].astype(value_result.dtype)

    def inputs(specs: dict[str, pl.BlockSpec]) -> list[tuple[jax.Array, pl.BlockSpec]]:
        return [
            (query_index[None], specs["index"]),
            (visible_until[None], specs["end"]),
            (query, specs["query"]),
            (key, specs["key"]),
            (value, specs["key"]),
            (gradient, specs["query"]),
            (log_sum_exp, specs["per query"]),
            (delta, specs["per query"]),
        ]

    entries, count = by_query
    specs = _specs(static, head_dim, lambda kv, member, *_: (kv * group + member, kv), step=2)
    (query_gradient,) = _call(
        query_kernel,
        "tree_attention_query_gradient",
        (kv_heads, group, count),
        entries,
        inputs(specs),
        [(jax.ShapeDtypeStruct(query.shape, query.dtype), specs["query"])],
        [(query_block, head_dim)],
        parallel=2,
        static=static,
    )
    entries, count = by_key
    # The query heads of a key head come innermost: their sum over the group stays in scratch.
    specs = _specs(static, head_dim, lambda kv, _, member, *__: (kv * group + member, kv), step=1)
    key_gradient, value_gradient = _call(
        key_value_kernel,
        "tree_attention_key_value_gradient",
        (kv_heads, count, group),
        entries,
        inputs(specs),
        [(jax.ShapeDtypeStruct(x.shape, x.dtype), specs["key"]) for x in (key, value)],
        [(key_block, head_dim), (key_block, head_dim)],
        parallel=1,
        static=static,
    )
    return _heads_first(query_gradient), _heads_first(key_gradient), _heads_first(value_gradient)
