"""Requests and responses without token ids, as JSON Lines and in HTTP archives: chains, junctions, and what the server
keeps to itself."""

from __future__ import annotations

import base64
import gzip
import json
import zlib

import pytest
import zstandard

from mwjax.cli import main
from mwjax.rollouts import Refusal
from mwjax.rollouts.readers import (
    Found,
    Options,
    Remark,
    chat_log,
    check_rendering,
    detect,
    har,
    rendering_for,
    template_options,
)
from mwjax.tree import build
from tests.test_readers_sessions import FIXTURES, OPTIONS

DROPS_THINKING = Options(tokenizer=OPTIONS.tokenizer, template=str(FIXTURES / "templates" / "drops_thinking.jinja"))
READ = {"type": "function", "function": {"name": "read", "parameters": {}}}


def user(text):
    return {"role": "user", "content": text}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


def calling(arguments, name="read", call_id="c1"):
    function = {"name": name, "arguments": arguments}
    return said("", tool_calls=[{"id": call_id, "type": "function", "function": function}])


def result(text, call_id="c1"):
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def chat(messages, answer, name, *, tools=(READ,), finish="stop", **more):
    choice = {"index": 0, "message": answer, "finish_reason": finish}
    return {
        "request": {"model": "m", "messages": messages, "tools": list(tools), **more},
        "response": {"id": name, "object": "chat.completion", "choices": [choice]},
        "session_id": "s",
    }


