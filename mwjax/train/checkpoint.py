"""Checkpoints: the only module that knows Orbax. One step directory holds the state and the data position together."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from mwjax.train.state import TrainState

FOLDER = "checkpoints"
Fingerprint = Mapping[str, Any]


class CheckpointMismatch(ValueError):
    """A run directory holds checkpoints of another model or configuration; the message lists the differing fields."""


class CheckpointNotSaved(ValueError):
    """A checkpoint could not be written, for instance because the disk is full. The earlier ones are intact."""


class CheckpointUnreadable(ValueError):
    """A checkpoint's files are torn or corrupted."""


class Checkpoints:
    """The checkpoints of one run.

    ``fingerprint`` says, key by key, what determines the numbers of the run (model, data, loss, optimiser) in JSON
    values. It is saved with every checkpoint and must agree when one is restored. Saving is asynchronous: ``save``
    returns when the arrays are copied, leaving the context waits for the files.
    """

    def __init__(self, run_dir: epath.PathLike, fingerprint: Fingerprint, keep: int) -> None:
        self.folder = epath.Path(run_dir).resolve() / FOLDER
        self.fingerprint = dict(fingerprint)
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        self._manager = _manager(self.folder, options)

    def __enter__(self) -> Checkpoints:
        # Orbax logs a traceback for each of its threads before it raises the same error here.
        self._logged = logging.getLogger("absl").level
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            with self._explained():
                self._manager.close()
        except CheckpointNotSaved:
            if error is None:
                raise
        finally:
            logging.getLogger("absl").setLevel(self._logged)

    def latest(self) -> int | None:
        """The newest step that was saved completely, None if there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState) -> None:
        """Saves ``state`` as of ``step`` updates, unless that step is there already. Errors of an earlier save (a full
        disk) are raised by the next call or on leaving the context."""
        if step == self.latest():
            return
        position = {"step": step, "fingerprint": self.fingerprint}
        arguments = ocp.args.Composite(state=ocp.args.StandardSave(state), position=ocp.args.JsonSave(position))
        with self._explained():
            self._manager.save(step, args=arguments, force=True)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns what writing can raise (TensorStore reports a full disk as ValueError) into CheckpointNotSaved."""
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:
            raise CheckpointNotSaved(
                f"{self.folder}: a checkpoint could not be written: {str(error).strip()}\n"
                f"Earlier checkpoints are intact (newest: {self.latest() or 'none'}); put the cause right and run the "
                "same command again."
            ) from error

    def restore(self, template: TrainState, step: int) -> TrainState:
        """The state saved at ``step``, in the shapes, dtypes and shardings of ``template`` (see ``state.abstract``).

        Raises ``CheckpointMismatch`` when the checkpoint's fingerprint is not this run's, before any array is read.
        """
        saved = self._manager.restore(step, args=ocp.args.Composite(position=ocp.args.JsonRestore()))["position"]
        compare(saved["fingerprint"], self.fingerprint, f"{self.folder / str(step)}")
        arguments = ocp.args.Composite(state=ocp.args.StandardRestore(template))
        return self._manager.restore(step, args=arguments)["state"]


def compare(saved: Fingerprint, current: Fingerprint, where: str) -> None:
    """Raises ``CheckpointMismatch`` listing every key on which the two differ."""
    missing = object()
    lines = [
        f"  {key}: {saved.get(key, 'not set')!r} in the checkpoint, {current.get(key, 'not set')!r} in this run"
        for key in sorted({*saved, *current})
        if saved.get(key, missing) != current.get(key, missing)
    ]
    if lines:
        raise CheckpointMismatch(
            f"{where}: a checkpoint of another run; these differ:\n"
            + "\n".join(lines)
            + "\nUse the configuration it was made with to continue it, or another run_dir to start afresh."
        )


def locate(path: epath.PathLike) -> tuple[epath.Path, int]:
    """Run directory and step meant by ``path``: a run directory (its newest step), its ``checkpoints`` folder or one of
    the steps in there. Raises ``FileNotFoundError`` when there is no such checkpoint."""
    given = epath.Path(path).expanduser().resolve()
    if given.parent.name == FOLDER and given.name.isdigit():
        run_dir, step = given.parent.parent, int(given.name)
        return run_dir, _chosen(run_dir, step)
    run_dir = given.parent if given.name == FOLDER else given
    return run_dir, _chosen(run_dir, None)


def load_params(run_dir: epath.PathLike, step: int | None = None) -> Any:
    """The parameters of a run's checkpoint (default: the newest) as nested dicts of numpy arrays, in host memory. The
    optimiser's state is not read.

    Raises ``FileNotFoundError`` when there is no such checkpoint and ``CheckpointUnreadable`` when it is damaged.
    """
    folder = epath.Path(run_dir).resolve() / FOLDER / str(_chosen(run_dir, step))
    with _readable(folder), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        tree = reader.metadata(folder / "state").item_metadata.tree
        wanted = {"params": jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree["params"])}
        host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), wanted)
        arguments = ocp.args.PyTreeRestore(item=wanted, restore_args=host, partial_restore=True)
        return reader.restore(folder / "state", args=arguments)["params"]


def load_fingerprint(run_dir: epath.PathLike, step: int | None = None) -> Fingerprint:
    """What determined the numbers of a run's checkpoint (default: the newest). Raises as `load_params`."""
    folder = epath.Path(run_dir).resolve() / FOLDER / str(_chosen(run_dir, step))
    with _readable(folder), ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
        return reader.restore(folder / "position", args=ocp.args.JsonRestore())["fingerprint"]


@contextlib.contextmanager
def _readable(folder: epath.Path) -> Iterator[None]:
    """Turns whatever reading a damaged checkpoint raises into CheckpointUnreadable, without Orbax's own log."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointUnreadable(
            f"{folder}: this checkpoint is damaged and cannot be read: {reason[0]}\nUse another step of that run."
        ) from error
    finally:
        logger.setLevel(level)


def load(run_dir: epath.PathLike, step: int | None = None) -> dict[str, Any]:
    """All of a run's checkpoint (default: the newest), whatever its configuration: the fields of ``TrainState`` as
    nested dicts and lists of arrays on one device.

    Raises ``FileNotFoundError`` when there is no such checkpoint.
    """
    folder, chosen = epath.Path(run_dir).resolve() / FOLDER, _chosen(run_dir, step)
    with _manager(folder, ocp.CheckpointManagerOptions(create=False)) as manager:
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        template = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device),
            manager.item_metadata(chosen)["state"],
        )
        return manager.restore(chosen, args=ocp.args.Composite(state=ocp.args.StandardRestore(template)))["state"]


def _chosen(run_dir: epath.PathLike, step: int | None) -> int:
    """``step``, or the newest where it is None; FileNotFoundError where there is none."""
    folder = epath.Path(run_dir).resolve() / FOLDER
    steps = sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdigit()) if folder.exists() else []
    if not steps or (step is not None and step not in steps):
        held = f"it holds the steps {', '.join(map(str, steps))}" if steps else "it holds none"
        raise FileNotFoundError(f"{folder}: no checkpoint{'' if step is None else f' of step {step}'}; {held}")
    return steps[-1] if step is None else step


def _manager(folder: epath.Path, options: ocp.CheckpointManagerOptions) -> ocp.CheckpointManager:
    handlers = {"state": ocp.StandardCheckpointHandler(), "position": ocp.JsonCheckpointHandler()}
    return ocp.CheckpointManager(folder, options=options, item_names=tuple(handlers), item_handlers=handlers)
