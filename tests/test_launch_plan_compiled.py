"""`mwjax plan` through XLA's real TPU compiler: needs libtpu (extra "tpu"), and no TPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(find_spec("libtpu") is None, reason="compiles with libtpu, of the extra 'tpu'")

ROOT = Path(__file__).parent.parent
LAYERS, WIDTH, INNER, HEADS, HEAD, VOCABULARY = 2, 128, 384, 2, 64, 512
CONFIG = f"""
data: {{row_length: 256, rows_per_microbatch: 4, rollouts_per_step: 8}}
model:
  attention: pallas
  remat: full
  small:
    {{vocab_size: {VOCABULARY}, layers: {LAYERS}, width: {WIDTH}, feed_forward_width: {INNER}, heads: {HEADS},
    key_value_heads: {HEADS}, head_dim: {HEAD}}}
mesh: {{fsdp: 4}}
"""


def planned(folder: Path, *arguments: str, status: int = 0) -> list[dict[str, Any]]:
    """What the verb prints as JSON, in a process of its own: libtpu is told what to do before jax starts."""
    (folder / "run.yaml").write_text(CONFIG)
    command = [sys.executable, "-m", "mwjax", "plan", str(folder / "run.yaml"), "--json", *arguments]
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == status, done.stderr[-3000:]
    return json.loads(done.stdout)


def check(found: dict[str, Any], shards: int = 4) -> None:
    """What holds for every compiled step: memory adds up, layers' weights are gathered as often as there are layers."""
    assert found["fits"] and found["failure"] is None and not found["ran_on_tpu"]
    memory = found["memory"]
    assert memory["total"] == sum(size for kind, size in memory.items() if kind not in ("function", "total"))
    matrices = LAYERS * (4 * WIDTH * HEADS * HEAD + 3 * WIDTH * INNER) + VOCABULARY * WIDTH
    head_norms = LAYERS * 2 * HEAD
    parameters = 4 * ((matrices + LAYERS * 2 * WIDTH + WIDTH) // shards + head_norms)
    assert memory["parameters"] == parameters
    assert memory["gradients"] == pytest.approx(parameters, abs=200)
    assert memory["optimiser"] == pytest.approx(2 * parameters, abs=20)
    assert memory["temporaries"] > 0 and memory["code"] > 0
    accumulate, apply = found["functions"]["accumulate"], found["functions"]["apply"]
    assert accumulate["unknown_loops"] == 0  # every loop's length is worked out
    # Parameters, gradients and two moments are read, all but the gradients written.
    assert 7 * parameters <= apply["hbm_bytes"] <= 14 * parameters
    assert found["estimate"]["seconds"] > 0 and 0 < found["estimate"]["mfu"] < 1


def weights_moved(found: dict[str, Any]) -> int:
    """Bytes a device gets of weights and gradients in the other devices' hands."""
    kinds = ("all-gather", "reduce-scatter", "collective-permute", "all-reduce")
    accumulate = found["functions"]["accumulate"]["collectives"]
    return sum(one["sent"] for one in accumulate if one["kind"] in kinds)


def test_two_generations(tmp_path: Path) -> None:
    found = planned(tmp_path, "--topology", "v5e-4,v6e-4")
    assert [(one["slice"], one["chips"], one["hosts"], one["topology"]) for one in found] == [
        ("v5litepod-4", 4, 1, "v5e:2x2"),
        ("v6e-4", 4, 1, "v6e:2x2"),
    ]
    layer = 2 * (4 * WIDTH * HEADS * HEAD + 3 * WIDTH * INNER)  # a layer's matrices in bfloat16
    for one in found:
        check(one)
        # Gathered for the forward pass and again for the backward pass, gradients scattered: each 3/4 of all weights.
        assert weights_moved(one) >= 3 * LAYERS * layer * 3 // 4
        assert one["chosen"] == [] and one["microbatches"] == 2


def test_a_mesh_that_the_decoder_does_not_divide_into(tmp_path: Path) -> None:
    options = ("mesh.fsdp=1", "mesh.tensor=4", "data.rows_per_microbatch=1")
    (found,) = planned(tmp_path, "--topology", "v5e-4", *options)
    assert "mesh.tensor (4) does not divide" in found["failure"]["cause"] and not found["fits"]
    (other,) = found["tried"]
    assert other["fits"] and other["mesh"]["tensor"] < 4 and set(other["chosen"]) == set(found["fitting"])
    check(other)


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5p-8", "v5e-8", "v6e-8", "v5p-16"])
@pytest.mark.parametrize(
    "options",
    [
        ("mesh.fsdp=2", "mesh.tensor=2", "loss.task=memorywalker"),
        ("mesh.fsdp=2", "mesh.context=2", "data.method=sdcc", "model.attention=splash"),
        ("mesh.data=2", "mesh.fsdp=2", "data.method=logittree", "loss.task=gspo", "model.remat=attention"),
    ],
)
def test_other_slices_meshes_and_losses(tmp_path: Path, topology: str, options: tuple[str, ...]) -> None:
    devices = {"v5p-8": 4}.get(topology, 8)
    more = () if devices == 4 else ("mesh.data=2",) if "mesh.data=2" not in options else ("mesh.data=4",)
    (found,) = planned(tmp_path, "--topology", topology, *options, *more, "data.rows_per_microbatch=8")
    assert found["fits"] and found["functions"]["accumulate"]["unknown_loops"] == 0
    assert ("score" in found["functions"]) == any("loss.task" in option for option in options)


@pytest.mark.slow
def test_what_is_too_large_is_refused_by_the_compiler_and_something_smaller_found(tmp_path: Path) -> None:
    """Without rematerialisation, 24 layers of 16,384 tokens a chip take more than a v5e chip has."""
    (found,) = planned(
        tmp_path,
        *("--topology", "v5e-4", "data.row_length=16384", "data.rollouts_per_step=4", "model.remat=none"),
        *("model.small.layers=24", "model.small.width=1024", "model.small.feed_forward_width=4096"),
        *("model.small.heads=8", "model.small.key_value_heads=8", "model.small.head_dim=128"),
    )
    assert not found["fits"] and found["fitting"]
    assert found["failure"] is None or found["failure"]["out_of_memory"]
    assert found["tried"][-1]["fits"] and found["tried"][-1]["remat"] in ("none", "attention", "full")


@pytest.mark.slow
def test_a_mixture_of_experts_with_a_balanced_load(tmp_path: Path) -> None:
    """With several micro-batches, what the routers do is summed before any gradient: one more function."""
    experts = ("model.small.family=qwen3_moe", "model.small.head_dim=64", "loss.router_auxiliary=0.001")
    (found,) = planned(tmp_path, "--topology", "v5e-4", *experts, "mesh.fsdp=2", "mesh.tensor=2")
    assert found["fits"] and set(found["functions"]) == {"accumulate", "apply", "routing"}
    (found,) = planned(tmp_path, "--topology", "v5e-4", *experts, "data.rollouts_per_step=4")
    assert found["fits"] and set(found["functions"]) == {"accumulate", "apply"}


def test_two_slices(tmp_path: Path) -> None:
    """Weights are gathered within a slice; between slices go the gradients of a micro-batch, once, and sums."""
    two = ("--slices", "2", "--topology", "v5e-4", "mesh.data=2", "data.rows_per_microbatch=8")
    (found,) = planned(tmp_path, *two)
    check(found)
    assert (found["slice"], found["slices"], found["chips"], found["hosts"]) == ("v5litepod-4", 2, 8, 2)
    collectives = found["functions"]["accumulate"]["collectives"]
    (between,) = [one for one in collectives if one["kind"] == "between slices"]
    assert between["sent"] == between["bytes"]  # of an all-reduce over two: half of it there, and half of the sum back
    layers = LAYERS * (4 * WIDTH * HEADS * HEAD + 3 * WIDTH * INNER) // 4  # a device's part
    table = VOCABULARY * WIDTH // 4
    # In bfloat16 as the layers compute; of the tied table, float32 twice: as embedding and as unembedding.
    assert between["sent"] == pytest.approx(2 * layers + 2 * 4 * table, rel=0.03)
    limits = found["functions"]["accumulate"]["limits"]
    assert limits["network"] == pytest.approx(between["sent"] / (25e9 / 8))
    (one,) = planned(tmp_path, "--topology", "v5e-4")
    assert weights_moved(found) < 1.1 * weights_moved(one)
    assert one["functions"]["accumulate"]["limits"]["network"] == 0


def test_gathered_weights_are_not_kept_for_the_backward_pass(tmp_path: Path) -> None:
    """Without rematerialisation what a layer computes is kept, but for its weights: they would be the whole model."""
    layers, width = 8, 512
    small = (f"layers={layers}", f"width={width}", f"feed_forward_width={3 * width}", "heads=4", "key_value_heads=4")
    options = (
        "data.row_length=128",
        "model.remat=none",
        *(f"model.small.{option}" for option in (*small, "head_dim=128")),
    )
    (found,) = planned(tmp_path, "--topology", "v5e-4", *options)
    assert found["fits"] and found["remat"] == "none" and found["chosen"] == []
    moved = {one["kind"]: one["bytes"] for one in found["functions"]["accumulate"]["collectives"]}
    assert moved["all-gather"] >= 2 * 2 * layers * (4 + 9) * width**2  # bfloat16, for each of the two passes
