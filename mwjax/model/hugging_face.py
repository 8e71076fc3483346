"""Hugging Face model folders (config.json, safetensors, tokenizer files) in and out, strictly and without torch."""

from __future__ import annotations

import contextlib
import json
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
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from mwjax.model.config import ModelConfig
from mwjax.model.decoder import Params, abstract_params, declarations
from mwjax.model.errors import ModelFilesError
from mwjax.model.hub import CONFIG, INDEX, WEIGHTS, local_folder, upload
from mwjax.model.parameters import Declaration, is_declaration
from mwjax.rollouts.storage import is_local

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


class _Stored(NamedTuple):
    file: Path
    shape: tuple[int, ...]
    dtype: str


class _Tensor(NamedTuple):
    """A tensor of the files: ``path`` leads to its parameter, ``layer`` to the slice of it (None outside layers)."""

    name: str
    declaration: Declaration
    path: tuple[str, ...]
    layer: int | None


def load(name: os.PathLike[str] | str, dtype: Any = jnp.float32) -> tuple[ModelConfig, Params]:
    """Read config.json and the weights (one model.safetensors, or shards with an index).

    Args:
      name: a folder, a hub id or a folder in object storage; see `mwjax.model.local_folder`.
      dtype: of the parameters, whatever the files hold; None keeps what the files hold.

    Raises:
      ModelFilesError: files missing or unreadable; or any tensor missing, unexpected, of the wrong shape or dtype: all
        such problems are listed together before any weight is read.
      UnsupportedModelError: config.json describes a model that is not supported.
    """
    with local_folder(name) as folder:
        config = read_config(folder)
        stored, problems = _headers(folder)
        problems += _misfits(config, stored)
        if problems:
            raise ModelFilesError(name, problems)
        return config, _read(config, stored, dtype)


def read_config(folder: Path) -> ModelConfig:
    """The configuration in a folder's config.json. Raises as `load`."""
    return ModelConfig.from_hf(_read_json(folder, CONFIG))


