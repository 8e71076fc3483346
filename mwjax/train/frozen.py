"""The weights a run does not train, on the disk: written once, beside the checkpoints of those it does."""

from __future__ import annotations

from typing import Any

import numpy as np
from etils import epath

from mwjax import model
from mwjax.train import checkpoint, setup
from mwjax.train.state import TrainState

FOLDER = "frozen"  # holds a folder for every digest
Params = Any


def save(run_dir: epath.PathLike, frozen: Params, digest: str) -> None:
    """Writes the frozen parameters of a run, unless they are there. digest: theirs, as in `setup.fingerprint`."""
    with checkpoint.Checkpoints(_folder(run_dir, digest), {setup.FROZEN_WEIGHTS: digest}, keep=1) as once:
        once.save(0, TrainState(frozen, (), np.zeros((), np.int32)))


def load_decoder(run_dir: epath.PathLike, step: int | None = None) -> tuple[model.ModelConfig, Params]:
    """The decoder of a run's checkpoint (default: the newest), adapters and frozen weights included, as nested dicts of
    numpy arrays in host memory.

    Raises as `checkpoint.load_params`, and ``FileNotFoundError`` where the frozen weights are not in the run directory.
    """
    fingerprint = checkpoint.load_fingerprint(run_dir, step)
    shape, digest = setup.decoder_of(fingerprint), fingerprint.get(setup.FROZEN_WEIGHTS)
    frozen: Params = {}
    if digest is not None:
        folder = _folder(run_dir, digest)
        if not folder.exists():
            raise FileNotFoundError(
                f"{folder}: the weights that were not trained are not there, and the checkpoints hold only those that "
                "were; move run directories as a whole"
            )
        frozen = checkpoint.load_params(folder)
    return shape, model.join_params(checkpoint.load_params(run_dir, step), frozen)


def _folder(run_dir: epath.PathLike, digest: str) -> epath.Path:
    return epath.Path(run_dir) / FOLDER / digest
