"""Attention on a mesh: every device computes its own rows and heads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
from jax.sharding import Mesh, PartitionSpec

from mwjax.model.attention import attend


def on_mesh(
    backend: str,
    mesh: Mesh,
    *,
    batch_axes: tuple[str, ...] = ("data", "fsdp"),
    head_axis: str | None = "tensor",
) -> Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]:
    """`attend` split over the batch and the heads, to be given to `mwjax.model.forward` as its ``attention``.

    Left to the partitioner, a loop over the rows of the batch gathers all rows on every device; this keeps each row
    where it is and needs no communication.

    Args:
      batch_axes: mesh axes that split the rows; names the mesh lacks are skipped.
      head_axis: mesh axis that splits query and key heads alike; the number of key heads must be a multiple of it.

    Returns:
      A function of (query, key, value, visible_until), shapes as in `attend`.
    """
    rows = tuple(name for name in batch_axes if name in mesh.shape) or None
    heads = head_axis if head_axis in mesh.shape else None
    spread = PartitionSpec(rows, None, heads, None)
    return jax.shard_map(
        partial(attend, backend=backend),
        mesh=mesh,
        in_specs=(spread, spread, spread, PartitionSpec(rows, None)),
        out_specs=spread,
        check_vma=False,  # the loops start from constants, which the check takes for values equal on all devices
    )
