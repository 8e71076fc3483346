"""What changes during training."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec


class TrainState(NamedTuple):
    """params: nested dict of the arrays that are trained; opt_state: optax's; step: int32 scalar, the number of updates
    done, which is also the data position: the next batch is that of global step ``step``; teacher: an average of
    ``params`` over the updates, None where the loss needs none."""

    params: Any
    opt_state: Any
    step: Any
    teacher: Any = None


def create(
    params: Any, optimizer: optax.GradientTransformation, sharding: Any, *, averaged: bool = False
) -> TrainState:
    """A state before the first update. The state owns its arrays: the update may donate them, so ``params`` is copied;
    ``averaged``: once more, as the teacher. sharding: one for all, or nested as ``params``; see `shardings`."""
    placed = shardings(params, optimizer, sharding, averaged=averaged)
    return jax.jit(lambda params: _start(params, optimizer, averaged), out_shardings=placed)(params)


def abstract(
    params: Any, optimizer: optax.GradientTransformation, sharding: Any, *, averaged: bool = False
) -> TrainState:
    """Shapes, dtypes and shardings of ``create``'s result: the template a checkpoint is restored into."""
    shapes = jax.eval_shape(lambda params: _start(params, optimizer, averaged), params)
    placed = shardings(params, optimizer, sharding, averaged=averaged)
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), shapes, placed
    )


def shardings(
    params: Any, optimizer: optax.GradientTransformation, sharding: Any, *, averaged: bool = False
) -> TrainState:
    """Where every leaf of a state lies. ``sharding``: one for all leaves, or nested as ``params``; then what the
    optimiser keeps of a parameter lies as the parameter does, and everything else on all devices."""
    shapes = jax.eval_shape(lambda params: _start(params, optimizer, averaged), params)
    if isinstance(sharding, jax.sharding.Sharding):
        return jax.tree.map(lambda _: sharding, shapes)
    by_path = dict(jax.tree_util.tree_leaves_with_path(sharding))
    everywhere = NamedSharding(next(iter(by_path.values())).mesh, PartitionSpec())

    def of(path: tuple[Any, ...], _: Any) -> NamedSharding:
        # What optax keeps of a parameter stands at the end of a path under the parameter's own.
        return next((by_path[path[start:]] for start in range(len(path)) if path[start:] in by_path), everywhere)

    return jax.tree_util.tree_map_with_path(of, shapes)


def _start(params: Any, optimizer: optax.GradientTransformation, averaged: bool) -> TrainState:
    teacher = jax.tree.map(jnp.copy, params) if averaged else None
    return TrainState(jax.tree.map(jnp.copy, params), optimizer.init(params), jnp.zeros((), jnp.int32), teacher)


def weights_digest(params: Any) -> str:
    """A checksum of all weights, the same under any sharding: names, shapes, dtypes and position-weighted sums of the
    bit patterns modulo 2^32. Tells one model from another; it is no cryptographic hash."""
    checksum = 0
    for (path, leaf), total in zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(_bit_sums(params))):
        label = f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}".encode()
        checksum = zlib.crc32(label + int(total).to_bytes(4, "little"), checksum)
    return f"{checksum:08x}"


def checksums(tree: Any) -> dict[str, str]:
    """Name of a leaf ('params.norm.scale') -> a checksum of its content, the same under any sharding. One changed
    element always changes it."""
    totals = jax.device_get(_bit_sums(tree))
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): f"{int(total):08x}"
        for path, total in jax.tree_util.tree_leaves_with_path(totals)
    }


@jax.jit
def _bit_sums(tree: Any) -> Any:
    """Of every leaf, the sum of its bit patterns times odd numbers that count the positions, modulo 2^32. No leaf is
    reshaped: that would gather what is sharded."""

    def total(leaf: jax.Array) -> jax.Array:
        width = leaf.dtype.itemsize
        bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * min(width, 4)}")).astype(jnp.uint32)
        position = jnp.zeros((), jnp.uint32)
        for axis, size in enumerate(bits.shape):
            position = position * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        return jnp.sum(bits * (2 * position + 1), dtype=jnp.uint32)

    return jax.tree.map(total, tree)