def save(
    folder: os.PathLike[str] | str,
    config: ModelConfig,
    params: Params,
    *,
    dtype: Any = None,
    source: os.PathLike[str] | str | None = None,
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
      overwrite: replace a folder that exists and is not empty.
      max_shard_bytes: more than that is split into shards with an index.

    Raises:
      ModelFilesError: the folder is not empty, the parameters do not fit the configuration, or writing failed.
    """
    target = epath.Path(folder)
    if target.exists() and not overwrite and (not target.is_dir() or any(target.iterdir())):
        raise ModelFilesError(
            folder,
            ["exists already and is not empty; choose another name, or overwrite it (overwrite=True, --overwrite)"],
        )
    problems = _unfit(config, params, dtype)
    if problems:
        raise ModelFilesError(folder, problems)
    beside = Path(folder).parent if is_local(folder) else None
    try:
        if beside is not None:
            beside.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=beside))
    except OSError as error:
        raise ModelFilesError(folder, [f"cannot create it: {error}"]) from None
    try:
        origin = None if source is None else Path(source)
        written = _write_weights(temporary, params, _shards(config, params, dtype, origin, max_shard_bytes), dtype)
        _write_config(temporary, config, written, origin)
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


def _misfits(config: ModelConfig, stored: Mapping[str, _Stored]) -> list[str]:
    """What is missing, unexpected or of the wrong kind in a folder's files."""
    sizes = config.axis_sizes()
    shapes = {tensor.name: tensor.declaration.file_shape(sizes) for tensor in _tensors(config)}
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


def _tensors(config: ModelConfig) -> list[_Tensor]:
    result: list[_Tensor] = []
    for path, declaration in jax.tree_util.tree_leaves_with_path(declarations(config), is_leaf=is_declaration):
        keys = tuple(part.key for part in path)
        if keys[0] != "layers":
            result.append(_Tensor(declaration.file_name, declaration, keys, None))
            continue
        for layer in range(config.layers):
            result.append(_Tensor(f"model.layers.{layer}.{declaration.file_name}", declaration, keys, layer))
    return result


def _get(tree: Params, keys: tuple[str, ...]) -> Any:
    for key in keys:
        tree = tree[key]
    return tree


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        values = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelFilesError(folder, [f"{name} is not there: this is no Hugging Face model folder"]) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelFilesError(folder, [f"{name} cannot be read: {error}"]) from None
    if not isinstance(values, dict):
        raise ModelFilesError(folder, [f"{name} must hold an object, not {type(values).__name__}"])
    return values


def _headers(folder: Path) -> tuple[dict[str, _Stored], list[str]]:
    """Name -> where and what, of every tensor in the folder's files, and what is wrong with the files."""
    if (folder / INDEX).exists():
        weight_map = _read_json(folder, INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelFilesError(folder, [f"{INDEX} has no weight_map from tensor names to file names"])
        files = sorted(set(weight_map.values()))
    else:
        weight_map, files = None, [WEIGHTS]
    stored: dict[str, _Stored] = {}
    problems = []
    for file in files:
        if Path(file).name != file or not (folder / file).is_file():
            problems.append(f"{file} is not there")
            continue
        try:
            with safe_open(folder / file, framework="np") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a dict)
                    if name in stored:
                        problems.append(f"tensor {name} is in {stored[name].file.name} and in {file}")
                    part = opened.get_slice(name)
                    stored[name] = _Stored(folder / file, tuple(part.get_shape()), part.get_dtype())
        except (OSError, SafetensorError) as error:
            problems.append(f"{file} cannot be read: {error}")
    if weight_map is not None and not problems:
        problems += [
            f"{INDEX} puts tensor {name} into {file}, where it is not"
            for name, file in weight_map.items()
            if name not in stored or stored[name].file.name != file
        ]
    if problems and not stored:
        raise ModelFilesError(folder, problems)
    return stored, problems


def _tied_copy(stored: Mapping[str, _Stored]) -> list[str]:
    """A tied model's file may repeat the embedding as lm_head.weight; a different one would be dropped silently."""
    embedding, head = stored.get(EMBEDDING), stored[HEAD]
    if embedding is None:
        return []
    if embedding[1:] == head[1:] and _array(embedding, EMBEDDING).tobytes() == _array(head, HEAD).tobytes():
        return []
    return [f"config.json says tie_word_embeddings, but {HEAD} differs from {EMBEDDING}"]


def _array(stored: _Stored, name: str) -> np.ndarray:
    with safe_open(stored.file, framework="np") as opened:
        return opened.get_tensor(name)


def _read(config: ModelConfig, stored: Mapping[str, _Stored], dtype: Any) -> Params:
    sizes = config.axis_sizes()
    by_path: dict[tuple[str, ...], list[_Tensor]] = {}
    for tensor in _tensors(config):
        by_path.setdefault(tensor.path, []).append(tensor)

    def read(path: Any, abstract: jax.ShapeDtypeStruct) -> jax.Array:
        tensors = by_path[tuple(part.key for part in path)]
        target = jnp.dtype(DTYPES[stored[tensors[0].name].dtype] if dtype is None else dtype)
        array = np.empty((len(tensors), *abstract.shape[-len(tensors[0].declaration.axes) :]), target)
        for slot, tensor in zip(array, tensors):
            slot[...] = tensor.declaration.from_file(_array(stored[tensor.name], tensor.name), sizes)
        return jnp.asarray(array.reshape(abstract.shape))

    return jax.tree_util.tree_map_with_path(read, abstract_params(config))


def _unfit(config: ModelConfig, params: Params, dtype: Any) -> list[str]:
    def shapes(tree: Params) -> dict[str, tuple[int, ...]]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {"/".join(str(part.key) for part in path): tuple(leaf.shape) for path, leaf in leaves}

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

    files: dict[str, list[_Tensor]]
    index_text: str | None


def _shards(config: ModelConfig, params: Params, dtype: Any, source: Path | None, max_shard_bytes: int) -> _Shards:
    tensors = _tensors(config)
    origin: dict[str, _Stored] = {}
    if source is not None:
        with contextlib.suppress(ModelFilesError):  # a source may hold tokenizer files only
            origin = _headers(source)[0]
    if config.tied and HEAD in origin:  # the source repeats the embedding: so do we
        declaration = next(tensor.declaration for tensor in tensors if tensor.name == EMBEDDING)
        tensors.append(_Tensor(HEAD, declaration, ("embedding",), None))

    def size(tensor: _Tensor) -> int:
        leaf = _get(params, tensor.path)
        count = leaf.size if tensor.layer is None else leaf.size // leaf.shape[0]
        return count * jnp.dtype(leaf.dtype if dtype is None else dtype).itemsize

    if {tensor.name for tensor in tensors} == set(origin):
        kept: dict[str, list[_Tensor]] = {}
        for tensor in tensors:
            kept.setdefault(origin[tensor.name].file.name, []).append(tensor)
        if all(sum(map(size, shard)) <= max_shard_bytes for shard in kept.values()):
            return _Shards(kept, _index(kept, size, source))
    shards: list[list[_Tensor]] = [[]]
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


def _index(files: Mapping[str, list[_Tensor]], size: Callable[[_Tensor], int], source: Path | None) -> str | None:
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


def _arrays(params: Params, shard: list[_Tensor], dtype: Any) -> Iterator[tuple[str, np.ndarray]]:
    for tensor in shard:
        leaf = _get(params, tensor.path)
        array = np.asarray(leaf if tensor.layer is None else leaf[tensor.layer])
        if dtype is not None:
            array = array.astype(jnp.dtype(dtype))
        yield tensor.name, np.ascontiguousarray(tensor.declaration.to_file(array))


def _write_config(folder: Path, config: ModelConfig, dtype: str, source: Path | None) -> None:
    values = {**config.to_hf(), "dtype": dtype, "torch_dtype": dtype}
    text = json.dumps(values, indent=2) + "\n"
    if source is not None:
        for name in COPIED:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        if (source / CONFIG).is_file():
            original = _read_json(source, CONFIG)
            if ModelConfig.from_hf(original) == config and original.get("dtype", original.get("torch_dtype")) == dtype:
                text = (source / CONFIG).read_text(encoding="utf-8")
            else:
                text = json.dumps({**original, **values}, indent=2) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")


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
