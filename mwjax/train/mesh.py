"""The devices of a run, and how arrays get onto them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
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
    """The part of every micro-batch's rows that a process makes: the ``part``-th of ``parts`` equal ones.

    Processes that share rows (because ``tensor`` or ``context`` spans them) make the same part. blocks: where on the
    mesh the part lies, in units of the rows of one device; a slice's devices are not ordered by host. Empty: in order.
    """

    part: int = 0
    parts: int = 1
    blocks: tuple[int, ...] = ()


WHOLE = Share()  # all rows


def make_mesh(config: MeshConfig) -> Mesh:
    """The mesh of a run over the first devices there are.

    Raises ValueError as `mwjax.model.sharding.make_mesh`, or where a process would be left without a device.
    """
    devices = jax.devices()
    if jax.process_count() > 1 and config.devices < len(devices):
        raise ValueError(
            f"mesh: {config.devices} of {len(devices)} devices used; with {jax.process_count()} processes it must be "
            "all: raise mesh.data or mesh.fsdp"
        )
    return sharding.make_mesh(config.data, config.fsdp, config.tensor, config.context, devices=devices)


@lru_cache
def share(mesh: Mesh) -> Share:
    """Which rows this process has to make. Raises ValueError where processes would hold overlapping parts."""
    rows = mesh.devices.reshape(mesh.shape[sharding.DATA] * mesh.shape[sharding.FSDP], -1)
    held: dict[int, set[int]] = {}
    for block, devices in enumerate(rows):
        for device in devices:
            held.setdefault(device.process_index, set()).add(block)
    return share_of(held, jax.process_index())


def share_of(held: Mapping[int, Collection[int]], process: int) -> Share:
    """A process's share, from the blocks of rows that lie on the devices of each. Raises as `share`."""
    parts = sorted({tuple(sorted(blocks)) for blocks in held.values()})
    if len({len(part) for part in parts}) > 1 or len(set().union(*parts)) < sum(map(len, parts)):
        raise ValueError(
            f"mesh: the processes would hold the rows {', '.join(map(str, parts))}, which overlap; choose mesh.tensor "
            "times mesh.context so that it divides a host's devices or is a multiple of them"
        )
    mine = tuple(sorted(held[process]))
    return Share(parts.index(mine), len(parts), mine)


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


def place(batch: Batch, mesh: Mesh) -> Batch:
    """A batch in numpy, this process's `share` of its rows, as arrays over the whole mesh, split as they are computed.

    Raises ValueError where ``context`` does not divide the length of a row or its number of edges.
    """
    batch = split_context(batch, mesh.shape[CONTEXT])
    return jax.tree.map(partial(_put, share(mesh)), batch, batch_shardings(batch, mesh))


def place_rows(rows: Rows, mesh: Mesh) -> Rows:
    """As `place`, of rows alone."""
    return place(Batch(rows), mesh).rows


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
    def part(index: Any) -> np.ndarray:
        start, stop, _ = index[0].indices(len(array) * held.parts)
        if held.blocks:  # a device asks for one block
            size = len(array) // len(held.blocks)
            start, stop = (at - start + held.blocks.index(start // size) * size for at in (start, stop))
        return array[(slice(start, stop), *index[1:])]

    return jax.make_array_from_callback((len(array) * held.parts, *array.shape[1:]), target, part)
