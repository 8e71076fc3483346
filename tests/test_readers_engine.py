"""Requests and responses of vLLM and SGLang with token ids, plain and through the recorder, as rollouts."""

from __future__ import annotations

import json

import pytest

from mwjax import rollouts, tree
from mwjax.rollouts.readers import Options, detect, import_files
from mwjax.rollouts.record import Sampling
from tests.scripted_engine import call, logprob, pieces, prompt_token_ids, recording, reply_to, running, token_id
from tests.toy_engine import answer, logprobs_of

PROMPT, FIRST = [2, 10, 11, 1, 3, 12, 13, 1, 4], [14, 15, 1]
SECOND_PROMPT, SECOND = [*PROMPT, *FIRST, 5, 16, 1, 4], [17, 1]
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "find it"}]
LATER = [*MESSAGES, {"role": "assistant", "content": "I look"}, {"role": "tool", "content": "x", "tool_call_id": "c"}]


def imported(records, folder, **options):
    log, out = folder / "log.jsonl", folder / "rollouts.jsonl"
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert detect(str(log)).NAME == "engine"
    result = import_files([str(log)], out, options=Options(**options), overwrite=True)
    return result, rollouts.read(out).rollouts if result.rollouts else []


def ids_of(rollout):
    return [(turn.prompt_ids.tolist(), turn.completion_ids.tolist()) for turn in rollout.turns]


def generate(prompt, ids, name, **meta):
    """A native call of SGLang."""
    info = {
        "id": name,
        "finish_reason": {"type": "stop", "matched": 1},
        "prompt_tokens": len(prompt),
        "completion_tokens": len(ids),
        "weight_version": "12",
        "output_token_logprobs": [[p, id, None] for id, p in zip(ids, logprobs_of(ids))],
        **meta,
    }
    request = {"input_ids": prompt, "sampling_params": {"temperature": 0.8, "top_p": 1.0, "top_k": -1}}
    return {"request": request, "response": {"text": "", "output_ids": ids, "meta_info": info}}


def test_chat_completions_of_vllm(tmp_path):
    request = {"temperature": 0.5, "top_p": 0.9, "top_k": -1}
    records = [
        {
            "session_id": "s",
            "request": {"messages": MESSAGES, **request},
            "response": answer("a", PROMPT, FIRST, "I look"),
        },
        {
            "session_id": "s",
            "request": {"messages": LATER, **request},
            "response": answer("b", SECOND_PROMPT, SECOND, "x"),
        },
        {"session_id": "s", "request": {"messages": LATER}, "response": {"error": {"message": "busy"}}},
    ]
    result, (rollout,) = imported(records, tmp_path)
    assert ids_of(rollout) == [(PROMPT, FIRST), (SECOND_PROMPT, SECOND)]
    assert [turn.logprobs.tolist() for turn in rollout.turns] == [logprobs_of(FIRST), logprobs_of(SECOND)]
    assert {turn.sampling for turn in rollout.turns} == {Sampling(0.5, 0.9, 0, "raw")}
    assert (rollout.id, result.used, result.empty) == ("s", 2, 1)


def test_native_calls_of_sglang(tmp_path):
    records = [generate(PROMPT, FIRST, "a"), generate(SECOND_PROMPT, SECOND, "b", finish_reason={"type": "length"})]
    _, (rollout,) = imported(records, tmp_path)
    assert ids_of(rollout) == [(PROMPT, FIRST), (SECOND_PROMPT, SECOND)]
    assert [turn.logprobs.tolist() for turn in rollout.turns] == [logprobs_of(FIRST), logprobs_of(SECOND)]
    assert {turn.sampling for turn in rollout.turns} == {Sampling(0.8, 1.0, 0, "processed")}
    assert [turn.finish_reason for turn in rollout.turns] == ["stop", "length"]
    assert {turn.policy_version for turn in rollout.turns} == {12}
    assert rollout.id == "log"


