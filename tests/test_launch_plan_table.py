"""README's table of plans: its commands are those of the script that computes it, and each is a possible one."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from mwjax.launch import presets, search, topologies
from mwjax.model import sharding
from mwjax.train import load
from tests.benchmarks import plan_table

ROOT = Path(__file__).parent.parent
PLAN = {
    "model": "Qwen/Qwen3-8B",
    "slice": "v5p-64",
    "slices": 1,
    "method": "sdcc",
    "mesh": {"data": 1, "fsdp": 32, "tensor": 1, "context": 1},
    "fits": True,
    "memory": {"total": 7.25 * 2**30},
    "usable_bytes": 95.74 * 2**30,
    "estimate": {"seconds": 1.2345, "tokens_per_second": 103054.2, "mfu": 0.886},
}


@pytest.mark.parametrize("row", plan_table.ROWS)
def test_every_row_uses_its_whole_slice_and_is_in_the_readme(row: str) -> None:
    config_file, option, slice_, *rest = shlex.split(row)
    assert option == "--topology"
    config = load.load(str(ROOT / config_file), [override for override in rest if "=" in override])
    found = topologies.find(slice_)
    slices = int(rest[1]) if rest[0] == "--slices" else 1
    assert config.mesh.devices == slices * found.devices and config.mesh.data % slices == 0
    assert config.data.rows_per_microbatch % (config.mesh.data * config.mesh.fsdp) == 0
    assert config.model.path in presets.DECODERS
    assert f"mwjax plan {row}\n" in (ROOT / "README.md").read_text()


def test_what_a_row_said_is_kept_until_its_command_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row, kept, ran = plan_table.ROWS[7], tmp_path / "plans" / "8.json", []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        ran.append(command[3:])
        return subprocess.CompletedProcess(command, len(ran) % 2, json.dumps([PLAN]))

    monkeypatch.setattr(subprocess, "run", run)
    for arguments in (row, row, f"{row} model.remat=none"):
        assert plan_table.outcome(arguments, kept) == PLAN
    assert ran == [["plan", *shlex.split(row), *more, "--json"] for more in ([], ["model.remat=none"])]


def test_a_row_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    first = ["Qwen3-8B, v5p-64", "sft, sdcc", "fsdp 32", "32 x 4k, teacher 16k"]
    cells = plan_table.cells(plan_table.ROWS[7], PLAN)
    assert cells == [*first, "7.2 of 95.74", "1.23", "103k", "89 %"]
    assert plan_table.cells(plan_table.ROWS[7], {**PLAN, "slices": 2})[0] == "Qwen3-8B, 2 x v5p-64"
    assert plan_table.cells(plan_table.ROWS[7], {**PLAN, "fits": False}) == [*first, "does not fit", "", "", ""]


def test_a_search_finds_the_mesh_of_the_mixture_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not split over ``tensor``: every device would lay out all pairs of its group's tokens."""
    monkeypatch.setattr(sharding, "make_mesh", lambda **_: None)  # as if the slice could be cut in any way
    (row,) = (row for row in plan_table.ROWS if "30B-A3B" in row)
    config_file, _, slice_, *rest = shlex.split(row)
    config = load.load(str(ROOT / config_file), [override for override in rest if "=" in override])
    assert config.model.path is not None
    shape, found = presets.DECODERS[config.model.path], topologies.find(slice_)
    ways = search.candidates(config, shape, found, range(found.chips), config.data.rows_per_microbatch)
    assert ways[0].config.mesh == config.mesh
