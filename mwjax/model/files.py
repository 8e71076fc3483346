"""What is in the files of a Hugging Face model folder: tensors by name, where they are and which parameter each is."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from mwjax.model.config import ModelConfig
from mwjax.model.decoder import declarations
from mwjax.model.errors import ModelFilesError
from mwjax.model.hub import INDEX, WEIGHTS
from mwjax.model.parameters import Declaration, is_declaration

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


FUSED = re.compile(r"(model\.layers\.\d+\.mlp\.experts\.)(gate_up|down)_proj")


class Stored(NamedTuple):
    """A tensor in a file; ``within``: or the part of one, its name, the number of the expert, and which of the rows."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    within: tuple[str, int, slice] | None = None


class Tensor(NamedTuple):
    """A tensor of the files: ``path`` leads to its parameter, ``slot`` to the part of it: () outside layers, (layer,),
    or (layer, expert)."""

    name: str
    declaration: Declaration
    path: tuple[str, ...]
    slot: tuple[int, ...]


def tensors_of(config: ModelConfig) -> list[Tensor]:
    result: list[Tensor] = []
    sizes = config.axis_sizes()
    for path, declaration in jax.tree_util.tree_leaves_with_path(declarations(config), is_leaf=is_declaration):
        keys = tuple(part.key for part in path)
        if keys[0] != "layers":
            result.append(Tensor(declaration.file_name, declaration, keys, ()))
            continue
        numbered = declaration.axes[: len(declaration.axes) - len(declaration.axes_in_file)]
        counts = [config.layers, *(sizes[axis] for axis in numbered)]
        for layer, *others in np.ndindex(*counts):
            name = f"model.layers.{layer}.{declaration.file_name.format(*others)}"
            result.append(Tensor(name, declaration, keys, (layer, *others)))
    return result


def read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        values = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelFilesError(folder, [f"{name} is not there: this is no Hugging Face model folder"]) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelFilesError(folder, [f"{name} cannot be read: {error}"]) from None
    if not isinstance(values, dict):
        raise ModelFilesError(folder, [f"{name} must hold an object, not {type(values).__name__}"])
    return values


def headers(folder: Path) -> tuple[dict[str, Stored], list[str]]:
    """Name -> where and what, of every tensor in the folder's files, and what is wrong with the files."""
    if (folder / INDEX).exists():
        weight_map = read_json(folder, INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelFilesError(folder, [f"{INDEX} has no weight_map from tensor names to file names"])
        files = sorted(set(weight_map.values()))
    else:
        weight_map, files = None, [WEIGHTS]
    stored: dict[str, Stored] = {}
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
                    stored[name] = Stored(folder / file, tuple(part.get_shape()), part.get_dtype())
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


def by_expert(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """The same with the tensors of single experts in place of those of all: transformers 5 holds, and can be told to
    save, the matrices of all experts as one, [E, 2 F, D] (gate above up) and [E, D, F]."""
    result: dict[str, Stored] = {}
    for name, whole in stored.items():
        fused = FUSED.fullmatch(name)
        if fused is None or len(whole.shape) != 3:
            result[name] = whole
            continue
        experts, rows, columns = whole.shape
        matrices = ("gate", "up") if fused[2] == "gate_up" else ("down",)
        share = rows // len(matrices)
        for expert in range(experts):
            for number, matrix in enumerate(matrices):
                within = name, expert, slice(number * share, (number + 1) * share)
                part = whole._replace(shape=(share, columns), within=within)
                result[f"{fused[1]}{expert}.{matrix}_proj.weight"] = part
    return result


def read_array(stored: Stored, name: str) -> np.ndarray:
    with safe_open(stored.file, framework="np") as opened:
        if stored.within is None:
            return opened.get_tensor(name)
        whole, expert, rows = stored.within
        return opened.get_slice(whole)[expert : expert + 1, rows][0]
