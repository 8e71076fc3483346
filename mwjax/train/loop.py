"""A training run: from a configuration to a finished run directory, continuing one that was stopped."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from etils import epath
from jax.sharding import Mesh

from mwjax import data, losses, model
from mwjax.train import card, exact, load, metrics_log, setup, state
from mwjax.train.checkpoint import Checkpoints
from mwjax.train.config import RunConfig
from mwjax.train.mesh import by_rows, make_mesh, place, replicated
from mwjax.train.optimizer import learning_rate, optimizer
from mwjax.train.progress import Reporter, measuring
from mwjax.train.recompiles import CompileCounter
from mwjax.train.step import COMPILED, Step, build
from mwjax.train.stop import StopOnSignal
from mwjax.train.update import Comparison, Outcome, update
from mwjax.tree import EXACT_METHODS, Batch, Rows, collate

SHOWN = 20  # refusals shown in full
# Differences to what the engine recorded: they mean something only for the weights that sampled.
AGAINST_THE_ENGINE = ("logdiff_", "mismatch_", "perplexity_gap")


class TrainingDiverged(ValueError):
    """The loss or a gradient is no longer finite."""


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
        if self.stopped:
            lines[0] += ", saved; the same command continues"
        if self.last is not None and self.last.get("loss") is not None:
            lines.append(f"loss {self.last['loss']:.6g}, {self.last['recompiles']} recompiles")
        if self.refused:
            lines.append(f"{self.refused} rollouts were refused")
        return "\n".join(lines)


def run(config: RunConfig) -> TrainResult:
    """Train as ``config`` says and return when done, or after SIGTERM with a checkpoint saved.

    Writes ``config.yaml``, ``metrics.jsonl``, ``card.md`` and ``checkpoints/`` in ``config.run_dir``; continues there
    when it holds checkpoints. Raises ValueError for what the user can put right (data, options, a run directory of
    another configuration, a loss that is not finite).
    """
    config = setup.resolved(config)
    with jax.disable_jit() if config.debug else contextlib.nullcontext():
        return _train(config, _prepare(config))


@dataclass(frozen=True)
class _Prepared:
    """What a run is made of before it starts. digest and description are of the initial weights, ``params``."""

    mesh: Mesh
    shape: model.ModelConfig
    params: Any
    digest: str
    description: str
    index: data.Index
    source: data.StepSource
    total: int


def _prepare(config: RunConfig) -> _Prepared:
    mesh = make_mesh(config.mesh)
    shape, params = setup.decoder(config.model)
    digest, description = state.weights_digest(params), setup.describe(config.model, shape, params)
    index = data.scan(config.data.paths, setup.layout(config), vocab_size=shape.vocab_size, progress=measuring)
    source = setup.step_source(config, index)
    total = config.data.steps or source.steps_in(config.data.epochs)
    params = jax.device_put(params, replicated(mesh))
    return _Prepared(mesh, shape, params, digest, description, index, source, total)


def _train(config: RunConfig, made: _Prepared) -> TrainResult:
    transform, everywhere = optimizer(config.optimizer, made.total), replicated(made.mesh)
    run_dir = epath.Path(config.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    fingerprint = setup.fingerprint(config, made.index, made.shape, made.digest, made.total)
    with Checkpoints(run_dir, fingerprint, config.checkpoint.keep) as checkpoints:
        begun = checkpoints.latest() or 0
        template = state.abstract(made.params, transform, everywhere)
        current = checkpoints.restore(template, begun) if begun else state.create(made.params, transform, everywhere)
        initial = made.params if setup.compares_with_initial(config) else None
        if initial is None:
            _free(made.params)
        (run_dir / "config.yaml").write_text(load.dump(config))
        metrics_log.truncate(run_dir, begun)
        with (
            Reporter(made.total, begun, config.log_every) as reporter,
            CompileCounter(COMPILED) as compiled,
            StopOnSignal() as stop,
        ):
            _announce(reporter, config, made, begun)
            log = _Log(config, made, compiled, reporter)
            log.write_card()
            done = begun
            if begun < made.total:
                step = _build(config, made, template.params, transform)
                comparison = _comparison(config, made, initial, step)
                done = _steps(config, made, step, comparison, current, checkpoints, log, stop)
    rows = metrics_log.read(run_dir)
    return TrainResult(
        run_dir=config.run_dir,
        step=done,
        total=made.total,
        refused=len(made.index.refused),
        stopped=done < made.total,
        last=rows[-1] if rows else None,
    )


def _free(params: Any) -> None:
    """Gives the devices' memory back now, whoever still refers to the arrays."""
    for leaf in jax.tree.leaves(params):
        leaf.delete()