def write(tmp_path, records, name="log.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def read(path, options=OPTIONS, reader=chat_log):
    items = list(reader.read(path, options))
    return [item.rollout for item in items if isinstance(item, Found)], [i for i in items if not isinstance(i, Found)]


def junctions(rollout):
    return [(junction.turn, junction.detail) for junction in build(rollout).junctions if junction.chain == "main"]


def decoded(rollout, turn, options=OPTIONS):
    return rendering_for("test", options).decode(rollout.turns[turn].prompt_ids.tolist())


GO, LONG = [{"role": "system", "content": "Be brief."}, user("Go")], "The village sells rope and salt. " * 3


def test_a_tool_loop_is_one_view_however_the_arguments_are_spelt(tmp_path):
    spelt, again = calling('{"path": "a", "lines": 2}'), calling('{"path":"a","lines":2}')
    log = [chat(GO, spelt, "r1"), chat([*GO, again, result(LONG)], said("Rope."), "r2")]
    (rollout,), _ = read(write(tmp_path, log))
    assert len(build(rollout).views) == 1 and [turn.chain for turn in rollout.turns] == ["main", "main"]
    assert rollout.meta["rendered"]["tokenizer"] == "tokenizer.json" and "context_incomplete" not in rollout.meta


def test_arguments_in_another_order_are_one_junction(tmp_path):
    spelt, again = calling('{"path": "a", "lines": 2}'), calling('{"lines": 2, "path": "a"}')
    more = [*GO, again, result(LONG), said("Rope."), user("And?")]
    log = [
        chat(GO, spelt, "r1"),
        chat([*GO, again, result(LONG)], said("Rope."), "r2"),
        chat(more, said("Salt."), "r3"),
    ]
    (rollout,), _ = read(write(tmp_path, log))
    assert junctions(rollout) == [(1, "tool_json")]


def test_thinking_that_the_template_drops_is_a_template_junction(tmp_path):
    first = said("Rope.", reasoning_content="I remember the rope.")
    log = [chat(GO, first, "r1"), chat([*GO, first, user("Sure?")], said("Yes.", reasoning="Still."), "r2")]
    (rollout,), _ = read(write(tmp_path, log), DROPS_THINKING)
    assert junctions(rollout) == [(1, "template")]
    assert "I remember" not in decoded(rollout, 1, DROPS_THINKING)


def test_an_empty_think_block_of_the_template_is_a_template_junction(tmp_path):
    made = calling('{"path": "a"}')
    log = [chat(GO, made, "r1"), chat([*GO, made, result(LONG)], said("Rope."), "r2")]
    (rollout,), _ = read(write(tmp_path, log), DROPS_THINKING)
    assert junctions(rollout) == [(1, "template")]


def test_a_pruned_tool_result_and_an_injected_user_turn(tmp_path):
    made = calling('{"path": "a"}')
    full, pruned = [*GO, made, result(LONG)], [*GO, made, result("[cleared]")]
    log = [
        chat(full, said("Rope."), "r1"),
        chat([*pruned, said("Rope."), user("And?")], said("Salt."), "r2"),
        chat([*pruned, user("Note the date."), said("Rope."), user("And?"), said("Salt.")], said("Done."), "r3"),
    ]
    (rollout,), _ = read(write(tmp_path, log))
    assert junctions(rollout) == [(1, "pruned_tool_result"), (2, "injected_turn")]


def test_a_continue_turn_extends_the_view(tmp_path):
    log = [chat(GO, said("Rope."), "r1"), chat([*GO, said("Rope."), user("Continue.")], said("Salt."), "r2")]
    (rollout,), others = read(write(tmp_path, log))
    assert not junctions(rollout) and not others


def test_the_same_response_twice_counts_once_and_two_samples_twice(tmp_path):
    log = [chat(GO, said("Rope."), "r1"), chat(GO, said("Rope."), "r1"), chat(GO, said("Salt."), "r2")]
    (rollout,), others = read(write(tmp_path, log))
    assert [other.kind for other in others] == ["merged"]
    assert len(rollout.turns) == 2
    assert rollout.turns[0].prompt_ids.tolist() == rollout.turns[1].prompt_ids.tolist()


def test_a_truncated_answer_is_kept_without_a_stop_token_and_said(tmp_path):
    (rollout,), others = read(write(tmp_path, [chat(GO, said("Rope and"), "r1", finish="length")]))
    text = rendering_for("test", OPTIONS).decode(rollout.turns[0].completion_ids.tolist())
    assert text == "Rope and" and rollout.meta["truncated_turns"] == [0]
    assert any("truncated at the token limit" in other.reason for other in others)


def test_a_system_line_that_changes_is_said_and_normalised_on_request(tmp_path):
    def dated(second, *rest):
        system = "You are an agent.\nBe brief.\nNever lie.\nAsk when unsure.\nIt is 12:00:0"
        return [{"role": "system", "content": f"{system}{second}"}, user("Go"), *rest]

    log = [
        chat(dated(1), said("Rope."), "r1"),
        chat(dated(2, said("Rope."), user("And?")), said("Salt."), "r2"),
        chat(dated(3, said("Rope."), user("And?"), said("Salt."), user("So?")), said("Done."), "r3"),
    ]
    path = write(tmp_path, log)
    (rollout,), (warning,) = read(path)
    assert junctions(rollout) == [(1, "system_prompt"), (2, "system_prompt")]
    assert "'It is 12:00:02'" in warning.reason and "--normalise-system gives" in warning.reason
    asked = Options(tokenizer=OPTIONS.tokenizer, template=OPTIONS.template, normalise_system=True)
    (rollout,), (warning,) = read(path, asked)
    assert not junctions(rollout) and rollout.meta["system_normalised"] == 2
    assert "12:00:01" in decoded(rollout, 2, asked) and "was given the first call's" in warning.reason


def responses(items, output, name, **more):
    return {
        "request": {"model": "m", "input": items, "instructions": "Be brief.", **more},
        "response": {"object": "response", "id": name, "status": "completed", "output": output},
        "session_id": "s",
    }


def text_item(text):
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def test_a_server_that_may_cut_the_prompt_is_said(tmp_path):
    _, others = read(write(tmp_path, [responses("Go", [text_item("Rope.")], "r1", truncation="auto")]))
    assert ["may be less" in other.reason for other in others] == [True]


def test_a_previous_response_is_followed_in_the_log(tmp_path):
    log = [
        responses("Go", [text_item("Rope.")], "r1"),
        responses([{"role": "user", "content": "And?"}], [text_item("Salt.")], "r2", previous_response_id="r1"),
    ]
    (rollout,), _ = read(write(tmp_path, log))
    assert not junctions(rollout)
    assert decoded(rollout, 1).count("Be brief.") == 1 and "Rope." in decoded(rollout, 1)


def test_what_was_said_before_a_previous_response_stays_but_not_its_instructions(tmp_path):
    pirate = {"role": "developer", "content": "Speak like a pirate."}
    log = [
        responses([pirate, user("Go")], [text_item("Rope.")], "r1"),
        responses([user("And?")], [text_item("Salt.")], "r2", previous_response_id="r1", instructions="Be loud."),
    ]
    (rollout,), _ = read(write(tmp_path, log))
    assert decoded(rollout, 1).count("Speak like a pirate.") == 1
    assert "Be loud." in decoded(rollout, 1) and "Be brief." not in decoded(rollout, 1)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (responses("And?", [text_item("Salt.")], "r2", previous_response_id="r9"), "'r9' is not in the log"),
        (responses("Go", [text_item("Salt.")], "r2", conversation="conv_1"), "kept on the server"),
        (responses([{"type": "compaction", "encrypted_content": "x"}], [text_item("a")], "r"), "encrypted compaction"),
        (responses([{"type": "item_reference", "id": "x"}], [text_item("a")], "r"), "stored on the server"),
        (responses([{"type": "message", "content": "x"}], [text_item("a")], "r"), "it has no role"),
        (
            {
                "request": {"model": "m", "messages": [user("Go")], "context_management": {}},
                "response": {
                    "type": "message",
                    "content": [{"type": "text", "text": "Rope."}],
                    "context_management": {"applied_edits": [{"type": "clear_tool_uses_20250919"}]},
                },
            },
            r"server edited the context of this call \(clear_tool_uses_20250919\)",
        ),
        (chat([{"role": "user", "content": [{"type": "image_url"}]}], said("A cat."), "r"), "only text can become"),
    ],
)
def test_what_the_server_keeps_or_is_no_text_is_refused_with_the_reason(tmp_path, record, reason):
    log = [chat(GO, said("Rope."), "r1"), record]
    rollouts, others = read(write(tmp_path, log))
    (refusal,) = [each for each in others if isinstance(each, Refusal)]
    assert refusal.line == 2
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(refusal.reason)
    assert len(rollouts) == 1


