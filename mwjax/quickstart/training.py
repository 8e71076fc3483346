"""The two short training runs: a small random decoder, once on exact rows and once on the last contexts alone."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from etils import epath

from mwjax.train import loop, metrics_log
from mwjax.train.checkpoint import CheckpointMismatch
from mwjax.train.config import (
    CheckpointConfig,
    DataConfig,
    LossConfig,
    ModelSection,
    OptimizerConfig,
    RunConfig,
    SmallModel,
)

METHODS = ("packed", "naive_compressed")
# Steps whose time is not counted: caches are cold, and the next batches are not yet prefetched.
WARM_UP = 3
WHY_SFT = (
    "Plain SFT on all recorded trajectories: the small decoder's weights are random and did not sample them, so ratios "
    "against the recorded log-probs (GRPO) would mean nothing, and its logdiff is N/A."
)


@dataclass(frozen=True)
class Training:
    """What is trained, beside the method. The defaults take about a second a step on two cores."""

    model: SmallModel
    steps: int = 24
    row_length: int = 1024
    edges_per_row: int = 256
    rollouts_per_step: int = 4
    learning_rate: float = 2e-3

    def config(self, data: str, method: str, run_dir: epath.Path) -> RunConfig:
        """The configuration of ``mwjax train`` for one of the runs."""
        return RunConfig(
            run_dir=str(run_dir / method),
            data=DataConfig(
                paths=[data],
                method=method,  # type: ignore[arg-type]
                row_length=self.row_length,
                edges_per_row=self.edges_per_row,
                rollouts_per_step=self.rollouts_per_step,
                steps=self.steps,
            ),
            model=ModelSection(small=self.model),
            loss=LossConfig(task="sft"),
            optimizer=OptimizerConfig(learning_rate=self.learning_rate, warmup_steps=min(4, self.steps)),
            checkpoint=CheckpointConfig(every=max(self.steps // 2, 1), keep=1),
            log_every=max(self.steps // 4, 1),
        )


@dataclass(frozen=True)
class TrainingRun:
    """A run as its directory tells it. rows: of ``metrics.jsonl``. refused: rollouts left out."""

    method: str
    run_dir: str
    rows: tuple[dict[str, Any], ...]
    refused: int
    stopped: bool

    @property
    def losses(self) -> list[tuple[int, float]]:
        """(step, loss) of all steps."""
        return [(row["step"], row["loss"]) for row in self.rows if row["loss"] is not None]

    @property
    def step_seconds(self) -> float | None:
        """Median time of a step, compilation and the first steps left out; None where no step is left."""
        later = [row["seconds"] for row in self.rows if row["step"] > WARM_UP]
        return statistics.median(later) if later else None

    @property
    def recompiles(self) -> int | None:
        """Compilations of a step function beyond its first, in the latest start of the run."""
        return self.rows[-1]["recompiles"] if self.rows else None

    def total(self, key: str) -> int:
        return int(sum(row[key] for row in self.rows))


def train(training: Training, data: str, method: str, run_dir: epath.Path) -> TrainingRun:
    """Train with one method in ``run_dir/method``, going on where an earlier start was stopped.

    Raises:
        ValueError: the directory holds a run of another configuration; what ``mwjax train`` raises.
    """
    config = training.config(data, method, run_dir)
    try:
        result = loop.run(config)
    except CheckpointMismatch as error:
        raise ValueError(f"{error}\nOr start the quickstart anew with --fresh.") from error
    rows = tuple(metrics_log.read(config.run_dir))
    return TrainingRun(method, config.run_dir, rows, result.refused, result.stopped)
