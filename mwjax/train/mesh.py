"""The devices of a run, and how batches get onto them."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mwjax.model import sharding
from mwjax.train.config import MeshConfig


def make_mesh(config: MeshConfig) -> Mesh:
    """The mesh of a run over the first devices there are. Raises ValueError where there are fewer."""
    return sharding.make_mesh(config.data, devices=jax.devices())


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def by_rows(mesh: Mesh) -> NamedSharding:
    """Axis 0, the rows of a micro-batch, is spread over the devices."""
    return NamedSharding(mesh, PartitionSpec(sharding.ROWS))


def place(tree: Any, sharding: NamedSharding) -> Any:
    """Numpy arrays, this process's rows, -> arrays over the whole mesh."""
    return jax.tree.map(lambda array: jax.make_array_from_process_local_data(sharding, array), tree)