def _build(config: RunConfig, made: _Prepared, params: Any, transform: optax.GradientTransformation) -> Step:
    layout = made.index.layout
    example = collate([], [], layout.shape, layout.rows_per_microbatch)
    return build(setup.step_config(config, made.shape), transform, made.mesh, params, example)


def _steps(
    config: RunConfig,
    made: _Prepared,
    step: Step,
    comparison: Comparison,
    current: state.TrainState,
    checkpoints: Checkpoints,
    log: _Log,
    stop: StopOnSignal,
) -> int:
    """Runs the steps from ``current.step`` on; returns the number of steps done in all."""
    loss, sdcc = setup.loss_config(config.loss), config.loss.sdcc
    every, done, distils = config.checkpoint.every, int(current.step), made.index.layout.method == "sdcc"
    for batches in data.iterate_steps(made.source, done, made.total, workers=config.data.workers):
        weight = losses.lambda_at(batches.step, made.total, sdcc.peak, sdcc.ramp) if distils else 0.0
        current, outcome = update(
            step, current, batches.microbatches, batches.denominator, loss, comparison, made.mesh, weight
        )
        log.add(batches, outcome, weight if distils else None)
        done = batches.step + 1
        stopping = stop.requested  # read once: a signal may come at any time
        if done == made.total or stopping or (every and done % every == 0):
            log.flush()  # and stop here if the loss is not finite: such weights are not worth keeping
            checkpoints.save(done, current)
            log.write_card()
        if stopping:
            break
    return done


def _comparison(config: RunConfig, made: _Prepared, initial: Any, step: Step) -> Comparison:
    if initial is None:
        return Comparison()
    layout, old = made.index.layout, config.loss.old_logprobs
    exact_rows = layout.method in EXACT_METHODS
    own_rows = old == "recompute_own_rows" or (old == "recompute" and exact_rows)
    reference = setup.loss_config(config.loss).policy_gradient.kl_coefficient != 0
    if own_rows or old == "recorded":
        return Comparison(initial, reference, own_rows)
    shape = exact.row_shape(made.index, layout.shape.length)

    def score(rows: Rows) -> np.ndarray:
        return np.asarray(step.score_exact(initial, place(rows, by_rows(made.mesh))))

    def fill(microbatches: Sequence[Batch]) -> None:
        exact.fill_old_logprobs(microbatches, made.index, shape, layout.rows_per_microbatch, score)

    return Comparison(initial, reference, own_rows, fill)


