"""Rented names against the published tables: https://docs.cloud.google.com/tpu/docs/v5e, v5p, v6e and tpu7x."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mwjax.launch import topologies

# name: shape, chips, hosts (virtual machines)
PUBLISHED = {
    "v5litepod-1": ("1x1", 1, 1),
    "v5litepod-4": ("2x2", 4, 1),
    "v5litepod-8": ("2x4", 8, 1),
    "v5litepod-16": ("4x4", 16, 4),
    "v5litepod-32": ("4x8", 32, 8),
    "v5litepod-64": ("8x8", 64, 16),
    "v5litepod-128": ("8x16", 128, 32),
    "v5litepod-256": ("16x16", 256, 64),
    "v5p-8": ("2x2x1", 4, 1),
    "v5p-16": ("2x2x2", 8, 2),
    "v5p-32": ("2x2x4", 16, 4),
    "v5p-64": ("2x4x4", 32, 8),
    "v5p-128": ("4x4x4", 64, 16),
    "v5p-256": ("4x4x8", 128, 32),
    "v5p-512": ("4x8x8", 256, 64),
    "v5p-1024": ("8x8x8", 512, 128),
    "v5p-2048": ("8x8x16", 1024, 256),
    "v5p-4096": ("8x16x16", 2048, 512),
    "v5p-8192": ("16x16x16", 4096, 1024),
    "v5p-12288": ("16x16x24", 6144, 1536),
    # Of the table of xpk, which has what the page leaves out.
    "v5p-384": ("4x4x12", 192, 48),
    "v5p-768": ("4x8x12", 384, 96),
    "v5p-896": ("4x4x28", 448, 112),
    "v5p-1152": ("4x12x12", 576, 144),
    "v5p-1280": ("4x8x20", 640, 160),
    "v5p-1536": ("8x8x12", 768, 192),
    "v5p-3072": ("8x12x16", 1536, 384),
    "v5p-6144": ("12x16x16", 3072, 768),
    "v5p-6912": ("12x12x24", 3456, 864),
    "v5p-9216": ("12x16x24", 4608, 1152),
    "v6e-1": ("1x1", 1, 1),
    "v6e-4": ("2x2", 4, 1),
    "v6e-8": ("2x4", 8, 1),
    "v6e-16": ("4x4", 16, 4),
    "v6e-32": ("4x8", 32, 8),
    "v6e-64": ("8x8", 64, 16),
    "v6e-128": ("8x16", 128, 32),
    "v6e-256": ("16x16", 256, 64),
    "tpu7x-8": ("2x2x1", 4, 1),
    "tpu7x-128": ("4x4x4", 64, 16),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_slices(name: str) -> None:
    shape, chips, hosts = PUBLISHED[name]
    found = topologies.find(name)
    generation = "v5e" if name.startswith("v5lite") else name.partition("-")[0]
    assert found.topology == f"{generation}:{shape}"
    assert (found.chips, found.hosts, found.chips_per_host * found.hosts) == (chips, hosts, chips)


def test_other_spellings_and_unknown_names() -> None:
    assert topologies.find("v5e-16") is topologies.find(" V5LITEPOD-16 ")
    assert topologies.find("v5e-16") is topologies.find("V5e-16")
    for name, message in (
        ("v5p-100", r"'v5p-100' .*v5p-64, v5p-128.*\(N counts cores, two a chip\)"),
        ("v5p-3", r"there are v5p-8, v5p-16, "),
        ("v5litepod-512", r"v5litepod-256 ... \(N counts chips\)"),
        ("v5p-", "v5p-8"),
        ("v6e", "v6e-1, v6e-4"),
        ("v4-8", "there are v5litepod-N, v5p-N, v6e-N, tpu7x-N"),
        ("", "is no TPU slice known here"),
    ):
        with pytest.raises(topologies.UnknownSlice, match=message) as caught:
            topologies.find(name)
        assert len(str(caught.value)) < 200


def test_chips_of_the_published_pods() -> None:
    """Whole pods, as their pages give them: 50.63 and 234.9 PFLOP/s of 256 chips."""
    for name, total in (("v5litepod-256", 50.63e15), ("v6e-256", 234.9e15)):
        pod = topologies.find(name)
        assert pod.chips * pod.generation.flops == pytest.approx(total, rel=0.005)


def test_one_line() -> None:
    assert topologies.find("v5p-32").describe() == "v5p-32: 16 chips (v5p:2x2x4) on 4 hosts of 4 chips"
    assert topologies.find("v6e-1").describe() == "v6e-1: 1 chip (v6e:1x1) on 1 host of 1 chip"


# XLA's own compiler, which knows what it can compile for: devices, and hosts they are on, of every slice.
PROGRAM = """
import sys
from jax.experimental.topologies import get_topology_desc
from mwjax.launch import topologies
for name in sys.argv[1:]:
    found = topologies.find(name)
    devices = get_topology_desc(found.topology, platform="tpu", chips_per_host_bounds=found.host_bounds).devices
    print(name, len(devices), len({device.process_index for device in devices}))
"""


@pytest.mark.slow
def test_the_compiler_knows_the_same_slices() -> None:
    pytest.importorskip("libtpu")
    names = [name for name in topologies.SLICES if topologies.find(name).chips <= 512]
    # Another process may hold the library's lock; a TPU is not wanted.
    environment = {**os.environ, "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", PROGRAM, *names]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    expected = [
        f"{name} {found.chips * found.generation.devices_per_chip} {found.hosts}"
        for name, found in ((name, topologies.find(name)) for name in names)
    ]
    assert done.stdout.splitlines() == expected, done.stderr[-2000:]
