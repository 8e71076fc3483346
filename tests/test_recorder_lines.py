"""One call as one line: whatever the engine sent, and nothing of what must not be written."""

import base64
import json
import re

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from mwjax.recorder.additions import additions
from mwjax.recorder.calls import Body, Exchange, as_object
from mwjax.recorder.log import CallLog
from mwjax.recorder.redaction import pattern
from mwjax.recorder.sessions import Session, query_secrets, secrets
from mwjax.rollouts.write import as_line
from tests.scripted_engine import call, recording, running

SAID = "a private sentence"
SECRET = 'sk-"quoted"-\\-ünïcode/0123'
ASKED = {"model": "m", "messages": [{"role": "user", "content": "one two"}]}


def exchange(answer=b"", *, endpoint="chat.completions", request=ASKED, hidden=(), **more):
    sent, got = Body(10**6), Body(10**6)
    sent.add(request if isinstance(request, bytes) else json.dumps(request).encode())
    got.add(answer if isinstance(answer, bytes) else json.dumps(answer).encode())
    return Exchange(endpoint, "/v1", Session(None, "none"), {}, sent, got, hidden, **{"status": 200, **more})


def stream_of(*payloads):
    return b"".join(b"data: " + json.dumps(payload).encode() + b"\n\n" for payload in payloads)


# Values with the names that the three APIs give their members, in any shape.
NAMES = st.sampled_from(
    re.findall(
        r"\S+",
        """choices delta message messages index content content_block tool_calls function arguments usage error type
        response output output_index content_index item part text input logprobs token_ids prompt_token_ids sglext
        meta_info finish_reason input_messages output_messages context_management""",
    )
)
KINDS = st.sampled_from(
    re.findall(
        r"\S+",
        """message_start message_delta content_block_start content_block_delta input_json_delta text_delta message_stop
        response.created response.output_item.added response.output_text.delta response.completed error""",
    )
)
TEXTS = st.text("aé\ud83d", max_size=3) | KINDS
LEAVES = st.none() | st.booleans() | st.integers(-2, 3) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
SHAPES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=25,
)


@settings(max_examples=200)
@given(
    st.lists(st.dictionaries(NAMES, SHAPES, min_size=1, max_size=6) | SHAPES, max_size=4),
    st.sampled_from(["chat.completions", "responses", "messages"]),
    st.sampled_from(["vllm", "sglang", "none"]),
    st.sampled_from([(), ("content",), ("choices.*.delta", "user")]),
)
def test_whatever_an_engine_sends_has_a_line(payloads, endpoint, engine, redact):
    patterns = [pattern(each) for each in redact]
    asked = additions(endpoint, engine, {**ASKED, "store": False}, {})
    for stream in (False, True):
        answer = stream_of(*payloads) if stream else json.dumps(payloads[0] if payloads else None).encode()
        value = as_object(exchange(answer, endpoint=endpoint, stream=stream, asked=asked), patterns)
        assert json.loads(as_line(value)) == value


def test_what_has_no_place_in_json_is_kept_as_text(tmp_path, capfd):
    with running("plain") as engine, recording(engine.url, tmp_path) as recorder:
        body = b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": 1e999}'
        assert call(recorder.url, "/v1/chat/completions", body=body).status == 200
        (recorded,) = recorder.calls()
    assert recorded["request_text"].encode() == body and recorded["error"]["kind"] == "malformed_response"
    assert json.loads(recorded["response_text"])["choices"] and "as text only: ValueError" in capfd.readouterr().err


def test_a_call_that_cannot_be_described_is_counted_and_the_next_is_written(tmp_path, monkeypatch, capfd):
    with running("plain") as engine, recording(engine.url, tmp_path) as recorder:
        with monkeypatch.context() as patched:
            patched.setattr("mwjax.recorder.log.as_object", lambda *_, **__: 1 / 0)
            assert call(recorder.url, "/v1/chat/completions", ASKED).status == 200
        assert call(recorder.url, "/v1/chat/completions", ASKED).status == 200
        log: CallLog = recorder.proxy.log
        assert (log.lost, log.written, len(recorder.calls())) == (1, 1, 1)
    assert "not recorded: ZeroDivisionError" in capfd.readouterr().err


