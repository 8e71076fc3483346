"""The one table of which mesh axis splits which axis of which array; everything that is sharded derives from it.

Mesh axes: ``data`` and ``fsdp`` split the rows of a batch; ``fsdp`` also splits every parameter along the residual
stream (ZeRO, arXiv:1910.02054); ``tensor`` splits heads, the feed-forward width, experts and the vocabulary (Megatron,
arXiv:1909.08053); ``context`` splits the positions of a row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mwjax.model.config import ModelConfig

DATA, FSDP, TENSOR, CONTEXT = AXES = ("data", "fsdp", "tensor", "context")
ROWS = (DATA, FSDP)  # what splits the rows of a batch

RULES: dict[str, str | None] = {
    "layers": None,
    "vocab": TENSOR,
    "embed": FSDP,
    "mlp": TENSOR,
    "experts": TENSOR,
    "expert_mlp": None,
    "heads": TENSOR,
    "kv_heads": TENSOR,
    "head_dim": None,
    "lora": None,
}

HIDDEN = PartitionSpec(ROWS, CONTEXT, None)  # [B, T, D] or, of edges, [B, E, D]
TOKENS = PartitionSpec(ROWS, CONTEXT)  # [B, T] or [B, E]
HEADS = PartitionSpec(ROWS, CONTEXT, TENSOR, None)  # [B, T, H, head_dim]
EXPERTS_IN = PartitionSpec(TENSOR, FSDP, None)  # experts' matrices from the residual stream [experts, D, F]
EXPERTS_OUT = PartitionSpec(TENSOR, None, FSDP)  # and back [experts, F, D]
ROUTER = PartitionSpec(FSDP, TENSOR)  # [D, experts]
TABLE = PartitionSpec(TENSOR, FSDP)  # embedding and unembedding [V, D]


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1, context: int = 1, *, devices: Sequence[Any]) -> Mesh:
    """A mesh with all four axes over the first ``data * fsdp * tensor * context`` of ``devices``.

    Where these are TPUs of several slices, ``data`` goes over the slices, the other axes stay within one: the network
    between slices is far slower than the links within. Raises ValueError where ``data`` does not allow that, where
    there are fewer devices, and for a number of TPU devices that does not divide theirs.
    """
    shape = (data, fsdp, tensor, context)
    wanted = data * fsdp * tensor * context
    sizes = " x ".join(f"{name} {size}" for name, size in zip(AXES, shape))
    if wanted > len(devices):
        raise ValueError(f"mesh {sizes}: {wanted} devices wanted, {len(devices)} {devices[0].platform} found")
    if devices[0].platform == "tpu" and len(devices) % wanted:  # jax makes no mesh of them, or XLA's compiler dies
        raise ValueError(f"mesh {sizes}: {wanted} of {len(devices)} TPU devices; take a number that divides theirs")
    slices = slice_count(devices[:wanted])
    if data % slices:
        raise ValueError(
            f"mesh.data ({data}) must be a multiple of the slices ({slices}): only it goes from one to another"
        )
    # Axes may be cut out of a physical one: not every shape is a product of those of a slice.
    options: dict[str, Any] = {"devices": devices[:wanted], "allow_split_physical_axes": True}
    if slices == 1:
        placed = mesh_utils.create_device_mesh(shape, **options)
    else:
        within = (data // slices, fsdp, tensor, context)
        placed = mesh_utils.create_hybrid_device_mesh(within, (slices, 1, 1, 1), **options)
    return Mesh(placed, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def slice_count(devices: Sequence[Any]) -> int:
    """Over how many TPU slices the devices are spread; 1 for devices of other kinds."""
    return len({getattr(device, "slice_index", 0) for device in devices}) if devices[0].platform == "tpu" else 1


def host_device() -> jax.Device | None:
    """A place in host memory; None, the usual device, where JAX was told to use accelerators only."""
    with contextlib.suppress(RuntimeError):
        return jax.local_devices(backend="cpu")[0]
    return None


def spec(axes: Sequence[str]) -> PartitionSpec:
    """The partition of an array with these logical axes. Raises ValueError where one mesh axis would split two."""
    names = [RULES[axis] for axis in axes]
    used = [name for name in names if name is not None]
    if len(set(used)) < len(used):
        raise ValueError(f"logical axes {' '.join(axes)}: a mesh axis would split two of them: {names}")
    return PartitionSpec(*names)


def shardings(logical_axes: Any, mesh: Mesh) -> Any:
    """The sharding of every parameter, from their logical axes (`mwjax.model.logical_axes`)."""
    return jax.tree.map(
        lambda axes: NamedSharding(mesh, spec(axes)), logical_axes, is_leaf=lambda leaf: isinstance(leaf, tuple)
    )


def misfits(config: ModelConfig, mesh: Mesh) -> list[str]:
    """Every reason why a decoder cannot be spread over a mesh: sizes that the mesh axes do not divide."""
    problems = []
    for axis, size in config.axis_sizes().items():
        name = RULES[axis]
        if name is not None and size % mesh.shape[name]:
            problems.append(f"mesh.{name} ({mesh.shape[name]}) does not divide {axis} ({size})")
    return problems


def constrain(x: jax.Array, partition: PartitionSpec, mesh: Mesh | None) -> jax.Array:
    """``x`` laid out as ``partition`` says; as it is without a mesh."""
    return x if mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, partition))


def gather(x: jax.Array, partition: PartitionSpec, mesh: Mesh) -> jax.Array:
    """A parameter, laid out as ``partition`` says, made whole along ``fsdp``. Its gradient is summed over the devices
    and then laid out as the parameter is."""
    whole = PartitionSpec(*(None if name == FSDP else name for name in partition))
    # A gradient goes the same way back: whole, then in parts. Asked for its part alone, XLA would compute it by parts.
    return constrain(constrain(x, partition, mesh), whole, mesh)
