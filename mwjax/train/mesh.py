"""The devices of a run: a mesh with the axis ``data``, rows spread over it, parameters on every device."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mwjax.train.config import MeshConfig

DATA_AXIS = "data"


def make_mesh(config: MeshConfig) -> Mesh:
    """A mesh over the first ``config.data`` devices. Raises ValueError where there are fewer."""
    devices = jax.devices()
    if config.data > len(devices):
        raise ValueError(f"mesh.data: {config.data} devices wanted, {len(devices)} {devices[0].platform} found")
    return jax.make_mesh((config.data,), (DATA_AXIS,), axis_types=(AxisType.Auto,), devices=devices[: config.data])


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def by_rows(mesh: Mesh) -> NamedSharding:
    """Axis 0, the rows of a micro-batch, is spread over the devices."""
    return NamedSharding(mesh, PartitionSpec(DATA_AXIS))


def place(tree: Any, sharding: NamedSharding) -> Any:
    """Numpy arrays, this process's rows, -> arrays over the whole mesh."""
    return jax.tree.map(lambda array: jax.make_array_from_process_local_data(sharding, array), tree)