STREAMS = {
    "chat.completions": [
        {"id": "c", "choices": [{"index": 0, "delta": {"content": SAID}}]},
        {
            "id": "c",
            "choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": SAID}}]}}],
        },
        {"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    ],
    "responses": [
        {"type": "response.created", "response": {"id": "r", "output": []}},
        {"type": "response.output_text.delta", "output_index": 0, "content_index": 0, "delta": SAID},
        {"type": "response.output_text.done", "output_index": 0, "content_index": 0, "text": SAID},
        {
            "type": "response.completed",
            "response": {"id": "r", "output": [{"content": [{"type": "output_text", "text": SAID}]}]},
        },
    ],
    "messages": [
        {"type": "message_start", "message": {"id": "m", "content": [], "usage": {}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": SAID}},
        {"type": "message_stop"},
    ],
}


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        ("chat.completions", ["choices.*.message.content", "choices.*.message.tool_calls.*.function.arguments"]),
        ("chat.completions", ["choices.*.delta.content", "choices.*.delta.tool_calls"]),
        ("chat.completions", ["content", "arguments"]),
        ("chat.completions", ["choices"]),
        ("responses", ["output.*.content.*.text"]),
        ("responses", ["text"]),
        ("responses", ["output"]),
        ("messages", ["content.*.text"]),
        ("messages", ["content"]),
    ],
)
def test_a_field_is_redacted_by_its_name_in_the_answer_or_in_its_stream(endpoint, fields):
    made = exchange(stream_of(*STREAMS[endpoint]), endpoint=endpoint, stream=True)
    value = as_object(made, [pattern(field) for field in fields])
    assert SAID not in json.dumps(value) and value["redacted"] and "error" not in value
    assert "events" not in value and SAID in json.dumps(as_object(made))
    assert value["ids_withheld"] is True


def test_what_the_line_repeats_of_an_answer_is_redacted_too():
    answer = {"choices": [{"token_ids": [1], "logprobs": None}], "prompt_token_ids": [2], "usage": {"total_tokens": 3}}
    value = as_object(exchange(answer), [pattern("usage")])
    assert value["usage"] == value["response"]["usage"] == "[redacted]" and value["prompt_ids"] == [2]
    value = as_object(exchange(answer), [pattern("completion_ids")])
    assert value["completions"] == [{"index": 0, "completion_ids": "[redacted]"}]
    assert value["redacted"] == ["completions.0.completion_ids"]


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (400, {"error": {"message": f"bad input: {SAID}"}}),
        (422, {"detail": [{"loc": ["messages"], "input": SAID}]}),
        (200, {"error": {"message": SAID}}),
    ],
)
def test_an_error_that_quotes_what_is_redacted_is_not_kept(status, answer):
    made = exchange(answer, request={"messages": [{"role": "user", "content": SAID}]}, status=status)
    assert as_object(made)["response"] == answer
    value = as_object(made, [pattern("messages.*.content")])
    assert SAID not in json.dumps(value) and value["response"] == "[redacted]"
    assert value["error"] == {"kind": "reported" if status == 200 else "http_status", "message": "[redacted]"}


@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_key_is_found_however_it_is_spelled(ascii_only):
    spelled = json.dumps({"messages": [{"role": "user", "content": f"it is {SECRET}"}]}, ensure_ascii=ascii_only)
    answer = {"choices": [{"index": 0, "message": {SECRET: "x"}, "token_ids": [1]}], "prompt_token_ids": [2]}
    value = as_object(exchange(answer, request=spelled.replace("/", "\\/").encode(), hidden=[SECRET]))
    assert value["request"]["messages"][0]["content"] == "it is [credential]"
    assert value["response"]["choices"][0]["message"] == {"[credential]": "x"}
    # The ids spell it too.
    assert value["ids_withheld"] is True and "prompt_ids" not in value and "completions" not in value
    assert value["response"]["choices"][0]["token_ids"] == "[redacted]"
    cut = exchange(answer, request=spelled.encode()[:-2], hidden=[SECRET])
    assert as_object(cut)["request_text"].count("[credential]") == 1


def test_a_key_that_a_stream_spells_piece_by_piece_is_not_written():
    half = len(SECRET) // 2
    deltas = [{"content": SECRET[:half]}, {"content": SECRET[half:]}]
    made = exchange(
        stream_of(*({"choices": [{"index": 0, "delta": each, "token_ids": [7]}]} for each in deltas))
        + b"data: [DONE]\n\n",
        stream=True,
    )
    assert zstandard.decompress(base64.b64decode(as_object(made)["events"])) == made.response.data()
    made.secrets = [SECRET]
    value = as_object(made)
    assert value["response"]["choices"][0]["message"]["content"] == "[credential]"
    assert "events" not in value and "completions" not in value


def test_where_keys_are():
    named = {"authorization": "Bearer a b", "x-auth-token": "t", "x-my-api-key": "k", "x-amz-security-token": "s"}
    assert secrets({**named, "accept": "*/*", "x-tokenizer": "Qwen", "x-max-tokens": "9"}) == ["a b", "t", "k", "s"]
    assert query_secrets("/v1/x?key=a%2Fb+c&api-version=1&=&y") == ["a%2Fb+c", "a/b+c", "a/b c"]


@pytest.mark.parametrize("status", [301, 307, 404, 503])
def test_a_status_without_an_answer_is_an_error(status):
    assert as_object(exchange(status=status))["error"] == {"kind": "http_status", "message": f"status {status}"}
