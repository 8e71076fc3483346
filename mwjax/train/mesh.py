"""The devices of a run, and how arrays get onto them."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mwjax.model import sharding
from mwjax.model.sharding import CONTEXT, ROWS, TOKENS
from mwjax.train.config import MeshConfig
from mwjax.tree import Batch, Rows
from mwjax.tree.context import split_context


class Share(NamedTuple):
    """The part of every micro-batch's rows that lies on a process's devices: the ``part``-th of ``parts`` equal ones.
    Processes that share rows (because ``tensor`` or ``context`` spans them) have the same part."""

    part: int = 0
    parts: int = 1


WHOLE = Share()  # all rows


def make_mesh(config: MeshConfig) -> Mesh:
    """The mesh of a run over the first devices there are.

    Raises ValueError where there are fewer, or where a process would be left without a device.
    """
    devices = jax.devices()
    mesh = sharding.make_mesh(config.data, config.fsdp, config.tensor, config.context, devices=devices)
    if jax.process_count() > 1 and mesh.size != len(devices):
        raise ValueError(
            f"mesh: {mesh.size} of {len(devices)} devices used; with {jax.process_count()} processes it must be all: "
            "raise mesh.data or mesh.fsdp"
        )
    return mesh


def share(mesh: Mesh) -> Share:
    """Which rows this process has to make. Raises ValueError where they would not be one stretch of the batch."""
    blocks = mesh.shape[sharding.DATA] * mesh.shape[sharding.FSDP]
    places = NamedSharding(mesh, PartitionSpec(ROWS)).addressable_devices_indices_map((blocks,))
    mine = sorted({index[0].indices(blocks)[0] for index in places.values() if index is not None})
    if mine != list(range(mine[0], mine[-1] + 1)) or blocks % len(mine) or mine[0] % len(mine):
        raise ValueError(
            f"mesh {dict(mesh.shape)}: process {jax.process_index()} would hold the rows {mine}, with gaps"
        )
    return Share(mine[0] // len(mine), blocks // len(mine))


def leads() -> bool:
    """Whether this process is the one that writes what all of them know."""
    return jax.process_index() == 0


class AnyProcess:
    """Whether any process says yes, known to all at the same place of the program, without waiting for the devices."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._asked = mesh, None
        self._sharding = NamedSharding(mesh, PartitionSpec(sharding.AXES))
        self._any = jax.jit(jnp.any, out_shardings=replicated(mesh))

    def __call__(self, mine: bool) -> bool:
        """Takes this process's word and returns whether any said yes by the call before: the sum over the devices is
        read one call later. One process alone learns its own word at once. All processes must call."""
        if jax.process_count() == 1:
            return mine
        before, word = self._asked, np.full(1, mine)
        self._asked = self._any(jax.make_array_from_callback((self._mesh.size,), self._sharding, lambda _: word))
        return before is not None and bool(before)


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def batch_shardings(batch: Batch, mesh: Mesh) -> Batch:
    """The sharding of every array of a batch: split over rows, and over ``context`` but for what all queries see."""
    cut, whole = NamedSharding(mesh, TOKENS), NamedSharding(mesh, PartitionSpec(ROWS))

    def of(rows: Rows) -> Rows:
        return jax.tree.map(lambda _: cut, rows)._replace(visible_until=whole)

    teacher = None if batch.teacher is None else of(batch.teacher)
    return Batch(of(batch.rows), teacher, jax.tree.map(lambda _: cut, batch.pairs))


def place(batch: Batch, mesh: Mesh, held: Share | None = None) -> Batch:
    """A batch in numpy as arrays over the whole mesh, split as they are computed.

    held: the part of the rows that ``batch`` holds; None: this process's `share`. Raises ValueError where ``context``
    does not divide the length of a row or its number of edges.
    """
    batch = split_context(batch, mesh.shape[CONTEXT])
    return jax.tree.map(partial(_put, held or share(mesh)), batch, batch_shardings(batch, mesh))


def place_rows(rows: Rows, mesh: Mesh, held: Share | None = None) -> Rows:
    """As `place`, of rows alone."""
    return place(Batch(rows), mesh, held).rows


def place_values(values: np.ndarray, mesh: Mesh) -> jax.Array:
    """Values of all edges of a batch, [B, E] over all processes, the same on each, split as the edges are."""
    return _put(WHOLE, values, NamedSharding(mesh, TOKENS))


def on_every_process(tree: Any, mesh: Mesh) -> Any:
    """Arrays over the mesh as numpy arrays, the whole of each on every process. All processes must ask."""
    return jax.device_get(tree if jax.process_count() == 1 else _replicate(mesh)(tree))


@lru_cache
def _replicate(mesh: Mesh) -> Any:
    return jax.jit(lambda tree: tree, out_shardings=replicated(mesh))


def _put(held: Share, array: np.ndarray, target: NamedSharding) -> jax.Array:
    first = held.part * len(array)

    def part(index: Any) -> np.ndarray:
        start, stop, _ = index[0].indices(len(array) * held.parts)
        return array[(slice(start - first, stop - first), *index[1:])]

    return jax.make_array_from_callback((len(array) * held.parts, *array.shape[1:]), target, part)
