"""Held-out rollouts: the loss against every call of the engine scored alone, and a run that evaluates as it goes."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mwjax import model, rollouts
from mwjax.train import evaluation, loop, metrics_log, setup
from mwjax.train.config import EvaluationConfig, MeshConfig, RunConfig
from mwjax.train.mesh import make_mesh
from mwjax.tree import Rows
from tests.training_runs import compile_once, configure, recorded, write  # noqa: F401

LONGEST = 256


def held_out(folder: Path, made: list[rollouts.Rollout] | None = None, name: str = "held.jsonl") -> str:
    """Rollouts that no training run of these tests has seen."""
    made = [dataclasses.replace(r, id=f"held {r.id}") for r in recorded(16)[10:]] if made is None else made
    rollouts.write(folder / name, made)
    return str(folder / name)


def by_calls(config: RunConfig, made: list[rollouts.Rollout]) -> tuple[list[float], list[float]]:
    """Log-probs of all trainable sampled tokens under the initial weights, each call of the engine as one plain causal
    sequence through dense attention; and those the engine recorded."""
    shape, params = setup.decoder(config.model)

    @jax.jit
    def logits(tokens: jax.Array) -> jax.Array:
        length = tokens.shape[1]
        positions = jnp.arange(length)[None]
        hidden = model.forward(params, shape, tokens, positions, jnp.full((1, length), length), attention="oracle")
        return jax.nn.log_softmax(hidden @ model.unembedding(params, shape).T)

    found: list[float] = []
    engine: list[float] = []
    for rollout in made:
        for turn in rollout.turns:
            if turn.trainable and len(turn.completion_ids):
                ids = np.concatenate([turn.prompt_ids, turn.completion_ids]).astype(np.int32)
                scored = np.asarray(logits(np.pad(ids, (0, LONGEST - len(ids)))[None]))[0]
                first = len(turn.prompt_ids)
                assert first > 0 and turn.logprobs is not None and turn.sampling.logprobs == "raw"
                found += [float(scored[place - 1, ids[place]]) for place in range(first, len(ids))]
                engine += turn.logprobs.tolist()
    return found, engine


def evaluated(config: RunConfig, sampled_the_data: bool = True) -> dict[str, Any]:
    config = setup.resolved(config)
    shape, params = setup.decoder(config.model)
    held = evaluation.scan(config, shape.vocab_size)
    assert held is not None
    mesh = make_mesh(MeshConfig())
    evaluate = evaluation.build(held, setup.step_config(config, shape), mesh, sampled_the_data)
    found = evaluate(params, lambda done, total: True)
    assert found is not None
    return found


@pytest.mark.parametrize("method", ["packed", "naive_compressed"])
def test_the_loss_is_that_of_every_call_scored_alone(tmp_path: Path, method: str) -> None:
    made = recorded(16)[10:]
    settings = (f"evaluation.paths={held_out(tmp_path, made)}", f"data.method={method}", "data.row_length=48")
    config = configure(tmp_path, *settings, "data.edges_per_row=24")
    logprobs, engine = by_calls(config, made)
    row = evaluated(config)
    assert row["tokens"] == len(logprobs) > 100
    assert row["loss"] == pytest.approx(-np.mean(logprobs), rel=1e-5)
    assert row["perplexity"] == pytest.approx(np.exp(-np.mean(logprobs)), rel=1e-5)
    difference = np.abs(np.array(logprobs) - np.array(engine))
    assert row["logdiff_mean"] == pytest.approx(difference.mean(), rel=1e-5)
    assert row["logdiff_max_token"] == pytest.approx(difference.max(), rel=1e-5)
    assert evaluated(config, sampled_the_data=False)["logdiff_mean"] is None


def test_a_context_longer_than_a_training_row_gets_longer_rows_unless_told_otherwise(tmp_path: Path) -> None:
    made = recorded(12)[10:]
    long = dataclasses.replace(
        made[0].turns[0], prompt_ids=np.arange(300, dtype=np.int32) % 40, completion_ids=np.arange(3, dtype=np.int32),
        logprobs=None, trainable=True,
    )  # fmt: skip
    made.append(rollouts.Rollout("long", (long,)))
    path = f"evaluation.paths={held_out(tmp_path, made)}"
    held = evaluation.scan(configure(tmp_path, path), 40)
    assert held is not None
    assert (held.index.layout.shape.length, len(held.index.ids), held.index.refused) == (512, 3, ())
    short = evaluation.scan(configure(tmp_path, path, "evaluation.row_length=128"), 40)
    assert short is not None
    assert len(short.index.ids) == 2 and short.tokens == held.tokens - 3
    assert "raise the row length to at least 302" in str(short.index.refused[0])
    narrow = evaluation.scan(configure(tmp_path, path, "data.edges_per_row=4"), 40)
    assert narrow is not None
    assert narrow.index.layout.shape.edges == 256 and narrow.tokens == held.tokens  # a multiple of any mesh.context


def test_nothing_usable_is_refused(tmp_path: Path) -> None:
    with pytest.raises(evaluation.EvaluationError, match=r"evaluation\.paths: .*nowhere\.jsonl"):
        evaluation.scan(configure(tmp_path, f"evaluation.paths={tmp_path / 'nowhere.jsonl'}"), 40)
    context = [
        dataclasses.replace(r, turns=tuple(dataclasses.replace(turn, trainable=False) for turn in r.turns))
        for r in recorded(2)
    ]
    with pytest.raises(evaluation.EvaluationError, match=r"none of the 2 rollouts .* has a trainable turn"):
        evaluation.scan(configure(tmp_path, f"evaluation.paths={held_out(tmp_path, context)}"), 40)


@pytest.mark.parametrize(("every", "steps"), [(0, [0, 5]), (2, [0, 2, 4, 5]), (5, [0, 5])])
def test_when_evaluation_is_due(every: int, steps: list[int]) -> None:
    config = EvaluationConfig(every=every)
    assert [step for step in range(6) if evaluation.due(config, step, 5)] == steps


def without_clock(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in ("seconds", "tokens_per_second")} for row in rows]


def test_a_stopped_run_has_the_evaluations_of_one_that_never_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path)
    settings = (f"evaluation.paths={held_out(tmp_path)}", "evaluation.every=2", "tracking.plots=false")
    plain = configure(tmp_path, "tracking.plots=false", run_dir="plain")
    whole = configure(tmp_path, *settings, run_dir="whole")
    for config in (plain, whole):
        loop.run(config)
    rows = metrics_log.read(whole.run_dir, metrics_log.EVALUATION)
    assert [row["step"] for row in rows] == [0, 2, 4]
    assert rows[0]["loss"] == evaluated(whole, False)["loss"]
    assert rows[2]["loss"] < rows[1]["loss"] < rows[0]["loss"]
    # Evaluating changes nothing that is trained, and compiles once.
    assert without_clock(metrics_log.read(whole.run_dir)) == without_clock(metrics_log.read(plain.run_dir))
    assert (
        f"held out**: {rows[0]['loss']:.4f} at step 0, {rows[2]['loss']:.4f} at step 4"
        in (tmp_path / "whole" / "card.md").read_text()
    )
    stopped = configure(tmp_path, *settings, "checkpoint.every=0", run_dir="stopped")
    append = metrics_log.append

    def stopping(run_dir: Any, row: Any, file: str = metrics_log.FILE) -> None:
        append(run_dir, row, file)
        if file == metrics_log.EVALUATION and row["step"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(metrics_log, "append", stopping)
        assert loop.run(stopped).stopped
    metrics_log.append(stopped.run_dir, {"step": 4, "loss": 9.0, "contents": "x"}, metrics_log.EVALUATION)
    assert loop.run(stopped).step == 4
    assert without_clock(metrics_log.read(stopped.run_dir, metrics_log.EVALUATION)) == without_clock(rows)
    shown = capsys.readouterr().err
    assert f"evaluation at step 0  loss {rows[0]['loss']:.4g}" in shown
    assert "trained on as well" not in shown and "cannot be compared" not in shown
    loop.run(stopped)  # finished: nothing is evaluated twice
    assert len(metrics_log.read(stopped.run_dir, metrics_log.EVALUATION)) == 3


def test_an_evaluation_that_a_signal_cut_short_is_made_on_resume(tmp_path: Path) -> None:
    config = configure(tmp_path, "evaluation.paths=held.jsonl", "evaluation.every=2")
    Path(config.run_dir).mkdir()
    asked: list[bool] = []

    def evaluate(params: Any, go_on: Any) -> dict[str, Any] | None:
        asked.append(go_on(1, 2))
        return {"loss": 1.0} if asked[-1] else None

    made = evaluation.Evaluations(config, 4, None, evaluate, lambda row: None)
    assert made.newest is None and made.wanted(2) and not made.wanted(3)
    made.add(2, None, lambda done, total: False)
    assert made.newest is None and made.wanted(2)
    made.add(2, None, lambda done, total: True)
    assert made.newest == {"step": 2, "loss": 1.0} and not made.wanted(2)
    again = evaluation.Evaluations(config, 4, None, evaluate, lambda row: None)
    assert again.newest == made.newest and not again.wanted(2)


def test_what_to_know_about_the_held_out_rollouts_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path)
    path = held_out(tmp_path, recorded(12)[8:])
    Path(path).write_text(Path(path).read_text() + '{"id": "broken"\n')
    settings = ("data.steps=1", "tracking.plots=false")
    result = loop.run(configure(tmp_path, *settings, f"evaluation.paths={path}"))
    assert result.refused == 1
    shown = capsys.readouterr().err
    assert f"held out, refused: {path}, line 5" in shown
    assert "evaluation: 4 held-out rollouts used, 1 refused" in shown
    assert "evaluation: 2 of them are trained on as well ('r8', 'r9')" in shown
    other = held_out(tmp_path, name="other.jsonl")
    loop.run(configure(tmp_path, "data.steps=2", "tracking.plots=false", f"evaluation.paths={other}"))
    assert "are of other held-out rollouts; they cannot be compared" in capsys.readouterr().err


SCRIPT = """
import json, sys
from pathlib import Path
import jax
from mwjax.train import evaluation, setup
from mwjax.train.config import MeshConfig
from mwjax.train.mesh import make_mesh, replicated
from tests.training_runs import configure

