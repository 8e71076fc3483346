"""Which parameters a run trains. The others are frozen: no gradient, no optimiser state, no copy of theirs exists."""

from __future__ import annotations

import fnmatch
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mwjax import model
from mwjax.train.config import ModelSection

Params = Any


class FrozenError(ValueError):
    """``model.frozen`` names no parameter, or all of them."""


class Parts(NamedTuple):
    """A decoder's parameters in two nested dicts, joined again by `mwjax.model.join_params`."""

    trained: Params
    frozen: Params


def trained_names(config: ModelSection, shape: model.ModelConfig) -> list[str]:
    """Dotted names of what a run trains: the adapters alone where there are any, else all that no pattern of
    ``model.frozen`` matches. Raises FrozenError for a pattern without a match, and where nothing is left."""
    if shape.lora is not None:
        return model.adapter_names(shape)
    names = [
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, _ in jax.tree_util.tree_leaves_with_path(model.abstract_params(shape))
    ]
    idle = [pattern for pattern in config.frozen if not fnmatch.filter(names, pattern)]
    left = [name for name in names if not any(fnmatch.fnmatchcase(name, pattern) for pattern in config.frozen)]
    if idle or not left:
        wrong = f"{', '.join(map(repr, idle))} match no parameter" if idle else "nothing would be left to train"
        raise FrozenError(f"model.frozen: {wrong}; the parameters are {', '.join(names)}")
    return left


def split(config: ModelSection, shape: model.ModelConfig, params: Params) -> Parts:
    """Parameters in two: those the run trains and those it does not. Raises FrozenError."""
    return Parts(*model.split_params(params, trained_names(config, shape)))


def stored(config: ModelSection, shape: model.ModelConfig, params: Params) -> Params:
    """Parameters in the types they are kept in: float32 those that are trained, ``model.frozen_dtype`` the others.
    Raises FrozenError."""
    trained, frozen = split(config, shape, params)
    return model.join_params(_cast(trained, jnp.float32), _cast(frozen, config.frozen_dtype))


def _cast(params: Params, dtype: Any) -> Params:
    return jax.tree.map(lambda leaf: leaf if leaf.dtype == dtype else leaf.astype(dtype), params)


def describe(config: ModelSection, shape: model.ModelConfig, params: Params) -> str | None:
    """How much of the parameters is trained, in words; None where it is all. Raises FrozenError."""
    trained, frozen = (sum(leaf.size for leaf in jax.tree.leaves(part)) for part in split(config, shape, params))
    if not frozen:
        return None
    how = ""
    if shape.lora is not None:
        on = "" if set(shape.lora.targets) == set(model.LORA_TARGETS) else f" on {', '.join(shape.lora.targets)}"
        how = f"LoRA rank {shape.lora.rank}, alpha {shape.lora.alpha:g}{on}: "
    kept = "" if config.frozen_dtype == "float32" else f", the others kept in {config.frozen_dtype}"
    return f"{how}{_short(trained)} of {_short(trained + frozen)} parameters trained{kept}"


def _short(count: int) -> str:
    """1234567 -> "1.2 M", 12345 -> "12,345"."""
    if count < 1_000_000:
        return f"{count:,}"
    return f"{count / 1e6:.1f} M" if count < 100_000_000 else f"{count / 1e6:,.0f} M"
