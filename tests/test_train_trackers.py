"""TensorBoard and Weights & Biases: the points are the rows of the run directory, read back by their own readers."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mwjax import cli, rollouts
from mwjax.commands import statuses
from mwjax.train import load, loop, metrics_log, trackers
from tests.training_runs import compile_once, configure, recorded, write  # noqa: F401


def points(run_dir: str) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of every scalar, as TensorBoard itself reads them."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(f"{run_dir}/tensorboard", size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def in_rows(rows: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    return [(row["step"], pytest.approx(row[name], rel=1e-6)) for row in rows if row.get(name) is not None]


def test_tensorboard_shows_every_row_of_a_resumed_run_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    write(tmp_path)
    rollouts.write(tmp_path / "held.jsonl", [dataclasses.replace(r, id=f"held {r.id}") for r in recorded(12)[10:]])
    settings = (
        "tracking.tensorboard=true", "tracking.plots=false", f"evaluation.paths={tmp_path / 'held.jsonl'}",
        "evaluation.every=1",
    )  # fmt: skip
    loop.run(configure(tmp_path, *settings, "data.steps=2"))
    # As if killed on the way to step 4, after its row and before its checkpoint.
    left = configure(tmp_path, *settings)
    with trackers.tracking(left, 2, print) as tracked:
        for step in (3, 4):
            tracked.add("train", {"step": step, "loss": 99.0, "tokens": 1})
        tracked.add("evaluation", {"step": 3, "loss": 98.0})
    assert points(left.run_dir)["train/loss"][-1] == (4, 99.0)
    loop.run(configure(tmp_path, *settings, "data.steps=4"))
    shown = points(left.run_dir)
    rows, evaluations = (metrics_log.read(left.run_dir, file) for file in ("metrics.jsonl", "evaluation.jsonl"))
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for name in ("loss", "gradient_norm", "learning_rate", "tokens_per_second", "loss_tokens"):
        assert shown[f"train/{name}"] == in_rows(rows, name) and len(in_rows(rows, name)) == 4
    for name in ("loss", "perplexity", "tokens"):
        assert shown[f"evaluation/{name}"] == in_rows(evaluations, name) and len(in_rows(evaluations, name)) == 5
    assert "train/logdiff_mean" not in shown  # never measured
    assert not any("contents" in tag for tag in shown)


def test_a_missing_library_is_named_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in ("wandb", "tensorboardX") else find(name)
    )
    write(tmp_path)
    config = configure(tmp_path, "tracking.tensorboard=true", "tracking.wandb=project")
    (tmp_path / "config.yaml").write_text(load.dump(config))
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", str(tmp_path / "config.yaml")])
    assert caught.value.code == statuses.UNUSABLE
    shown = capsys.readouterr().err
    assert 'tracking.tensorboard: needs the package tensorboardX: pip install "mwjax[tensorboard]"' in shown
    assert 'tracking.wandb: needs the package wandb: pip install "mwjax[wandb]"' in shown
    assert not Path(config.run_dir).exists()
    trackers.check(configure(tmp_path).tracking)


def test_a_tracker_that_fails_is_reported_once_and_the_others_go_on() -> None:
    said: list[str] = []
    taken: list[tuple[int, dict[str, float]]] = []

    def broken(scalars: dict[str, float], step: int) -> None:
        if step > 1:
            raise OSError("disk full")

    def closing() -> None:
        raise RuntimeError("no network")

    made = [
        trackers.Tracker("Broken", broken, lambda: None),
        trackers.Tracker("Good", lambda scalars, step: taken.append((step, scalars)), closing),
    ]
    tracked = trackers.Trackers(made, said.append)
    for step in (1, 2, 3):
        tracked.add("train", {"step": step, "loss": 0.5, "logdiff_mean": None, "contents": "x", "spike": float("nan")})
    tracked.close()
    assert taken == [(step, {"train/loss": 0.5}) for step in (1, 2, 3)]
    assert said == [
        "Broken failed at step 2 and is left out from here on: disk full",
        "Good could not be closed: no network",
    ]


def test_a_tracker_that_cannot_start_says_which_option_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(config: Any, begun: int) -> trackers.Tracker:
        raise RuntimeError("no API key")

    monkeypatch.setattr(trackers, "_wandb", refused)
    config = configure(tmp_path, "tracking.wandb=project")
    with (
        pytest.raises(trackers.TrackingError, match=r"tracking\.wandb: could not be started: no API key"),
        trackers.tracking(config, 0, print),
    ):
        pass


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    pytest.importorskip("wandb")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb-home"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield


@pytest.mark.slow
def test_weights_and_biases_offline_takes_the_rows_under_one_id(offline: None, tmp_path: Path) -> None:
    write(tmp_path)
    settings = ("tracking.wandb=project", "tracking.wandb_mode=offline", "tracking.plots=false")
    config = configure(tmp_path, *settings, "data.steps=2")
    loop.run(config)
    loop.run(configure(tmp_path, *settings, "data.steps=4"))
    run_id = (Path(config.run_dir) / trackers.WANDB_ID).read_text().strip()
    files = sorted(Path(config.run_dir).glob("wandb/offline-run-*/*.wandb"))
    assert [file.name for file in files] == [f"run-{run_id}.wandb"] * 2
    found = [point for file in files for point in logged(file)]
    rows = metrics_log.read(config.run_dir)
    assert found == [(row["step"], pytest.approx(row["loss"])) for row in rows] and len(found) == 4


def logged(file: Path) -> list[tuple[int, float]]:
    """(step, train/loss) of every history record of a .wandb file."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for data in records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            values = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            if "train/loss" in values:
                found.append((int(json.loads(values["_step"])), float(json.loads(values["train/loss"]))))
    return found


def records(content: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log behind W&B's 7 bytes: blocks of 32 KiB of checksum, length, kind and piece."""
    at, whole = 7, b""
    while at + 7 <= len(content):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        _, size, kind = struct.unpack_from("<IHB", content, at)
        whole += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            yield whole
            whole = b""
