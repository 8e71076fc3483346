"""Checkpoints: the only module that knows Orbax. One step directory holds the state and the data position together.

Orbax writes a step under a temporary name and renames it when all of it is there (in a bucket, it adds a file that says
so): a killed run leaves whole steps only. It does not notice a byte that changes on the disk later: the position holds
a checksum of every array, and one of itself.
"""

from __future__ import annotations

import contextlib
import gc
import json
import time
import traceback
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers

from mwjax.model.sharding import host_device
from mwjax.rollouts.storage import is_local
from mwjax.train import agreement
from mwjax.train.quiet import quiet
from mwjax.train.state import TrainState, checksums

FOLDER = "checkpoints"
POLL = 0.02  # seconds between looks at a save under way
DAMAGED = ".damaged"  # the end of the name of a step that was set aside
Fingerprint = Mapping[str, Any]
Scores = Mapping[int, float]  # step -> what the best checkpoints are lowest in


class CheckpointMismatch(ValueError):
    """A run directory holds checkpoints of another model or configuration; the message lists the differing fields."""


class CheckpointNotSaved(ValueError):
    """A checkpoint could not be written, for instance because the disk is full. The earlier ones are intact."""


class CheckpointUnreadable(ValueError):
    """A checkpoint's files are torn or corrupted. reason: which and why, without advice."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason or message


class Restored(NamedTuple):
    """The state of the newest whole checkpoint; damaged: a message for every newer one, which were set aside."""

    state: TrainState
    step: int
    damaged: Sequence[str]


class Checkpoints:
    """The checkpoints of one run.

    ``fingerprint`` says, key by key, what determines the numbers of the run (model, data, loss, optimiser) in JSON
    values. It is saved with every checkpoint and must agree when one is restored. The ``keep`` newest checkpoints are
    kept, and the ``best`` ones of lowest score. Saving is asynchronous: ``save`` returns when the arrays are copied,
    leaving the context waits for the files.
    """

    def __init__(self, run_dir: epath.PathLike, fingerprint: Fingerprint, keep: int, best: int = 0) -> None:
        self.folder = absolute(run_dir) / FOLDER
        self.fingerprint = dict(fingerprint)
        self._lowest = _Lowest(best)
        policy = checkpoint_managers.AnyPreservationPolicy([checkpoint_managers.LatestN(keep), self._lowest])
        options = ocp.CheckpointManagerOptions(preservation_policy=policy, cleanup_tmp_directories=True)
        self._errors: list[BaseException] = []
        self._manager = _manager(self.folder, options, self._errors)

    def __enter__(self) -> Checkpoints:
        self._quiet = quiet()
        self._quiet.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        try:
            # Of several processes, one that leaves with an error ends the others: it does not wait for them.
            if error is None or jax.process_count() == 1:
                with self._explained():
                    self._settle()
                    self._cleaned()
                    self._manager.close()
        except CheckpointNotSaved:
            if error is None:
                raise
        finally:
            self._quiet.__exit__(None, None, None)

    def latest(self) -> int | None:
        """The newest step that was saved completely, None if there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, scores: Scores = MappingProxyType({})) -> None:
        """Saves ``state`` as of ``step`` updates, unless that step is there already. ``scores``: of this step and the
        earlier ones; a checkpoint without one is not among the best. Errors of an earlier save (a full disk) are raised
        by the next call or on leaving the context."""
        if step == self.latest():
            return
        self._lowest.scores = scores
        position = {"step": step, "fingerprint": self.fingerprint, "checksums": checksums(state)}
        sealed = {**position, "checksum": _checksum(position)}
        arguments = ocp.args.Composite(state=ocp.args.StandardSave(state), position=ocp.args.JsonSave(sealed))
        with self._explained():
            self._settle()
            with _noted(self._errors):  # a save that fails before its thread starts counts as under way for ever
                self._manager.save(step, args=arguments, force=True)

    def _settle(self) -> None:
        """Waits for the save under way, and raises what it failed with. Orbax raises that too, but with several
        processes only when it has waited for the others, who wait for this one, until its time-out of 20 minutes."""
        while self._manager.is_saving_in_progress():
            if self._errors:
                raise self._errors[0]
            time.sleep(POLL)

    def _cleaned(self) -> None:
        """Waits for the thread that removes what killed saves left. Orbax does so before a save only, and a process
        that ends before the thread does gets a traceback from it."""
        cleaning = getattr(self._manager, "_cleanup_tmp_directory_future", None)
        if cleaning is not None:
            with contextlib.suppress(Exception):  # nothing was to be saved: what is left is in nobody's way
                cleaning.result()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns what writing can raise (TensorStore reports a full disk as ValueError) into CheckpointNotSaved."""
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:
            newest = max(_steps(self.folder), default="none")  # Orbax counts the one that is not there
            raise CheckpointNotSaved(
                f"{self.folder}: a checkpoint could not be written: {str(error).strip()}\n"
                f"Earlier checkpoints are intact (newest: {newest}); put the cause right and run the "
                "same command again."
            ) from error

    def restore(self, template: TrainState, step: int) -> TrainState:
        """The state saved at ``step``, in the shapes, dtypes and shardings of ``template`` (see ``state.abstract``).

        Raises ``CheckpointMismatch`` when the checkpoint's fingerprint is not this run's, before any array is read, and
        ``CheckpointUnreadable`` when it is damaged.
        """
        folder = self.folder / str(step)
        with _readable_everywhere(folder):
            position = _position(folder)
        compare(position["fingerprint"], self.fingerprint, f"{folder}")
        # The handler itself: around it Orbax waits for all processes, also for one that could not read its part.
        with _readable_everywhere(folder), contextlib.closing(ocp.StandardCheckpointHandler()) as handler:
            state = handler.restore(folder / "state", args=ocp.args.StandardRestore(template))
        with _readable(folder):
            _verify(checksums(state), position["checksums"])
        return state

    def restore_newest(self, template: TrainState) -> Restored | None:
        """The newest checkpoint that is whole, None where the run has none at all.

        Damaged ones found on the way are renamed, so that their steps can be saved again and nothing is lost. Raises
        ``CheckpointUnreadable`` where all are damaged (none is renamed then), and ``CheckpointMismatch``.
        """
        broken: list[tuple[int, CheckpointUnreadable]] = []
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                state = self.restore(template, step)
            except CheckpointUnreadable as error:
                broken.append((step, error))
                continue
            damaged = [f"{error.reason}; set aside as {self._set_aside(number).name}" for number, error in broken]
            self._manager.reload()
            return Restored(state, step, damaged)
        if broken:
            raise CheckpointUnreadable(
                "\n".join(error.reason for _, error in broken) + "\n"
                "No whole checkpoint is left to continue from. Put the files back from a copy; or remove "
                f"{self.folder}, or choose another run_dir, to start afresh."
            )
        return None

    def _set_aside(self, step: int) -> epath.Path:
        folder = self.folder / str(step)
        names = (f"{step}{DAMAGED}{number or ''}" for number in range(1_000_000))
        target = next(target for name in names if not (target := self.folder / name).exists())
        if jax.process_index() == 0:
            folder.rename(target)
        multihost_utils.sync_global_devices(f"set aside {step}")
        return target


class _Lowest(checkpoint_managers.PreservationPolicy):
    """Preserves the ``count`` checkpoints of lowest score, the newest of equal ones. (Orbax's own BestN wants the score
    in the step's directory: an evaluation after the save would come too late.)"""

    def __init__(self, count: int) -> None:
        self.count = count
        self.scores: Scores = {}

    def should_preserve(
        self,
        checkpoints: Sequence[checkpoint_managers.PolicyCheckpointInfo],
        *,
        context: checkpoint_managers.PreservationContext,
    ) -> Sequence[bool]:
        kept = ranked([entry.step for entry in checkpoints], self.scores)[: self.count]
        return [entry.step in kept for entry in checkpoints]


def ranked(steps: Sequence[int], scores: Scores) -> list[int]:
    """Those of ``steps`` that have a score, from the lowest to the highest; of equal ones the newest first."""
    return sorted((step for step in steps if step in scores), key=lambda step: (scores[step], -step))


def compare(saved: Fingerprint, current: Fingerprint, where: str) -> None:
    """Raises ``CheckpointMismatch`` listing every key on which the two differ."""
    lines = agreement.differing(saved, "in the checkpoint", current, "in this run")
    if lines:
        raise CheckpointMismatch(
            f"{where}: a checkpoint of another run; these differ:\n"
            + "\n".join(lines)
            + "\nUse the configuration it was made with to continue it, or another run_dir to start afresh."
        )


def absolute(path: epath.PathLike) -> epath.Path:
    """As Orbax needs it. A name in a bucket is so already: `resolve` would put the working directory before it."""
    return epath.Path(path).resolve() if is_local(path) else epath.Path(path)


def locate(path: epath.PathLike) -> tuple[epath.Path, int]:
    """Run directory and step meant by ``path``: a run directory (its newest step), its ``checkpoints`` folder or one of
    the steps in there. Raises ``FileNotFoundError`` when there is no such checkpoint."""
    given = absolute(epath.Path(path).expanduser())
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
    folder = absolute(run_dir) / FOLDER / str(_chosen(run_dir, step))
    saved = _position(folder)["checksums"]
    with _readable(folder), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        tree = reader.metadata(folder / "state").item_metadata.tree
        wanted = {"params": jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree["params"])}
        host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), wanted)
        arguments = ocp.args.PyTreeRestore(item=wanted, restore_args=host, partial_restore=True)
        read = {"params": reader.restore(folder / "state", args=arguments)["params"]}
        with jax.default_device(host_device()):
            _verify(checksums(read), {name: value for name, value in saved.items() if name.startswith("params.")})
        return read["params"]


