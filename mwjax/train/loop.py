"""A training run: from a configuration to a finished run directory, continuing one that was stopped."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
import optax
from etils import epath
from jax.sharding import Mesh

from mwjax import data, losses, model
from mwjax.model.attention import check_rows
from mwjax.model.sharding import CONTEXT
from mwjax.rollouts import Refusal
from mwjax.train import (
    agreement,
    card,
    curves,
    debug,
    evaluation,
    exact,
    frozen,
    load,
    metrics_log,
    setup,
    state,
    trackers,
    trainable,
)
from mwjax.train.checkpoint import Checkpoints
from mwjax.train.config import RunConfig
from mwjax.train.mesh import AnyProcess, leads, make_mesh, on_every_process, place_rows, share
from mwjax.train.optimizer import learning_rate, optimizer
from mwjax.train.progress import Reporter, measuring
from mwjax.train.recompiles import CompileCounter
from mwjax.train.run_directory import claimed
from mwjax.train.step import COMPILED, Step, build, parameter_shardings
from mwjax.train.stop import StopOnSignal
from mwjax.train.update import Comparison, Outcome, update
from mwjax.tree import Batch, Edges, Rows, collate

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
        return _train(config, run_dir, _prepare(config))


@dataclass(frozen=True)
class _Prepared:
    """What a run is made of before it starts. digest and description are of the initial weights: ``params``, which are
    trained, and ``frozen``, whose digest is None where all are trained; adapters are not in a digest, they go by their
    seed. held: the rollouts to evaluate on."""

    mesh: Mesh
    shape: model.ModelConfig
    params: Any
    frozen: Any
    digest: str
    frozen_digest: str | None
    description: str
    index: data.Index
    source: data.StepSource
    total: int
    held: evaluation.HeldOut | None


def _prepare(config: RunConfig) -> _Prepared:
    mesh = make_mesh(config.mesh)
    shape, params = setup.decoder(config.model, mesh)
    _, base = model.split_params(params, model.adapter_names(shape))
    digest, description = state.weights_digest(base), setup.describe(config.model, shape, params)
    index = data.scan(config.data.paths, setup.layout(config), vocab_size=shape.vocab_size, progress=measuring)
    source = setup.step_source(config, index, share(mesh))
    total = config.data.steps or source.steps_in(config.data.epochs)
    held = evaluation.scan(config, shape.vocab_size, measuring, share(mesh))
    parts = trainable.split(config.model, shape, params)
    frozen_digest = state.weights_digest(parts.frozen) if parts.frozen else None
    return _Prepared(mesh, shape, *parts, digest, frozen_digest, description, index, source, total, held)


def _train(config: RunConfig, run_dir: epath.Path, made: _Prepared) -> TrainResult:
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
            _announce(reporter, config, made, begun, restored.damaged if restored else (), changed)
            stopping = _Stopping(stop, made.mesh)
            log = _Log(config, made, compiled, reporter, tracked, stopping, begun)
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


class _Stopping:
    """Whether to stop on a signal: all processes learn it at the same place, whichever of them it came to."""

    def __init__(self, signal: StopOnSignal, mesh: Mesh) -> None:
        self._signal, self._any = signal, AnyProcess(mesh)

    def now(self) -> bool:
        """Whether any process has had a signal; waits until all have asked."""
        return any(agreement.gathered(self._signal.requested))

    def soon(self) -> bool:
        """The same as of the call before, where there are several processes, without waiting."""
        return self._any(self._signal.requested)


def _free(params: Any) -> None:
    """Gives the devices' memory back now, whoever still refers to the arrays."""
    for leaf in jax.tree.leaves(params):
        leaf.delete()


def _build(config: RunConfig, made: _Prepared, params: Any, transform: optax.GradientTransformation) -> Step:
    layout = made.index.layout
    example = collate([], [], layout.shape, layout.rows_per_microbatch)
    step = build(setup.step_config(config, made.shape), transform, made.mesh, params, example, made.frozen)
    return debug.checked(step, made.index.ids) if config.debug else step


