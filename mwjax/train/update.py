"""One optimiser step on real batches: fill in what the loss compares with, sum gradients, divide once, update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from mwjax import losses
from mwjax.losses import Balance, Metrics, PolicyGradientConfig
from mwjax.train.mesh import on_every_process, place, place_values, replicated
from mwjax.train.state import TrainState
from mwjax.train.step import Step
from mwjax.tree import Batch, Edges, Rows

Params = Any
# Writes old_logprob of the edges of some micro-batches, in place; the numbers are those of the step's rollouts.
ExactOld = Callable[[Sequence[Batch], Sequence[int] | None], None]


class Comparison(NamedTuple):
    """What the loss compares the policy with. initial: the trained ones of the weights the run began with, or None
    where nothing needs them. reference, own_rows: whether they give ``ref_logprob``, and ``old_logprob`` on the
    method's own rows. exact: gives ``old_logprob`` under the exact prefixes."""

    initial: Params | None = None
    reference: bool = False
    own_rows: bool = False
    exact: ExactOld | None = None


class Outcome(NamedTuple):
    """Device arrays of one step, not waited for; both None for a step without loss tokens."""

    scalars: dict[str, jax.Array] | None
    metrics: Metrics | None


def update(
    step: Step,
    state: TrainState,
    microbatches: Sequence[Batch],
    denominator: float,
    loss: losses.LossConfig,
    comparison: Comparison,
    mesh: Mesh,
    sdcc_lambda: float = 0.0,
    *,
    loss_tokens: int | None = None,
    numbers: Sequence[int] | None = None,
) -> tuple[TrainState, Outcome]:
    """The state after the micro-batches (numpy, this process's rows) of one step. ``state`` is donated.

    loss_tokens, numbers: of the whole step, its loss tokens and its rollouts; where there is one process they may be
    left to be found in the micro-batches.

    A step without any loss token changes nothing but the step count. Raises LossError for edges without what the loss
    needs (a log-prob that was never recorded, say).
    """
    if loss_tokens is None:
        loss_tokens = sum(int(np.count_nonzero(batch.rows.edges.weight)) for batch in microbatches)
    if denominator == 0 or loss_tokens == 0:
        return step.skip(state), Outcome(None, None)
    if comparison.exact is not None:
        comparison.exact(microbatches, numbers)
    for batch in microbatches:
        _check(batch.rows.edges, loss, comparison)
    placed = [_compared(step, place(batch, mesh), comparison) for batch in microbatches]
    by_unit: list[Any] = [None] * len(placed)
    if loss.task == "policy_gradient" and loss.policy_gradient.algorithm == "gspo":
        means = unit_log_ratios(partial(step.score, state.params), placed, loss.policy_gradient, mesh)
        by_unit = [place_values(values, mesh) for values in means]
    total = step.zero()
    divisor = np.asarray(denominator, total.numerator.dtype)
    balance = _balance(step, state.params, placed, divisor, mesh) if loss.router_auxiliary else None
    for batch, unit_log_ratio in zip(placed, by_unit):
        weight = np.float32(sdcc_lambda)
        total = step.accumulate(state.params, total, batch, unit_log_ratio, weight, state.teacher, balance)
    metrics = total.metrics
    state, scalars = step.apply(state, total, divisor)
    return state, Outcome(scalars, metrics)


def _check(edges: Edges, loss: losses.LossConfig, comparison: Comparison) -> None:
    """As `losses.check_edges`, taking what the initial weights will fill in for granted."""
    known = np.zeros_like(edges.ref_logprob)
    losses.check_edges(
        edges._replace(
            ref_logprob=known if comparison.reference else edges.ref_logprob,
            old_logprob=known if comparison.own_rows else edges.old_logprob,
        ),
        loss,
    )


def _compared(step: Step, batch: Batch, comparison: Comparison) -> Batch:
    if not (comparison.reference or comparison.own_rows):
        return batch
    scored: Any = step.score(comparison.initial, batch.rows)
    edges = batch.rows.edges
    edges = edges._replace(
        ref_logprob=scored if comparison.reference else edges.ref_logprob,
        old_logprob=scored if comparison.own_rows else edges.old_logprob,
    )
    return batch._replace(rows=batch.rows._replace(edges=edges))


def _balance(step: Step, params: Params, placed: Sequence[Batch], denominator: np.ndarray, mesh: Mesh) -> Balance:
    """What the load-balancing term needs; of several micro-batches the sums have to be there before any gradient, which
    takes a forward pass. One alone gets zeros: the same program serves steps of one and of several."""
    if len(placed) == 1:

        def zeros(leaf: Any) -> jax.Array:
            # Not by jax.device_put: of several processes, it waits for all to have the same to put.
            everywhere, nothing = replicated(mesh), np.zeros(leaf.shape, leaf.dtype)
            return jax.make_array_from_callback(leaf.shape, everywhere, lambda _: nothing)

        return Balance(denominator, jax.tree.map(zeros, jax.eval_shape(step.routing, params, placed[0].rows)))
    sums = [step.routing(params, batch.rows) for batch in placed]
    return Balance(denominator, jax.tree.map(lambda *parts: sum(parts), *sums))


def unit_log_ratios(
    score: Callable[[Rows], Any], microbatches: Sequence[Batch], config: PolicyGradientConfig, mesh: Mesh
) -> list[np.ndarray]:
    """GSPO's ``unit_log_ratio`` [B, E] of every micro-batch: an edge's mean log-ratio over its unit (rollout or view)
    among all of them. ``score`` gives the policy's log-probs [B, E]. Batches are placed on the mesh, B is over all
    processes."""
    edges: list[Edges] = [on_every_process(batch.rows.edges, mesh) for batch in microbatches]
    scored = [on_every_process(score(batch.rows), mesh) for batch in microbatches]
    ratios = [np.asarray(losses.edge_log_ratio(logprob, batch)) for logprob, batch in zip(scored, edges)]
    unit = [e.rollout.astype(np.int64) << 32 | (e.view if config.unit == "view" else 0) for e in edges]
    active = [e.weight != 0 for e in edges]
    units, number = np.unique(np.concatenate([u[a] for u, a in zip(unit, active)]), return_inverse=True)
    values = np.concatenate([ratio[a] for ratio, a in zip(ratios, active)])
    means = np.bincount(number, values, len(units)) / np.bincount(number, minlength=len(units))
    return [
        np.where(a, means[np.searchsorted(units, u).clip(max=len(units) - 1)], 0.0).astype(ratio.dtype)
        for u, a, ratio in zip(unit, active, ratios)
    ]