def load_fingerprint(run_dir: epath.PathLike, step: int | None = None) -> Fingerprint:
    """What determined the numbers of a run's checkpoint (default: the newest). Raises as `load_params`."""
    return _position(absolute(run_dir) / FOLDER / str(_chosen(run_dir, step)))["fingerprint"]


def best(run_dir: epath.PathLike, scores: Scores) -> int:
    """The step of a run's checkpoint with the lowest score. Raises ``FileNotFoundError`` where none has one."""
    folder = absolute(run_dir) / FOLDER
    found = ranked(_steps(folder), scores)
    if not found:
        raise FileNotFoundError(f"{folder}: no checkpoint there has a score: none was evaluated at its step")
    return found[0]


def _position(folder: epath.Path) -> dict[str, Any]:
    """What was saved beside the state. Raises ``CheckpointUnreadable``."""
    with _readable(folder), contextlib.closing(ocp.JsonCheckpointHandler()) as handler:
        sealed = handler.restore(folder / "position", args=ocp.args.JsonRestore())
        position = {key: value for key, value in sealed.items() if key != "checksum"}
        if "checksum" not in sealed:
            raise ValueError("it has no checksum: an older mwjax made it, or it is torn")
        if sealed["checksum"] != _checksum(position):
            raise ValueError("the data position is not what was saved")
        return position


