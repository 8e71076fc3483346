"""Hugging Face model folders out: config.json, safetensors and tokenizer files, without torch."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from safetensors import SafetensorError
from safetensors.numpy import save_file

from mwjax.model.config import ModelConfig
from mwjax.model.decoder import Params, abstract_params
from mwjax.model.errors import ModelFilesError
from mwjax.model.files import DTYPES, EMBEDDING, HEAD, Stored, Tensor, headers, read_json, tensors_of
from mwjax.model.hub import CONFIG, INDEX, WEIGHTS, upload
from mwjax.rollouts.storage import is_local

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
GENERATION = "generation_config.json"


def save(
    folder: os.PathLike[str] | str,
    config: ModelConfig,
    params: Params,
    *,
    dtype: Any = None,
    source: os.PathLike[str] | str | None = None,
    tokenizer: os.PathLike[str] | str | None = None,
    overwrite: bool = False,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a folder that transformers and `load` read. It appears complete or not at all.

    Args:
      folder: where to; in object storage too, where config.json appears last.
      params: arrays of jax or numpy.
      dtype: float32, float16 or bfloat16; None keeps the parameters' own.
      source: folder the model came from: its tokenizer files are copied, its config.json is kept where it still
        describes ``config``, and its division into files unless one would be larger than ``max_shard_bytes``. So what
        `load` read with dtype None is written back equal to the byte.
      tokenizer: folder, or tokenizer.json, from which to copy tokenizer files in place of those of ``source``.
      overwrite: replace a folder that exists and is not empty.
      max_shard_bytes: more than that is split into shards with an index.

    Raises:
      ModelFilesError: the folder is not empty, the parameters do not fit the configuration, or writing failed.
    """
    check_free(folder, overwrite)
    folder = os.path.expanduser(folder)
    problems = _unfit(config, params, dtype)
    if problems:
        raise ModelFilesError(folder, problems)
    beside = Path(folder).parent if is_local(folder) else None
    try:
        if beside is not None:
            beside.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{epath.Path(folder).name}.", dir=beside))
    except OSError as error:
        raise ModelFilesError(folder, [f"cannot create it: {error}"]) from None
    try:
        origin = None if source is None else Path(source)
        written = _write_weights(temporary, params, _shards(config, params, dtype, origin, max_shard_bytes), dtype)
        _write_config(temporary, config, written, origin)
        _copy_tokenizer(temporary, origin if tokenizer is None else Path(tokenizer))
        _let_others_read(temporary)
        if is_local(folder):
            _move(temporary, Path(folder))
        else:
            upload(temporary, os.fspath(folder))
    except (OSError, SafetensorError) as error:
        changed = ", nothing was changed" if is_local(folder) else ""
        raise ModelFilesError(folder, [f"writing failed{changed}: {error}"]) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_free(folder: os.PathLike[str] | str, overwrite: bool = False) -> None:
    """Raises `ModelFilesError` where `save` would refuse to write because of what is there already."""
    target = epath.Path(folder).expanduser()
    if target.exists() and not overwrite and (not target.is_dir() or any(target.iterdir())):
        problem = "exists already and is not empty; choose another name, or overwrite it (overwrite=True, --overwrite)"
        raise ModelFilesError(folder, [problem])


def _get(tree: Params, keys: tuple[str, ...]) -> Any:
    for key in keys:
        tree = tree[key]
    return tree


def _unfit(config: ModelConfig, params: Params, dtype: Any) -> list[str]:
    def shapes(tree: Params) -> dict[str, tuple[int, ...]]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {"/".join(str(part.key) for part in path): tuple(leaf.shape) for path, leaf in leaves}

    if config.lora is not None:
        return ["the weights of adapters have no place there; mwjax.model.merge_adapters folds them into the others"]
    expected, given = shapes(abstract_params(config)), shapes(params)
    problems = [f"parameter {name} is missing" for name in expected.keys() - given.keys()]
    problems += [f"parameter {name} is not part of this model" for name in given.keys() - expected.keys()]
    problems += [
        f"parameter {name} has shape {given[name]}, the configuration asks for {expected[name]}"
        for name in expected.keys() & given.keys()
        if expected[name] != given[name]
    ]
    dtypes = (
        {jnp.dtype(leaf.dtype).name for leaf in jax.tree.leaves(params)} if dtype is None else {jnp.dtype(dtype).name}
    )
    problems += [
        f"{name} parameters cannot be saved; pass dtype, one of {', '.join(DTYPES.values())}"
        for name in sorted(dtypes - set(DTYPES.values()))
    ]
    return sorted(problems)


class _Shards(NamedTuple):
    """Which tensors go into which file, and the text of the index (None: there is one file)."""

    files: dict[str, list[Tensor]]
    index_text: str | None


