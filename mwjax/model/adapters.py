"""Low-rank adapters folded into the weights they adapt."""

from __future__ import annotations

import dataclasses

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from mwjax.model.config import ModelConfig
from mwjax.model.decoder import Params, adapter_names
from mwjax.model.parameters import split_params


def merge_adapters(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """The plain decoder that computes what the adapted one does: every target becomes ``W + alpha / rank * A B``, on
    the host and in float32 or wider. Other leaves are returned as they are; without ``config.lora`` all of them."""
    if config.lora is None:
        return config, params
    adapters, base = (flatten_dict(part) for part in split_params(params, adapter_names(config)))
    for *block, target in {path[:-1] for path in adapters}:
        a, b = (np.asarray(adapters[*block, target, factor]) for factor in ("a", "b"))
        weight = base[*block, target.removesuffix("_lora")]
        wide = np.promote_types(np.promote_types(a.dtype, b.dtype), np.float32)
        a, b = (
            a.astype(wide).reshape(len(a), -1, config.lora.rank),
            b.astype(wide).reshape(len(b), config.lora.rank, -1),
        )
        change = (config.lora.scale * (a @ b)).reshape(weight.shape)
        base[*block, target.removesuffix("_lora")] = np.asarray(weight).astype(wide) + change
    return dataclasses.replace(config, lora=None), unflatten_dict(base)
