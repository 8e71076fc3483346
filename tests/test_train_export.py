"""mwjax export: from a training run to a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mwjax import cli, model
from mwjax.train import checkpoint, export, loop, state
from mwjax.train.config import OptimizerConfig
from mwjax.train.optimizer import optimizer
from tests import training_runs

FILES = {"tokenizer.json": "{}", "tokenizer_config.json": '{"a": 1}', "generation_config.json": '{"top_p": 0.9}'}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``model``: a bfloat16 model in shards with a tokenizer; ``run``: a run from it that saved steps 1 and 2."""
    folder = tmp_path_factory.mktemp("export")
    config = model.small_config(training_runs.VOCABULARY, 2, 16, rope_theta=5e5)
    params = model.init(config, jax.random.key(0), jnp.bfloat16)
    model.save(folder / "model", config, params, max_shard_bytes=3000)
    for name, text in FILES.items():
        (folder / "model" / name).write_text(text)
    training_runs.write(folder, training_runs.recorded(5))
    settings = training_runs.configure(
        folder,
        "data.epochs=2",
        "checkpoint.every=1",
        "model.small=null",
        f"model.path={folder / 'model'}",
    )
    loop.run(settings)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def status(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(["export", *arguments])
    return int(caught.value.code or 0)


def test_what_was_not_trained_comes_back_equal_to_the_byte(made: Path, tmp_path: Path) -> None:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    untrained = state.create(model.load(made / "model")[1], optimizer(OptimizerConfig(), total=10), device)
    with checkpoint.Checkpoints(tmp_path / "run", checkpoint.load_fingerprint(made / "run"), keep=1) as checkpoints:
        checkpoints.save(7, untrained)
    shutil.copy(made / "run" / "config.yaml", tmp_path / "run")
    written = export.export(tmp_path / "run", tmp_path / "out", dtype="bfloat16")
    assert contents(tmp_path / "out") == contents(made / "model")
    assert (written.step, written.dtype, written.tokenizer) == (7, "bfloat16", True)
    assert written.size == sum(len(content) for content in contents(made / "model").values())


def test_the_newest_weights_are_written_as_trained(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(str(made / "run"), "--to", "hf", "--out", str(tmp_path / "out")) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert shown.out.startswith(f"{tmp_path / 'out'}: qwen3, ") and "parameters in float32, step 2," in shown.out
    config, params = model.load(tmp_path / "out", dtype=None)
    trained = checkpoint.load(made / "run", 2)["params"]
    jax.tree.map(np.testing.assert_array_equal, params, trained)
    assert config == model.load(made / "model")[0]
    assert not np.array_equal(params["norm"]["scale"], model.load(made / "model")[1]["norm"]["scale"])
    for name, text in FILES.items():
        assert (tmp_path / "out" / name).read_text() == text
    model.save(tmp_path / "again", config, params, source=tmp_path / "out")
    assert contents(tmp_path / "again") == contents(tmp_path / "out")


def test_only_the_parameters_are_read(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = checkpoint.load_params(made / "run")
    assert {type(leaf) for leaf in jax.tree.leaves(params)} == {np.ndarray}
    read: list[str] = []
    handler = checkpoint.ocp.type_handlers.NumpyHandler
    original = handler.deserialize

    async def deserialize(self, infos, args=None):
        read.extend(info.name for info in infos)
        return await original(self, infos, args)

    monkeypatch.setattr(handler, "deserialize", deserialize)
    checkpoint.load_params(made / "run")
    assert len(read) == len(jax.tree.leaves(params)) and all(name.startswith("params.") for name in read)


def test_shards_and_a_folder_that_is_there(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert status(str(made / "run"), "--out", str(out), "--max-shard-gb", "0.00001") == 2
    assert "--max-shard-gb" in capsys.readouterr().err
    export.export(made / "run", out, max_shard_bytes=3000)
    assert len(list(out.glob("model-*.safetensors"))) > 8
    assert status(str(made / "run"), "--out", str(out)) == 2
    assert "exists already and is not empty" in capsys.readouterr().err
    assert status(str(made / "run"), "--out", str(out), "--overwrite") == 0
    assert set(contents(out)) == set(contents(made / "model"))  # the files of the model it began from


def test_the_model_the_run_began_from_may_be_gone(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Then the checkpoint alone says what the model looks like."""
    step = tmp_path / "elsewhere" / "checkpoints" / "2"
    shutil.copytree(made / "run" / "checkpoints" / "2", step)
    assert status(str(step), "--out", str(tmp_path / "a")) == 0
    assert "no tokenizer files were found" in capsys.readouterr().err
    assert set(contents(tmp_path / "a")) == {"config.json", "model.safetensors"}
    assert model.load(tmp_path / "a")[0] == model.load(made / "model")[0]

    assert status(str(step), "--out", str(tmp_path / "b"), "--tokenizer", str(made / "model")) == 0
    assert set(contents(tmp_path / "b")) == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    (tmp_path / "my_tokenizer.json").write_text("[]")
    assert status(str(step), "--out", str(tmp_path / "c"), "--tokenizer", str(tmp_path / "my_tokenizer.json")) == 0
    assert (tmp_path / "c" / "tokenizer.json").read_text() == "[]"
    assert capsys.readouterr().err == ""
    for nothing in ("absent.json", "absent"):
        assert status(str(step), "--out", str(tmp_path / "d"), "--tokenizer", str(tmp_path / nothing)) == 2
        assert f"{tmp_path / nothing}: no tokenizer files there" in capsys.readouterr().err
    assert not (tmp_path / "d").exists()


def test_a_small_models_own_tokenizer_is_copied(made: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(made / "run", run_dir)
    (tmp_path / "words.json").write_text("{}")
    text = (run_dir / "config.yaml").read_text()
    lines = text.splitlines()
    start = lines.index("model:")
    end = next(number for number in range(start + 1, len(lines)) if not lines[number].startswith(" "))
    lines[start:end] = ["model:", "  small:", f"    tokenizer: {tmp_path / 'words.json'}"]
    (run_dir / "config.yaml").write_text("\n".join(lines))
    assert export.export(run_dir, tmp_path / "out").tokenizer
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


# Orbax leaves tasks behind when a read fails
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_cannot_be_exported_says_why(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "out")]
    assert status(str(tmp_path / "nowhere"), *out) == 2
    assert f"{tmp_path / 'nowhere' / 'checkpoints'}: no checkpoint; it holds none" in capsys.readouterr().err
    assert status(str(made / "run" / "checkpoints" / "7"), *out) == 2
    assert "no checkpoint of step 7; it holds the steps 1, 2" in capsys.readouterr().err
    assert status(str(made / "model"), *out) == 2
    assert "this is a model folder already" in capsys.readouterr().err
    assert status(str(made / "run"), *out, "--to", "gguf") == 2
    assert status(str(made / "run")) == 2
    capsys.readouterr()

    run_dir = tmp_path / "run"
    shutil.copytree(made / "run", run_dir)
    position = run_dir / "checkpoints" / "2" / "position" / "metadata"
    kept = position.read_text()
    nothing = {"step": 2, "fingerprint": {"data.seed": 0}, "checksums": {}}
    position.write_text(json.dumps({**nothing, "checksum": checkpoint._checksum(nothing)}))
    assert status(str(run_dir), *out) == 2
    assert "does not say what the model looks like" in capsys.readouterr().err
    position.write_text(kept[: len(kept) // 2])
    assert status(str(run_dir), *out) == 2
    assert "this checkpoint is damaged and cannot be read" in capsys.readouterr().err
    position.write_text(kept)
    for path in (run_dir / "checkpoints" / "2" / "state").rglob("*"):
        if path.is_file() and path.parent.name == "d":
            path.write_bytes(path.read_bytes()[:-50])
    assert status(str(run_dir), *out) == 2
    assert "Use another step of that run" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert status(str(run_dir / "checkpoints" / "1"), *out) == 0


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("--help") == 0
    assert "mwjax export runs/b --out models/b --dtype bfloat16" in capsys.readouterr().out