class _Log:
    """Writes a step's row once the next step is under way, so that the host never waits for the devices."""

    def __init__(self, config: RunConfig, made: _Prepared, compiled: CompileCounter, reporter: Reporter) -> None:
        self.config, self.made, self.compiled, self.reporter = config, made, compiled, reporter
        self.rate = learning_rate(config.optimizer, made.total)
        self.pending: tuple[dict[str, Any], Outcome] | None = None
        self.since, self.compiling = time.perf_counter(), 0.0

    def add(self, batches: data.StepBatches, outcome: Outcome, sdcc_lambda: float | None) -> None:
        self.flush()
        self.pending = _planned(batches, self.made.index, sdcc_lambda), outcome

    def flush(self) -> None:
        """Waits for the step last added and writes its row. Raises TrainingDiverged."""
        if self.pending is None:
            return
        (row, outcome), self.pending = self.pending, None
        measured = _measured(outcome, self.config.model.sampled_the_data)
        now = time.perf_counter()
        seconds = now - self.since - (self.compiled.seconds - self.compiling)
        self.since, self.compiling = now, self.compiled.seconds
        row |= {key: value for key, value in measured.items() if key not in row}
        row |= {
            "learning_rate": None if outcome.scalars is None else float(self.rate(row["step"] - 1)),
            "seconds": seconds,
            "tokens_per_second": row["tokens"] / max(seconds, 1e-9),
            "recompiles": self.compiled.recompiles,
        }
        metrics_log.append(self.config.run_dir, row)
        self.reporter.step(row)
        for name in ("loss", "gradient_norm"):
            if row[name] is not None and not math.isfinite(row[name]):
                raise TrainingDiverged(
                    f"step {row['step']}: {name} is {row[name]}; the checkpoints in {self.config.run_dir} are from "
                    "before. Lower optimizer.learning_rate, or look at the batch with debug=true"
                )

    def write_card(self) -> None:
        made = self.made
        rows = metrics_log.read(self.config.run_dir)
        card.write(self.config, made.index, made.description, made.digest, made.total, rows)


def _planned(batches: data.StepBatches, index: data.Index, sdcc_lambda: float | None) -> dict[str, Any]:
    """The part of a row that is known before the step has run."""
    row: dict[str, Any] = {
        "step": batches.step + 1,
        "epoch": batches.epoch,
        "rollouts": batches.rollouts,
        "rows": batches.rows,
        "microbatches": len(batches.microbatches),
        "tokens": batches.row_tokens,
        "fill": batches.row_tokens / max(batches.rows * index.layout.shape.length, 1),
        "trie_ratio": batches.view_tokens / batches.trie_tokens if batches.trie_tokens else None,
        "sampled_tokens": batches.sampled_tokens,
        "loss_tokens": batches.loss_tokens,
    }
    return row if sdcc_lambda is None else {**row, "sdcc_lambda": sdcc_lambda}


def _measured(outcome: Outcome, sampled_the_data: bool) -> dict[str, float | None]:
    """The part of a row that the devices computed; waits for them."""
    if outcome.scalars is None or outcome.metrics is None:
        return {"loss": None, "gradient_norm": None}
    scalars, metrics = jax.device_get((outcome.scalars, outcome.metrics))
    measured = {name: float(value) for name, value in scalars.items()} | losses.finalise(metrics)
    if not sampled_the_data:
        measured |= {name: None for name in measured if name.startswith(AGAINST_THE_ENGINE)}
    return measured


def _announce(reporter: Reporter, config: RunConfig, made: _Prepared, begun: int) -> None:
    index = made.index
    for refusal in index.refused[:SHOWN]:
        reporter.say(f"refused: {refusal}")
    more = f" ({len(index.refused) - SHOWN} not shown)" if len(index.refused) > SHOWN else ""
    reporter.say(f"data: {len(index.ids)} rollouts used, {len(index.refused)} refused{more}")
    lost = int(index.sampled.sum() - index.edges.sum())
    if lost:
        reporter.say(f"{index.layout.method}: {lost} of {int(index.sampled.sum())} sampled tokens get no loss")
    reporter.say(f"model: {made.description}")
    if not config.model.sampled_the_data:
        reporter.say(f"logdiff: {card.NOT_SAMPLED_HERE}")
    if begun >= made.total:
        reporter.say(f"{config.run_dir}: finished at step {begun} of {made.total}; raise data.steps to go on")
    elif begun:
        reporter.say(f"continuing at step {begun} of {made.total}")