def anthropic(messages, blocks, name, **more):
    return {
        "request": {"model": "m", "messages": messages, "system": [{"type": "text", "text": "Be brief."}], **more},
        "response": {"type": "message", "id": name, "role": "assistant", "content": blocks, "stop_reason": "end_turn"},
        "session_id": "s",
    }


def test_anthropic_messages_read_as_chat(tmp_path):
    use = {"type": "tool_use", "id": "t1", "name": "read", "input": {"path": "a"}}
    given = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rope"}]}
    thinking = {"type": "thinking", "thinking": "I look.", "signature": "x"}
    tools = [{"name": "read", "input_schema": {"type": "object"}}]
    turns = [user("Go"), {"role": "assistant", "content": [thinking, use]}, {"role": "user", "content": [given]}]
    log = [
        anthropic(turns[:1], [thinking, use], "m1", tools=tools),
        anthropic(turns, [{"type": "text", "text": "Rope."}], "m2", tools=tools),
    ]
    (rollout,), _ = read(write(tmp_path, log))
    assert not junctions(rollout)
    shown = decoded(rollout, 1)
    assert shown.startswith('<|im_start|>system\nBe brief.\n{"type": "function", "function": {"name": "read"')
    assert "<think>\nI look.\n</think>" in shown and "<|im_start|>tool\nrope<|im_end|>" in shown


def test_an_answer_in_several_blocks_is_one_text(tmp_path):
    blocks = [{"type": "text", "text": part} for part in ("The north sells ", "rope", ".")]
    (rollout,), _ = read(write(tmp_path, [anthropic([user("Go")], blocks, "m1")]))
    text = rendering_for("test", OPTIONS).decode(rollout.turns[0].completion_ids.tolist())
    assert text.startswith("The north sells rope.")


def test_hidden_thinking_makes_the_context_incomplete(tmp_path):
    blocks = [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "Rope."}]
    (rollout,), _ = read(write(tmp_path, [anthropic([user("Go")], blocks, "m1")]))
    assert rollout.meta["context_incomplete"] == ["thinking (encrypted, summed up or left out)"]


def archive(*entries):
    return {"log": {"version": "1.2", "creator": {"name": "x", "version": "1"}, "entries": list(entries)}}


def entry(path, request, body, second, **content):
    return {
        "startedDateTime": f"2026-01-01T00:00:{second:02d}.000Z",
        "request": {
            "method": "POST",
            "url": f"http://127.0.0.1:1/v1{path}?beta=true",
            "headers": [{"name": "X-Session-Id", "value": "s7"}],
            "postData": {"mimeType": "application/json", "text": json.dumps(request)},
        },
        "response": {"status": 200, "content": {"mimeType": "text/event-stream", "text": body, **content}},
    }


def events(*payloads):
    return "".join(f"data: {json.dumps(payload)}\n\n" for payload in payloads) + "data: [DONE]\n\n"


