"""A training run: from a configuration to a finished run directory, continuing one that was stopped."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from etils import epath

from mwjax import data, losses
from mwjax.model.attention import check_rows
from mwjax.model.sharding import CONTEXT
from mwjax.train import (
    agreement,
    debug,
    evaluation,
    exact,
    frozen,
    load,
    metrics_log,
    setup,
    state,
    trackers,
)
from mwjax.train.checkpoint import Checkpoints
from mwjax.train.config import RunConfig
from mwjax.train.log import Log, announce
from mwjax.train.mesh import leads, on_every_process, place_rows, share
from mwjax.train.optimizer import optimizer
from mwjax.train.prepared import Prepared, prepare
from mwjax.train.progress import Reporter
from mwjax.train.recompiles import CompileCounter
from mwjax.train.run_directory import claimed
from mwjax.train.step import COMPILED, Step, build, parameter_shardings
from mwjax.train.stop import StopOnSignal
from mwjax.train.stopping import Stopping
from mwjax.train.update import Comparison, update
from mwjax.tree import Batch, Edges, Rows, collate


@dataclass(frozen=True)
class TrainResult:
    """What a run came to. step: updates done of ``total``; refused: rollouts left out; stopped: on a signal, before the
    end; last: the last row of ``metrics.jsonl``, None where there is none."""

    run_dir: str
    step: int
    total: int
    refused: int
    stopped: bool
    last: dict[str, Any] | None

    def summary(self) -> str:
        """For people, on stdout."""
        lines = [f"{self.run_dir}: step {self.step} of {self.total}"]
        if self.stopped and self.step:
            lines[0] += ", saved; the same command continues"
        elif self.stopped:
            lines[0] += ", nothing to save yet; the same command begins again"
        if self.last is not None and self.last.get("loss") is not None:
            lines.append(f"loss {self.last['loss']:.6g}, {self.last['recompiles']} recompiles")
        if self.refused:
            lines.append(f"{self.refused} rollouts were refused")
        return "\n".join(lines)


def run(config: RunConfig) -> TrainResult:
    """Train as ``config`` says and return when done, or after SIGTERM with a checkpoint saved.

    Writes ``config.yaml``, ``metrics.jsonl``, ``evaluation.jsonl``, ``card.md``, ``plots/`` and ``checkpoints/`` in
    ``config.run_dir``; continues there when it holds checkpoints. Raises ValueError for what the user can put right
    (data, options, a run directory of another configuration, a loss that is not finite).
    """
    config = setup.resolved(config)
    agreement.check_alike(dict(load.flat(config.model_dump(mode="json"))), "options")
    trackers.check(config.tracking)
    with (
        claimed(config.run_dir) as run_dir,
        jax.disable_jit() if config.debug else contextlib.nullcontext(),
    ):
        return _train(config, run_dir, prepare(config))


def _train(config: RunConfig, run_dir: epath.Path, made: Prepared) -> TrainResult:
    transform = optimizer(config.optimizer, made.total)
    placed = parameter_shardings(made.shape, made.mesh, made.params)
    fingerprint = setup.fingerprint(config, made.index, made.shape, made.digest, made.total, made.frozen_digest)
    held = {"evaluation (content of the rollouts)": made.held.contents} if made.held else {}
    agreement.check_alike({**fingerprint, **held}, "data or weights")
    agreement.check_shared(run_dir)
    kept = config.checkpoint
    # Signals are caught until the last checkpoint is written.
    with StopOnSignal() as stop, Checkpoints(run_dir, fingerprint, kept.keep, kept.best) as checkpoints:
        averaged = setup.averages_teacher(config)
        template = state.abstract(made.params, transform, placed, averaged=averaged)
        restored = checkpoints.restore_newest(template)
        begun = restored.step if restored else 0
        current = restored.state if restored else state.create(made.params, transform, placed, averaged=averaged)
        initial = made.params if setup.compares_with_initial(config) else None
        if initial is None:
            _free(made.params)
        changed = load.changes(run_dir / "config.yaml", config, setup.FREE_ON_RESUME) if restored else []
        if leads():
            load.write(config, run_dir / "config.yaml")
        if made.frozen_digest is not None:
            frozen.save(run_dir, made.frozen, made.frozen_digest)
        for file in (metrics_log.FILE, metrics_log.EVALUATION) if leads() else ():
            metrics_log.truncate(run_dir, begun, file)
        with (
            Reporter(made.total, begun, config.log_every, quiet=not leads()) as reporter,
            trackers.tracking(config, begun, reporter.say) as tracked,
            CompileCounter((*COMPILED, evaluation.COMPILED)) as compiled,
        ):
            announce(reporter, config, made, begun, restored.damaged if restored else (), changed)
            stopping = Stopping(stop, made.mesh)
            log = Log(config, made, compiled, reporter, tracked, stopping, begun)
            log.write_card()
            log.evaluate(begun, current.params)
            done = begun
            if begun < made.total and not stopping.now():
                step = _build(config, made, template.params, transform)
                comparison = _comparison(config, made, initial, step)
                done = _steps(config, made, step, comparison, current, checkpoints, log, stopping)
            elif begun:
                log.write_card()
    return TrainResult(
        run_dir=config.run_dir,
        step=done,
        total=made.total,
        refused=len(made.index.refused) + (len(made.held.index.refused) if made.held else 0),
        stopped=done < made.total,
        last=log.rows[-1] if log.rows else None,
    )


def _free(params: Any) -> None:
    """Gives the devices' memory back now, whoever still refers to the arrays."""
    for leaf in jax.tree.leaves(params):
        leaf.delete()


