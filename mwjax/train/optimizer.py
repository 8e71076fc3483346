"""AdamW as MemoryWalker trains with it (section 5 of its settings: b1 0.9, b2 0.98, constant rate, clipping at 1)."""

from __future__ import annotations

from typing import Any

import jax
import optax

from mwjax.train.config import OptimizerConfig

Params = Any


def learning_rate(config: OptimizerConfig) -> optax.Schedule:
    """Constant rate after ``warmup_steps`` of linear warm-up. Update k (from 0) of the warm-up runs at
    ``(k + 1) / (warmup_steps + 1)`` of the rate, so that no update is wasted at rate 0."""

    def rate(count: jax.typing.ArrayLike) -> jax.typing.ArrayLike:
        return config.learning_rate * optax.linear_schedule(
            1.0 / (config.warmup_steps + 1), 1.0, max(config.warmup_steps, 1)
        )(count)

    return rate if config.warmup_steps else optax.constant_schedule(config.learning_rate)


def decayed(params: Params) -> Params:
    """Which leaves weight decay applies to: all but norm scales and biases, as is standard (their names say so:
    layers are stacked, so the rank does not). Same structure as ``params``, leaves are bool."""

    def one(path: tuple[Any, ...], _: Any) -> bool:
        names = [str(getattr(key, "key", getattr(key, "name", key))).lower() for key in path]
        return not any("norm" in name or "bias" in name for name in names)

    return jax.tree_util.tree_map_with_path(one, params)


def optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) after clipping to a global L2 norm of ``config.clip_norm``."""
    adamw = optax.adamw(
        learning_rate(config),
        b1=config.b1,
        b2=config.b2,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        mask=decayed,
    )
    return adamw if config.clip_norm is None else optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)