settings = f"evaluation.paths={sys.argv[2]}", "evaluation.rows_per_batch=8"
config = setup.resolved(configure(Path(sys.argv[1]), *settings))
shape, params = setup.decoder(config.model)
held = evaluation.scan(config, shape.vocab_size)
found = []
for devices in (1, 8):
    mesh = make_mesh(MeshConfig(data=devices))
    evaluate = evaluation.build(held, setup.step_config(config, shape), mesh, True)
    row = evaluate(jax.device_put(params, replicated(mesh)), lambda done, total: True)
    found.append([row[name] for name in ("loss", "logdiff_mean", "logdiff_max_token", "tokens")])
print(json.dumps([len(jax.devices()), *found]))
"""


@pytest.mark.slow
def test_eight_devices_evaluate_as_one(tmp_path: Path) -> None:
    root = Path(__file__).parent.parent
    flags = "--xla_force_host_platform_device_count=8"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), held_out(tmp_path)],
        capture_output=True, text=True, timeout=300, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    devices, one, eight = json.loads(done.stdout.splitlines()[-1])
    assert devices == 8
    assert eight == pytest.approx(one, rel=1e-6)


def test_losses_on_other_held_out_rollouts_do_not_rank_a_checkpoint() -> None:
    rows = [
        {"step": 2, "loss": 1.0, "contents": "a"},
        {"step": 4, "loss": 3.0, "contents": "b"},
        {"step": 6, "loss": 2.0, "contents": "b"},
    ]
    assert metrics_log.scores(rows) == {4: 3.0, 6: 2.0}
    assert metrics_log.scores(rows[:1]) == {2: 1.0}
    assert metrics_log.scores([]) == {}
    assert metrics_log.scores([{"step": 1, "loss": 5.0}, {"step": 2, "loss": None}]) == {1: 5.0}


def test_the_masks_of_all_rows_are_looked_at_before_attention_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training rows, SDCC's teacher rows, those of the exact log-probs, those of the evaluation: of a mask that splash
    attention cannot hold nothing would be told but NaN."""
    looked_at: set[int] = set()

    def note(backend: str, rows: Rows, shards: int) -> None:
        assert (backend, shards) == ("blockwise", 1)
        looked_at.add(rows.tokens.shape[1])

    for module in (loop, evaluation):
        monkeypatch.setattr(module, "check_rows", note)
    write(tmp_path)
    settings = (f"evaluation.paths={held_out(tmp_path)}", "evaluation.row_length=144", "data.method=sdcc")
    settings += ("loss.task=memorywalker", "loss.old_logprobs=recompute", "data.teacher_row_length=160")
    loop.run(configure(tmp_path, *settings, "data.steps=1"))
    assert looked_at == {128, 160, 144, 256}
