"""Answers that broke off, failed, or were left by a harness that had them whole."""

from __future__ import annotations

import json

import pytest

from mwjax.rollouts.readers import calls_log, rendering_for
from tests.test_readers_requests import GO, chat, read, recorded, said, text_item, write
from tests.test_readers_sessions import OPTIONS


def test_an_answer_that_the_recorder_saw_break_off_is_context_only_and_has_no_stop_token(tmp_path):
    cut = recorded(chat(GO, said("Rope a"), "r1", finish=None), 1, error={"kind": "upstream_cut_off", "message": "x"})
    (rollout,), others = read(write(tmp_path, [cut, recorded(chat(GO, said("Rope and salt."), "r2"), 2)]))
    assert [(turn.trainable, turn.purpose) for turn in rollout.turns] == [(False, "cut_off"), (True, "act")]
    assert rendering_for("test", OPTIONS).decode(rollout.turns[0].completion_ids.tolist()) == "Rope a"
    assert rollout.meta["cut_off_turns"] == [0] and any("the answer broke off" in other.reason for other in others)


@pytest.mark.parametrize("kind", ["client_disconnected", "upstream_cut_off", "incomplete_stream"])
def test_an_answer_whose_end_was_there_before_the_stream_broke_off_is_whole(tmp_path, kind):
    record = recorded(chat(GO, said("Rope."), "r1"), 1, error={"kind": kind, "message": "x"})
    (rollout,), others = read(write(tmp_path, [record]))
    assert rollout.turns[0].trainable and not others
    ids = {"prompt_ids": [1, 2], "completions": [{"index": 0, "completion_ids": [5]}]}
    (rollout,), others = read(write(tmp_path, [{**record, **ids}]), reader=calls_log)
    assert rollout.turns[0].trainable and not others
    record["response"]["choices"] = []
    (rollout,), _ = read(write(tmp_path, [{**record, **ids}]), reader=calls_log)
    assert not rollout.turns[0].trainable


CUT_STREAMS = {
    "chat.completions": [
        {"id": "r1", "choices": [{"index": 0, "delta": {"content": part}, "finish_reason": None}]}
        for part in ("Rope", " a")
    ],
    "messages": [
        {"type": "message_start", "message": {"id": "m1", "type": "message", "content": [], "stop_reason": None}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Rope a"}},
    ],
    "responses": [
        {"type": "response.created", "response": {"object": "response", "id": "r1", "status": "in_progress"}},
        {"type": "response.output_item.added", "output_index": 0, "item": {**text_item(""), "content": []}},
        *(
            {"type": "response.output_text.delta", "output_index": 0, "content_index": 0, "delta": part}
            for part in ("Rope", " a")
        ),
    ],
}


@pytest.mark.parametrize("endpoint", CUT_STREAMS)
def test_a_stream_that_broke_off_is_context_only_and_has_no_stop_token(tmp_path, endpoint):
    asked = {"input": GO} if endpoint == "responses" else {"messages": GO[1:]}
    stream = "".join(f"data: {json.dumps(payload)}\n\n" for payload in CUT_STREAMS[endpoint])
    (rollout,), others = read(write(tmp_path, [{"request": {"model": "m", **asked}, "response": stream}]))
    (turn,) = rollout.turns
    assert (turn.trainable, turn.purpose) == (False, "cut_off")
    assert rendering_for("test", OPTIONS).decode(turn.completion_ids.tolist()) == "Rope a"
    assert any("the answer broke off" in other.reason for other in others)


@pytest.mark.parametrize("status", ["failed", "cancelled"])
def test_what_a_response_that_failed_had_said_is_context_only(tmp_path, status):
    response = {"object": "response", "id": "r1", "status": status, "error": None, "output": [text_item("Rope a")]}
    (rollout,), _ = read(write(tmp_path, [{"request": {"model": "m", "input": GO}, "response": response}]))
    assert [(turn.trainable, turn.purpose) for turn in rollout.turns] == [(False, "cut_off")]
