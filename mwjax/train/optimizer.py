"""AdamW as MemoryWalker trains with it (section 5 of its settings: b1 0.9, b2 0.98, constant rate, clipping at 1), and
the usual schedules in place of the constant rate."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from mwjax.train.config import OptimizerConfig

Params = Any


class ScheduleError(ValueError):
    """A learning-rate schedule that does not fit into the run's steps."""


def learning_rate(config: OptimizerConfig, total: int) -> optax.Schedule:
    """Step (from 0) -> learning rate of its update, over a run of ``total`` steps.

    Step k of the warm-up runs at ``(k + 1) / (warmup_steps + 1)`` of the peak. Decays reach ``final_rate`` one step
    after the last: no update is wasted at rate 0. Raises ScheduleError where the warm-up leaves no step to decay over.
    """
    share = optax.join_schedules([_warmup(config.warmup_steps), _after_warmup(config, total)], [config.warmup_steps])
    return lambda step: config.learning_rate * share(step)


def _warmup(steps: int) -> optax.Schedule:
    return optax.linear_schedule(1.0 / (steps + 1), 1.0, max(steps, 1))


def _after_warmup(config: OptimizerConfig, total: int) -> optax.Schedule:
    """Share of the peak, by the number of steps since the warm-up."""
    if config.schedule == "constant":
        return optax.constant_schedule(1.0)
    left, final = total - config.warmup_steps, config.final_rate
    if left < 1:
        raise ScheduleError(
            f"optimizer.warmup_steps: {config.warmup_steps} of the run's {total} steps leave none for "
            f"optimizer.schedule={config.schedule} to decay over; lower warmup_steps, or set data.steps"
        )
    if config.schedule == "cosine":
        return optax.cosine_decay_schedule(1.0, left, alpha=final)
    decaying = left if config.schedule == "linear" else min(max(round(config.decay_share * total), 1), left)
    return optax.linear_schedule(1.0, final, decaying, transition_begin=left - decaying)


def decayed(params: Params) -> Params:
    """Which leaves weight decay applies to: all but norm scales and biases, as is standard (their names say so:
    layers are stacked, so the rank does not). Same structure as ``params``, leaves are bool."""

    def one(path: tuple[Any, ...], _: Any) -> bool:
        names = [str(getattr(key, "key", getattr(key, "name", key))).lower() for key in path]
        return not any("norm" in name or "bias" in name for name in names)

    return jax.tree_util.tree_map_with_path(one, params)


def optimizer(config: OptimizerConfig, total: int) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) after clipping to a global L2 norm of ``config.clip_norm``, for a
    run of ``total`` steps. Raises ScheduleError."""
    adamw = optax.adamw(
        learning_rate(config, total),
        b1=config.b1,
        b2=config.b2,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        mask=decayed,
    )
    if config.moments_dtype == "bfloat16":
        adamw = _moments_in_bfloat16(adamw)
    return adamw if config.clip_norm is None else optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)


def _moments_in_bfloat16(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Both moments rounded where they are stored; the update is computed in float32. (Optax's own option covers only
    the first.)"""

    def stored(state: Any, dtype: jnp.dtype) -> Any:
        return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, state)

    def init(params: Params) -> Any:
        return stored(inner.init(params), jnp.dtype("bfloat16"))

    def update(gradients: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        updates, state = inner.update(gradients, stored(state, jnp.dtype("float32")), params)
        return updates, stored(state, jnp.dtype("bfloat16"))

    return optax.GradientTransformation(init, update)


def schedule_on(opt_state: optax.OptState) -> optax.OptState:
    """The state after a step without an update: the schedule goes on, the moments stay."""
    counts = optax.tree.get_all_with_path(opt_state, "count", filtering=_of_schedule)
    return optax.tree.set(opt_state, _of_schedule, count=counts[0][1] + 1)


def _of_schedule(path: tuple[Any, ...], _: Any) -> bool:
    return getattr(path[-1], "tuple_name", None) == "ScaleByScheduleState"