def test_completions_with_several_choices_are_several_samples(tmp_path):
    choices = [
        {"index": k, "text": "", "finish_reason": "stop", "prompt_token_ids": PROMPT, "token_ids": ids,
         "logprobs": {"token_logprobs": logprobs_of(ids), "tokens": []}}
        for k, ids in enumerate((FIRST, SECOND))
    ]  # fmt: skip
    usage = {"prompt_tokens": len(PROMPT), "completion_tokens": len(FIRST) + len(SECOND)}
    records = [{"id": "cmpl-1", "choices": choices, "usage": usage}]  # a response alone
    result, (rollout,) = imported(records, tmp_path)
    assert ids_of(rollout) == [(PROMPT, FIRST), (PROMPT, SECOND)]
    assert [junction.reason for junction in tree.build(rollout).junctions] == ["resample"]
    assert result.records == result.used == 1


def test_calls_without_a_session_are_told_apart_by_what_they_share(tmp_path):
    system = list(range(50, 90))  # as long as it is, it tells nothing
    prompts = [[*system, *prompt] for prompt in (PROMPT, [9, 8, 7], SECOND_PROMPT)]
    records = [generate(prompt, ids, k) for k, (prompt, ids) in enumerate(zip(prompts, (FIRST, SECOND, SECOND)))]
    _, found = imported(records, tmp_path)
    assert [ids_of(rollout) for rollout in found] == [
        [(prompts[0], FIRST), (prompts[2], SECOND)],
        [(prompts[1], SECOND)],
    ]
    named = [{**record, "info": {"task": "t"}} for record in records]
    _, (one,) = imported(named, tmp_path, session_by="info.task", group_by="info.task")
    assert (one.id, one.group, len(one.turns)) == ("t", "t", 3)


def test_episodes_of_one_task_without_a_session_stay_apart_and_a_title_goes_with_its_own(tmp_path):
    tools = [{"type": "function", "function": {"name": "read"}}]
    opening = [*MESSAGES[:1], {"role": "user", "content": "find the file that holds it"}]
    later = [*opening, *LATER[2:]]
    title = {"messages": [{"role": "system", "content": "make a title"}, opening[1]]}
    records = [
        {"request": title, "response": answer("t", [7, 7, 7], [70, 1], "The file")},
        {"request": {"messages": opening, "tools": tools}, "response": answer("a", PROMPT, FIRST, "I look")},
        {"request": {"messages": later, "tools": tools}, "response": answer("b", SECOND_PROMPT, SECOND, "x")},
        {"request": {"messages": opening, "tools": tools}, "response": answer("c", PROMPT, FIRST, "I look")},
        {"request": {"messages": later, "tools": tools}, "response": answer("d", SECOND_PROMPT, [18, 1], "y")},
    ]
    _, found = imported(records, tmp_path)
    assert [[turn.chain for turn in rollout.turns] for rollout in found] == [["title-1", "main", "main"], ["main"] * 2]
    assert found[1].turns[1].completion_ids.tolist() == [18, 1]


@pytest.mark.parametrize(
    ("change", "field", "reason"),
    [
        ({"completion_tokens": 5}, "usage.completion_tokens", "says 5, but there are 3 completion ids"),
        ({"prompt_tokens": 8}, "usage.prompt_tokens", "says 8, but there are 9 prompt ids"),
        ({"output_token_logprobs": [[-0.5, 14, None]]}, "logprobs", "has 1, must have one per completion id (3)"),
    ],
)
def test_what_disagrees_is_refused(change, field, reason, tmp_path):
    result, (rollout,) = imported([generate(PROMPT, FIRST, "a"), generate(PROMPT, FIRST, "b", **change)], tmp_path)
    (refusal,) = result.refused
    assert (refusal.line, refusal.field) == (2, field) and reason in refusal.reason
    assert rollout.meta["refused_lines"] == [2]


CHAT = {"model": "m", "messages": [{"role": "user", "content": "where is it"}], "temperature": 0.9}


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def engine(request):
    with running(request.param) as started:
        yield started


def recorded(engine, folder, *exchanges):
    """The rollouts of a recorder's log of these calls: (payload, script), in the session "s"."""
    with recording(engine.url, folder) as recorder:
        for payload, script in exchanges:
            headers = {"x-session-id": "s", "x-script": script}
            call(recorder.url, "/v1/chat/completions", payload, headers=headers)
    result = import_files([str(recorder.path)], folder / "out.jsonl")
    return result, rollouts.read(folder / "out.jsonl").rollouts if result.rollouts else []