def _checksum(position: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(position, sort_keys=True).encode()):08x}"


def _verify(read: Mapping[str, str], saved: Mapping[str, str]) -> None:
    different = sorted(name for name in {*read, *saved} if read.get(name) != saved.get(name))
    if different:
        more = f" and {len(different) - 1} more" if len(different) > 1 else ""
        raise ValueError(f"{different[0]}{more}: the content is not what was saved")


@contextlib.contextmanager
def _readable(folder: epath.Path) -> Iterator[None]:
    """Turns whatever reading a damaged checkpoint raises into CheckpointUnreadable. What is no damage (memory that does
    not suffice, a refused permission) stays what it is."""
    with quiet():
        try:
            yield
        except (CheckpointUnreadable, MemoryError, PermissionError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:
            _let_go(error)
            # TensorStore appends kilobytes of its own description.
            lines = str(error).split(" [tensorstore_spec")[0].strip().splitlines() or [type(error).__name__]
            reason = f"{folder}: this checkpoint is damaged and cannot be read: {lines[0]}"
            raise CheckpointUnreadable(f"{reason}\nUse another step of that run.", reason) from error


def _let_go(error: BaseException | None) -> None:
    """Frees what the frames of an error and of its causes hold: the reads that were given up tell so as they go."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.collect()


@contextlib.contextmanager
def _readable_everywhere(folder: epath.Path) -> Iterator[None]:
    """As `_readable`, and what is damaged for one process is damaged for all."""
    found: CheckpointUnreadable | None = None
    try:
        with _readable(folder):
            yield
    except CheckpointUnreadable as error:
        found = error
    reasons = [reason for reason in agreement.gathered(found and [str(found), found.reason]) if reason]
    if reasons:
        raise CheckpointUnreadable(*reasons[0]) from found


def load(run_dir: epath.PathLike, step: int | None = None) -> dict[str, Any]:
    """All of a run's checkpoint (default: the newest), whatever its configuration: the fields of ``TrainState`` as
    nested dicts and lists of arrays on one device.

    Raises ``FileNotFoundError`` when there is no such checkpoint.
    """
    folder, chosen = absolute(run_dir) / FOLDER, _chosen(run_dir, step)
    with _manager(folder, ocp.CheckpointManagerOptions(create=False)) as manager:
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        template = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device),
            manager.item_metadata(chosen)["state"],
        )
        return manager.restore(chosen, args=ocp.args.Composite(state=ocp.args.StandardRestore(template)))["state"]


def _chosen(run_dir: epath.PathLike, step: int | None) -> int:
    """``step``, or the newest where it is None; FileNotFoundError where there is none."""
    folder = absolute(run_dir) / FOLDER
    steps = _steps(folder)
    if not steps or (step is not None and step not in steps):
        held = f"it holds the steps {', '.join(map(str, steps))}" if steps else "it holds none"
        raise FileNotFoundError(f"{folder}: no checkpoint{'' if step is None else f' of step {step}'}; {held}")
    return steps[-1] if step is None else step


def _steps(folder: epath.Path) -> list[int]:
    """The steps that were saved completely."""
    named = [entry for entry in folder.iterdir() if entry.name.isdigit()] if folder.exists() else []
    return sorted(int(entry.name) for entry in named if ocp.utils.is_checkpoint_finalized(entry))


def _manager(
    folder: epath.Path, options: ocp.CheckpointManagerOptions, errors: list[BaseException] | None = None
) -> ocp.CheckpointManager:
    noted = [] if errors is None else errors
    handlers = {
        "state": _noting(ocp.StandardCheckpointHandler(), noted),
        "position": _noting(ocp.JsonCheckpointHandler(), noted),
    }
    return ocp.CheckpointManager(folder, options=options, item_names=tuple(handlers), item_handlers=handlers)


def _noting(handler: Any, errors: list[BaseException]) -> Any:
    """The handler itself, which then writes down what its part of a save fails with, as it happens. (Orbax finds a
    handler's arguments by its type, so it is no type of our own.)"""
    save, finalize = handler.async_save, handler.finalize

    async def noted_save(*arguments: Any, **options: Any) -> list[_NotingFuture]:
        return [_NotingFuture(future, errors) for future in await save(*arguments, **options) or ()]

    def noted_finalize(directory: epath.Path) -> None:
        with _noted(errors):
            finalize(directory)

    handler.async_save, handler.finalize = noted_save, noted_finalize
    return handler


@dataclass(frozen=True)
class _NotingFuture:
    future: Any
    errors: list[BaseException]

    def result(self, timeout: int | None = None) -> Any:
        with _noted(self.errors):
            return self.future.result(timeout)


@contextlib.contextmanager
def _noted(errors: list[BaseException]) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        errors.append(error)
        raise
