"""Runs killed by SIGKILL at any moment, saves included, end as if they had never been interrupted."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

from mwjax.train import checkpoint, load, loop, metrics_log
from tests.test_train_loop import compile_once  # noqa: F401
from tests.training_runs import configure, write

CLOCK = ("seconds", "tokens_per_second")
# `mwjax train`, killed by itself some time after the count-th call of a function begins.
CHILD = """
import importlib, os, signal, sys, threading, time
from mwjax import cli

place, count, delay, *arguments = sys.argv[1:]

def kill():
    time.sleep(float(delay))
    os.kill(os.getpid(), signal.SIGKILL)

module, names = place.split(":")
*holders, name = names.split(".")
holder = importlib.import_module(module)
for part in holders:
    holder = getattr(holder, part)
function, calls = getattr(holder, name), [0]

def counted(*args, **kwargs):
    calls[0] += 1
    if calls[0] == int(count):
        threading.Thread(target=kill).start()
    return function(*args, **kwargs)

setattr(holder, name, counted)
cli.main(["train", *arguments])
"""
SAVE, ROW, FILE = (
    "mwjax.train.checkpoint:Checkpoints.save",
    "mwjax.train.metrics_log:append",
    "mwjax.train.whole_file:write",
)
OVERRIDES = (
    "loss.task=memorywalker",
    "data.method=naive_compressed",
    "checkpoint.every=1",
    "optimizer.schedule=cosine",
)


def finish(folder: Path, name: str) -> None:
    """The run until its end, in this process."""
    assert loop.run(configure(folder, *OVERRIDES, run_dir=name)).step == 4


def train_and_kill(folder: Path, place: str, count: int, delay: float = 0.0) -> int:
    """The exit status of the run ``killed`` as a process of its own: 0 or the signal that ended it."""
    (folder / "killed.yaml").write_text(load.dump(configure(folder, *OVERRIDES, run_dir="killed")))
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", CHILD, place, str(count), str(delay), str(folder / "killed.yaml")],
        env={**os.environ, **cache},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


def assert_same_run(left: Path, right: Path) -> None:
    """Parameters, optimiser state, metrics and configuration, bit for bit."""
    jax.tree.map(np.testing.assert_array_equal, checkpoint.load(left), checkpoint.load(right))
    rows = [
        [{key: value for key, value in row.items() if key not in CLOCK} for row in metrics_log.read(run)]
        for run in (left, right)
    ]
    assert rows[0] == rows[1]
    settings = [yaml.safe_load((run / "config.yaml").read_text()) for run in (left, right)]
    assert {**settings[0], "run_dir": ""} == {**settings[1], "run_dir": ""}
    cards = [(run / "card.md").read_text().splitlines()[1:] for run in (left, right)]
    assert cards[0] == cards[1]


def assert_little_is_lost(run: Path) -> None:
    """Every step is saved: at most the step whose save was under way and the one after it are gone."""
    rows = metrics_log.read(run)
    saved = checkpoint.locate(run)[1] if list((run / "checkpoints").glob("[0-9]")) else 0
    assert len(rows) <= saved + 2


def test_a_run_killed_during_a_save_and_between_steps_ends_as_if_it_never_was(tmp_path: Path) -> None:
    write(tmp_path)
    finish(tmp_path, "whole")
    for place, count, delay in ((SAVE, 2, 0.01), (ROW, 2, 0.0)):
        assert train_and_kill(tmp_path, place, count, delay) == -signal.SIGKILL
        assert_little_is_lost(tmp_path / "killed")
    finish(tmp_path, "killed")
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_run_killed_again_and_again_at_random_moments_ends_as_if_it_never_was(tmp_path: Path, seed: int) -> None:
    write(tmp_path)
    finish(tmp_path, "whole")
    rng, killed = random.Random(seed), 0
    for _ in range(8):
        place = rng.choice((SAVE, SAVE, ROW, FILE))
        status = train_and_kill(tmp_path, place, rng.randint(1, 2), rng.choice((0.0, 1.0)) * rng.uniform(0, 0.1))
        killed += status != 0
        if (tmp_path / "killed").exists():
            assert_little_is_lost(tmp_path / "killed")
    finish(tmp_path, "killed")
    assert killed >= 3
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