def _shards(config: ModelConfig, params: Params, dtype: Any, source: Path | None, max_shard_bytes: int) -> _Shards:
    tensors = tensors_of(config)
    origin: dict[str, Stored] = {}
    if source is not None:
        with contextlib.suppress(ModelFilesError):  # a source may hold tokenizer files only
            origin = headers(source)[0]
    if config.tied and HEAD in origin:  # the source repeats the embedding: so do we
        declaration = next(tensor.declaration for tensor in tensors if tensor.name == EMBEDDING)
        tensors.append(Tensor(HEAD, declaration, ("embedding",), ()))

    def size(tensor: Tensor) -> int:
        leaf = _get(params, tensor.path)
        count = math.prod(leaf.shape[len(tensor.slot) :])
        return count * jnp.dtype(leaf.dtype if dtype is None else dtype).itemsize

    if {tensor.name for tensor in tensors} == set(origin):
        kept: dict[str, list[Tensor]] = {}
        for tensor in tensors:
            kept.setdefault(origin[tensor.name].file.name, []).append(tensor)
        if all(sum(map(size, shard)) <= max_shard_bytes for shard in kept.values()):
            return _Shards(kept, _index(kept, size, source))
    shards: list[list[Tensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + size(tensor) > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += size(tensor)
    if len(shards) == 1:
        return _Shards({WEIGHTS: shards[0]}, None)
    files = {f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard for number, shard in enumerate(shards, 1)}
    return _Shards(files, _index(files, size, None))


def _index(files: Mapping[str, list[Tensor]], size: Callable[[Tensor], int], source: Path | None) -> str | None:
    """The text of model.safetensors.index.json; that of ``source`` where it says the same."""
    total = sum(size(tensor) for shard in files.values() for tensor in shard)
    if source is not None:
        if not (source / INDEX).is_file():
            return None
        text = (source / INDEX).read_text(encoding="utf-8")
        metadata = json.loads(text).get("metadata")
        if isinstance(metadata, dict) and metadata.get("total_size") == total:
            return text
    weight_map = {tensor.name: file for file, shard in files.items() for tensor in shard}
    values = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(values, indent=2) + "\n"


def _write_weights(folder: Path, params: Params, shards: _Shards, dtype: Any) -> str:
    """Write the weights, one file in memory at a time; returns the name of their dtype."""
    for file, tensors in shards.files.items():
        save_file(dict(_arrays(params, tensors, dtype)), folder / file, metadata={"format": "pt"})
    if shards.index_text is not None:
        (folder / INDEX).write_text(shards.index_text, encoding="utf-8")
    return jnp.dtype(params["embedding"].dtype if dtype is None else dtype).name


def _arrays(params: Params, shard: list[Tensor], dtype: Any) -> Iterator[tuple[str, np.ndarray]]:
    for tensor in shard:
        leaf = _get(params, tensor.path)
        array = np.asarray(leaf[tensor.slot])
        if dtype is not None:
            array = array.astype(jnp.dtype(dtype))
        yield tensor.name, np.ascontiguousarray(tensor.declaration.to_file(array))


def _write_config(folder: Path, config: ModelConfig, dtype: str, source: Path | None) -> None:
    values = {**config.to_hf(), "dtype": dtype, "torch_dtype": dtype}
    text = json.dumps(values, indent=2) + "\n"
    if source is not None and (source / CONFIG).is_file():
        original = read_json(source, CONFIG)
        if ModelConfig.from_hf(original) == config and original.get("dtype", original.get("torch_dtype")) == dtype:
            text = (source / CONFIG).read_text(encoding="utf-8")
        else:
            text = json.dumps({**original, **values}, indent=2) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")
    if source is not None and (source / GENERATION).is_file():
        shutil.copyfile(source / GENERATION, folder / GENERATION)


def _copy_tokenizer(folder: Path, origin: Path | None) -> None:
    if origin is not None and origin.is_file():
        shutil.copyfile(origin, folder / "tokenizer.json")
    elif origin is not None:
        for name in TOKENIZER_FILES:
            if (origin / name).is_file():
                shutil.copyfile(origin / name, folder / name)


def _let_others_read(folder: Path) -> None:
    """Temporary folders and safetensors files are made for their owner alone."""
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o644)


def _move(temporary: Path, folder: Path) -> None:
    """Put the finished folder in place; one that was there is kept until the new one stands."""
    if folder.exists():
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        os.rename(folder, aside / "old")
        try:
            os.rename(temporary, folder)
        except OSError:
            os.rename(aside / "old", folder)
            raise
        shutil.rmtree(aside)
    else:
        os.rename(temporary, folder)
