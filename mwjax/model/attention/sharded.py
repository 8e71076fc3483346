"""Attention on a mesh: every device computes its own rows, heads and positions."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from mwjax.model.attention import attend as attend_tree
from mwjax.model.attention import check_platform
from mwjax.model.sharding import CONTEXT, HEADS, ROWS, TOKENS
from mwjax.tree.context import BLOCK


def on_mesh(backend: str, mesh: Mesh, *, interpret: bool = False) -> Callable[..., jax.Array]:
    """`attend` split over a mesh with the axes of `mwjax.model.sharding`: rows, heads, and positions of the queries.

    Left to the partitioner, a loop over the rows of the batch gathers all rows on every device; this keeps each row
    where it is. Without ``context`` there is no communication. With it, keys and values are gathered over its devices
    and put back into the row's own order; queries stay where they are.

    Returns:
      A function of (query, key, value, visible_until, index): shapes as in `attend`; index int32 [B, T] as
      `mwjax.tree.Rows.index`, or None where ``context`` is 1. The number of key heads must be a multiple of ``tensor``.

    Raises:
      ValueError: a backend that does not run on the mesh's devices (unless ``interpret``, as in `attend`).
    """
    if not interpret:
        check_platform(backend, mesh.devices.flat[0].platform)
    attend = partial(attend_tree, backend=backend, interpret=interpret)
    spread, whole = HEADS, PartitionSpec(ROWS, None)
    mapped: Callable[..., jax.Array]
    if mesh.shape[CONTEXT] == 1:
        mapped = jax.shard_map(
            attend, mesh=mesh, in_specs=(spread, spread, spread, whole), out_specs=spread, check_vma=False
        )  # the loops start from constants, which the check takes for values equal on all devices
        return lambda query, key, value, visible_until, index=None: mapped(query, key, value, visible_until)

    def gathered(query, key, value, visible_until, own_index, index):
        key, value = (
            _in_row_order(jax.lax.all_gather(x, CONTEXT, axis=1, tiled=True), index, query.shape[1])
            for x in (key, value)
        )
        return attend(query, key, value, visible_until, query_index=own_index)

    mapped = jax.shard_map(
        gathered,
        mesh=mesh,
        in_specs=(spread, spread, spread, whole, TOKENS, whole),
        out_specs=spread,
        check_vma=False,
    )
    return lambda query, key, value, visible_until, index: mapped(query, key, value, visible_until, index, index)


def _in_row_order(x: jax.Array, index: jax.Array, share: int) -> jax.Array:
    """x [B, T, H, D] as `mwjax.tree.context` dealt it out -> in row order; whole blocks move."""
    batch, length = index.shape
    block = math.gcd(share, BLOCK)
    place = jnp.argsort(index[:, ::block] // block, axis=1)
    blocks = x.reshape(batch, length // block, block, *x.shape[2:])
    return jnp.take_along_axis(blocks, place[:, :, None, None, None], axis=1).reshape(x.shape)
