"""Trajectories in ATIF. They are those of the schema: the models of ``pip install atif==1.8.0`` check it, in a test
that runs where they are installed."""

from __future__ import annotations

import json

import pytest

from mwjax.rollouts import Refusal
from mwjax.rollouts.readers import Found, Options, Remark, atif, detect
from mwjax.tree import build
from tests.test_readers_sessions import OPTIONS, seen_by

TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}


def trajectory(**changes):
    return {
        "schema_version": "ATIF-v1.7",
        "session_id": "run-1",
        "trajectory_id": "main-1",
        "agent": {"name": "harbor-agent", "version": "1.0.0", "tool_definitions": [TOOL]},
        "steps": [
            {"step_id": 1, "source": "system", "message": "Be brief."},
            {"step_id": 2, "source": "user", "message": "Go"},
            {
                "step_id": 3,
                "source": "agent",
                "message": "",
                "reasoning_content": "I look.",
                "tool_calls": [{"tool_call_id": "c1", "function_name": "read", "arguments": {"path": "a"}}],
                "observation": {"results": [{"source_call_id": "c1", "content": "rope"}]},
            },
            {"step_id": 4, "source": "agent", "message": "Rope."},
        ],
        **changes,
    }


def write(tmp_path, *trajectories, name="trajectory.json"):
    path = tmp_path / name
    path.write_text("\n".join(json.dumps(each) for each in trajectories))
    return str(path)


def short(messages):
    return [
        f"{each['role'][0]}:{each['content'] or '+'.join(c['id'] for c in each['tool_calls'])}" for each in messages
    ]


def read(path, monkeypatch, reader=atif):
    calls, items = seen_by(reader, path, monkeypatch)
    return calls, items, [item.rollout for item in items if isinstance(item, Found)]


def test_steps_are_calls_under_all_that_came_before(tmp_path, monkeypatch):
    path = write(tmp_path, trajectory())
    calls, items, (rollout,) = read(path, monkeypatch)
    assert [short(call.messages) for call in calls] == [
        ["s:Be brief.", "u:Go"],
        ["s:Be brief.", "u:Go", "a:c1", "t:rope"],
    ]
    assert calls[0].tools == (TOOL,) and calls[0].answer["reasoning_content"] == "I look."
    assert rollout.id == "main-1" and not build(rollout).junctions
    assert "context_incomplete" not in rollout.meta and rollout.meta["rendered"]
    assert [item.records for item in items if isinstance(item, Found)] == [1]
    assert detect(path).NAME == "atif"


def test_a_document_over_many_lines_and_several_documents_one_a_line_are_both_read(tmp_path, monkeypatch):
    whole = tmp_path / "whole.json"
    whole.write_text(json.dumps(trajectory(), indent=2))
    assert len(read(str(whole), monkeypatch)[2]) == 1
    lines = write(tmp_path, trajectory(trajectory_id="a"), trajectory(trajectory_id="b"), name="lines.jsonl")
    assert [rollout.id for rollout in read(lines, monkeypatch)[2]] == ["a", "b"]


def test_without_a_system_prompt_or_tools_the_context_is_incomplete(tmp_path, monkeypatch):
    value = trajectory(agent={"name": "a", "version": "1"})
    value["steps"] = value["steps"][1:]
    _, _, (rollout,) = read(write(tmp_path, value), monkeypatch)
    assert rollout.meta["context_incomplete"] == ["system prompt", "tool list"]


