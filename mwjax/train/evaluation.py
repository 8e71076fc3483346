"""Held-out rollouts, scored while a run goes: the mean negative log-likelihood of their sampled tokens, each under
exactly the context it was sampled under, on prefix tries, whatever method is trained."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mwjax import data
from mwjax.losses.masking import active, only
from mwjax.model.attention import check_rows
from mwjax.model.sharding import CONTEXT
from mwjax.train import agreement, metrics_log
from mwjax.train.config import EvaluationConfig, RunConfig
from mwjax.train.exact import ROUND_TO, UNBOUNDED
from mwjax.train.mesh import WHOLE, Share, leads, place_rows, replicated
from mwjax.train.step import Params, StepConfig, logprobs, on_mesh
from mwjax.tree import Rows, RowShape

COMPILED = "evaluate_batch"

Scan = Callable[[Iterable[int], int], Iterable[int]]


class EvaluationError(ValueError):
    """Held-out rollouts that cannot be evaluated."""


@dataclass(frozen=True)
class HeldOut:
    """Held-out rollouts in rows of one shape. contents: a checksum of what they hold."""

    index: data.Index
    source: data.StepSource
    tokens: int
    contents: str


def scan(config: RunConfig, vocab_size: int, progress: Scan | None = None, share: Share = WHOLE) -> HeldOut | None:
    """The held-out rollouts of ``config.evaluation``; None where it names none. Reads them twice: the first time to
    find the longest context.

    Raises ValueError: no usable rollout, or none with a trainable sampled token.
    """
    wanted = config.evaluation
    if not wanted.paths:
        return None
    shape = _row_shape(config, vocab_size, progress)
    layout = data.Layout(
        "packed",
        shape,
        rollouts_per_step=config.data.rollouts_per_step,
        rows_per_microbatch=wanted.rows_per_batch or config.data.rows_per_microbatch,
    )
    try:
        index = data.scan(wanted.paths, layout, vocab_size=vocab_size, progress=progress)
    except ValueError as error:
        raise EvaluationError(f"evaluation.paths: {error}") from error
    tokens = int(index.edges.sum())
    if not tokens:
        raise EvaluationError(
            f"evaluation.paths: none of the {len(index.ids)} rollouts in {', '.join(wanted.paths)} has a trainable "
            "turn that sampled a token"
        )
    source = data.StepSource(index, process=share.part, processes=share.parts)
    return HeldOut(index, source, tokens, f"{zlib.crc32(np.sort(index.contents).tobytes()):08x}")


def _row_shape(config: RunConfig, vocab_size: int, progress: Scan | None) -> RowShape:
    """Rows of the training's length, or longer where a single context needs it: tries are split at forks, down to
    single contexts."""
    length = config.evaluation.row_length or config.data.row_length
    edges = config.data.edges_per_row or length
    try:
        index = data.scan(
            config.evaluation.paths, data.Layout("logittree", UNBOUNDED), vocab_size=vocab_size, progress=progress
        )
    except ValueError as error:
        raise EvaluationError(f"evaluation.paths: {error}") from error
    longest, most = np.concatenate([np.zeros((1, 4), np.int64), *index.needs])[:, :2].max(axis=0).tolist()
    if config.evaluation.row_length is None and longest > length:
        length = -(-longest // ROUND_TO) * ROUND_TO
    if most > edges:
        edges = -(-most // ROUND_TO) * ROUND_TO  # mesh.context cuts edges too
    return RowShape(length, edges)


def due(config: EvaluationConfig, step: int, total: int) -> bool:
    """Whether the weights after ``step`` of ``total`` steps are evaluated."""
    return step in (0, total) or bool(config.every and step % config.every == 0)


def overlap(held: HeldOut, trained: Collection[str]) -> list[str]:
    """Ids of held-out rollouts that are trained on as well."""
    known = set(trained)
    return [name for name in held.index.ids if name in known]


class Sums(NamedTuple):
    """Scalars over scored tokens: negative log-likelihood; number with a recorded log-prob, and of those the sum and
    the maximum of |log p - recorded log p|."""

    nll: jax.Array
    known: jax.Array
    logdiff: jax.Array
    largest: jax.Array


def batch_sums(params: Params, rows: Rows, config: StepConfig) -> Sums:
    """Sums over the edges of some rows."""
    mask, scored = active(rows.edges), logprobs(params, rows, config)
    recorded = jnp.asarray(rows.edges.rollout_logprob)
    known = mask & ~jnp.isnan(recorded)
    difference = jnp.abs(only(known, scored) - only(known, recorded))
    return Sums(-only(mask, scored).sum(), known.sum(), difference.sum(), difference.max(initial=0.0))


Evaluate = Callable[[Params, Callable[[int, int], bool]], dict[str, Any] | None]


def build(held: HeldOut, config: StepConfig, mesh: Mesh, sampled_the_data: bool) -> Evaluate:
    """The function that evaluates parameters placed on ``mesh``; compiled once.

    Called with parameters and ``go_on(done, total)``, which is asked between batches, it returns ``loss`` (mean
    negative log-likelihood per sampled token, in nats, at the temperature of the recorded log-probs), ``perplexity``,
    ``tokens``, ``logdiff_mean`` and ``logdiff_max_token`` (None unless ``sampled_the_data`` and log-probs
    were recorded), ``rollouts``, ``refused``, ``contents`` and ``seconds``; or None if ``go_on`` said no.
    """
    config = on_mesh(config, mesh)
    steps = held.source.steps_in(1)

    def evaluate_batch(params: Params, total: Sums, rows: Rows) -> Sums:
        fresh = batch_sums(params, rows, config)
        return Sums(
            total.nll + fresh.nll,
            total.known + fresh.known,
            total.logdiff + fresh.logdiff,
            jnp.maximum(total.largest, fresh.largest),
        )

    add = jax.jit(evaluate_batch, out_shardings=replicated(mesh))

    def evaluate(params: Params, go_on: Callable[[int, int], bool]) -> dict[str, Any] | None:
        begun = time.perf_counter()
        zero = np.float32(0)
        total = Sums(*jax.device_put((zero, np.int32(0), zero, zero), replicated(mesh)))
        for batches in data.iterate_steps(held.source, 0, steps):
            for batch in batches.microbatches:
                if isinstance(config.attention, str):
                    check_rows(config.attention, batch.rows, mesh.shape[CONTEXT])
                before, total = total, add(params, total, place_rows(batch.rows, mesh))
                jax.block_until_ready(before)  # one batch ahead, not all of them
            if not go_on(batches.step + 1, steps):
                return None
        sums = jax.device_get(total)
        known = int(sums.known) if sampled_the_data else 0
        loss = float(sums.nll) / held.tokens
        return {
            "loss": loss,
            "perplexity": math.exp(loss) if loss < 709 else math.inf,
            "tokens": held.tokens,
            "logdiff_mean": float(sums.logdiff) / known if known else None,
            "logdiff_max_token": float(sums.largest) if known else None,
            "rollouts": len(held.index.ids),
            "refused": len(held.index.refused),
            "contents": held.contents,
            "seconds": time.perf_counter() - begun,
        }

    return evaluate


class Evaluations:
    """The evaluations of one run, made where they are due and not there yet. Only process 0 writes."""

    def __init__(
        self,
        config: RunConfig,
        total: int,
        held: HeldOut | None,
        evaluate: Evaluate | None,
        show: Callable[[Mapping[str, Any]], None],
        begun: int | None = None,
    ) -> None:
        """evaluate: what `build` made for ``held``; show: is given every new row of ``evaluation.jsonl``; begun: the
        step the run goes on from, rows of later ones do not count."""
        self.config, self.total, self.held, self.evaluate, self.show = config, total, held, evaluate, show
        # All processes have to evaluate at the same steps, whatever their caches show of the file.
        self.rows = agreement.of_leader(metrics_log.read(config.run_dir, metrics_log.EVALUATION, begun))
        self._kept = metrics_log.Kept(config.run_dir, self.rows, metrics_log.EVALUATION)

    @property
    def newest(self) -> dict[str, Any] | None:
        """The row of the latest evaluation, None before the first."""
        return self.rows[-1] if self.rows else None

    def wanted(self, step: int) -> bool:
        """Whether the weights after ``step`` steps are due, and not evaluated yet."""
        done = any(row["step"] == step for row in self.rows)
        return self.evaluate is not None and due(self.config.evaluation, step, self.total) and not done

    def add(self, step: int, params: Params, go_on: Callable[[int, int], bool]) -> bool:
        """Evaluates the weights after ``step`` steps; False, and nothing is added, if ``go_on`` says no on the way."""
        assert self.evaluate is not None
        found = self.evaluate(params, go_on)
        if found is None:
            return False
        row = {"step": step, **found}
        self.rows.append(row)
        if leads():
            self._kept.added()
            self._kept.keep()
        self.show(row)
        return True

    def notes(self, trained: Collection[str]) -> list[str]:
        """What to know about the held-out rollouts of a run that trains on the ids ``trained``."""
        if self.held is None:
            return []
        index = self.held.index
        notes = [
            f"evaluation: {len(index.ids)} held-out rollouts used, {len(index.refused)} refused, "
            f"{self.held.tokens:,} sampled tokens, rows of {index.layout.shape.length:,} tokens"
        ]
        both = overlap(self.held, trained)
        if both:
            some = ", ".join(map(repr, both[:3])) + (", ..." if len(both) > 3 else "")
            notes.append(
                f"evaluation: {len(both)} of them are trained on as well ({some}): their loss says nothing about "
                "rollouts the model has not seen"
            )
        if any(row["contents"] != self.held.contents for row in self.rows):
            notes.append(
                f"evaluation: earlier rows of {metrics_log.EVALUATION} are of other held-out rollouts; they cannot be "
                "compared"
            )
        return notes
