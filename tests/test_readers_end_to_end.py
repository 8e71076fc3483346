"""Logs with token ids, imported, go through inspect, audit and train."""

from __future__ import annotations

import json
import zlib

import numpy as np
from typer.testing import CliRunner

from mwjax import rollouts
from mwjax.cli import app
from mwjax.train import loop
from tests.test_readers_claude_code import compacted, text
from tests.test_readers_formats import FIXTURES
from tests.test_readers_requests import DROPS_THINKING, READ, said, user
from tests.training_runs import compile_once, configure

__all__ = ["compile_once"]

LOGS = (
    "verifiers_traces.jsonl",
    "verifiers_steps.jsonl",
    "agent_lightning_events.jsonl",
    "areal_rows.jsonl",
    "slime_rollout_3.pt",
    "trl_rows.jsonl",
    "verl_rows.jsonl",
)


def run(*arguments):
    done = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_imported_rollouts_are_inspected_audited_and_trained_on(tmp_path):
    out = tmp_path / "rollouts.jsonl"
    made = run("import", *(FIXTURES / name for name in LOGS), "--out", out)
    found = rollouts.read(out).rollouts
    assert made.startswith(f"{len(found)} rollouts, ")

    sampled = sum(len(turn.completion_ids) for rollout in found for turn in rollout.turns)
    lines = [json.loads(line) for line in run("inspect", out, "--json", "--tokens").splitlines()]
    tokens = [line for line in lines if "methods" in line]
    assert len(tokens) == sampled
    by_id = {rollout.id: rollout for rollout in found}
    for token in tokens:  # what would be trained under the exact method is the recorded prompt, id by id
        turn = by_id[token["id"]].turns[token["turn"]]
        prefix = np.concatenate([turn.prompt_ids, turn.completion_ids[: token["index"]]]).astype("<i4")
        expected = {"prefix_len": len(prefix), "prefix_crc32": zlib.crc32(prefix.tobytes())}
        assert token["methods"]["packed"] == (expected if token["trainable"] else None)

    run("audit", out, "--json", tmp_path / "audit.json")
    audited = json.loads((tmp_path / "audit.json").read_text())
    assert audited["rollouts"] == len(found)

    settings = configure(
        tmp_path,
        "loss.task=grpo",
        "model.small.layers=1",
        "data.rollouts_per_step=20",
        "data.steps=2",
        "model.small.vocab_size=80",
    )
    result = loop.run(settings)
    assert not result.refused
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(step["step"], step["rollouts"]) for step in steps] == [(1, len(found)), (2, len(found))]
    assert all(np.isfinite(step["loss"]) and step["gradient_norm"] > 0 for step in steps)


def test_rendered_rollouts_are_inspected_audited_and_trained_on(tmp_path):
    sets, out = tmp_path / "set.jsonl", tmp_path / "rollouts.jsonl"
    first, second = said("First.", reasoning_content="Hm."), said("Second.", reasoning_content="So.")
    messages = [user("Go"), first, user("On"), second]
    sets.write_text(json.dumps({"messages": messages}) + "\n")
    session = compacted().user("u9", "And?").said("a9", "m9", text("Rope."))
    (tmp_path / "system").write_text(json.dumps([{"role": "system", "content": "Be brief."}, user("A reminder.")]))
    (tmp_path / "tools").write_text(json.dumps([READ]))
    model = ("--tokenizer", DROPS_THINKING.tokenizer, "--template", DROPS_THINKING.template)
    given = ("--system", tmp_path / "system", "--tools", tmp_path / "tools")
    run("import", sets, session.write(tmp_path), "--out", out, *model, *given)
    found = rollouts.read(out).rollouts
    assert len(found) == 2 and not any("context_incomplete" in rollout.meta for rollout in found)

    lines = [json.loads(line) for line in run("inspect", out, "--json").splitlines()]
    assert [junction["detail"] for junction in lines[0]["junctions"]] == ["template"]
    run("audit", out, "--json", tmp_path / "audit.json")
    assert json.loads((tmp_path / "audit.json").read_text())["rollouts"] == 2

    settings = configure(
        tmp_path,
        "loss.task=sft",
        "model.small.layers=1",
        "data.rollouts_per_step=2",
        "data.row_length=512",
        "data.steps=1",
        "model.small.vocab_size=49152",
    )
    result = loop.run(settings)
    assert not result.refused
    (step,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert step["rollouts"] == 2 and np.isfinite(step["loss"]) and step["gradient_norm"] > 0
