"""What a training run tells as it goes: metrics, evaluations, the card and the plots, on disk and on the terminal."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from mwjax import data, losses, model
from mwjax.rollouts import Refusal
from mwjax.train import card, curves, debug, evaluation, metrics_log, setup, trackers
from mwjax.train.config import RunConfig
from mwjax.train.mesh import leads, on_every_process, place_rows
from mwjax.train.optimizer import learning_rate
from mwjax.train.prepared import Prepared
from mwjax.train.progress import Reporter
from mwjax.train.recompiles import CompileCounter
from mwjax.train.step import Step
from mwjax.train.stopping import Stopping
from mwjax.train.update import Comparison, Outcome
from mwjax.tree import Rows

SHOWN = 20  # refusals shown in full
# Differences to what the engine recorded: they mean something only for the weights that sampled.
AGAINST_THE_ENGINE = ("logdiff_", "mismatch_", "perplexity_gap")


class TrainingDiverged(ValueError):
    """The loss or a gradient is no longer finite."""


class Log:
    """Writes a step's row once the next step is under way, so that the host never waits for the devices; and what else
    a run tells: evaluations, the card, the plots."""

    def __init__(
        self,
        config: RunConfig,
        made: Prepared,
        compiled: CompileCounter,
        reporter: Reporter,
        tracked: trackers.Trackers,
        stop: Stopping,
        begun: int,
    ) -> None:
        self.config, self.made, self.compiled, self.reporter = config, made, compiled, reporter
        self.tracked, self.stop, self.shown = tracked, stop, False
        self.evaluations = _evaluations(config, made, reporter, tracked, begun)
        self.rows = metrics_log.read(config.run_dir, until=begun)
        self.kept = metrics_log.Kept(config.run_dir, self.rows)
        # All at once: a schedule evaluated on a device waits for the step under way.
        self.rates = np.asarray(jax.vmap(learning_rate(config.optimizer, made.total))(np.arange(made.total)))
        self.pending: tuple[dict[str, Any], Outcome] | None = None
        self.since, self.compiling = time.perf_counter(), 0.0

    def add(self, batches: data.StepBatches, outcome: Outcome, sdcc_lambda: float | None) -> None:
        self.flush()
        self.pending = planned(batches, self.made.index, sdcc_lambda), outcome
        if self.config.debug:  # without jit the step is over by now, and its time would be counted as the one's before
            self.flush()

    def flush(self) -> None:
        """Waits for the step last added and writes its row. Raises TrainingDiverged."""
        if self.pending is None:
            return
        (row, outcome), self.pending = self.pending, None
        of_devices = measured(outcome, self.config.model.sampled_the_data)
        now = time.perf_counter()
        seconds = now - self.since - (self.compiled.seconds - self.compiling)
        self.since, self.compiling = now, self.compiled.seconds
        row |= {key: value for key, value in of_devices.items() if key not in row}
        row |= {
            "learning_rate": None if outcome.scalars is None else float(self.rates[row["step"] - 1]),
            "seconds": seconds,
            "tokens_per_second": row["tokens"] / max(seconds, 1e-9),
            "recompiles": self.compiled.recompiles,
        }
        self.rows.append(row)
        if leads():
            self.kept.added()
        self.reporter.step(row)
        self.tracked.add("train", row)
        for name in ("loss", "gradient_norm"):
            if row[name] is not None and not math.isfinite(row[name]):
                self.kept.keep()
                raise TrainingDiverged(
                    f"step {row['step']}: {name} is {row[name]}; nothing of it is saved, checkpoints in "
                    f"{self.config.run_dir} are of earlier steps. Lower optimizer.learning_rate, or look for the "
                    "operation with --debug"
                )

    def keep(self) -> None:
        """As `flush`; and all rows are on the disk, as a checkpoint of their last step needs them."""
        self.flush()
        self.kept.keep()

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
    config: RunConfig, made: Prepared, reporter: Reporter, tracked: trackers.Trackers, begun: int
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


def planned(batches: data.StepBatches, index: data.Index, sdcc_lambda: float | None) -> dict[str, Any]:
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


def measured(outcome: Outcome, sampled_the_data: bool) -> dict[str, float | None]:
    """The part of a row that the devices computed; waits for them."""
    if outcome.scalars is None or outcome.metrics is None:
        return {"loss": None, "gradient_norm": None}
    scalars, metrics = jax.device_get((outcome.scalars, outcome.metrics))
    row = {name: float(value) for name, value in scalars.items()} | losses.finalise(metrics)
    if sampled_the_data:
        return row
    return {name: None if name.startswith(AGAINST_THE_ENGINE) else value for name, value in row.items()}


def announce(
    reporter: Reporter,
    config: RunConfig,
    made: Prepared,
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
