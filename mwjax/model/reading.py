"""Hugging Face model folders in: config.json and safetensors, strictly and without torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mwjax.model.config import ModelConfig
from mwjax.model.decoder import Params, abstract_params
from mwjax.model.errors import ModelFilesError
from mwjax.model.files import (
    DTYPES,
    EMBEDDING,
    HEAD,
    Stored,
    Tensor,
    by_expert,
    headers,
    read_array,
    read_json,
    tensors_of,
)
from mwjax.model.hub import CONFIG, local_folder


def load(
    name: os.PathLike[str] | str,
    dtype: Any = jnp.float32,
    *,
    shardings: Callable[[ModelConfig, Params], Params] | None = None,
) -> tuple[ModelConfig, Params]:
    """Read config.json and the weights (one model.safetensors, or shards with an index).

    Args:
      name: a folder, a hub id or a folder in object storage; see `mwjax.model.local_folder`.
      dtype: of the parameters, whatever the files hold; None keeps what the files hold.
      shardings: gives the sharding of every parameter, nested as they are, from the configuration and their shapes;
        None puts all on the default device. One stacked parameter at a time is held in host memory.

    Raises:
      ModelFilesError: files missing or unreadable; or any tensor missing, unexpected, of the wrong shape or dtype: all
        such problems are listed together before any weight is read.
      UnsupportedModelError: config.json describes a model that is not supported.
    """
    with local_folder(name) as folder:
        config = read_config(folder)
        found, problems = headers(folder)
        stored = by_expert(found)
        problems += _misfits(config, stored)
        if problems:
            raise ModelFilesError(name, problems)
        abstract = abstract_params(config)
        return config, _read(config, stored, dtype, None if shardings is None else shardings(config, abstract))


def read_config(folder: Path) -> ModelConfig:
    """The configuration in a folder's config.json. Raises as `load`."""
    return ModelConfig.from_hf(read_json(folder, CONFIG))


def _misfits(config: ModelConfig, stored: Mapping[str, Stored]) -> list[str]:
    """What is missing, unexpected or of the wrong kind in a folder's files."""
    sizes = config.axis_sizes()
    shapes = {tensor.name: tensor.declaration.file_shape(sizes) for tensor in tensors_of(config)}
    ignored = {name for name in stored if name.endswith("rotary_emb.inv_freq")}  # a buffer old checkpoints carry
    problems = []
    if config.tied and HEAD in stored:
        ignored.add(HEAD)
        problems += _tied_copy(stored)
    problems += [f"missing tensor {name} {shapes[name]}" for name in shapes if name not in stored]
    for name, tensor in stored.items():
        if name in ignored:
            continue
        if name not in shapes:
            problems.append(f"unexpected tensor {name} {tensor.shape}")
            continue
        if tensor.shape != shapes[name]:
            problems.append(f"tensor {name} has shape {tensor.shape}, config.json asks for {shapes[name]}")
        if tensor.dtype not in DTYPES:
            problems.append(f"tensor {name} has dtype {tensor.dtype}; supported: {', '.join(DTYPES)}")
    return problems


def _tied_copy(stored: Mapping[str, Stored]) -> list[str]:
    """A tied model's file may repeat the embedding as lm_head.weight; a different one would be dropped silently."""
    embedding, head = stored.get(EMBEDDING), stored[HEAD]
    if embedding is None:
        return []
    if embedding[1:] == head[1:] and read_array(embedding, EMBEDDING).tobytes() == read_array(head, HEAD).tobytes():
        return []
    return [f"config.json says tie_word_embeddings, but {HEAD} differs from {EMBEDDING}"]


def _read(config: ModelConfig, stored: Mapping[str, Stored], dtype: Any, shardings: Params | None) -> Params:
    sizes = config.axis_sizes()
    by_path: dict[tuple[str, ...], list[Tensor]] = {}
    for tensor in tensors_of(config):
        by_path.setdefault(tensor.path, []).append(tensor)

    def read(path: Any, abstract: jax.ShapeDtypeStruct, *where: jax.sharding.Sharding) -> jax.Array:
        tensors = by_path[tuple(part.key for part in path)]
        target = jnp.dtype(DTYPES[stored[tensors[0].name].dtype] if dtype is None else dtype)
        array = np.empty(abstract.shape, target)
        for tensor in tensors:
            array[tensor.slot] = tensor.declaration.from_file(read_array(stored[tensor.name], tensor.name), sizes)
        if not where:
            return jnp.asarray(array)
        return jax.make_array_from_callback(array.shape, where[0], lambda part: array[part])

    spread = () if shardings is None else (shardings,)
    return jax.tree_util.tree_map_with_path(read, abstract_params(config), *spread)
