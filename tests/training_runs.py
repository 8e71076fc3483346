"""Small rollouts, batches and configurations for tests of training."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from mwjax import data, rollouts
from mwjax.train import load
from mwjax.train.config import RunConfig
from mwjax.tree import Batch, RowShape
from tests.random_rollouts import simulate

VOCABULARY = 40


@pytest.fixture(scope="module", autouse=True)
def compile_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs of one configuration share their compiled steps."""
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = [getattr(jax.config, name) for name in names]
    for name, value in zip(names, (str(tmp_path_factory.mktemp("compiled")), 0.0)):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in zip(names, before):
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def recorded(count: int = 10, *, turns: int = 6) -> list[rollouts.Rollout]:
    """Rollouts of groups of five, white and black box, with junctions, side chains, untrainable turns and rewards."""
    made = [simulate(seed, turns=turns, vocabulary=VOCABULARY, edits=seed % 2 == 0) for seed in range(count)]
    return [
        dataclasses.replace(s.rollout, id=f"r{number}", group=f"g{number // 5}", reward=float(number * 7 % 4))
        for number, s in enumerate(made)
    ]


def write(folder: Path, made: Sequence[rollouts.Rollout] | None = None) -> str:
    """A rollout file in ``folder``; its path."""
    path = folder / "rollouts.jsonl"
    rollouts.write(path, recorded() if made is None else made)
    return str(path)


def configure(folder: Path, *overrides: str, run_dir: str = "run") -> RunConfig:
    """A run of four steps on the rollouts in ``folder``, with a decoder of two tiny layers."""
    settings = [
        f"run_dir={folder / run_dir}",
        f"data.paths={folder / 'rollouts.jsonl'}",
        "data.row_length=128",
        "data.edges_per_row=96",
        "data.rows_per_microbatch=2",
        "data.rollouts_per_step=5",
        f"model.small.vocab_size={VOCABULARY}",
        "model.small.layers=2",
        "model.small.width=16",
        "optimizer.learning_rate=0.003",
        "data.epochs=2",
    ]
    return load.load(None, [*settings, *overrides])


def microbatches(
    path: str, method: str = "packed", *, rows: int = 2, length: int = 96, edges: int = 64, merge: bool = False
) -> tuple[tuple[Batch, ...], float]:
    """All rollouts of a file as the micro-batches of one step, advantages and old log-probs included; denominator."""
    paired = method == "sdcc"
    shape = RowShape(length, edges, 2 * length if paired else 0, edges if paired else 0)
    index = data.scan([path], data.Layout(method, shape, 100, rows, merge=merge))
    advantages = np.random.default_rng(0).normal(size=len(index.ids))
    step = data.StepSource(index, advantages=advantages)[0]
    return step.microbatches, step.denominator
