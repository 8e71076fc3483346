"""A run directory in a bucket, where no file can grow and no folder is empty, on a stand-in for gcsfs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import pytest
from etils import epath
from etils.epath import backend
from fsspec.implementations.local import LocalFileSystem

from mwjax import model
from mwjax.train import checkpoint, loop, metrics_log
from tests.training_runs import compile_once, configure, write  # noqa: F401


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket in a folder. As gcsfs does, it overwrites what is opened to append."""

    class Bucket(LocalFileSystem):
        @classmethod
        def _strip_protocol(cls, path: Any) -> str:
            return super()._strip_protocol(str(path).replace("gs://", f"{tmp_path}/"))

        def mkdir(self, path: Any, create_parents: bool = True, **options: Any) -> None:
            pass

        def makedirs(self, path: Any, exist_ok: bool = False) -> None:
            pass

        def open(self, path: Any, mode: str = "rb", **options: Any) -> Any:
            Path(self._strip_protocol(path)).parent.mkdir(parents=True, exist_ok=True)
            return super().open(path, mode.replace("a", "w"), **options)

    made = Bucket()
    monkeypatch.setattr(backend._FileSystemSpecBackend, "fs", lambda self, path: made)
    return "gs://bucket/run"


def test_rows_come_all_together_when_they_must_or_after_a_while(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[dict[str, Any]] = []
    kept = metrics_log.Kept(bucket, rows)

    def add(step: int) -> None:
        rows.append({"step": step, "loss": float("nan") if step == 2 else 0.5})
        kept.added()

    add(1)
    add(2)
    assert metrics_log.read(bucket) == []
    kept.keep()
    expected = [{"step": 1, "loss": 0.5}, {"step": 2, "loss": None}, {"step": 3, "loss": 0.5}]
    assert metrics_log.read(bucket) == expected[:2]
    monkeypatch.setattr(metrics_log, "PAUSE", 0)
    add(3)
    assert metrics_log.read(bucket) == expected
    metrics_log.truncate(bucket, 1)
    assert metrics_log.read(bucket) == expected[:1]


def test_a_checkpoint_follows_the_rows_of_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    config = configure(tmp_path, "checkpoint.every=1", f"evaluation.paths={tmp_path / 'rollouts.jsonl'}")
    save, there = checkpoint.Checkpoints.save, {}

    def looking(self: checkpoint.Checkpoints, step: int, *arguments: Any) -> None:
        there[step] = [row["step"] for row in metrics_log.read(config.run_dir)]
        save(self, step, *arguments)

    monkeypatch.setattr(metrics_log, "is_local", lambda path: False)
    monkeypatch.setattr(checkpoint.Checkpoints, "save", looking)
    loop.run(config)
    assert there == {step: list(range(1, step + 1)) for step in range(1, 5)}
    assert [row["step"] for row in metrics_log.read(config.run_dir, metrics_log.EVALUATION)] == [0, 4]


def test_checkpoints_are_in_the_bucket_and_not_below_the_working_directory(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # It asks the bucket itself.
    monkeypatch.setattr("orbax.checkpoint._src.path.gcs_utils.is_hierarchical_namespace_enabled", lambda _: False)
    for run_dir, there in ((bucket, f"{bucket}/checkpoints"), ("run", f"{tmp_path}/run/checkpoints")):
        with checkpoint.Checkpoints(run_dir, {}, keep=1) as checkpoints:
            assert str(checkpoints.folder) == there
            assert checkpoints.latest() is None


def test_a_step_whose_save_was_interrupted_is_none(bucket: str) -> None:
    for step in (5, 7):
        (epath.Path(bucket) / "checkpoints" / str(step) / "state" / "manifest").write_text("")
    (epath.Path(bucket) / "checkpoints" / "5" / "commit_success.txt").write_text("")
    assert checkpoint.locate(bucket)[1] == 5
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 7; it holds the steps 5"):
        checkpoint.locate(f"{bucket}/checkpoints/7")


def test_a_model_is_written_into_a_folder_of_a_bucket_that_is_not_there(bucket: str) -> None:
    shape = model.small_config(40, layers=1, width=16)
    for overwrite in (False, True):
        model.save(f"{bucket}/model", shape, model.init(shape, jax.random.key(0)), overwrite=overwrite)
    names = {path.name for path in epath.Path(f"{bucket}/model").iterdir()}
    assert names == {"config.json", "model.safetensors"}
