"""Where a model's files are: a folder, a Hugging Face hub id, or a folder in object storage."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from etils import epath

from mwjax.model.errors import ModelFilesError
from mwjax.rollouts.storage import is_local

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
WANTED = ("*.json", "*.jinja", "tokenizer.model", "merges.txt")
WEIGHT_FILES = ("*.safetensors",)
HUB_ID = re.compile(r"(?P<id>[\w][\w.-]*/[\w][\w.-]*)(@(?P<revision>[\w./-]+))?")


@contextlib.contextmanager
def local_folder(name: os.PathLike[str] | str, *, weights: bool = True) -> Iterator[Path]:
    """The files of ``name`` in a local folder, for as long as the block runs.

    ``name`` is a folder; or a hub id, ``Qwen/Qwen3-0.6B`` or ``Qwen/Qwen3-0.6B@REVISION``, which is read from the local
    Hugging Face cache (``HF_HOME``) and downloaded into it only if it is not complete there; or a folder in object
    storage (``gs://bucket/folder``), which is copied into a temporary folder. With ``weights`` False the weights are
    not fetched: they may or may not be there.

    Raises:
      ModelFilesError: a hub id that is neither cached nor can be downloaded, or storage that cannot be read.
    """
    text = os.fspath(name)
    if not is_local(text):
        with tempfile.TemporaryDirectory(prefix="mwjax-model-") as folder:
            _download(text, Path(folder), WANTED + (WEIGHT_FILES if weights else ()))
            yield Path(folder)
        return
    path, hub_id = Path(text).expanduser(), HUB_ID.fullmatch(text)
    if hub_id is None or path.exists():
        yield path
        return
    yield _from_hub(text, hub_id["id"], hub_id["revision"] or "main", weights)


def upload(folder: Path, name: str) -> None:
    """Copy the files of a local model folder into object storage. config.json goes first if it is there and comes last:
    no reader takes half a model for a whole one. Weights that were there and are no part of the new model are removed.
    """
    target = epath.Path(name)
    target.mkdir(parents=True, exist_ok=True)
    new = {path.name for path in folder.iterdir()}
    for path in list(target.iterdir()) if target.exists() else ():  # a bucket has no empty folders
        stale = path.name == INDEX or any(Path(path.name).match(pattern) for pattern in WEIGHT_FILES)
        if path.name == CONFIG or (stale and path.name not in new):
            path.unlink()
    for file in sorted(new, key=lambda file: (file == CONFIG, file)):
        _copy(epath.Path(folder) / file, target / file)


def _download(name: str, folder: Path, wanted: tuple[str, ...]) -> None:
    try:
        for path in epath.Path(name).iterdir():
            if any(Path(path.name).match(pattern) for pattern in wanted):
                _copy(path, epath.Path(folder) / path.name)
    except Exception as error:  # every storage has exceptions of its own
        raise ModelFilesError(name, [f"cannot be read: {_first_line(error)}"]) from error


def _copy(source: epath.Path, target: epath.Path) -> None:
    with source.open("rb") as read, target.open("wb") as written:
        shutil.copyfileobj(read, written, 16 << 20)


def _from_hub(name: str, hub_id: str, revision: str, weights: bool) -> Path:
    import huggingface_hub
    from huggingface_hub.constants import HF_HUB_CACHE

    cached = huggingface_hub.try_to_load_from_cache(hub_id, CONFIG, revision=revision)
    if isinstance(cached, str) and (not weights or _is_complete(Path(cached).parent)):
        return Path(cached).parent
    wanted = [*WANTED, *(WEIGHT_FILES if weights else ())]
    try:
        return Path(huggingface_hub.snapshot_download(hub_id, revision=revision, allow_patterns=wanted))
    except Exception as error:  # among them those of whatever HTTP library the client uses
        raise ModelFilesError(
            name,
            [
                "no such folder here",
                f"as a hub id: not complete in the local cache, {HF_HUB_CACHE}",
                f"as a hub id: download failed: {_first_line(error)}",
                "give the path of a model folder; or check the id and the network (a gated or private model needs "
                "`hf auth login`, HF_HOME is where downloaded models are)",
            ],
        ) from error


def _is_complete(folder: Path) -> bool:
    """Whether all weights are there: a cache may hold just what a tokenizer needs, or an interrupted download."""
    if not (folder / INDEX).exists():
        return (folder / WEIGHTS).exists()
    try:
        files = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError):
        return False
    return all((folder / file).exists() for file in files)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