def test_streams_in_an_http_archive_are_put_together(tmp_path):
    first = events(
        *(
            {"id": "r1", "choices": [{"index": 0, "delta": {"role": "assistant", "content": word}}]}
            for word in ("Ro", "pe.")
        ),
        {"id": "r1", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    )
    second = base64.b64encode(json.dumps(chat([], said("Salt."), "r2")["response"]).encode()).decode()
    requests = [{"model": "m", "messages": GO}, {"model": "m", "messages": [*GO, said("Rope."), user("And?")]}]
    value = archive(
        entry("/chat/completions", requests[0], first, 1),
        {"request": {"method": "GET", "url": "http://127.0.0.1:1/v1/models"}, "response": {"status": 200}},
        entry("/chat/completions", requests[1], second, 2, encoding="base64"),
        {**entry("/chat/completions", requests[1], "", 3), "response": {"status": 500}},
    )
    path = tmp_path / "calls.har"
    path.write_text(json.dumps(value, indent=1))
    assert detect(str(path)).NAME == "har"
    (rollout,), others = read(str(path), reader=har)
    assert rollout.id == "s7" and len(rollout.turns) == 2 and not junctions(rollout)
    assert sorted(other.kind for other in others if isinstance(other, Remark)) == ["empty", "warning"]


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress, zstandard.compress])
def test_bodies_in_base64_and_compressed_are_read(tmp_path, pack):
    stream = events({"id": "r1", "choices": [{"index": 0, "delta": {"role": "assistant", "content": "Rope."}}]})
    one = entry("/chat/completions", {"model": "m", "messages": GO}, stream, 1)
    for content in (one["request"]["postData"], one["response"]["content"]):
        content.update(text=base64.b64encode(pack(content["text"].encode())).decode(), encoding="base64")
    path = tmp_path / "calls.har"
    path.write_text(json.dumps(archive(one)))
    (rollout,), _ = read(str(path), reader=har)
    assert "Go" in decoded(rollout, 0)
    assert rendering_for("test", OPTIONS).decode(rollout.turns[0].completion_ids.tolist()).startswith("Rope.")


def test_chunks_in_a_list_are_put_together_and_what_is_no_response_is_refused(tmp_path):
    chunks = [{"id": "r1", "choices": [{"index": 0, "delta": {"content": part}}]} for part in ("Ro", "pe.")]
    log = [{**chat(GO, said(""), ""), "response": each} for each in (chunks, "upstream died", None)]
    (rollout,), (refusal, remark) = read(write(tmp_path, log))
    assert rendering_for("test", OPTIONS).decode(rollout.turns[0].completion_ids.tolist()).startswith("Rope.")
    assert (refusal.line, refusal.field) == (2, "response") and "is no response" in refusal.reason
    assert (remark.line, remark.kind, remark.reason) == (3, "empty", "there is no response")


