"""One optimiser step on real batches: fill in what the loss compares with, sum gradients, divide once, update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from mwjax import losses
from mwjax.losses import Metrics, PolicyGradientConfig
from mwjax.train.mesh import by_rows, place
from mwjax.train.state import TrainState
from mwjax.train.step import Step
from mwjax.tree import Batch, Edges

Params = Any
ExactOld = Callable[[Sequence[Batch]], None]  # writes old_logprob of the edges, in place


class Comparison(NamedTuple):
    """What the loss compares the policy with. initial: the weights the run began with, or None where nothing needs
    them. reference, own_rows: whether they give ``ref_logprob``, and ``old_logprob`` on the method's own rows.
    exact: gives ``old_logprob`` under the exact prefixes."""

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
) -> tuple[TrainState, Outcome]:
    """The state after the micro-batches (numpy, this process's rows) of one step. ``state`` is donated.

    A step without any loss token changes nothing but the step count. Raises LossError for edges without what the loss
    needs (a log-prob that was never recorded, say).
    """
    if denominator == 0 or not any(np.any(batch.rows.edges.weight) for batch in microbatches):
        return step.skip(state), Outcome(None, None)
    if comparison.exact is not None:
        comparison.exact(microbatches)
    for batch in microbatches:
        _check(batch.rows.edges, loss, comparison)
    placed = [_compared(step, place(batch, by_rows(mesh)), comparison) for batch in microbatches]
    unit_log_ratios: list[Any] = [None] * len(placed)
    if loss.task == "policy_gradient" and loss.policy_gradient.algorithm == "gspo":
        unit_log_ratios = _unit_log_ratios(step, state.params, placed, loss.policy_gradient, mesh)
    total = step.zero()
    for batch, unit_log_ratio in zip(placed, unit_log_ratios):
        total = step.accumulate(state.params, total, batch, unit_log_ratio, np.float32(sdcc_lambda))
    metrics = total.metrics
    state, scalars = step.apply(state, total, np.asarray(denominator, total.numerator.dtype))
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


def _unit_log_ratios(
    step: Step, params: Params, placed: Sequence[Batch], config: PolicyGradientConfig, mesh: Mesh
) -> list[jax.Array]:
    """GSPO: every edge's mean log-ratio over its unit (rollout or view), over all micro-batches of the step."""
    edges: list[Edges] = [jax.device_get(batch.rows.edges) for batch in placed]
    ratios = [np.asarray(losses.edge_log_ratio(step.score(params, batch.rows), batch.rows.edges)) for batch in placed]
    unit = [e.rollout.astype(np.int64) << 32 | (e.view if config.unit == "view" else 0) for e in edges]
    active = [e.weight != 0 for e in edges]
    units = np.unique(np.concatenate([u[a] for u, a in zip(unit, active)]))
    total, count = np.zeros(len(units)), np.zeros(len(units))
    for u, a, ratio in zip(unit, active, ratios):
        place_of = np.searchsorted(units, u[a])
        total += np.bincount(place_of, ratio[a], len(units))
        count += np.bincount(place_of, minlength=len(units))
    means = total / count
    spread = [
        np.where(a, means[np.minimum(np.searchsorted(units, u), len(units) - 1)], 0.0).astype(ratio.dtype)
        for u, a, ratio in zip(unit, active, ratios)
    ]
    return place(spread, by_rows(mesh))