def _build(config: RunConfig, made: Prepared, params: Any, transform: optax.GradientTransformation) -> Step:
    layout = made.index.layout
    example = collate([], [], layout.shape, layout.rows_per_microbatch)
    step = build(setup.step_config(config, made.shape), transform, made.mesh, params, example, made.frozen)
    return debug.checked(step, made.index.ids) if config.debug else step


def _steps(
    config: RunConfig,
    made: Prepared,
    step: Step,
    comparison: Comparison,
    current: state.TrainState,
    checkpoints: Checkpoints,
    log: Log,
    stop: Stopping,
) -> int:
    """Runs the steps from ``current.step`` on; returns the number of steps done in all."""
    loss, sdcc = setup.loss_config(config.loss), config.loss.sdcc
    every, done, distils = config.checkpoint.every, int(current.step), made.index.layout.method == "sdcc"
    for batches in data.iterate_steps(made.source, done, made.total, workers=config.data.workers):
        weight = losses.lambda_at(batches.step, made.total, sdcc.peak, sdcc.ramp) if distils else 0.0
        for batch in batches.microbatches:
            for rows in (batch.rows, batch.teacher):
                if rows is not None:
                    check_rows(config.model.attention, rows, made.mesh.shape[CONTEXT])
        if config.debug and not log.shown:
            log.show_rollout(step, current.params, comparison, batches)
        with debug.naming(batches.step + 1):
            current, outcome = update(
                step,
                current,
                batches.microbatches,
                batches.denominator,
                loss,
                comparison,
                made.mesh,
                weight,
                loss_tokens=batches.loss_tokens,
                numbers=batches.numbers.tolist(),
            )
        log.add(batches, outcome, weight if distils else None)
        done = batches.step + 1
        stopping = stop.soon()  # asked once: a signal may come at any time
        stopping = stopping or not log.evaluate(done, current.params)
        if done == made.total or stopping or (every and done % every == 0):
            log.keep()  # and stop here if the loss is not finite: such weights are not worth keeping
            by = config.checkpoint
            checkpoints.save(done, current, log.scores(by.best_by) if by.best else {})
            log.write_card()
        if stopping:
            break
    return done


def _comparison(config: RunConfig, made: Prepared, initial: Any, step: Step) -> Comparison:
    if initial is None:
        return Comparison()
    own_rows = setup.scores_own_rows(config)
    reference = setup.has_reference(config)
    if own_rows or config.loss.old_logprobs == "recorded":
        return Comparison(initial, reference, own_rows)
    source = exact.plan(made.index, made.index.layout.shape.length, share(made.mesh))

    def score(rows: Rows) -> tuple[Edges, np.ndarray]:
        check_rows(config.model.attention, rows, made.mesh.shape[CONTEXT])
        placed = place_rows(rows, made.mesh)
        return on_every_process((placed.edges, step.score_exact(initial, placed)), made.mesh)

    def fill(microbatches: Sequence[Batch], numbers: Sequence[int] | None) -> None:
        exact.fill_old_logprobs(microbatches, source, score, numbers)

    return Comparison(initial, reference, own_rows, fill)
