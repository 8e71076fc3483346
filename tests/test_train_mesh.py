"""Which rows a process makes, and where they go."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mwjax.model import sharding
from mwjax.train import mesh
from mwjax.train.config import MeshConfig
from mwjax.train.mesh import Share, share_of


def test_parts_are_numbered_by_where_they_begin() -> None:
    by_host = {0: {0, 1, 4, 5}, 1: {2, 3, 6, 7}}  # four chips by two: a host has a square, a row of chips crosses both
    assert share_of(by_host, 0) == Share(0, 2, (0, 1, 4, 5))
    assert share_of(by_host, 1) == Share(1, 2, (2, 3, 6, 7))
    assert share_of({0: {0}, 1: {0}, 2: {1}, 3: {1}}, 3) == Share(1, 2, (1,))  # tensor spans two processes
    with pytest.raises(ValueError, match="overlap"):
        share_of({0: {0, 1}, 1: {1, 2}}, 0)
    with pytest.raises(ValueError, match="overlap"):
        share_of({0: {0, 1}, 1: {2}}, 0)


def test_only_data_goes_over_slices() -> None:
    devices = [SimpleNamespace(platform="tpu", slice_index=number // 4) for number in range(8)]
    for sizes in ({"fsdp": 8}, {"data": 1, "fsdp": 4, "tensor": 2}, {"data": 1, "context": 8}):
        with pytest.raises(ValueError, match=r"mesh.data \(1\) must be a multiple of the slices \(2\)"):
            sharding.make_mesh(**sizes, devices=devices)
    assert sharding.slice_count(devices) == 2 and sharding.slice_count(devices[4:]) == 1
    # Other kinds of devices count something else by that name.
    assert sharding.slice_count([SimpleNamespace(platform="gpu", slice_index=number) for number in range(8)]) == 1


def test_some_of_a_hosts_tpu_devices_must_divide_all() -> None:
    """jax finds no block of 3 or 5 of 8, and with 6 XLA's compiler ends the process."""
    devices = [SimpleNamespace(platform="tpu", slice_index=0)] * 8
    for some in (3, 5, 6, 7):
        with pytest.raises(ValueError, match=rf"fsdp {some} x .*: {some} of 8 TPU devices; take a number that divides"):
            sharding.make_mesh(fsdp=some, devices=devices)
    with pytest.raises(ValueError, match="16 devices wanted, 8 tpu found"):
        sharding.make_mesh(fsdp=16, devices=devices)


def test_every_row_lands_once_whatever_the_order_of_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes of four blocks each, in one: what each puts where its devices are is the batch, reordered."""
    asked: list[Callable[[tuple[slice, ...]], np.ndarray]] = []
    monkeypatch.setattr(jax, "make_array_from_callback", lambda shape, target, part: asked.append(part))
    rows = np.arange(16 * 3).reshape(16, 3)  # two rows a block
    held = {0: {0, 1, 4, 5}, 1: {2, 3, 6, 7}}
    whole = NamedSharding(mesh.make_mesh(MeshConfig()), PartitionSpec())
    landed = np.full_like(rows, -1)
    for process in held:
        share = share_of(held, process)
        mesh._put(share, rows[share.part * 8 : share.part * 8 + 8], whole)
        for block in sorted(held[process]):
            at = slice(2 * block, 2 * block + 2)
            landed[at] = asked[-1]((at, slice(0, 3)))
    assert sorted(map(tuple, landed)) == sorted(map(tuple, rows))
    np.testing.assert_array_equal(landed[[0, 1, 2, 3, 8, 9, 10, 11]], rows[:8])
    np.testing.assert_array_equal(landed[[4, 5, 6, 7, 12, 13, 14, 15]], rows[8:])