@pytest.mark.parametrize("stream", [False, True])
def test_a_recorded_call_gives_what_the_engine_sampled(engine, stream, tmp_path):
    result, (rollout,) = recorded(engine, tmp_path, ({**CHAT, "stream": stream}, ""))
    sampled = pieces(reply_to(CHAT))
    if stream:  # the scripted engine's parser swallows one token, which is sampled all the same
        sampled.insert(1, "<tool>")
    assert ids_of(rollout) == [(prompt_token_ids(CHAT), [token_id(piece) for piece in sampled])]
    assert rollout.turns[0].logprobs.tolist() == [logprob(piece) for piece in sampled]
    kind = "processed" if engine.flavour == "sglang" else "raw"
    assert {turn.sampling for turn in rollout.turns} == {Sampling(0.9, 1.0, 0, kind)}
    assert (rollout.id, result.records, result.used) == ("s", 1, 1)
    assert ("sampled at temperature 0.9" in result.account()) == (kind == "raw")


def test_a_request_of_several_prompts_is_refused(tmp_path):
    choices = [
        {"index": k, "text": "x", "token_ids": [5 + k], "prompt_token_ids": [1, 2 + k], "finish_reason": "stop"}
        for k in (0, 1)
    ]
    result, _ = imported([{"request": {"prompt": ["a", "b"]}, "response": {"choices": choices}}], tmp_path)
    assert [(each.field, each.reason) for each in result.refused] == [
        (
            "choices[1].prompt_token_ids",
            "is another prompt than the first choice's: a request of several prompts; log one a record",
        )
    ]
    for choice in choices:
        choice["prompt_token_ids"] = [1, 2]
    _, (rollout,) = imported([{"request": {"prompt": "a"}, "response": {"choices": choices}}], tmp_path)
    assert ids_of(rollout) == [([1, 2], [5]), ([1, 2], [6])]


def test_a_stream_with_ids_may_be_its_text_or_its_chunks(tmp_path):
    chunks = [
        {"id": "a", "prompt_token_ids": PROMPT, "choices": [{"index": 0, "delta": {"role": "assistant"}}]},
        *(
            {
                "id": "a",
                "choices": [
                    {
                        "index": 0,
                        "delta": {"content": "x"},
                        "token_ids": [each],
                        "logprobs": {"content": [{"token": "x", "logprob": -0.5}]},
                        "finish_reason": "stop" if each == FIRST[-1] else None,
                    }
                ],
            }
            for each in FIRST
        ),
    ]
    text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    for response in (chunks, text, {"status": 200, "body": text}):
        _, (rollout,) = imported([{"request": {"messages": MESSAGES}, "response": response}], tmp_path)
        assert ids_of(rollout) == [(PROMPT, FIRST)]
        assert rollout.turns[0].logprobs.tolist() == [-0.5] * 3 and rollout.turns[0].finish_reason == "stop"
    _, (rollout,) = imported([{"request": {"messages": MESSAGES}, "response": chunks[:-1]}], tmp_path)
    assert ids_of(rollout) == [(PROMPT, FIRST[:-1])] and not rollout.turns[0].trainable


def test_an_answer_that_broke_off_is_context_only_and_said_so(tmp_path):
    with running("vllm") as engine:
        result, found = recorded(engine, tmp_path, ({**CHAT, "stream": True}, "cut"), ({**CHAT, "stream": True}, ""))
    (rollout,) = found
    cut, whole = rollout.turns
    assert len(cut.completion_ids) < len(whole.completion_ids)
    assert cut.completion_ids.tolist() == whole.completion_ids[: len(cut.completion_ids)].tolist()
    assert (cut.trainable, cut.purpose, whole.trainable) == (False, "cut_off", True)
    assert rollout.meta["cut_off_turns"] == [0]
    assert "the answer broke off" in result.account()


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("refuse", "nothing sampled: the call failed (http_status)"),
        ("hang-up", "nothing sampled: the call failed (upstream_disconnected)"),
        ("malformed", "malformed_events: events of the stream could not be read; ids may be missing"),
        ("error-event", "the answer broke off"),
    ],
)
def test_failed_calls_are_accounted_for(script, told, tmp_path):
    with running("vllm") as engine:
        result, found = recorded(engine, tmp_path, ({**CHAT, "stream": True}, script))
    assert told in result.account()
    assert (result.records, result.used, len(found)) == (1, script == "error-event", script == "error-event")
