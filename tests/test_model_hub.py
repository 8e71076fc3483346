"""Models by hub id, from a made-up cache and a made-up hub, and from object storage; nothing here needs a network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import huggingface_hub
import jax
import numpy as np
import pytest
from etils import epath
from huggingface_hub import constants

from mwjax import model

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A saved model in shards, and its parameters."""
    folder = tmp_path_factory.mktemp("made") / "model"
    config = model.small_config(40, 2, 16)
    params = model.init(config, jax.random.key(0))
    model.save(folder, config, params, max_shard_bytes=6000)
    (folder / "tokenizer.json").write_text("{}")
    return folder, params


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty local cache, and a hub that cannot be reached. ``cache.asked`` counts downloads."""

    def unreachable(*arguments, **_):
        asked.append(arguments)
        raise ConnectionError("Cannot reach the hub\nand more")

    asked = []
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    unreachable.asked, unreachable.folder = asked, tmp_path / "hub"
    return unreachable


def put(cache, source, *, names=None, revision=REVISION, ref="main"):
    """Store ``source`` as the hub's client does: blobs, and links to them in the snapshot."""
    repository = cache / "models--org--tiny"
    snapshot = repository / "snapshots" / revision
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if names is None or path.name in names:
            shutil.copy(path, repository / "blobs" / path.name)
            (snapshot / path.name).symlink_to(os.path.join("..", "..", "blobs", path.name))
    (repository / "refs" / ref).write_text(revision)
    return snapshot


def same(loaded, params):
    jax.tree.map(np.testing.assert_array_equal, loaded[1], params)


def test_a_cached_model_is_read_without_asking_the_hub(cache, made):
    folder, params = made
    put(cache.folder, folder)
    same(model.load("org/tiny"), params)
    with model.local_folder("org/tiny") as local:
        assert (local / "tokenizer.json").read_text() == "{}"
    same(model.load(f"org/tiny@{REVISION}"), params)
    assert cache.asked == []


def test_a_revision_is_its_own_snapshot(cache, made, tmp_path):
    folder, params = made
    put(cache.folder, folder)
    config = model.small_config(40, 2, 16)
    doubled = jax.tree.map(lambda x: 2 * x, params)
    model.save(tmp_path / "other", config, doubled)
    put(cache.folder, tmp_path / "other", revision="f" * 40, ref="v2")
    same(model.load("org/tiny@v2"), doubled)
    same(model.load("org/tiny"), params)


def test_a_folder_of_that_name_comes_first(cache, made, tmp_path, monkeypatch):
    folder, params = made
    shutil.copytree(folder, tmp_path / "org" / "tiny")
    monkeypatch.chdir(tmp_path)
    same(model.load("org/tiny"), params)
    assert cache.asked == []


@pytest.mark.parametrize(
    "names",
    [
        (),
        ("config.json", "tokenizer.json"),
        ("config.json", "model.safetensors.index.json", "model-00001-of-00008.safetensors"),
    ],
)
def test_what_is_not_complete_in_the_cache_is_downloaded(cache, made, names, monkeypatch):
    folder, params = made
    put(cache.folder, folder, names=names)

    def download(hub_id, *, revision, allow_patterns):
        assert (hub_id, revision) == ("org/tiny", "main")
        assert "*.safetensors" in allow_patterns and "*.bin" not in allow_patterns
        shutil.rmtree(cache.folder)
        return str(put(cache.folder, folder))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    same(model.load("org/tiny"), params)


def test_a_model_that_is_nowhere_says_what_to_do(cache):
    with pytest.raises(model.ModelFilesError) as caught:
        model.load("org/tiny")
    message = str(caught.value)
    assert message.startswith("model folder org/tiny:\n  no such folder here\n")
    assert f"not complete in the local cache, {cache.folder}" in message
    assert "download failed: Cannot reach the hub" in message and "and more" not in message
    assert "hf auth login" in message and "HF_HOME" in message


@pytest.mark.parametrize("name", ["tiny", "/org/tiny", "./org/tiny", "a/b/c", "org/tiny/", "../tiny", "~/tiny"])
def test_other_names_are_folders(cache, name):
    with pytest.raises(model.ModelFilesError, match=r"config.json is not there: this is no Hugging Face model folder"):
        model.load(name)
    assert cache.asked == []


def test_the_cache_is_where_the_environment_says(made, tmp_path):
    put(tmp_path / "hub", made[0])
    code = "from mwjax.model.hub import local_folder\nwith local_folder('org/tiny') as folder: print(folder)"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE"))}
    environment = {**kept, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment, check=True
    )
    assert shown.stdout.strip().endswith(os.path.join("models--org--tiny", "snapshots", REVISION))


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """gs://bucket/ is a local folder."""
    real = epath.Path

    def path(name, *parts):
        text = os.fspath(name)
        return real(text.replace("gs://bucket", str(tmp_path / "bucket")), *parts)

    monkeypatch.setattr(epath, "Path", path)
    (tmp_path / "bucket").mkdir()
    return tmp_path / "bucket"


def test_object_storage_in_and_out(made, bucket):
    folder, params = made
    config, loaded = model.load(folder)
    model.save("gs://bucket/models/tiny", config, loaded, source=folder, max_shard_bytes=6000)
    written = {path.name: path.read_bytes() for path in (bucket / "models" / "tiny").iterdir()}
    assert written == {path.name: path.read_bytes() for path in folder.iterdir()}
    same(model.load("gs://bucket/models/tiny"), params)
    with pytest.raises(model.ModelFilesError, match="exists already and is not empty"):
        model.save("gs://bucket/models/tiny", config, loaded)
    with pytest.raises(model.ModelFilesError, match=r"(?s)gs://bucket/models/none.*cannot be read"):
        model.load("gs://bucket/models/none")
    model.save("gs://bucket/models/tiny", config, loaded, overwrite=True)
    assert {path.name for path in (bucket / "models" / "tiny").iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    same(model.load("gs://bucket/models/tiny"), params)
    (bucket / "models" / "tiny" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(model.UnsupportedModelError, match="gpt2"):
        model.load("gs://bucket/models/tiny")
