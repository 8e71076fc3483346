"""One optimiser step in pure functions: gradient sums over fixed-shape micro-batches, one division, one update.

Each function compiles once. On a mesh, rows, positions, parameters and vocabulary are spread as `mwjax.model.sharding`
says, and sums over devices are part of the functions: no number depends on how the work is spread, beyond rounding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh, NamedSharding

from mwjax import losses, model
from mwjax.losses import Balance, Metrics
from mwjax.model import sharding
from mwjax.model.attention import check_platform
from mwjax.train.mesh import replicated
from mwjax.train.optimizer import schedule_on
from mwjax.train.state import TrainState
from mwjax.train.state import shardings as state_shardings
from mwjax.tree import Batch, Rows

Params = Any


@dataclass(frozen=True)
class StepConfig:
    """Static choices of a step. ``sdcc`` says whether the distillation term exists at all (False: teacher and pairs of
    a batch are never looked at); ``ema_decay`` is that of its averaged teacher (None: the teacher is the student);
    ``dtype`` is that of the activations; the others are `model.forward`'s. ``mesh``: None for one device."""

    model: model.ModelConfig
    loss: losses.LossConfig = field(default_factory=losses.LossConfig)
    sdcc: bool = False
    ema_decay: float | None = None
    attention: str | Callable[..., jax.Array] = "blockwise"
    dtype: str = "float32"
    remat: str = "none"
    scan: bool = True
    mesh: Mesh | None = None


class Total(NamedTuple):
    """Sums over micro-batches, before any division: gradients (as the trained parameters), the loss's numerator,
    metrics."""

    gradients: Params
    numerator: jax.Array
    metrics: Metrics


class Step(NamedTuple):
    """The jitted functions of a step; everything named ``params`` is of the trained parameters only: the frozen ones
    the functions know.

    zero() -> Total; accumulate(params, total, batch, unit_log_ratio, sdcc_lambda, teacher, balance) -> Total
    (``total`` is donated; teacher: `TrainState.teacher`; balance: with ``loss.router_auxiliary``, else None);
    routing(params, rows) -> what the routers do with some rows;
    apply(state, total, denominator) -> (state, scalars) (``state`` is donated); skip(state) -> state, one step on
    without an update; score(params, rows) -> log-probs [B, E] of the edges, spread as they are; score_exact: of
    rows of another shape.
    """

    zero: Callable[[], Total]
    accumulate: Callable[..., Total]
    routing: Callable[[Params, Rows], model.Routing]
    apply: Callable[..., tuple[TrainState, dict[str, jax.Array]]]
    skip: Callable[[TrainState], TrainState]
    score: Callable[[Params, Rows], jax.Array]
    score_exact: Callable[[Params, Rows], jax.Array]


COMPILED = ("zero", "accumulate", "routing", "apply", "skip", "score", "score_exact")


def on_mesh(config: StepConfig, mesh: Mesh) -> StepConfig:
    """``config`` for a mesh. Raises ValueError where the mesh does not divide the decoder, and for an attention that
    does not run on its devices."""
    if isinstance(config.attention, str):
        check_platform(config.attention, mesh.devices.flat[0].platform)
    problems = sharding.misfits(config.model, mesh)
    if problems:
        raise ValueError("the mesh does not fit the model: " + "; ".join(problems))
    return config if mesh.size == 1 else dataclasses.replace(config, mesh=mesh)


def parameter_shardings(config: model.ModelConfig, mesh: Mesh, params: Params) -> Params:
    """Where ``params`` (all of a decoder's parameters, or some) lie on a mesh, nested as they are."""
    if mesh.size == 1:
        return jax.tree.map(lambda _: replicated(mesh), params)
    whole = sharding.shardings(model.logical_axes(config), mesh)
    return model.split_params(whole, set(flatten_dict(params, sep=".")))[0]


def hidden_states(params: Params, rows: Rows, config: StepConfig) -> jax.Array:
    """Hidden states [B, T, D] of some rows after the final norm."""
    return routed(params, rows._replace(token_weight=None), config)[0]


def routed(params: Params, rows: Rows, config: StepConfig) -> tuple[jax.Array, model.Routing | None]:
    """Hidden states [B, T, D] of some rows after the final norm, and what the routers did with their tokens, where the
    decoder has experts and the rows say what counts."""
    return model.forward_routed(
        params,
        config.model,
        jnp.asarray(rows.tokens),
        jnp.asarray(rows.positions),
        jnp.asarray(rows.visible_until),
        None if rows.token_weight is None else jnp.asarray(rows.token_weight),
        attention=config.attention,
        dtype=config.dtype,
        remat=config.remat,
        scan=config.scan,
        index=None if rows.index is None else jnp.asarray(rows.index),
        mesh=config.mesh,
    )


def loss_sums(
    params: Params,
    batch: Batch,
    config: StepConfig,
    *,
    unit_log_ratio: jax.Array | None = None,
    sdcc_lambda: float | jax.Array = 0.0,
    teacher: Params = None,
    balance: Balance | None = None,
) -> tuple[jax.Array, Metrics]:
    """The loss's numerator and the metric sums of one micro-batch; arguments as in `losses.batch_loss`.

    teacher: SDCC's teacher, which runs on the teacher rows, as ``params``; None: the same weights. Either is under a
    stop-gradient.
    """
    unembedding = model.unembedding(params, config.model)
    taught = None
    if config.sdcc:
        assert batch.teacher is not None and batch.pairs is not None  # the sdcc method builds them
        constant = jax.lax.stop_gradient(params if teacher is None else teacher)
        hidden = hidden_states(constant, batch.teacher, config)
        taught = losses.Teacher(hidden, model.unembedding(constant, config.model), batch.pairs)
    hidden, routing = routed(params, batch.rows, config)
    return losses.batch_loss(
        hidden,
        unembedding,
        batch.rows.edges,
        config.loss,
        teacher=taught,
        sdcc_lambda=sdcc_lambda,
        unit_log_ratio=unit_log_ratio,
        routing=routing,
        balance=balance,
        mesh=config.mesh,
    )


