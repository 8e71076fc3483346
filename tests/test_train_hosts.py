"""Several processes on loopback train as one does; what happens to one of them happens to all."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import pytest

from mwjax import data, rollouts
from mwjax.train import checkpoint, ending, load, loop, metrics_log, setup
from mwjax.train.config import RunConfig
from tests.test_launch_processes import free_port
from tests.training_runs import VOCABULARY, compile_once, configure, recorded, write  # noqa: F401

CLOCK = ("seconds", "tokens_per_second")
# `mwjax train`; writes down the rollouts of every step and those it reads for it. What is done at the count-th call
# of a function: kill (delay seconds later), terminate (SIGTERM), pester (SIGTERM again and again), freeze, fail, fill
# (files of this process have no room from then on).
CHILD = """
import importlib, json, os, resource, signal, sys, threading, time
from mwjax import cli

config, trace, action, place, count, delay = sys.argv[1:]

def wrap(place, before):
    module, names = place.split(":")
    *holders, name = names.split(".")
    holder = importlib.import_module(module)
    for part in holders:
        holder = getattr(holder, part)
    function = getattr(holder, name)

    def wrapped(*args, **kwargs):
        before(*args)
        return function(*args, **kwargs)

    setattr(holder, name, wrapped)

def note(**what):
    with open(trace, "a") as out:
        out.write(json.dumps(what) + "\\n")

def kill():
    time.sleep(float(delay))
    os.kill(os.getpid(), signal.SIGKILL)

def pester():
    while True:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.02)

calls = 0

def act(*_):
    global calls
    calls += 1
    if calls == int(count):
        if action == "kill":
            threading.Thread(target=kill).start()
        elif action == "pester":
            threading.Thread(target=pester, daemon=True).start()
        elif action == "fill":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        elif action == "fail":
            raise OSError(5, "Input/output error", "rollouts.jsonl")
        else:
            os.kill(os.getpid(), signal.SIGTERM if action == "terminate" else signal.SIGSTOP)

made = threading.local()  # the step whose rows this thread makes

def read(index, numbers):
    if getattr(made, "source", None) is index:
        note(made=made.step, method=index.layout.method, read=[int(number) for number in numbers])

def make(source, step):
    made.source, made.step = source.index, step

if "workers: 0" in open(config).read():  # what is wrapped cannot be handed to worker processes
    wrap("mwjax.data.steps:StepSource.__getitem__", make)
wrap("mwjax.data.index:Index.trees", read)
wrap("mwjax.train.log:planned", lambda batches, *_: note(step=batches.step, numbers=batches.numbers.tolist()))
if action:
    wrap(place, act)