def _steps(
    config: RunConfig,
    made: _Prepared,
    step: Step,
    comparison: Comparison,
    current: state.TrainState,
    checkpoints: Checkpoints,
    log: _Log,
    stop: _Stopping,
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
            log.flush()  # and stop here if the loss is not finite: such weights are not worth keeping
            by = config.checkpoint
            checkpoints.save(done, current, log.scores(by.best_by) if by.best else {})
            log.write_card()
        if stopping:
            break
    return done


def _comparison(config: RunConfig, made: _Prepared, initial: Any, step: Step) -> Comparison:
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


class _Log:
    """Writes a step's row once the next step is under way, so that the host never waits for the devices; and what else
    a run tells: evaluations, the card, the plots."""

    def __init__(
        self,
        config: RunConfig,
        made: _Prepared,
        compiled: CompileCounter,
        reporter: Reporter,
        tracked: trackers.Trackers,
        stop: _Stopping,
        begun: int,
    ) -> None:
        self.config, self.made, self.compiled, self.reporter = config, made, compiled, reporter
        self.tracked, self.stop, self.shown = tracked, stop, False
        self.evaluations = _evaluations(config, made, reporter, tracked, begun)
        self.rows = metrics_log.read(config.run_dir, until=begun)
        # All at once: a schedule evaluated on a device waits for the step under way.
        self.rates = np.asarray(jax.vmap(learning_rate(config.optimizer, made.total))(np.arange(made.total)))
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
            "learning_rate": None if outcome.scalars is None else float(self.rates[row["step"] - 1]),
            "seconds": seconds,
            "tokens_per_second": row["tokens"] / max(seconds, 1e-9),
            "recompiles": self.compiled.recompiles,
        }
        self.rows.append(row)
        if leads():
            metrics_log.append(self.config.run_dir, row)
        self.reporter.step(row)
        self.tracked.add("train", row)
        for name in ("loss", "gradient_norm"):
            if row[name] is not None and not math.isfinite(row[name]):
                raise TrainingDiverged(
                    f"step {row['step']}: {name} is {row[name]}; nothing of it is saved, checkpoints in "
                    f"{self.config.run_dir} are of earlier steps. Lower optimizer.learning_rate, or look for the "
                    "operation with --debug"
                )

    def evaluate(self, step: int, params: Any) -> bool:
        """Evaluates the (trained) weights after ``step`` steps if that is due. Its time is not the next step's. False
        where a signal cut it short: the run that goes on from this step makes up for it."""
        if not self.evaluations.wanted(step):
            return True
        self.flush()

        def go_on(done: int, total: int) -> bool:
            self.reporter.evaluating(done, total)
            return not self.stop.soon()

        finished = self.evaluations.add(step, model.join_params(params, self.made.frozen), go_on)
        self.since, self.compiling = time.perf_counter(), self.compiled.seconds
        return finished

    def scores(self, name: Literal["loss", "evaluation_loss"]) -> dict[int, float]:
        """What checkpoints are ranked by, of all steps so far."""
        return metrics_log.scores(self.rows if name == "loss" else self.evaluations.rows)

    def write_card(self) -> None:
        """The card and the plots as of the rows written so far. Their time is not the next step's."""
        begun = time.perf_counter()
        made, config, evaluated = self.made, self.config, self.evaluations.rows
        if not leads():
            return
        card.write(config, made.index, made.description, made.digest, made.total, self.rows, evaluated)
        if config.tracking.plots:
            curves.draw(config.run_dir, self.rows, evaluated)
        self.since += time.perf_counter() - begun

    def show_rollout(self, step: Step, params: Any, comparison: Comparison, batches: data.StepBatches) -> None:
        """Prints the first rollout of a step token by token, as `debug` lists it."""
        self.shown, made, microbatches = True, self.made, batches.microbatches
        number = debug.first_rollout(microbatches)
        if number is None:
            return
        if comparison.exact is not None:
            comparison.exact(microbatches, batches.numbers.tolist())

        def score(params: Any, rows: Rows) -> np.ndarray:
            return on_every_process(step.score(params, place_rows(rows, made.mesh)), made.mesh)

        old = functools.partial(score, comparison.initial) if comparison.own_rows else None
        items = debug.listing(microbatches, number, functools.partial(score, params), old)
        method = made.index.layout.method
        title = f"step {batches.step + 1}: rollout {made.index.ids[number]!r} as rows of {method} train it"
        for text in debug.lines(items, title, self.reporter.console.width, debug.text_of(self.config)):
            self.reporter.show(text)


def _evaluations(
    config: RunConfig, made: _Prepared, reporter: Reporter, tracked: trackers.Trackers, begun: int
) -> evaluation.Evaluations:
    def show(row: Mapping[str, Any]) -> None:
        reporter.evaluated(row)
        tracked.add("evaluation", row)

    evaluate = None
    if made.held is not None:
        settings = setup.step_config(config, made.shape)
        evaluate = evaluation.build(made.held, settings, made.mesh, config.model.sampled_the_data)
    made_of = evaluation.Evaluations(config, made.total, made.held, evaluate, show, begun)
    _refusals(reporter, "held out, refused", made.held.index.refused if made.held else ())
    for note in made_of.notes(made.index.ids):
        reporter.say(note)
    return made_of


def _planned(batches: data.StepBatches, index: data.Index, sdcc_lambda: float | None) -> dict[str, Any]:
    """The part of a row that is known before the step has run."""
    row: dict[str, Any] = {
        "step": batches.step + 1,
        "epoch": batches.epoch,
        "rollouts": len(batches.numbers),
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


def _announce(
    reporter: Reporter,
    config: RunConfig,
    made: _Prepared,
    begun: int,
    damaged: Sequence[str],
    changed: Sequence[str],
) -> None:
    index = made.index
    _refusals(reporter, "refused", index.refused)
    reporter.say(f"data: {len(index.ids)} rollouts used, {len(index.refused)} refused")
    lost = int(index.sampled.sum() - index.edges.sum())
    if lost:
        reporter.say(f"{index.layout.method}: {lost} of {int(index.sampled.sum())} sampled tokens get no loss")
    reporter.say(f"model: {made.description}")
    if made.mesh.size < jax.device_count():
        reporter.say(f"devices: {made.mesh.size} of {jax.device_count()} used; mesh.fsdp or mesh.data takes more")
    if not config.model.sampled_the_data:
        reporter.say(f"logdiff: {card.NOT_SAMPLED_HERE}")
    for message in damaged:
        reporter.say(message)
    since = f"; changed since then: {', '.join(changed)}" if changed else ""
    if begun >= made.total:
        reporter.say(f"{config.run_dir}: finished at step {begun} of {made.total}; raise data.steps to go on{since}")
    elif begun:
        reporter.say(f"continuing at step {begun} of {made.total}{since}")


def _refusals(reporter: Reporter, kind: str, refused: Sequence[Refusal]) -> None:
    for refusal in refused[:SHOWN]:
        reporter.say(f"{kind}: {refusal}")
    if len(refused) > SHOWN:
        reporter.say(f"{kind}: {len(refused) - SHOWN} more, not shown")
