"""What a run does with what an earlier start of it left: other options, damaged checkpoints, the best ones."""

from __future__ import annotations

import math
import os
import re
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml

from mwjax import cli, losses
from mwjax.commands import statuses
from mwjax.train import checkpoint, load, loop, metrics_log, setup, state, stop
from mwjax.train.config import MeshConfig, RunConfig
from mwjax.train.mesh import make_mesh, replicated
from mwjax.train.optimizer import optimizer
from mwjax.train.step import StepConfig, build, gradient_sums
from tests.test_train_loop import assert_same_state, compile_once, folder, rows, without_clock  # noqa: F401
from tests.training_runs import configure, microbatches, write


def steps_of(config: RunConfig) -> list[str]:
    return sorted(path.name for path in (Path(config.run_dir) / "checkpoints").iterdir())


def damage(config: RunConfig, step: int) -> None:
    """Flips a byte in the middle of a checkpoint's largest file: its arrays."""
    files = (path for path in (Path(config.run_dir) / "checkpoints" / str(step)).rglob("*") if path.is_file())
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def test_options_that_changed_since_the_last_start_are_listed(
    folder: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    loop.run(configure(folder, "data.epochs=1"))
    assert "changed" not in capsys.readouterr().err
    longer = configure(folder, "data.epochs=1", "data.steps=3", "checkpoint.every=2")
    loop.run(longer)
    expected = "continuing at step 2 of 3; changed since then: data.steps: null -> 3, checkpoint.every: 50 -> 2\n"
    assert expected in capsys.readouterr().err
    settings = folder / "run" / "config.yaml"
    for content in (b"run_dir: x\ndata:\n  paths: [a", b"data: 3\n\xff"):
        settings.write_bytes(content)
        loop.run(longer)
        assert "finished at step 3 of 3; raise data.steps to go on\n" in capsys.readouterr().err
        assert load.load(str(settings)) == setup.resolved(longer)


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(
    folder: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = configure(folder, "checkpoint.every=1", run_dir="whole")
    loop.run(whole)
    config = configure(folder, "checkpoint.every=1", "data.steps=3")
    loop.run(config)
    assert steps_of(config) == ["2", "3"]
    damage(config, 3)
    longer = configure(folder, "checkpoint.every=1")
    capsys.readouterr()
    loop.run(longer)
    said = capsys.readouterr().err
    assert re.search(r"checkpoints/3: this checkpoint is damaged and cannot be read: .*; set aside as 3\.damaged", said)
    assert "continuing at step 2 of 4" in said
    assert steps_of(config) == ["3", "3.damaged", "4"]
    assert without_clock(rows(longer)) == without_clock(rows(whole))
    assert_same_state(longer, whole)
    for step in (3, 4):
        damage(config, step)
    (folder / "config.yaml").write_text(load.dump(longer))
    before = rows(longer)
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", str(folder / "config.yaml")])
    assert caught.value.code == statuses.UNUSABLE
    shown = capsys.readouterr()
    assert "No whole checkpoint is left to continue from" in shown.err and shown.out == ""
    assert rows(longer) == before


def test_a_decay_shows_in_the_rows_and_fixes_the_number_of_steps(folder: Path) -> None:  # noqa: F811
    decaying = ("optimizer.schedule=cosine", "optimizer.final_rate=0.1", "optimizer.warmup_steps=1")
    config = configure(folder, *decaying)
    loop.run(config)
    after = [0.1 + 0.9 * (1 + math.cos(math.pi * step / 3)) / 2 for step in range(3)]
    assert [row["learning_rate"] for row in rows(config)] == pytest.approx(
        [0.003 * share for share in (0.5, *after)], rel=1e-5
    )
    with pytest.raises(checkpoint.CheckpointMismatch) as caught:
        loop.run(configure(folder, *decaying, "data.steps=6"))
    (line,) = (line for line in str(caught.value).splitlines() if line.startswith("  "))
    assert line == (
        "  data.steps (all steps: optimizer.schedule go by their number): 4 in the checkpoint, 6 in this run"
    )


def test_the_best_checkpoints_by_held_out_loss_survive(folder: Path) -> None:  # noqa: F811
    settings = ("checkpoint.every=1", "checkpoint.keep=1", "checkpoint.best=1", "optimizer.learning_rate=0.3")
    settings += (f"evaluation.paths={folder / 'rollouts.jsonl'}", "evaluation.every=1")
    loop.run(configure(folder, *settings, "data.steps=3"))
    config = configure(folder, *settings)
    loop.run(config)
    figures = metrics_log.scores(metrics_log.read(config.run_dir, metrics_log.EVALUATION))
    assert sorted(figures) == [0, 1, 2, 3, 4]
    best = min(range(1, 5), key=lambda step: (figures[step], -step))
    assert best < 4, "the rate is far too high: it gets worse"
    assert steps_of(config) == [str(best), "4"]
    assert checkpoint.best(config.run_dir, figures) == best


def test_the_best_need_a_loss_to_go_by() -> None:
    def error(*overrides: str) -> str:
        with pytest.raises(load.ConfigError) as caught:
            configure(Path("x"), *overrides)
        return str(caught.value)

    assert "give evaluation.paths, or set checkpoint.best_by=loss" in error("checkpoint.best=1")
    held = ("checkpoint.best=1", "evaluation.paths=y")
    assert "evaluation.every must divide it or be a multiple of it, got 0" in error(*held)
    assert "with checkpoint.every 50, evaluation.every must divide" in error(*held, "evaluation.every=20")
    for every in (10, 50, 100):
        configure(Path("x"), *held, f"evaluation.every={every}")


def test_the_activations_type_goes_by_the_device_and_is_part_of_the_run(
    folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = configure(folder, "data.steps=1")
    assert config.model.dtype == "auto"
    loop.run(config)
    assert yaml.safe_load((folder / "run" / "config.yaml").read_text())["model"]["dtype"] == "float32"
    assert "**activations**: float32" in (folder / "run" / "card.md").read_text()
    assert setup.resolved(configure(folder, "model.dtype=bfloat16")).model.dtype == "bfloat16"
    monkeypatch.setattr(setup.jax, "default_backend", lambda: "tpu")
    with pytest.raises(
        checkpoint.CheckpointMismatch, match=r"model\.dtype: 'float32' in the checkpoint, 'bfloat16' in this run"
    ):
        loop.run(config)


def test_a_signal_while_a_checkpoint_is_read_stops_before_the_first_step(
    folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, restore = configure(folder), checkpoint.Checkpoints.restore_newest

    def interrupted(self: checkpoint.Checkpoints, template: state.TrainState) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return restore(self, template)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Checkpoints, "restore_newest", interrupted)
        stopped = loop.run(config)
    assert (stopped.step, stopped.stopped) == (0, True)
    assert stopped.summary().splitlines() == [
        f"{config.run_dir}: step 0 of 4, nothing to save yet; the same command begins again"
    ]
    assert loop.run(config).step == 4


def test_sigterm_ends_a_run_before_training_and_is_not_heard_after_it() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        stop.stop_early()
        with pytest.raises(stop.StoppedEarly, match="nothing new to save; give the same command again"):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # as `timeout` sends it: would come while the first is dealt with
        with stop.StopOnSignal() as training:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            assert training.requested
        signal.raise_signal(signal.SIGTERM)  # would end the tests
    finally:
        signal.signal(signal.SIGTERM, before)
    with stop.StopOnSignal():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before  # a library's caller keeps what is its own


def test_bfloat16_activations_leave_parameters_gradients_and_optimiser_in_float32(folder: Path) -> None:  # noqa: F811
    config = configure(folder)
    shape, params = setup.decoder(config.model)
    (batch, *_), denominator = microbatches(write(folder))
    half, full = (StepConfig(shape, losses.LossConfig("sft"), dtype=dtype) for dtype in ("bfloat16", "float32"))
    rounded = jax.jit(lambda p, b: gradient_sums(p, b, half))(params, batch)
    exact = jax.jit(lambda p, b: gradient_sums(p, b, full))(params, batch)
    assert {leaf.dtype.name for leaf in jax.tree.leaves((rounded.gradients, rounded.numerator))} == {"float32"}
    assert float(rounded.numerator) != float(exact.numerator)
    assert float(rounded.numerator) == pytest.approx(float(exact.numerator), rel=3e-3)
    for one, other in zip(jax.tree.leaves(rounded.gradients), jax.tree.leaves(exact.gradients)):
        assert np.linalg.norm(one - other) < 0.05 * np.linalg.norm(other)
    transform, mesh = optimizer(config.optimizer, 4), make_mesh(MeshConfig())
    before = state.abstract(params, transform, replicated(mesh))
    step = build(half, transform, mesh, params, batch)
    after, scalars = jax.eval_shape(step.apply, before, rounded, np.float32(denominator))
    assert {leaf.dtype.name for leaf in jax.tree.leaves((after.params, after.opt_state))} == {"float32", "int32"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(scalars)} == {"float32"}


def test_the_best_checkpoint_is_exported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    config = configure(folder, "checkpoint.every=1", "checkpoint.best=1", "checkpoint.best_by=loss", "data.steps=3")
    loop.run(config)
    for step, loss in enumerate((0.5, 0.25, 0.75), 1):  # as if the second of the kept ones were the best
        metrics_log.append(config.run_dir, {"step": step, "loss": loss})

    def export(*arguments: str) -> Any:
        with pytest.raises(SystemExit) as caught:
            cli.main(["export", *arguments, "--best"])
        return caught.value.code

    assert export(config.run_dir, "--out", str(folder / "model")) == statuses.DONE
    assert ", step 2, " in capsys.readouterr().out
    assert export(f"{config.run_dir}/checkpoints/3", "--out", str(folder / "other")) == statuses.UNUSABLE
    assert "names a step already" in capsys.readouterr().err
    (folder / "run" / "metrics.jsonl").unlink()
    assert export(config.run_dir, "--out", str(folder / "other")) == statuses.UNUSABLE
    assert "no checkpoint there has a score" in capsys.readouterr().err