cli.main(["train", config])
"""
SAVE, UPDATE = "mwjax.train.checkpoint:Checkpoints.save", "mwjax.train.loop:update"
COMMIT = "orbax.checkpoint._src.path.atomicity:on_commit_callback"
MAKE = "mwjax.data.steps:StepSource.__getitem__"
PLANNED = "mwjax.train.log:planned"
RECOMPUTE = "loss.old_logprobs=recompute"


@dataclass(frozen=True)
class Act:
    """What happens in one process, at the count-th call of a function."""

    process: int
    action: str
    place: str
    count: int
    delay: float = 0.0


@dataclass(frozen=True)
class Ended:
    status: int
    out: str
    err: str


def train(
    config: RunConfig,
    *,
    processes: int = 2,
    devices: int = 1,
    acts: Sequence[Act] = (),
    others: Mapping[int, RunConfig] = MappingProxyType({}),
) -> list[Ended]:
    """The run in as many processes, until all have ended. others: what some are started with in place of ``config``."""
    port, running = free_port(), []
    try:
        for process in range(processes):
            folder = traces(config, process).parent
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.yaml").write_text(load.dump(others.get(process, config)))
            mine = next((act for act in acts if act.process == process), Act(process, "", "", 0))
            words = (mine.action, mine.place, str(mine.count), str(mine.delay))
            environment = {
                **{name: value for name, value in os.environ.items() if not name.startswith("MWJAX_")},
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0",
                "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "PYTHONPATH": str(Path(__file__).parent.parent),
                "MWJAX_COORDINATOR": f"127.0.0.1:{port}",
                "MWJAX_PROCESS_ID": str(process),
                "MWJAX_PROCESSES": str(processes),
                "MWJAX_HEARTBEAT_TIMEOUT": "20",
            }
            command = [sys.executable, "-c", CHILD, str(folder / "config.yaml"), str(folder / "trace"), *words]
            # Into files: what is said through a pipe that nobody reads yet would hold a process, and all the others.
            with open(folder / "out", "w") as out, open(folder / "err", "w") as err:
                running.append(subprocess.Popen(command, env=environment, cwd=folder, stdout=out, stderr=err))
        for number, child in enumerate(running):
            if any(act.action == "freeze" and act.process == number for act in acts):
                child.kill()  # it would stay for ever
            child.wait(timeout=240)
    finally:
        for child in running:
            child.kill()
    folders = [traces(config, process).parent for process in range(processes)]
    return [
        Ended(child.returncode, (folder / "out").read_text(), (folder / "err").read_text())
        for child, folder in zip(running, folders)
    ]


def traces(config: RunConfig, process: int) -> Path:
    """Where a process writes down what it does."""
    return Path(f"{config.run_dir}.processes") / str(process) / "trace"


def finished(config: RunConfig, **options: Any) -> None:
    """The run in several processes, which end well."""
    done = train(config, **options)
    assert [ended.status for ended in done] == [0] * len(done), done


def trace(config: RunConfig, process: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in traces(config, process).read_text().splitlines()]


def assert_same_run(config: RunConfig, expected: RunConfig, tolerance: float = 2e-4) -> None:
    """Weights, optimiser state, rows and evaluations up to rounding; every row once."""
    left, right = (checkpoint.load(run.run_dir) for run in (config, expected))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), left, right)
    for file in (metrics_log.FILE, metrics_log.EVALUATION):
        rows, others = (metrics_log.read(run.run_dir, file) for run in (config, expected))
        assert [row["step"] for row in rows] == [row["step"] for row in others]
        for row, other in zip(rows, others):
            assert row.keys() == other.keys()
            for name in row.keys() - set(CLOCK):
                same = row[name] == other[name] or row[name] == pytest.approx(other[name], rel=tolerance, abs=tolerance)
                assert same, (file, row["step"], name)
    for name in ("config.yaml", "card.md"):
        assert (Path(config.run_dir) / name).exists()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path)
    return tmp_path


def test_two_processes_stopped_by_a_signal_to_one_and_continued_by_one_train_as_one_does(folder: Path) -> None:
    settings = (f"evaluation.paths={folder / 'rollouts.jsonl'}", "evaluation.every=2", "data.method=logittree")
    settings += ("data.rollouts_per_step=3", "tracking.plots=false")
    alone = configure(folder, *settings, run_dir="alone")
    total = loop.run(alone).total
    shared = configure(folder, *settings, "mesh.fsdp=2", run_dir="shared")
    done = train(shared, acts=[Act(1, "terminate", PLANNED, 2)])
    assert [ended.status for ended in done] == [0, 0], done
    (stopped,) = {re.search(r"step (\d+) of", ended.out)[1] for ended in done}  # type: ignore[index]
    assert 2 <= int(stopped) < total
    assert "the same command continues" in done[0].out
    assert "step 1/" in done[0].err and "step 1/" not in done[1].err
    rows = metrics_log.read(shared.run_dir)
    assert [row["step"] for row in rows] == list(range(1, int(stopped) + 1))
    assert_reads_its_rows_only(shared, alone)
    continued = configure(folder, *settings, run_dir="shared")
    assert loop.run(continued).step == total
    assert_same_run(continued, alone)


def assert_reads_its_rows_only(config: RunConfig, alone: RunConfig, processes: int = 2) -> None:
    """Every process plans the same rollouts for every step, and reads those alone that lie in its part of the rows."""
    index = data.scan(alone.data.paths, setup.layout(alone), vocab_size=VOCABULARY)
    source = setup.step_source(alone, index)
    part = index.layout.rows_per_microbatch // processes
    shares = []
    for process in range(processes):
        entries = trace(config, process)
        planned = [entry["numbers"] for entry in entries if "step" in entry]
        assert planned == [source[step].numbers.tolist() for step in range(len(planned))]
        for step in range(len(planned)):
            mine = (e for e in entries if e.get("made") == step and e["method"] == alone.data.method)
            read = {number for entry in mine for number in entry["read"]}
            lying = set()
            for batch in source[step].microbatches:
                edges = batch.rows.edges
                mine = edges.rollout[process * part : (process + 1) * part]
                lying |= set(mine[edges.weight[process * part : (process + 1) * part] > 0].tolist())
            assert read == lying
            shares.append(len(read) / len(planned[step]))
    assert min(shares) < 1


def test_an_error_in_one_process_ends_the_other(folder: Path) -> None:
    config = configure(folder, "mesh.data=2")
    began = time.monotonic()
    first, second = train(config, acts=[Act(1, "fail", MAKE, 1)])
    assert time.monotonic() - began < 120
    assert (first.status, second.status) == (2, 2), (first, second)
    assert second.err == "mwjax: rollouts.jsonl: Input/output error\n"
    said = "[Errno 5] Input/output error: 'rollouts.jsonl'"
    assert first.err.endswith(f"mwjax: process 1 ({socket.gethostname()}) failed: {said}\n")


KILLED = (
    "mesh.fsdp=2",
    "tracking.plots=false",
    "checkpoint.every=1",
    "data.method=logittree",
    "data.rollouts_per_step=3",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "act",
    [
        Act(1, "kill", UPDATE, 3),
        Act(0, "kill", UPDATE, 3, 0.05),
        Act(1, "kill", SAVE, 2, 0.02),
        Act(0, "kill", SAVE, 2, 0.02),
        Act(0, "kill", COMMIT, 3),
    ],
    ids=["step of 1", "step of 0", "save of 1", "save of 0", "commit"],
)
def test_a_killed_process_ends_the_other_and_the_run_goes_on_from_the_last_checkpoint(folder: Path, act: Act) -> None:
    alone = configure(folder, *KILLED[1:], run_dir="alone")
    loop.run(alone)
    config = configure(folder, *KILLED, run_dir="killed")
    began = time.monotonic()
    done = train(config, acts=[act])
    took = time.monotonic() - began
    assert took < 120
    other = done[1 - act.process]
    assert done[act.process].status == -signal.SIGKILL
    assert f"mwjax: process {act.process} (" in other.err, other
    assert "is gone without a word" in other.err
    assert other.status == ending.LOST, other
    before = metrics_log.read(config.run_dir)
    saved = checkpoint.locate(config.run_dir)[1] if list((Path(config.run_dir) / "checkpoints").glob("[0-9]")) else 0
    assert len(before) <= saved + 2
    finished(config)
    assert_same_run(config, alone)
    planned = [entry["numbers"] for entry in trace(config, 0) if "step" in entry]
    again = {entry["step"]: entry["numbers"] for entry in trace(config, 0) if "step" in entry}
    once = setup.step_source(alone, data.scan(alone.data.paths, setup.layout(alone), vocab_size=VOCABULARY))
    assert [again[step] for step in range(len(again))] == [once[step].numbers.tolist() for step in range(len(again))]
    assert len(planned) <= len(again) + 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "mesh", "processes", "devices"),
    [
        ((), ("data=2", "fsdp=2"), 4, 1),
        (("loss.task=memorywalker", "data.method=naive_compressed", RECOMPUTE), ("fsdp=4",), 2, 2),
        (("loss.task=gspo", "data.method=logittree", "loss.kl=0.01"), ("tensor=2", "context=2"), 4, 1),
        (("loss.task=gspo", "data.method=logittree", "loss.unit=view"), ("data=2", "tensor=2"), 4, 1),
        (("data.method=sdcc", "loss.sdcc.teacher=ema"), ("fsdp=2", "context=2"), 2, 2),
        (("data.method=sdcc", "loss.task=memorywalker", RECOMPUTE), ("data=2", "context=2"), 4, 1),
        (("model.lora.rank=2",), ("fsdp=2",), 2, 1),
    ],
    ids=["sft", "recompute", "gspo", "gspo by view", "sdcc", "sdcc recompute", "lora"],
)
def test_every_mesh_over_processes_trains_as_one_device_does(
    folder: Path, settings: tuple[str, ...], mesh: tuple[str, ...], processes: int, devices: int
) -> None:
    common = (
        "data.rows_per_microbatch=4",
        "tracking.plots=false",
        f"evaluation.paths={folder / 'rollouts.jsonl'}",
        *settings,
    )
    alone = configure(folder, *common, run_dir="alone")
    loop.run(alone)
    together = configure(folder, *common, *(f"mesh.{size}" for size in mesh), run_dir="together")
    finished(together, processes=processes, devices=devices)
    assert_same_run(together, alone)


@pytest.mark.slow
def test_two_processes_then_one_then_four_go_on_where_the_others_were(folder: Path) -> None:
    settings = ("loss.task=memorywalker", "data.method=naive_compressed", "data.rows_per_microbatch=4", RECOMPUTE)
    settings += ("checkpoint.every=1", "data.rollouts_per_step=3", "tracking.plots=false")
    alone = configure(folder, *settings, "data.steps=6", run_dir="alone")
    loop.run(alone)
    finished(configure(folder, *settings, "data.steps=2", "mesh.fsdp=2"))
    loop.run(configure(folder, *settings, "data.steps=4"))
    last = configure(folder, *settings, "data.steps=6", "mesh.data=2", "mesh.tensor=2")
    finished(last, processes=4)
    assert_same_run(last, alone)
    source = setup.step_source(alone, data.scan(alone.data.paths, setup.layout(alone), vocab_size=VOCABULARY))
    planned = {process: {e["step"]: e["numbers"] for e in trace(last, process) if "step" in e} for process in range(4)}
    assert [sorted(steps) for steps in planned.values()] == [[0, 1, 4, 5], [0, 1, 4, 5], [4, 5], [4, 5]]
    for steps in planned.values():
        assert all(numbers == source[step].numbers.tolist() for step, numbers in steps.items())


@pytest.mark.slow
def test_a_checkpoint_damaged_for_one_process_is_damaged_for_all(folder: Path) -> None:
    settings = (*KILLED, "data.steps=4")
    alone = configure(folder, *settings[1:], run_dir="alone")
    loop.run(alone)
    config = configure(folder, *settings)
    finished(configure(folder, *KILLED, "data.steps=3"))
    newest = Path(config.run_dir) / "checkpoints" / "3"
    of_one = [path for path in newest.rglob("*") if path.is_file() and "ocdbt.process_1" in str(path)]
    largest = max(of_one, key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    done = train(config)
    assert [ended.status for ended in done] == [0, 0], done
    assert "checkpoints/3: this checkpoint is damaged" in done[0].err
    assert "set aside as 3.damaged" in done[0].err
    assert_same_run(config, alone)


@pytest.mark.slow
def test_processes_that_are_not_alike_are_told_so(folder: Path) -> None:
    config = configure(folder, "mesh.data=2")
    done = train(config, others={1: configure(folder, "mesh.data=2", "optimizer.b1=0.5")})
    assert [ended.status for ended in done] == [2, 2], done
    assert "has options that process 0 has not:\n  optimizer.b1: 0.9 in process 0, 0.5 here" in done[1].err
    assert "failed: process 1" in done[0].err


@pytest.mark.slow
@pytest.mark.parametrize("apart", ["data", "run_dir"])
def test_hosts_that_do_not_share_their_files_are_told_so(tmp_path: Path, apart: str) -> None:
    """Relative paths, in a folder of its own for each process."""
    config = configure(tmp_path, "mesh.data=2")
    write(tmp_path)
    for process in range(2):
        folder = traces(config, process).parent
        folder.mkdir(parents=True)
        rollouts.write(folder / "here.jsonl", recorded(10 - 5 * process))
    relative = {"data": ["data.paths=here.jsonl"], "run_dir": ["run_dir=here"]}[apart]
    here = configure(tmp_path, "mesh.data=2", *relative)
    done = train(config, others={0: here, 1: here})
    assert [ended.status for ended in done] == [2, 2], done
    if apart == "data":
        assert (
            "has data or weights that process 0 has not:\n  data (content of the rollouts): '10 rollouts" in done[1].err
        )
    else:
        assert "is not seen by process 1: give a folder that all hosts share" in done[0].err


@pytest.mark.slow
def test_a_host_that_falls_silent_ends_the_other_after_the_heartbeat_time_out(folder: Path) -> None:
    began = time.monotonic()
    first, _ = train(configure(folder, "mesh.data=2"), acts=[Act(1, "freeze", UPDATE, 2)])
    assert time.monotonic() - began < 200
    assert first.status != 0
    assert "heartbeat" in first.err.lower(), first


@pytest.mark.slow
@pytest.mark.parametrize(
    "acts",
    [[Act(0, "terminate", PLANNED, 2), Act(1, "terminate", PLANNED, 2)], [Act(1, "pester", PLANNED, 2)]],
    ids=["all at once", "one again and again"],
)
def test_signals_to_all_and_many_to_one_stop_a_run_in_order(folder: Path, acts: list[Act]) -> None:
    settings = (*KILLED, f"evaluation.paths={folder / 'rollouts.jsonl'}")
    alone = configure(folder, *settings[1:], run_dir="alone")
    loop.run(alone)
    config = configure(folder, *settings)
    done = train(config, acts=acts)
    assert [ended.status for ended in done] == [0, 0], done
    assert all("saved; the same command continues" in ended.out for ended in done)
    finished(config)
    assert_same_run(config, alone)


SCAN, CONNECT, SCORE = "mwjax.data:scan", "mwjax.train.distributed:_connect", "mwjax.train.evaluation:place_rows"


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("place", [CONNECT, SCAN])
def test_a_process_stopped_or_killed_before_training_ends_the_other(folder: Path, process: int, place: str) -> None:
    config = configure(folder, "mesh.fsdp=2")
    for action, statuses in (("terminate", (143, 143)), ("kill", (-signal.SIGKILL, ending.LOST))):
        began = time.monotonic()
        done = train(config, acts=[Act(process, action, place, 1)])
        assert time.monotonic() - began < 120
        assert (done[process].status, done[1 - process].status) == statuses, done
        if action == "terminate":
            assert done[process].err.startswith("mwjax: SIGTERM came before the first step")
            assert f"mwjax: process {process} ({socket.gethostname()}) failed: SIGTERM came" in done[1 - process].err


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_a_process_killed_during_an_evaluation_and_one_that_fails_at_the_very_end(folder: Path, process: int) -> None:
    settings = (*KILLED, f"evaluation.paths={folder / 'rollouts.jsonl'}", "evaluation.every=1", "data.steps=3")
    alone = configure(folder, *settings[1:], run_dir="alone")
    loop.run(alone)
    config = configure(folder, *settings)
    done = train(config, acts=[Act(process, "kill", SCORE, 12)])
    assert (done[process].status, done[1 - process].status) == (-signal.SIGKILL, ending.LOST), done
    done = train(config, acts=[Act(process, "fail", "mwjax.train.loop:TrainResult", 1)])
    assert [ended.status for ended in done] == [2, 2], done
    assert f"mwjax: process {process} ({socket.gethostname()}) failed" in done[1 - process].err
    finished(config)
    assert_same_run(config, alone)


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_a_full_disk_of_one_process_ends_both_and_spoils_nothing(folder: Path, process: int) -> None:
    alone = configure(folder, *KILLED[1:], run_dir="alone")
    loop.run(alone)
    config = configure(folder, *KILLED)
    done = train(config, acts=[Act(process, "fill", SAVE, 2)])
    assert [ended.status for ended in done] == [2, 2], done
    assert re.search("a checkpoint could not be written|metrics.jsonl: File too large", done[process].err)
    finished(config)
    assert_same_run(config, alone)


@pytest.mark.slow
def test_worker_processes_of_two_processes_make_the_same_batches(folder: Path) -> None:
    alone = configure(folder, *KILLED[1:], run_dir="alone")
    loop.run(alone)
    config = configure(folder, *KILLED, "data.workers=2")
    done = train(config, acts=[Act(1, "terminate", PLANNED, 2)])
    assert [ended.status for ended in done] == [0, 0], done
    finished(config)
    assert_same_run(config, alone)
