"""Looking tokens up in an embedding that is cut over a mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mwjax.model.sharding import FSDP, HIDDEN, TABLE, TENSOR, TOKENS


def look_up(table: jax.Array, tokens: jax.Array, dtype: Any, mesh: Mesh | None) -> jax.Array:
    """Rows of ``table`` [V, D] for ``tokens`` int32 [B, T]: [B, T, D] of ``dtype``.

    On a mesh the table stays where it is: every device looks the tokens of its ``fsdp`` group up in its own rows and
    columns, and the devices exchange the results, which are far smaller than the table.
    """
    if mesh is None:
        return table[tokens].astype(dtype)

    def local(table: jax.Array, tokens: jax.Array) -> jax.Array:
        everyone = jax.lax.all_gather(tokens, FSDP, axis=0, tiled=True)
        column = everyone - jax.lax.axis_index(TENSOR) * table.shape[0]
        here = (column >= 0) & (column < table.shape[0])
        found = jnp.where(here[..., None], table[jnp.where(here, column, 0)], 0).astype(dtype)
        mine = jax.lax.all_to_all(found, FSDP, split_axis=0, concat_axis=2, tiled=True)
        return jax.lax.psum(mine, TENSOR)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(TABLE, TOKENS), out_specs=HIDDEN, check_vma=False)
    return mapped(table, tokens)
