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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mwjax import data
from mwjax.train import checkpoint, distributed, load, loop, metrics_log, setup
from mwjax.train.config import RunConfig
from tests.test_launch_processes import free_port
from tests.training_runs import VOCABULARY, compile_once, configure, recorded, write  # noqa: F401

CLOCK = ("seconds", "tokens_per_second", "recompiles")
# `mwjax train`; writes down the rollouts of every step and those it reads for it. What is done at the count-th call
# of a function in one process: kill (delay seconds later), terminate (SIGTERM), fail.
CHILD = """
import importlib, json, os, signal, sys, threading, time
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

calls = 0

def act(*_):
    global calls
    calls += 1
    if calls == int(count):
        if action == "kill":
            threading.Thread(target=kill).start()
        elif action == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            raise ValueError("rollout 'r3' has no log-probs")

made = threading.local()  # the step whose rows this thread makes

def read(index, numbers):
    if getattr(made, "source", None) is index:
        note(made=made.step, method=index.layout.method, read=[int(number) for number in numbers])

def make(source, step):
    made.source, made.step = source.index, step

wrap("mwjax.data.steps:StepSource.__getitem__", make)
wrap("mwjax.data.index:Index.trees", read)
wrap("mwjax.train.loop:_planned", lambda batches, *_: note(step=batches.step, numbers=batches.numbers.tolist()))
if action:
    wrap(place, act)
cli.main(["train", config])
"""
SAVE, UPDATE = "mwjax.train.checkpoint:Checkpoints.save", "mwjax.train.loop:update"
COMMIT = "orbax.checkpoint._src.path.atomicity:on_commit_callback"
PLANNED = "mwjax.train.loop:_planned"


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


def start(config: RunConfig, folder: Path, process: int, count: int, port: int, devices: int, act: Act | None) -> Any:
    own = act is not None and act.process == process
    words = (act.action, act.place, str(act.count), str(act.delay)) if act and own else ("", "", "0", "0")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("MWJAX_")},
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0",
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "MWJAX_COORDINATOR": f"127.0.0.1:{port}",
        "MWJAX_PROCESS_ID": str(process),
        "MWJAX_PROCESSES": str(count),
        "MWJAX_HEARTBEAT_TIMEOUT": "20",
    }
    command = [sys.executable, "-c", CHILD, str(folder / "config.yaml"), str(folder / f"trace{process}"), *words]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def train(config: RunConfig, *, processes: int = 2, devices: int = 1, act: Act | None = None) -> list[Ended]:
    """The run in as many processes, until all have ended."""
    folder = Path(config.run_dir + ".processes")
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(load.dump(config))
    port = free_port()
    running = [start(config, folder, process, processes, port, devices, act) for process in range(processes)]
    try:
        texts = [process.communicate(timeout=240) for process in running]
    finally:
        for process in running:
            process.kill()
    return [Ended(process.returncode, *text) for process, text in zip(running, texts)]


def finished(config: RunConfig, **options: Any) -> None:
    """The run in several processes, which end well."""
    done = train(config, **options)
    assert [ended.status for ended in done] == [0] * len(done), done


def trace(config: RunConfig, process: int) -> list[dict[str, Any]]:
    path = Path(config.run_dir + ".processes") / f"trace{process}"
    return [json.loads(line) for line in path.read_text().splitlines()]


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
    settings += ("data.rollouts_per_step=3",)
    alone = configure(folder, *settings, run_dir="alone")
    total = loop.run(alone).total
    shared = configure(folder, *settings, "mesh.fsdp=2", run_dir="shared")
    done = train(shared, act=Act(1, "terminate", PLANNED, 2))
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
    began = time.monotonic()
    first, second = train(configure(folder, "mesh.data=2", "data.steps=2"), act=Act(1, "fail", UPDATE, 1))
    assert time.monotonic() - began < 120
    assert (first.status, second.status) == (2, 2), (first, second)
    assert f"mwjax: process 1 ({socket.gethostname()}) failed: rollout 'r3' has no log-probs\n" in first.err
    assert "mwjax: rollout 'r3' has no log-probs\n" in second.err or "Traceback" in second.err


KILLED = ("mesh.fsdp=2", "checkpoint.every=1", "data.method=logittree", "data.rollouts_per_step=3")


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
    done = train(config, act=act)
    took = time.monotonic() - began
    assert took < 120
    other = done[1 - act.process]
    assert done[act.process].status == -signal.SIGKILL
    assert f"mwjax: process {act.process} (" in other.err, other
    assert "is gone without a word" in other.err
    assert other.status == distributed.LOST, other
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