def test_ids_in_every_step_are_taken_as_they_are(tmp_path):
    value = trajectory()
    for step, prompt, sampled in ((value["steps"][2], [1, 2, 3], [4, 5]), (value["steps"][3], [1, 2, 3, 4, 5, 6], [7])):
        step["metrics"] = {
            "prompt_token_ids": prompt,
            "completion_token_ids": sampled,
            "logprobs": [-0.5] * len(sampled),
            "prompt_tokens": len(prompt),
            "completion_tokens": len(sampled),
        }
    (found,) = atif.read(write(tmp_path, value), Options())  # no tokenizer is needed
    first, second = found.rollout.turns
    assert (first.prompt_ids.tolist(), first.completion_ids.tolist()) == ([1, 2, 3], [4, 5])
    assert second.logprobs.tolist() == [-0.5] and "rendered" not in found.rollout.meta
    assert len(build(found.rollout).views) == 1
    value["steps"][3]["metrics"]["completion_tokens"] = 9
    (refusal,) = atif.read(write(tmp_path, value, name="wrong.json"), Options())
    assert "says 9, but there are 1 completion ids" in refusal.reason


def test_ids_in_some_steps_only_are_left_for_rendering(tmp_path, monkeypatch):
    value = trajectory()
    value["steps"][3]["metrics"] = {"prompt_token_ids": [1], "completion_token_ids": [2]}
    _, items, (rollout,) = read(write(tmp_path, value), monkeypatch)
    assert rollout.meta["rendered"] and len(rollout.turns) == 2
    assert any("some steps have token ids" in item.reason for item in items if isinstance(item, Remark))


def test_copied_context_and_aggregated_answers_are_context_only_and_dispatches_no_calls(tmp_path, monkeypatch):
    value = trajectory()
    value["steps"][2]["is_copied_context"] = True
    value["steps"].insert(3, {"step_id": 9, "source": "agent", "message": "dispatched", "llm_call_count": 0})
    value["steps"][4]["llm_call_count"] = 2
    calls, _, (rollout,) = read(write(tmp_path, value), monkeypatch)
    assert [turn.trainable for turn in rollout.turns] == [False, False]
    assert short(calls[1].messages)[-1] == "a:dispatched"


def test_embedded_sub_agents_are_chains_that_name_the_step_that_delegated(tmp_path, monkeypatch):
    value = trajectory()
    value["steps"][2]["observation"]["results"][0]["subagent_trajectory_ref"] = [{"trajectory_id": "sub-1"}]
    value["subagent_trajectories"] = [trajectory(trajectory_id="sub-1", steps=trajectory()["steps"][1:])]
    _, _, (rollout,) = read(write(tmp_path, value), monkeypatch)
    assert [(turn.chain, turn.cause_turn) for turn in rollout.turns] == [
        ("main", None),
        ("subagent-1", 0),
        ("subagent-1", None),
        ("main", None),
    ]


def test_an_observation_without_a_tool_call_is_the_users_word(tmp_path, monkeypatch):
    value = trajectory()
    step = value["steps"][2]
    step["message"] = "ls"
    del step["tool_calls"], step["observation"]["results"][0]["source_call_id"]
    calls, _, _ = read(write(tmp_path, value), monkeypatch)
    assert short(calls[1].messages) == ["s:Be brief.", "u:Go", "a:ls", "u:rope"]


@pytest.mark.parametrize(
    ("change", "field", "reason"),
    [
        ({"source": "robot"}, "steps[1].source", "must be system, user or agent"),
        ({"message": [{"type": "image", "source": {}}]}, "steps[1].message[0]", "only text can become token ids"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(tmp_path, change, field, reason):
    value = trajectory()
    value["steps"][1].update(change)
    (refusal,) = atif.read(write(tmp_path, value), OPTIONS)
    assert isinstance(refusal, Refusal) and refusal.field == field and reason in refusal.reason


def test_the_trajectories_here_are_what_the_schema_has():
    models = pytest.importorskip("atif")
    value = trajectory()
    value["steps"][2]["observation"]["results"][0]["subagent_trajectory_ref"] = [{"trajectory_id": "sub-1"}]
    steps = [{**step, "step_id": k} for k, step in enumerate(trajectory()["steps"][1:], start=1)]
    value["subagent_trajectories"] = [trajectory(trajectory_id="sub-1", steps=steps)]
    models.Trajectory.model_validate(value)
