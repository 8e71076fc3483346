"""TensorBoard and Weights & Biases: the scalars of every row of ``metrics.jsonl`` and ``evaluation.jsonl``."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
from etils import epath

from mwjax.rollouts.storage import is_local
from mwjax.train.config import RunConfig, TrackingConfig

TENSORBOARD = "tensorboard"
WANDB_ID = "wandb_id.txt"

Say = Callable[[str], None]


class TrackingError(ValueError):
    """A tracker that was asked for cannot be used."""


class Tracker(NamedTuple):
    """write(scalars by name, step); close()."""

    name: str
    write: Callable[[dict[str, float], int], None]
    close: Callable[[], None]


class Trackers:
    """Hands rows to every open tracker. One that fails is reported once and left out from then on: a run does not end
    because a disk or a network did not take its figures."""

    def __init__(self, opened: list[Tracker], say: Say) -> None:
        self._open, self._say = opened, say

    def add(self, group: str, row: Mapping[str, Any]) -> None:
        """The finite numbers of a row with a ``step``, as ``group/name``."""
        scalars = {f"{group}/{name}": value for name, value in row.items() if name != "step" and _is_scalar(value)}
        for tracker in list(self._open):
            try:
                tracker.write(scalars, row["step"])
            except Exception as error:  # of whatever kind the library has
                self._open.remove(tracker)
                self._say(f"{tracker.name} failed at step {row['step']} and is left out from here on: {_words(error)}")

    def close(self) -> None:
        for tracker in self._open:
            try:
                tracker.close()
            except Exception as error:
                self._say(f"{tracker.name} could not be closed: {_words(error)}")


def check(config: TrackingConfig) -> None:
    """Raises TrackingError where a library that is needed is not installed."""
    wanted = {"tensorboard": (config.tensorboard, "tensorboardX"), "wandb": (config.wandb is not None, "wandb")}
    missing = [
        f'tracking.{option}: needs the package {package}: pip install "mwjax[{option}]"'
        for option, (asked, package) in wanted.items()
        if asked and importlib.util.find_spec(package) is None
    ]
    if missing:
        raise TrackingError("\n".join(missing))


@contextlib.contextmanager
def tracking(config: RunConfig, begun: int, say: Say) -> Iterator[Trackers]:
    """The trackers of a run that goes on after step ``begun``; what they hold of later steps is not shown twice. Only
    process 0 writes. Raises TrackingError where one cannot be opened."""
    wanted = config.tracking
    openers = [
        *([("tracking.tensorboard", _tensorboard)] if wanted.tensorboard else []),
        *([("tracking.wandb", _wandb)] if wanted.wandb is not None else []),
    ]
    trackers = Trackers(opened := [], say)
    try:
        for name, opener in openers if jax.process_index() == 0 else []:
            try:
                opened.append(opener(config, begun))
            except Exception as error:
                raise TrackingError(f"{name}: could not be started: {_words(error)}") from error
        yield trackers
    finally:
        trackers.close()


def _tensorboard(config: RunConfig, begun: int) -> Tracker:
    from tensorboardX import SummaryWriter

    folder = os.fspath(epath.Path(config.run_dir) / TENSORBOARD)
    # Readers forget what earlier files say of this step and later ones.
    writer = SummaryWriter(folder, purge_step=begun + 1, flush_secs=10)

    def write(scalars: dict[str, float], step: int) -> None:
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)

    return Tracker("TensorBoard", write, writer.close)


def _wandb(config: RunConfig, begun: int) -> Tracker:
    import wandb

    run_dir = epath.Path(config.run_dir)
    run = wandb.init(
        project=config.tracking.wandb,
        name=config.tracking.name or run_dir.name,
        id=_wandb_id(run_dir),
        resume="allow",
        mode=config.tracking.wandb_mode,
        dir=os.fspath(run_dir) if is_local(run_dir) else None,
        config=config.model_dump(mode="json"),
    )

    def write(scalars: dict[str, float], step: int) -> None:
        run.log(scalars, step=step)  # a step it has already is not taken again

    return Tracker("Weights & Biases", write, run.finish)


def _wandb_id(run_dir: epath.Path) -> str:
    """The run's id at Weights & Biases, made up at its first start."""
    file = run_dir / WANDB_ID
    if not file.exists():
        file.write_text(secrets.token_hex(6) + "\n")
    return file.read_text().strip()


def _is_scalar(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _words(error: Exception) -> str:
    return str(error).strip() or type(error).__name__