def gradient_sums(
    params: Params,
    batch: Batch,
    config: StepConfig,
    *,
    unit_log_ratio: jax.Array | None = None,
    sdcc_lambda: float | jax.Array = 0.0,
    frozen: Params = None,
    teacher: Params = None,
    balance: Balance | None = None,
) -> Total:
    """Numerator, metric sums and the numerator's gradient with respect to ``params`` of one micro-batch.

    frozen: the decoder's other parameters; teacher: as ``params``, see `loss_sums`; balance: see `losses.batch_loss`.
    """
    others = {} if frozen is None else frozen
    averaged = None if teacher is None else model.join_params(teacher, others)

    def loss(params: Params) -> tuple[jax.Array, Metrics]:
        whole = model.join_params(params, others)
        return loss_sums(
            whole,
            batch,
            config,
            unit_log_ratio=unit_log_ratio,
            sdcc_lambda=sdcc_lambda,
            teacher=averaged,
            balance=balance,
        )

    (numerator, metrics), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    return Total(gradients, numerator, metrics)


def logprobs(params: Params, rows: Rows, config: StepConfig) -> jax.Array:
    """Log-probs [B, E] of the edges' targets, at their temperature; without gradient."""
    hidden, edges = hidden_states(params, rows, config), rows.edges
    temperature = jnp.where(edges.weight != 0, edges.temperature, 1.0)
    return losses.edge_logprobs(
        hidden,
        model.unembedding(params, config.model),
        jnp.asarray(edges.parent),
        jnp.asarray(edges.target),
        temperature,
        vocab_chunk=config.loss.vocab_chunk,
        mesh=config.mesh,
    ).logprob


def build(
    config: StepConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    params: Params,
    example: Batch,
    frozen: Params = None,
) -> Step:
    """The step functions. ``params`` (what is trained) and ``example`` give shapes only (arrays or
    ``jax.ShapeDtypeStruct``); ``frozen`` are the decoder's other parameters, where `parameter_shardings` says.

    Raises ValueError as `on_mesh`.
    """
    frozen = {} if frozen is None else frozen
    # As an array: a Python 0 would be the static branch without the distillation term's metrics.
    no_weight = np.float32(0)
    # Shapes do not depend on the attention, and a kernel may take no row that is not spread over ``context``.
    alone = dataclasses.replace(config, attention="blockwise") if isinstance(config.attention, str) else config
    shapes = jax.eval_shape(
        lambda f, p, b, w: gradient_sums(p, b, alone, sdcc_lambda=w, frozen=f, balance=Balance(w)),
        frozen,
        params,
        example,
        no_weight,
    )
    config = on_mesh(config, mesh)

    def zero() -> Total:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def accumulate(
        frozen: Params,
        params: Params,
        total: Total,
        batch: Batch,
        unit_log_ratio: jax.Array | None,
        sdcc_lambda: jax.Array,
        teacher: Params,
        balance: Balance | None = None,
    ) -> Total:
        fresh = gradient_sums(
            params,
            batch,
            config,
            unit_log_ratio=unit_log_ratio,
            sdcc_lambda=sdcc_lambda,
            frozen=frozen,
            teacher=teacher,
            balance=balance,
        )
        return Total(
            jax.tree.map(jnp.add, total.gradients, fresh.gradients),
            total.numerator + fresh.numerator,
            losses.combine(total.metrics, fresh.metrics),
        )

    def routing(frozen: Params, params: Params, rows: Rows) -> model.Routing:
        sums = routed(model.join_params(params, frozen), rows, config)[1]
        assert sums is not None  # asked for with experts only
        return sums

    def apply(state: TrainState, total: Total, denominator: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        gradients = jax.tree.map(lambda leaf: (leaf / denominator).astype(leaf.dtype), total.gradients)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        teacher = state.teacher
        if teacher is not None:
            assert config.ema_decay is not None
            teacher = optax.incremental_update(params, teacher, 1 - config.ema_decay)
        scalars = {"loss": total.numerator / denominator, "gradient_norm": optax.tree.norm(gradients)}
        return TrainState(params, opt_state, state.step + 1, teacher), scalars

    def skip(state: TrainState) -> TrainState:
        return state._replace(opt_state=schedule_on(state.opt_state), step=state.step + 1)

    def score(frozen: Params, params: Params, rows: Rows) -> jax.Array:
        return logprobs(model.join_params(params, frozen), rows, config)

    def score_exact(frozen: Params, params: Params, rows: Rows) -> jax.Array:
        return logprobs(model.join_params(params, frozen), rows, config)

    everywhere, by_edge = replicated(mesh), NamedSharding(mesh, sharding.TOKENS)
    trained = parameter_shardings(config.model, mesh, params)
    total: Any = (trained, everywhere, everywhere)
    after = state_shardings(params, optimizer, trained, averaged=config.ema_decay is not None)
    return Step(
        jax.jit(zero, out_shardings=Total(*total)),
        partial(jax.jit(accumulate, donate_argnums=2, out_shardings=Total(*total)), frozen),
        partial(jax.jit(routing, out_shardings=everywhere), frozen),
        jax.jit(apply, donate_argnums=0, out_shardings=(after, everywhere)),
        jax.jit(skip, donate_argnums=0, out_shardings=after),
        partial(jax.jit(score, out_shardings=by_edge), frozen),
        partial(jax.jit(score_exact, out_shardings=by_edge), frozen),
    )
