"""Which ways a plan compiles, in which order, when it stops, and what is printed. The compiler is a stand-in."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from mwjax import cli
from mwjax.launch import (
    ahead,
    flops,
    memory,
    plan,
    plan_report,
    plan_request,
    presets,
    roofline,
    search,
    topologies,
    traffic,
)
from mwjax.model import sharding
from mwjax.model.decoder import REMAT
from mwjax.train import load, setup
from mwjax.train.config import RunConfig

SLICE = topologies.find("v5litepod-8")
NAME = "Qwen/Qwen3-0.6B"
GIB = topologies.GIB


def configured(*overrides: str) -> RunConfig:
    base = ["run_dir=x", "data.paths=x", f"model.path={NAME}", "data.row_length=4096", "data.rollouts_per_step=8"]
    return setup.resolved(load.load(None, [*base, "model.attention=pallas", *overrides]), "tpu")


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stands in for the compiler: ``peak`` says what a configuration takes, or how it fails; ``asked`` lists them."""
    state: dict[str, Any] = {"peak": lambda config: GIB, "asked": []}

    def lower(config: RunConfig, shape: Any, mesh: Any, microbatches: int, density: float) -> ahead.Lowering:
        state["asked"].append(config)
        state["now"] = config
        counted = flops.Flops({"layers": 1e12}, {"layers": 1e11})
        names = ("accumulate", "apply")
        return ahead.Lowering(
            {name: lambda: None for name in names},
            {"accumulate": microbatches, "apply": 1},
            dict.fromkeys(names, GIB // 2),
            memory.Resident(GIB // 4, 0, GIB // 4, 0, 0, GIB // 4, 1000),
            {"accumulate": counted},
        )

    def compile_one(_: ahead.Lowering, name: str, devices: int, slices: int) -> ahead.Program | ahead.Failure:
        found = state["peak"](state["now"])
        if isinstance(found, ahead.Failure):
            return found
        collectives = (traffic.Collective("all-gather", 3, 4 * GIB, 3 * GIB),)
        if slices > 1:
            collectives += (traffic.Collective(traffic.NETWORK, 2, GIB, GIB),)
        return ahead.Program(name, 1.0, int(found), GIB // 2, 1000, traffic.Traffic(collectives, 10 * GIB, 0))

    def make_mesh(*, devices: Any, **sizes: int) -> SimpleNamespace:
        if sizes["tensor"] == 8:
            raise NotImplementedError("the slice's wiring cannot be cut like that")
        if sizes["data"] % (len(devices) // SLICE.chips):
            raise ValueError("mesh.data must be a multiple of the slices")
        return SimpleNamespace(shape=sizes)

    monkeypatch.setattr(plan, "check_installed", lambda: None)
    monkeypatch.setattr(ahead, "devices", lambda slice_, slices: [object()] * (slices * slice_.chips))
    monkeypatch.setattr(ahead, "lower", lower)
    monkeypatch.setattr(ahead, "compile_one", compile_one)
    monkeypatch.setattr(sharding, "make_mesh", make_mesh)
    return state


def every(config: RunConfig) -> list[search.Candidate]:
    return search.candidates(config, presets.DECODERS[NAME], SLICE, [object()] * 8, config.data.rollouts_per_step)


def test_candidates_use_the_whole_slice_and_never_ask_for_more_work(compiler: dict[str, Any]) -> None:
    config = configured("data.rows_per_microbatch=4", "model.remat=attention")
    found = every(config)
    shape = presets.DECODERS[NAME]
    for one in found:
        mesh, data = one.config.mesh, one.config.data
        assert mesh.devices == 8 and mesh.tensor != 8
        assert shape.key_value_heads % mesh.tensor == 0 and data.row_length % mesh.context == 0
        assert data.rows_per_microbatch % (mesh.data * mesh.fsdp) == 0
        assert data.rows_per_microbatch <= max(4, mesh.data * mesh.fsdp)
        assert REMAT.index(one.config.model.remat) >= REMAT.index("attention")
    assert len({plan.describe(one.config) for one in found}) == len(found)
    lengths = [one.config.data.row_length for one in found]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] == 4096 and lengths[-1] == search.SHORTEST
    full = [one for one in found if one.config.data.row_length == 4096]
    assert [one.score for one in full] == sorted(one.score for one in full)
    meshes = {tuple(one.config.mesh.model_dump().values()) for one in full}
    assert {(1, 8, 1, 1), (1, 4, 2, 1), (1, 4, 1, 2), (8, 1, 1, 1)} <= meshes


def test_other_capacities_shrink_with_the_row(compiler: dict[str, Any]) -> None:
    config = configured("data.method=sdcc", "data.teacher_row_length=16384", "data.pairs_per_row=512")
    half = next(one.config.data for one in every(config) if one.config.data.row_length == 2048)
    assert (half.teacher_row_length, half.pairs_per_row, half.edges_per_row) == (8192, 256, None)


def test_what_is_chosen_is_a_configuration_that_loads(compiler: dict[str, Any]) -> None:
    """Rows that are evaluated at once go over the same devices."""
    given = ["evaluation.paths=y", "evaluation.rows_per_batch=2"]
    made = plan.make(configured(*given), SLICE)
    assert "evaluation.rows_per_batch=8" in made.asked.chosen
    assert configured(*given, *made.asked.chosen) == made.asked.config


@pytest.mark.parametrize(("attention", "length"), [("pallas", 2**19), ("splash", 2**18)])
def test_rows_too_long_for_a_kernel_are_spread_over_context(
    compiler: dict[str, Any], attention: str, length: int
) -> None:
    config = configured(f"model.attention={attention}", f"data.row_length={length}")
    found = [one.config for one in every(config)]
    assert {one.mesh.context for one in found if one.data.row_length == length} == {2, 4, 8}
    assert 1 in {one.mesh.context for one in found if one.data.row_length < length}
    compiler["peak"] = lambda config: GIB if config.mesh.context > 1 else ahead.Failure("accumulate", "too many pairs")
    made = plan.make(
        configured(
            f"model.attention={attention}",
            f"data.row_length={length}",
            "mesh.fsdp=8",
            "data.rows_per_microbatch=8",
        ),
        SLICE,
    )
    assert not made.asked.fits and made.fitting is not None and made.fitting.config.mesh.context > 1


def test_guesses_of_memory_go_with_the_choices(compiler: dict[str, Any]) -> None:
    found = {plan.describe(one.config): one.bytes for one in every(configured("data.rows_per_microbatch=16"))}
    rows, name = "{} rows of 4,096; remat {}", "fsdp 8; " + "{} rows of 4,096; remat {}"
    assert found[name.format(16, "none")] > found[name.format(16, "attention")] > found[name.format(16, "full")]
    assert found[name.format(16, "full")] > found[name.format(8, "full")]
    assert found["data 8; " + rows.format(8, "full")] > found[name.format(8, "full")]


def test_what_fits_is_compiled_once(compiler: dict[str, Any]) -> None:
    config = configured("mesh.fsdp=8", "data.rows_per_microbatch=8")
    made = plan.make(config, SLICE)
    assert made.fitting is made.asked and made.tried == () and compiler["asked"] == [config]
    assert made.asked.chosen == () and made.asked.peak is not None
    assert made.asked.peak.kinds["temporaries"] == GIB // 2
    accumulate = roofline.limits(SLICE.generation, 8, 1.1e12, 10 * GIB, 3 * GIB).seconds
    applied = roofline.limits(SLICE.generation, 8, 0, 10 * GIB, 3 * GIB).seconds
    estimate = made.asked.estimate
    assert estimate is not None and estimate.seconds == pytest.approx(accumulate + applied)
    assert estimate.tokens_per_second == pytest.approx(8 * 4096 / estimate.seconds)
    assert estimate.mfu == pytest.approx(1e12 / (8 * SLICE.generation.flops * estimate.seconds))


def test_padding_counts_for_nothing(compiler: dict[str, Any]) -> None:
    """Six rollouts in micro-batches of four rows: two micro-batches, of which two rows are padding."""
    config = configured("mesh.fsdp=4", "mesh.tensor=2", "data.rows_per_microbatch=4", "data.rollouts_per_step=6")
    found = plan.make(config, SLICE).asked
    assert found.microbatches == 2 and found.estimate is not None
    assert found.estimate.tokens_per_second == pytest.approx(6 * 4096 / found.estimate.seconds)
    full = plan.make(config, SLICE, microbatches=2).asked
    assert full.estimate is not None and full.estimate.mfu == pytest.approx(found.estimate.mfu * 8 / 6)


def test_the_nearest_that_fits_is_found(compiler: dict[str, Any]) -> None:
    config = configured("mesh.data=8", "data.rows_per_microbatch=8", "model.remat=attention")
    compiler["peak"] = lambda config: (20 if config.model.remat == "attention" else 5) * GIB
    said: list[tuple[str, int, int]] = []
    made = plan.make(config, SLICE, tries=60, say=lambda *what: said.append(what))
    assert not made.asked.fits and made.fitting is made.tried[-1]
    assert all(not other.fits for other in made.tried[:-1])
    assert "model.remat=full" in made.fitting.chosen
    assert made.fitting.config.data.row_length == 4096
    assert [other.config for other in (made.asked, *made.tried)] == compiler["asked"]
    assert {most for _, _, most in said} == {61} and max(done for _, done, _ in said) == len(made.tried)
    # Only what fits is compiled as a whole.
    assert [len(other.programs) for other in made.tried] == [1] * (len(made.tried) - 1) + [2]


def test_a_search_is_bounded(compiler: dict[str, Any]) -> None:
    compiler["peak"] = lambda config: ahead.Failure("accumulate", "no", out_of_memory=True, needed=None)
    made = plan.make(configured("mesh.fsdp=8", "data.rows_per_microbatch=8"), SLICE, tries=2)
    assert made.fitting is None and len(made.tried) == 2 and made.untried > 0
    assert len(compiler["asked"]) == 3
    assert made.asked.needed is None and not made.asked.fits


def test_another_error_is_no_reason_to_search(compiler: dict[str, Any]) -> None:
    compiler["peak"] = lambda config: ahead.Failure("accumulate", "a kernel does not lower")
    made = plan.make(configured("mesh.fsdp=8", "data.rows_per_microbatch=8"), SLICE)
    assert made.tried == () and made.fitting is None
    assert "does not compile: accumulate: a kernel does not lower" in shown(made)


@pytest.mark.parametrize("auto", [False, True])
def test_a_mesh_is_chosen_where_there_is_none_or_it_is_asked_for(compiler: dict[str, Any], auto: bool) -> None:
    config = configured("mesh.data=8", "data.rows_per_microbatch=8") if auto else configured()
    made = plan.make(config, SLICE, auto=auto)
    (first,) = compiler["asked"]
    assert first.mesh.devices == 8 and made.fitting is made.asked
    chosen = next(one for one in every(config) if one.bytes < 1.1 * memory.usable(SLICE.generation)).config
    assert first == chosen and f"mesh.fsdp={chosen.mesh.fsdp}" in made.asked.chosen
    assert "chosen here" in shown(made)


def test_a_mesh_that_cannot_be_is_replaced(compiler: dict[str, Any]) -> None:
    """The slice cannot be cut like that: nothing of it is compiled, and the nearest mesh that can be is."""
    made = plan.make(configured("mesh.tensor=8"), SLICE)
    assert made.asked.failure is not None and "cannot be cut" in made.asked.failure.cause
    assert made.fitting is made.tried[-1] and made.fitting.config.mesh.tensor != 8
    text = shown(made)
    assert "does not compile: mesh: the slice's wiring cannot be cut like that" in text
    assert "The nearest that fits: mesh." in text


def test_a_mesh_that_does_not_divide_is_said(compiler: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> ahead.Lowering:
        raise ValueError("the mesh does not fit the model:\n  mesh.tensor (3)")

    monkeypatch.setattr(ahead, "lower", refuse)
    made = plan.make(configured("mesh.fsdp=8", "data.rows_per_microbatch=8"), SLICE)
    assert made.asked.failure == ahead.Failure("mesh", "the mesh does not fit the model: mesh.tensor (3)")
    assert made.asked.peak is None and made.asked.estimate is None
    assert "the mesh does not fit the model" in shown(made)
    json.dumps(plan_report.to_json([made]))


def shown(made: plan.Planned, width: int = 200) -> str:
    out = io.StringIO()
    plan_report.show(made, Console(file=out, width=width, highlight=False))
    return out.getvalue()


def test_no_figure_is_cut_off_in_80_columns(compiler: dict[str, Any]) -> None:
    overrides = (
        "mesh.fsdp=8",
        "data.rows_per_microbatch=8",
        "data.rollouts_per_step=800",
        "evaluation.paths=held.jsonl",
    )
    text = shown(plan.make(configured(*overrides), SLICE), 80)
    assert "…" not in text
    function = next(line for line in text.splitlines() if line.startswith("accumulate") and "links" in line)
    assert " ".join(function.split()) == "accumulate 100 0.000698 0.0131 0.0161 links 10.00 GiB 3.00 GiB"
    assert "8 rows of 4,096; remat none; 800 rows a step in 100 micro-batches; attention pallas, bfloat16\n" in text
    assert "note: scoring evaluation.paths is not planned" in text


def test_several_slices(compiler: dict[str, Any]) -> None:
    made = plan.make(configured("data.rows_per_microbatch=32", "data.rollouts_per_step=32"), SLICE, slices=4)
    mesh = made.asked.config.mesh
    assert (mesh.devices, mesh.data % 4, made.asked.slices) == (32, 0, 4)
    text = shown(made, 80)
    assert "\n4 x v5litepod-8: 8 chips (v5e:2x4) on 1 host of 8 chips\n" in text and "…" not in text
    function = next(line for line in text.splitlines() if line.startswith("accumulate") and "network" in line)
    # A chip has 25 Gb/s to the other slices: 1 GiB takes 0.344 s.
    assert " ".join(function.split()) == "accumulate 1 0.000174 0.0131 0.0161 0.344 network 10.00 GiB"
    assert "between slices" in text
    (values,) = plan_report.to_json([made])
    assert (values["slices"], values["chips"], values["hosts"]) == (4, 32, 4)
    assert values["functions"]["accumulate"]["limits"]["network"] == pytest.approx(8 * GIB / 25e9)


def test_tables_and_values(compiler: dict[str, Any]) -> None:
    compiler["peak"] = lambda config: (20 if config.mesh.data == 8 else 5) * GIB
    made = plan.make(configured("mesh.data=8", "data.rows_per_microbatch=8"), SLICE)
    text = shown(made)
    for part in (
        "v5litepod-8: 8 chips (v5e:2x4) on 1 host of 8 chips",
        "does not fit: 20.25 GiB of 15.75 GiB a device, 4.50 GiB too much (in accumulate)",
        "The nearest that fits: mesh.data=",
        "all-gather",
        "estimate",
        "not run on a TPU",
    ):
        assert part in text
    (values,) = json.loads(json.dumps(plan_report.to_json([made])))
    assert values["fits"] is False and values["tried"][-1]["fits"] is True
    assert values["memory"]["total"] == made.asked.needed
    assert values["functions"]["accumulate"]["collectives"] == [
        {"kind": "all-gather", "number": 3, "bytes": 4 * GIB, "sent": 3 * GIB}
    ]
    assert values["ran_on_tpu"] is False and values["fitting"] == list(made.tried[-1].chosen)


def test_what_was_planned_is_printed_though_a_later_slice_is_refused(
    compiler: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def devices(slice_: topologies.Slice, slices: int) -> list[object]:
        if slice_.chips == 4:
            raise RuntimeError("libtpu is in use")
        return [object()] * slice_.chips

    monkeypatch.setattr(ahead, "devices", devices)
    monkeypatch.setattr(plan_request, "ENVIRONMENT", {})
    (tmp_path / "c.yaml").write_text(load.dump(configured("mesh.fsdp=8", "data.rows_per_microbatch=8")))
    with pytest.raises(SystemExit) as caught:
        cli.main(["plan", str(tmp_path / "c.yaml"), "--topology", "v5e-8,v5e-4,v5e-8", "--json"])
    assert caught.value.code == 2
    said = capsys.readouterr()
    (only,) = json.loads(said.out)
    assert only["slice"] == "v5litepod-8" and only["fits"]
    assert "v5litepod-4: XLA's TPU compiler does not take v5e:2x2: libtpu is in use" in said.err


BUSY = """
import hashlib, sys
from mwjax import cli
from mwjax.launch import plan, search

def busy(*_, **__):
    print("at work", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # as the compiler: not to be interrupted from Python

plan.check_installed = lambda: None
plan.make = busy
cli.main(["plan", sys.argv[1], "--topology", "v6e-1", "model.path=a/b"])
"""


def test_ctrl_c_does_not_wait_for_the_compiler() -> None:
    config = str(Path(__file__).parent.parent / "configs" / "sft.yaml")
    running = subprocess.Popen([sys.executable, "-c", BUSY, config], stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None and running.stdout.readline() == "at work\n"
    running.send_signal(signal.SIGINT)
    assert running.wait(60) == 130  # it would be at work for many minutes


@pytest.mark.parametrize(
    ("text", "out_of_memory", "needed"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (900.00G) "
            "exceeds available HBM (15.75G).",
            True,
            900 * GIB,
        ),
        ("RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
         "Used 20.50G of 15.75G hbm. Exceeded hbm capacity by 4.75G.", True, 20.5 * GIB),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem while allocating on stack", False, None),
        ("INTERNAL: Mosaic failed to compile TPU kernel", False, None),
    ],
)  # fmt: skip
def test_causes_of_failures(text: str, out_of_memory: bool, needed: float | None) -> None:
    def fail() -> None:
        raise RuntimeError(text)

    lowering = ahead.Lowering({"accumulate": fail}, {}, {"accumulate": 1}, None, {})  # type: ignore[arg-type]
    found = ahead.compile_one(lowering, "accumulate", 4)
    assert isinstance(found, ahead.Failure)
    assert (found.out_of_memory, found.needed, found.function) == (out_of_memory, needed, "accumulate")
    assert found.cause.startswith(text[:40])
