"""Whole runs: resuming, run directories, what each option does to the numbers, and how a run refuses."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mwjax import cli, losses, model
from mwjax.commands import statuses
from mwjax.train import checkpoint, load, log, loop, metrics_log, setup
from mwjax.train.config import RunConfig
from tests.training_runs import VOCABULARY, compile_once, configure, recorded, write  # noqa: F401

POLICY_GRADIENT = ("loss.task=memorywalker", "data.method=naive_compressed")
CLOCK = ("seconds", "tokens_per_second")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path)
    return tmp_path


def stop_in_step(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """SIGTERM while that step runs: the row of the one before is being written then."""
    append = metrics_log.append

    def append_and_stop(run_dir: Any, row: Any, file: str) -> None:
        append(run_dir, row, file)
        if row["step"] == step - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(metrics_log, "append", append_and_stop)


def rows(config: RunConfig) -> list[dict[str, Any]]:
    return metrics_log.read(config.run_dir)


def without_clock(made: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in CLOCK} for row in made]


def assert_same_state(left: RunConfig, right: RunConfig) -> None:
    """Optimiser state and step count included."""
    jax.tree.map(np.testing.assert_array_equal, checkpoint.load(left.run_dir), checkpoint.load(right.run_dir))


def test_a_stopped_run_continues_as_if_it_had_never_stopped(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = configure(folder, *POLICY_GRADIENT, run_dir="whole")
    assert loop.run(whole).step == 4
    config = configure(folder, *POLICY_GRADIENT, "checkpoint.every=0", run_dir="stopped")
    with monkeypatch.context() as patch:
        stop_in_step(patch, 3)
        stopped = loop.run(config)
    assert (stopped.step, stopped.stopped, len(rows(config))) == (3, True, 3)
    metrics_log.append(config.run_dir, {"step": 4, "loss": 99.0})  # as if killed before the next checkpoint
    assert loop.run(config).step == 4
    assert "continuing at step 3 of 4" in capsys.readouterr().err
    assert without_clock(rows(config)) == without_clock(rows(whole))
    assert_same_state(config, whole)


def test_a_finished_run_says_so_and_another_configuration_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configure(folder, "data.epochs=1")
    finished = loop.run(config)
    assert (finished.step, finished.stopped) == (2, False)
    before = rows(config)
    assert loop.run(config) == finished
    assert "finished at step 2 of 2" in capsys.readouterr().err
    assert rows(config) == before
    changes = {"data.seed=1": "data.seed", "loss.aggregation=sequence_mean": "loss.aggregation"}
    for change, key in {**changes, "model.small.seed=3": "model (initial weights)"}.items():
        with pytest.raises(checkpoint.CheckpointMismatch) as caught:
            loop.run(configure(folder, "data.epochs=1", change))
        assert key in str(caught.value)
    other = recorded()
    first = next(number for number, turn in enumerate(other[3].turns) if len(turn.completion_ids))
    turns = list(other[3].turns)
    assert turns[first].logprobs is not None
    turns[first] = dataclasses.replace(turns[first], logprobs=turns[first].logprobs - 0.5)
    other[3] = dataclasses.replace(other[3], turns=tuple(turns))
    for changed in (recorded(9), other):
        write(folder, changed)
        with pytest.raises(checkpoint.CheckpointMismatch, match="content of the rollouts"):
            loop.run(config)


def test_a_run_goes_on_when_asked_for_more_steps_and_saved_less_often(folder: Path) -> None:
    loop.run(configure(folder, "data.epochs=1"))
    longer = configure(folder, "data.steps=4", "checkpoint.every=3", "log_every=2")
    assert loop.run(longer).step == 4
    whole = configure(folder, run_dir="whole")
    loop.run(whole)
    assert without_clock(rows(longer)) == without_clock(rows(whole))
    assert_same_state(longer, whole)


def test_ragged_batches_compile_once(folder: Path) -> None:
    config = configure(
        folder, "loss.task=memorywalker", "data.rollouts_per_step=3", "data.row_length=64", "data.rows_per_microbatch=1"
    )
    loop.run(config)
    made = rows(config)
    assert len({row["loss_tokens"] for row in made}) > 2
    assert len({row["microbatches"] for row in made}) > 1
    assert len({row["rollouts"] for row in made}) > 1
    assert [row["recompiles"] for row in made] == [0] * len(made)


def test_lambda_0_trains_as_naive_compressed_bit_for_bit(folder: Path) -> None:
    plain = configure(folder, "data.method=naive_compressed", run_dir="plain")
    off = configure(folder, "data.method=sdcc", "loss.sdcc.peak=0", run_dir="off")
    on = configure(folder, "data.method=sdcc", "loss.sdcc.ramp=0.5", run_dir="on")
    for config in (plain, off, on):
        loop.run(config)
    assert without_clock(rows(off)) == without_clock(rows(plain))
    assert_same_state(off, plain)
    ramped = rows(on)
    assert [row["sdcc_lambda"] for row in ramped] == [0.0, 0.05, 0.1, 0.1]
    assert all(row["sdcc_kl_sum"] > 0 and row["diverging_leaves"] > 0 for row in ramped)
    assert ramped[0]["loss"] == pytest.approx(rows(plain)[0]["loss"], rel=1e-5)
    assert ramped[3]["loss"] != pytest.approx(rows(plain)[3]["loss"], rel=1e-5)


def test_recomputed_old_log_probs_and_reference_are_those_of_the_initial_weights(folder: Path) -> None:
    settings = ("loss.task=memorywalker", "data.steps=2")
    methods = {"packed": "packed", "logittree": "logittree", "naive_full": "naive_full"}
    first = {}
    for name, method in methods.items():
        config = configure(folder, *settings, f"data.method={method}", "loss.old_logprobs=recompute", run_dir=name)
        loop.run(config)
        first[name] = rows(config)[0]
    assert first["packed"]["ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert first["logittree"]["ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert first["naive_full"]["ratio_mean"] != pytest.approx(1.0, abs=1e-4)
    assert all(row["reference_k3"] == pytest.approx(0.0, abs=1e-6) for row in first.values())
    hidden = configure(
        folder, *settings, "data.method=naive_full", "loss.old_logprobs=recompute_own_rows", run_dir="hidden"
    )
    loop.run(hidden)
    assert rows(hidden)[0]["ratio_mean"] == pytest.approx(1.0, abs=1e-6)


def test_devices_that_are_left_out_are_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loop.run(configure(folder, "data.steps=1"))
    assert "devices:" not in capsys.readouterr().err
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    loop.run(configure(folder, "data.steps=1"))
    assert "devices: 1 of 4 used; mesh.fsdp or mesh.data takes more" in capsys.readouterr().err


def test_the_run_directory_tells_what_was_done(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = folder / "weights"
    shape = model.small_config(VOCABULARY, layers=2, width=16)
    model.save(weights, shape, model.init(shape, jax.random.key(0)))
    settings = ("model.small=null", f"model.path={weights}", "data.epochs=1")
    config = configure(folder, *settings, "model.sampled_the_data=true")
    result = loop.run(config)
    card = (folder / "run" / "card.md").read_text()
    first, *_ = rows(config)
    for text in (
        "10 rollouts used, 0 refused",
        "white box",
        "**method**: packed",
        f"({weights})",
        f"mean {first['logdiff_mean']:.4g}, token maximum {first['logdiff_max_token']:.4g} in the first step",
        "2 of 2",
        f"jax {jax.__version__}",
    ):
        assert text in card
    assert first["logdiff_mean"] > 0
    assert first["trie_ratio"] > 1
    assert first["loss_tokens"] == first["sampled_tokens"]
    assert "step 2 of 2" in result.summary()
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "step 1/2  loss" in shown.err and "recompiles 0" in shown.err
    unknown = configure(folder, *settings, run_dir="unknown")
    loop.run(unknown)
    assert rows(unknown)[0]["logdiff_mean"] is None
    assert "logdiff**: N/A: the model's weights are not declared" in (folder / "unknown" / "card.md").read_text()
    assert rows(unknown)[0]["loss"] == first["loss"]


def test_weights_that_are_not_finite_are_not_saved(folder: Path) -> None:
    config = configure(folder, "optimizer.learning_rate=1e30", "optimizer.clip_norm=null")
    with pytest.raises(log.TrainingDiverged, match=r"step 2: \w+ is nan"):
        loop.run(config)
    with pytest.raises(FileNotFoundError):
        checkpoint.load(config.run_dir)
    assert [row["step"] for row in rows(config)] == [1, 2]


@pytest.mark.slow
def test_without_jit_and_scan_the_numbers_stay(folder: Path) -> None:
    write(folder, recorded(2, turns=2))
    settings = ("data.steps=1", "data.row_length=32", "data.edges_per_row=16", "data.rows_per_microbatch=1")
    usual = configure(folder, *settings, run_dir="usual")
    debug = configure(folder, *settings, "debug=true", "model.attention=oracle", run_dir="debug")
    for config in (usual, debug):
        loop.run(config)
    assert rows(debug)[0]["loss"] == pytest.approx(rows(usual)[0]["loss"], rel=1e-5)
    assert rows(debug)[0]["gradient_norm"] == pytest.approx(rows(usual)[0]["gradient_norm"], rel=1e-4)


def test_rewards_that_teach_nothing_are_refused(folder: Path) -> None:
    write(folder, [dataclasses.replace(rollout, group=None) for rollout in recorded()])
    with pytest.raises(losses.LossError, match="all 10 advantages are 0"):
        loop.run(configure(folder, "loss.task=grpo"))
    write(folder, [dataclasses.replace(rollout, reward=None) for rollout in recorded()])
    with pytest.raises(losses.LossError, match="'r0' has no usable reward"):
        loop.run(configure(folder, "loss.task=grpo"))
    with pytest.raises(losses.LossError, match=r"loss\.tokens_per_rollout: needed"):
        loop.run(configure(folder, "loss.task=dr_grpo"))


def test_rollouts_without_a_loss_token_and_weights_that_are_not_finite_are_refused(folder: Path) -> None:
    config = configure(folder)
    shape, params = setup.decoder(config.model)
    params["norm"]["scale"] = params["norm"]["scale"].at[3].set(np.nan)
    model.save(str(folder / "model"), shape, params)
    with pytest.raises(ValueError, match=r"model\.path: .*NaN or infinite weights in norm\.scale"):
        loop.run(configure(folder, "model.small=null", f"model.path={folder / 'model'}"))
    context = [
        dataclasses.replace(rollout, turns=tuple(dataclasses.replace(turn, trainable=False) for turn in rollout.turns))
        for rollout in recorded()
    ]
    write(folder, context)
    with pytest.raises(losses.LossError, match="none of the 10 rollouts has a token that gets a loss under packed"):
        loop.run(config)


def test_more_devices_than_there_are_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"mesh data 64 x fsdp 1 x tensor 1 x context 1: 64 devices wanted"):
        loop.run(configure(folder, "mesh.data=64", "data.rows_per_microbatch=64"))


def test_the_command_line_reports_refused_rollouts_by_its_status(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder / "rollouts.jsonl"
    file.write_text(file.read_text() + '{"id": "broken"\n')
    (folder / "config.yaml").write_text(load.dump(configure(folder, "data.epochs=1")))
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", str(folder / "config.yaml")])
    assert caught.value.code == statuses.SOME_REFUSED
    shown = capsys.readouterr()
    assert "1 rollouts were refused" in shown.out
    assert f"refused: {file}, line 11" in shown.err
    file.write_text("{}\n")
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", str(folder / "config.yaml"), f"run_dir={folder / 'nothing'}"])
    assert caught.value.code == statuses.UNUSABLE
    assert "no usable rollout" in capsys.readouterr().err
