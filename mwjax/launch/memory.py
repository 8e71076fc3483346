"""What lies in a chip's main memory during a step, by kind, from the shardings; the rest is the compiled programs'."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax

from mwjax.launch.topologies import GIB, TPU7X, V5E, V5P, V6E, Generation

# Bytes that XLA's TPU compiler lets a program have on one jax device, as its out-of-memory messages say (libtpu
# 0.0.42): not quite what the chip has. What it holds against them is a program's peak, not the sum of the sizes it
# reports (15.66 GiB compile for v5e where that sum is 16.02). A TPU7x is two devices.
USABLE = {V5E: 15.75 * GIB, V5P: 95.74 * GIB, V6E: 31.25 * GIB, TPU7X: 94.75 * GIB}


def usable(generation: Generation) -> float:
    """Bytes a program may have on one jax device of a chip."""
    return USABLE[generation]


def shard_bytes(tree: Any) -> int:
    """Bytes on one device of arrays, or of shapes with their shardings; all of them where there is no sharding."""

    def one(leaf: Any) -> int:
        placed = getattr(leaf, "sharding", None)
        shape = leaf.shape if placed is None else placed.shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(map(one, jax.tree.leaves(tree)))


class Resident(NamedTuple):
    """Bytes on one device of what the step holds. reference: the weights the run began with, where the loss compares
    with them; batch: all micro-batches of the step, which are placed before the first is computed."""

    parameters: int
    frozen: int
    optimiser: int
    teacher: int
    reference: int
    gradients: int
    batch: int


class Peak(NamedTuple):
    """The fullest moment of a step on one device. function: whose; temporaries: activations, gathered weights and
    padding, what the program takes beyond its arguments; code: of all programs."""

    function: str
    kinds: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.kinds.values())


def peaks(resident: Resident, programs: dict[str, tuple[int, int]], code: int) -> list[Peak]:
    """Of every function, the fullest first. programs: of every function, (peak bytes with its arguments, bytes of its
    arguments, without padding)."""
    found = []
    for name, (peak, arguments) in programs.items():
        kinds = {kind: size for kind, size in resident._asdict().items() if size}
        if name == "score":
            kinds.pop("gradients", None)  # not there yet
        kinds["temporaries"] = max(peak - arguments, 0)
        kinds["code"] = code
        found.append(Peak(name, kinds))
    return sorted(found, key=lambda peak: -peak.total)
