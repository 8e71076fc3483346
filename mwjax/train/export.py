"""A checkpoint as a Hugging Face folder: weights, configuration, and the tokenizer of the model the run began from."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from etils import epath

from mwjax import model
from mwjax.train import checkpoint, frozen, load, metrics_log
from mwjax.train.config import ModelSection, RunConfig


class ExportError(ValueError):
    """What was asked for cannot be exported."""


@dataclass(frozen=True)
class Exported:
    """What was written. parameters: their number; size: bytes of all files; tokenizer: whether its files are there."""

    folder: str
    step: int
    config: model.ModelConfig
    parameters: int
    dtype: str
    size: int
    tokenizer: bool

    def summary(self) -> str:
        """For people, on stdout."""
        return (
            f"{self.folder}: {self.config.family}, {self.parameters:,} parameters in {self.dtype}, step {self.step}, "
            f"{self.size / 1e6:,.1f} MB"
        )


def export(
    path: epath.PathLike,
    folder: epath.PathLike,
    *,
    dtype: str | None = None,
    tokenizer: str | None = None,
    overwrite: bool = False,
    best: bool = False,
    max_shard_bytes: int = 5_000_000_000,
) -> Exported:
    """Write the parameters of a checkpoint to ``folder`` as `mwjax.model.save` does, adapters merged into the weights
    they adapt; optimiser state is not read.

    Args:
      path: run directory (its newest checkpoint), or one of the steps in its ``checkpoints`` folder.
      dtype: float32, float16 or bfloat16; None: as in the checkpoint, or the wider of two types, so that nothing is
        rounded.
      tokenizer: folder, hub id or tokenizer.json, in place of what the run's configuration names. What that names may
        be gone since: then the folder has no tokenizer.
      best: the checkpoint that is best by the run's ``checkpoint.best_by``, in place of the newest.

    Raises:
      FileNotFoundError: no such checkpoint.
      ValueError: a damaged checkpoint, a folder that is not empty, a ``tokenizer`` that is not there.
    """
    if (epath.Path(path) / "config.json").exists():
        raise ExportError(f"{path}: this is a model folder already; give a run directory or a checkpoint in it")
    run_dir, step = checkpoint.locate(path)
    if best and checkpoint.absolute(epath.Path(path).expanduser()).parent.name == checkpoint.FOLDER:
        raise ExportError(f"{path}: names a step already; give the run directory to export its best checkpoint")
    step = _best(run_dir) if best else step
    model.check_free(folder, overwrite)
    run = _settings(run_dir)
    settings = run.model if run else None
    with _tokenizer(tokenizer, settings) as chosen, _folder(settings.path if settings else None) as source:
        config, params = model.merge_adapters(*frozen.load_decoder(run_dir, step))
        leaves = jax.tree.leaves(params)
        dtype = dtype or jnp.result_type(*leaves).name
        model.save(
            folder,
            config,
            params,
            dtype=dtype,
            source=source,
            tokenizer=chosen,
            overwrite=overwrite,
            max_shard_bytes=max_shard_bytes,
        )
    files = {entry.name: entry.stat().length for entry in epath.Path(folder).iterdir()}
    return Exported(
        folder=os.fspath(folder),
        step=step,
        config=config,
        parameters=sum(leaf.size for leaf in leaves),
        dtype=dtype,
        size=sum(files.values()),
        tokenizer=any(name.startswith(("tokenizer", "vocab.")) for name in files),
    )


def _best(run_dir: epath.Path) -> int:
    """The step that is best by what the run's configuration says."""
    settings = _settings(run_dir)
    by = settings.checkpoint.best_by if settings else "evaluation_loss"
    file = metrics_log.FILE if by == "loss" else metrics_log.EVALUATION
    return checkpoint.best(
        run_dir,
        metrics_log.scores(metrics_log.read(run_dir, file)),
    )


@contextlib.contextmanager
def _tokenizer(given: str | None, settings: ModelSection | None) -> Iterator[Path | None]:
    """The folder or tokenizer.json to copy tokenizer files from, if there is one beside the model's own folder."""
    small = settings.small if settings else None
    named = given or (small.tokenizer if small else None)
    with _file(named) if named and named.endswith(".json") else _folder(named) as found:
        if given is not None and (found is None or not (found.is_file() or _has_tokenizer(found))):
            raise ExportError(f"{given}: no tokenizer files there; give a folder, a hub id or a tokenizer.json")
        yield found


@contextlib.contextmanager
def _folder(name: str | None) -> Iterator[Path | None]:
    """The files of a model, without its weights where they would have to be fetched; None if they cannot be had."""
    with contextlib.ExitStack() as stack:
        found = None
        if name is not None:
            with contextlib.suppress(model.ModelFilesError):
                found = stack.enter_context(model.local_folder(name, weights=False))
        yield found if found is not None and found.is_dir() else None


@contextlib.contextmanager
def _file(name: str) -> Iterator[Path | None]:
    """A local copy of a file; None if it cannot be read."""
    with tempfile.TemporaryDirectory(prefix="mwjax-tokenizer-") as folder:
        copy = Path(folder) / "tokenizer.json"
        with contextlib.suppress(OSError):
            copy.write_bytes(epath.Path(name).read_bytes())
        yield copy if copy.exists() else None


def _has_tokenizer(folder: Path) -> bool:
    return any(folder.glob("tokenizer*")) or (folder / "vocab.json").is_file()


def _settings(run_dir: epath.Path) -> RunConfig | None:
    """The run's configuration, if it is there."""
    try:
        return load.load(os.fspath(run_dir / "config.yaml"))
    except load.ConfigError:
        return None