@pytest.mark.parametrize(
    ("message", "usage", "hidden"),
    [
        ({"reasoning_details": [{"type": "reasoning.text", "text": "Think."}]}, {}, False),
        ({"reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}]}, {}, True),
        ({"reasoning_details": [{"type": "reasoning.summary", "summary": "Thought."}]}, {}, True),
        ({}, {"completion_tokens_details": {"reasoning_tokens": 7}}, True),
        ({"reasoning_content": "Think."}, {"completion_tokens_details": {"reasoning_tokens": 7}}, False),
        ({}, {"completion_tokens_details": {"reasoning_tokens": 0}}, False),
    ],
)
def test_thinking_in_any_form_is_rendered_or_said_to_be_missing(tmp_path, message, usage, hidden):
    one = chat(GO, said("Rope.", **message), "r1")
    one["response"]["usage"] = usage
    (rollout,), _ = read(write(tmp_path, [one]))
    assert ("context_incomplete" in rollout.meta) == hidden
    text = rendering_for("test", OPTIONS).decode(rollout.turns[0].completion_ids.tolist())
    assert ("Think." in text) == (not hidden and bool(message))


def test_thinking_for_which_the_template_has_no_place_is_said_to_be_left_out(tmp_path):
    template = tmp_path / "plain.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    path = write(tmp_path, [chat(GO, said("Rope.", reasoning_content="Think."), "r1")])
    (rollout,), remarks = read(path, Options(tokenizer=OPTIONS.tokenizer, template=str(template)))
    assert rollout.meta["rendered"]["notes"] == {"thinking_left_out": 1}
    assert "answers are rendered without it" in remarks[0].reason
    assert not read(path)[1]


def test_the_check_renders_a_date_as_of_the_call(tmp_path):
    template = tmp_path / "dated.jinja"
    template.write_text(
        "{{ strftime_now('%Y') }}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    rendering = rendering_for("test", Options(tokenizer=OPTIONS.tokenizer, template=str(template)))
    turn = rendering.turn(GO, said("Rope."), now=1.0e9)  # in 2001
    record = chat(GO, said("Rope."), "r1", tools=())
    record["timestamp"] = 1.0e9
    record["response"]["prompt_token_ids"] = turn.prompt_ids.tolist()
    record["response"]["choices"][0]["token_ids"] = turn.completion_ids.tolist()
    skew = check_rendering(write(tmp_path, [record]), rendering)
    assert (skew.calls, skew.same_prompts, skew.same_completions) == (1, 1, 1)


def test_reasoning_items_without_their_text_make_the_context_incomplete(tmp_path):
    items = [{"type": "reasoning", "id": "rs", "summary": []}, text_item("Rope.")]
    (rollout,), _ = read(write(tmp_path, [responses([{"role": "user", "content": "Go"}], items, "r1")]))
    assert rollout.meta["context_incomplete"] == ["thinking (encrypted, summed up or left out)"]


@pytest.mark.parametrize("unit", [1, 1e3, 1e6, 1e9])
def test_times_are_seconds_or_fractions_of_them_and_order_the_calls(tmp_path, unit):
    later = chat([*GO, said("Rope."), user("And now?")], said("Done."), "r2")
    log = [
        {**later, "timestamp": 1.8e9 * unit + 2 * unit},
        {**chat(GO, said("Rope."), "r1"), "timestamp": 1.8e9 * unit},
    ]
    (rollout,), _ = read(write(tmp_path, log))
    assert "And now?" not in decoded(rollout, 0) and "And now?" in decoded(rollout, 1)


def test_a_time_that_is_no_date_refuses_its_call_only(tmp_path):
    log = [{**chat(GO, said("Rope."), "r1"), "timestamp": -1e11}, {**chat(GO, said("Salt."), "r2"), "timestamp": 1}]
    (rollout,), (refusal,) = read(write(tmp_path, log))
    assert refusal.line == 1 and "is no date" in refusal.reason and len(rollout.turns) == 1


def test_an_archive_without_contents_says_what_to_do(tmp_path):
    path = tmp_path / "calls.har"
    path.write_text(json.dumps(archive(entry("/messages", {"model": "m", "messages": GO}, "", 1))))
    rollouts, (refusal,) = read(str(path), reader=har)
    assert not rollouts and "save the archive with its contents" in refusal.reason


def test_options_of_the_template_are_the_users_unless_the_request_has_its_own(tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("{{ style }}:{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    asked = Options(
        tokenizer=OPTIONS.tokenizer, template=str(template), template_options=template_options(['style="a"'])
    )
    log = [chat(GO, said("Rope."), "r1"), chat(GO, said("Salt."), "r2", chat_template_kwargs={"style": "b"})]
    (rollout,), _ = read(write(tmp_path, log), asked)
    assert [decoded(rollout, turn, asked)[:2] for turn in (0, 1)] == ["a:", "b:"]
    assert rollout.meta["rendered"]["options"] == {"style": "a"}
    with pytest.raises(ValueError, match="'maybe' is not JSON"):
        template_options(["style=maybe"])


def test_a_recorders_log_without_ids_can_be_read_as_chat(tmp_path):
    record = {
        **chat(GO, said("Rope."), "r1"),
        "format": "mwjax-call/1",
        "endpoint": "chat.completions",
        "session": "s3",
    }
    del record["session_id"]
    path = write(tmp_path, [record])
    assert detect(path).NAME == "mwjax"
    (rollout,), _ = read(path)
    assert rollout.id == "s3" and rollout.meta["rendered"]


def recorded(record, number, source="key", **more):
    """A call as mwjax record writes it where the engine gives no ids."""
    known = {key: value for key, value in record.items() if key != "session_id"}
    line = {"format": "mwjax-call/1", "endpoint": "chat.completions", "session": "k7", "session_from": source}
    return {**line, "started": float(number), **known, **more}


def test_requests_and_responses_may_be_text_or_lie_under_a_body(tmp_path):
    plain = chat(GO, said("Rope."), "r1")
    request, response = plain["request"], plain["response"]
    forms = [
        {"request": {"method": "POST", "body": request}, "response": {"status": 200, "body": response}},
        {"request": json.dumps(request), "response": json.dumps(response)},
        {"request": {"body": json.dumps(request)}, "response": {"body": events(*_streamed(response))}},
    ]
    (expected,), _ = read(write(tmp_path, [plain]))
    for form in forms:
        path = write(tmp_path, [form])
        assert detect(path).NAME == "chat"
        (rollout,), _ = read(path)
        assert _ids(rollout) == _ids(expected)


def _streamed(response):
    (choice,) = response["choices"]
    yield {"id": response["id"], "choices": [{"index": 0, "delta": choice["message"]}]}
    yield {"id": response["id"], "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]}


def _ids(rollout):
    return [(turn.prompt_ids.tolist(), turn.completion_ids.tolist()) for turn in rollout.turns]


def test_functions_are_tools_by_their_earlier_name(tmp_path):
    old = chat(GO, said("Rope."), "r1", tools=(), functions=[READ["function"]])
    (named,), _ = read(write(tmp_path, [chat(GO, said("Rope."), "r1")]))
    (rollout,), _ = read(write(tmp_path, [old]))
    assert _ids(rollout) == _ids(named) and '"name": "read"' in decoded(rollout, 0)


def test_an_answer_whose_beginning_was_given_is_refused(tmp_path):
    begun = [*GO[1:], said("The village sells")]
    log = [
        anthropic(begun, [{"type": "text", "text": " rope."}], "m1"),
        chat(begun, said(" rope."), "r1", continue_final_message=True, add_generation_prompt=False),
    ]
    rollouts, refusals = read(write(tmp_path, log))
    assert not rollouts
    assert [(each.line, each.field) for each in refusals] == [(1, "request.messages"), (2, "request.messages")]
    assert all("ends with the beginning of the answer" in each.reason for each in refusals)


def with_ids(record, prompt, completion):
    response = record["response"]
    choice = {**response["choices"][0], "token_ids": completion}
    return {**record, "response": {**response, "prompt_token_ids": prompt, "choices": [choice]}}


def test_the_check_tells_other_text_from_other_tokens(tmp_path):
    rendering = rendering_for("test", OPTIONS)
    turn = rendering.turn(GO, said("Rope."), [READ])
    prompt, completion = turn.prompt_ids.tolist(), turn.completion_ids.tolist()
    spelt = [token for letter in "Rope." for token in rendering.encode(letter).tolist()] + completion[-1:]
    other = rendering.encode("<|im_start|>user\nGone<|im_end|>\n").tolist()
    record = chat(GO, said("Rope."), "r1")
    log = [
        with_ids(record, prompt, completion),
        with_ids(record, prompt, spelt),
        with_ids(record, other, completion),
        record,
    ]
    skew = check_rendering(write(tmp_path, log), rendering)
    assert (skew.calls, skew.skipped, skew.same_prompts, skew.same_completions) == (3, 1, 2, 2)
    tokens, text = skew.differences
    assert (tokens.line, tokens.part, tokens.kind, tokens.at) == (2, "completion", "tokens", _differ(spelt, completion))
    assert (text.line, text.part, text.kind) == (3, "prompt", "text")
    assert text.at == _differ(other, prompt)
    report = skew.report()
    assert "2 of 3 prompts and 2 of 3 completions are the recorded ids; 1 records skipped" in report
    assert "line 3, prompt: other text from id" in report


def _differ(left, right):
    return next(k for k, (a, b) in enumerate(zip(left, right)) if a != b)


def test_the_command_imports_and_checks(tmp_path, capsys):
    rendering = rendering_for("test", OPTIONS)
    turn = rendering.turn(GO, said("Rope."), [READ])
    path = write(
        tmp_path, [with_ids(chat(GO, said("Rope."), "r1"), turn.prompt_ids.tolist(), turn.completion_ids.tolist())]
    )
    words = ["import", path, "--out", str(tmp_path / "out.jsonl"), "--check-rendering"]
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2 and "--tokenizer" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        main([*words, "--tokenizer", OPTIONS.tokenizer, "--template", OPTIONS.template])
    shown = capsys.readouterr().out
    assert left.value.code == 0
    assert "1 rollout, 1 turn" in shown and "1 of 1 prompts and 1 of 1 completions are the recorded ids" in shown


def test_the_command_says_what_a_log_without_ids_needs(tmp_path, capsys):
    path = write(tmp_path, [chat(GO, said("Rope."), "r1")])
    with pytest.raises(SystemExit) as left:
        main(["import", path, "--out", str(tmp_path / "out.jsonl")])
    assert left.value.code == 2 and "chat logs hold messages, not token ids: give" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()
