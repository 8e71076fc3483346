"""TPU slices by the names people rent: what is in one, how jax calls its topology, and what its chips can do.

``v5p-N`` and ``tpu7x-N`` count TensorCores (two a chip), ``v5litepod-N`` and ``v6e-N`` chips. A host is a virtual
machine: what runs one process. Sources, per chip (read 2026-11):

- v5e https://docs.cloud.google.com/tpu/docs/v5e (memory bandwidth: 819 GB/s there, 800 GiB/s in other editions)
- v5p https://docs.cloud.google.com/tpu/docs/v5p (which lists "most, but not all" shapes) and, beside it, v6e and TPU7x:
  https://docs.cloud.google.com/tpu/docs/tpu7x (whose table gives memory in GiB)
- v6e https://docs.cloud.google.com/tpu/docs/v6e (shapes and virtual machines)
- network between slices: v5p, v6e and TPU7x from the same table, v5e from its page (6.4 Tb/s for a pod of 256 chips)
- runtime versions https://docs.cloud.google.com/tpu/docs/runtimes

A v5p or TPU7x slice of more than 64 chips is made of whole cubes of 4 x 4 x 4, up to 96 of them. A name says only how
many; their shape is the most compact there is, as in xpk's table of slices
(https://github.com/AI-Hypercomputer/xpk, src/xpk/core/system_characteristics.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Generation:
    """A kind of chip.

    name: in jax's topology names. prefix: in rented names. cores_per_chip: what the number in a rented name counts per
    chip. devices_per_chip: how many jax devices a chip is. runtime_version: the image of the virtual machines; None
    where queued resources do not offer it (GKE only). hbm_bytes: memory, bytes. flops: peak bfloat16 FLOP/s.
    hbm_bandwidth, ici_bandwidth: bytes/s of the memory, and of the links to other chips, both directions together.
    dcn_bandwidth: bytes/s to other slices over the data centre's network, each way.
    """

    name: str
    prefix: str
    cores_per_chip: int
    devices_per_chip: int
    runtime_version: str | None
    hbm_bytes: int
    flops: float
    hbm_bandwidth: float
    ici_bandwidth: float
    dcn_bandwidth: float


V5E = Generation("v5e", "v5litepod", 1, 1, "v2-alpha-tpuv5-lite", 16 * GIB, 197e12, 819e9, 400e9, 25e9 / 8)
V5P = Generation("v5p", "v5p", 2, 1, "v2-alpha-tpuv5", 95 * GIB, 459e12, 2765e9, 1200e9, 50e9 / 8)
V6E = Generation("v6e", "v6e", 1, 1, "v2-alpha-tpuv6e", 32 * GIB, 918e12, 1638e9, 800e9, 100e9 / 8)
TPU7X = Generation("tpu7x", "tpu7x", 2, 2, None, 192 * GIB, 2307e12, 7380e9, 1200e9, 100e9 / 8)

_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_LESS_THAN_A_CUBE = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
MOST_CUBES, LONGEST = 96, 256  # cubes of a slice, chips along a dimension


def _of_cubes(cubes: int) -> tuple[int, ...] | None:
    """The most compact box of so many cubes, in chips; None where one dimension would be too long."""
    boxes = [
        (a, b, cubes // (a * b))
        for a in range(1, cubes + 1)
        for b in range(a, cubes + 1)
        if cubes % (a * b) == 0 and cubes // (a * b) >= b
    ]
    a, b, c = min(boxes, key=lambda box: box[0] * box[1] + box[1] * box[2] + box[0] * box[2])
    return (4 * a, 4 * b, 4 * c) if 4 * c <= LONGEST else None


_DEEP = (
    *_LESS_THAN_A_CUBE,
    *("x".join(map(str, shape)) for cubes in range(1, MOST_CUBES + 1) if (shape := _of_cubes(cubes))),
)
SHAPES = {V5E: _FLAT, V5P: _DEEP, V6E: _FLAT, TPU7X: _DEEP}
SHOWN = 8  # names in a message


class UnknownSlice(ValueError):
    """No slice of that name; the message lists those there are."""


@dataclass(frozen=True)
class Slice:
    """Chips that are wired together and rented together. name: as rented. shape: chips along every dimension."""

    name: str
    generation: Generation
    shape: tuple[int, ...]

    @property
    def chips(self) -> int:
        return math.prod(self.shape)

    @property
    def hosts(self) -> int:
        """Eight flat chips are one virtual machine of eight; larger slices are made of machines of four."""
        return self.chips // self.chips_per_host

    @property
    def chips_per_host(self) -> int:
        return self.chips if len(self.shape) == 2 and self.chips <= 8 else 4

    @property
    def devices_per_host(self) -> int:
        """What ``jax.local_device_count()`` gives on a host."""
        return self.chips_per_host * self.generation.devices_per_chip

    @property
    def devices(self) -> int:
        """Of all hosts."""
        return self.hosts * self.devices_per_host

    @property
    def host_bounds(self) -> tuple[int, int, int]:
        """Chips of a host along the dimensions: ``chips_per_host_bounds`` of `get_topology_desc`, whose own default of
        2 x 2 x 1 would make two hosts of eight chips and refuse a single one."""
        if self.chips == self.chips_per_host and len(self.shape) == 2:
            return (*self.shape, 1)
        return (2, 2, 1)

    @property
    def topology(self) -> str:
        """As `jax.experimental.topologies.get_topology_desc` takes it, beside ``host_bounds``."""
        return f"{self.generation.name}:{'x'.join(map(str, self.shape))}"

    def describe(self) -> str:
        """One line for people."""
        chips, hosts = _count(self.chips, "chip"), _count(self.hosts, "host")
        return f"{self.name}: {chips} ({self.topology}) on {hosts} of {_count(self.chips_per_host, 'chip')}"


def _slices() -> dict[str, Slice]:
    every = {}
    for generation, shapes in SHAPES.items():
        for text in shapes:
            shape = tuple(map(int, text.split("x")))
            name = f"{generation.prefix}-{math.prod(shape) * generation.cores_per_chip}"
            every[name] = Slice(name, generation, shape)
    return every


SLICES = _slices()


def find(name: str) -> Slice:
    """The slice of a rented name (``v5p-32``, ``v5litepod-16`` or short ``v5e-16``, ``v6e-8``).

    Raises UnknownSlice, with the names that are close.
    """
    wanted = name.strip().lower()
    if wanted.startswith("v5e-"):
        wanted = f"{V5E.prefix}-{wanted.removeprefix('v5e-')}"
    if wanted in SLICES:
        return SLICES[wanted]
    prefix, _, number = wanted.partition("-")
    generation = next((one for one in SHAPES if one.prefix == prefix), None)
    if generation is None:
        kinds = ", ".join(f"{one.prefix}-N" for one in SHAPES)
        raise UnknownSlice(
            f"{name!r} is no TPU slice known here; there are {kinds}, such as v5p-32, and v5e-N for short"
        )
    sizes = [one.chips * generation.cores_per_chip for one in SLICES.values() if one.generation is generation]
    if number.isdecimal():
        sizes = sorted(sizes, key=lambda size: abs(size - int(number)))
    near = ", ".join(f"{prefix}-{size}" for size in sorted(sizes[:SHOWN]))
    counts = "cores, two a chip" if generation.cores_per_chip == 2 else "chips"
    raise UnknownSlice(f"{name!r} is no TPU slice that can be rented; there are {near} ... (N counts {counts})")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
