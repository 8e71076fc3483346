"""The recorder's text work, on its own: JSON edits, event streams, redaction, sessions, content codings, assembly."""

import gzip
import itertools
import json
import zlib

import brotli
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from mwjax.recorder import content_codings, redaction, sessions
from mwjax.recorder.json_text import applied, loads, rewrite, with_members
from mwjax.recorder.upstream import has_own_version
from mwjax.rollouts.assembly import assembled
from mwjax.rollouts.server_events import Event, Splitter, read, with_data

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from('abcd\n"é'), inner), max_leaves=20
)
PLAN = {"a": "null", "b": None, "c": {"*": {"a": None, "b": "[1]"}, "a": None}, "*": {"d": None}}


def changed(value, plan):
    """The plan by brute force: an independent statement of what a rewrite means."""
    if isinstance(value, list):
        return [changed(each, plan["*"]) for each in value] if isinstance(plan.get("*"), dict) else value
    if not isinstance(value, dict):
        return value
    out = {}
    for key, each in value.items():
        what = plan[key] if key in plan else plan.get("*", "keep")
        if what == "keep":
            out[key] = each
        elif isinstance(what, dict):
            out[key] = changed(each, what)
        elif what is not None:
            out[key] = json.loads(what)
    return out


@given(JSON, st.sampled_from([None, 1, "\t"]), st.sampled_from([(",", ":"), (" , ", " : ")]), st.booleans())
def test_rewrite_does_what_the_plan_says_and_nothing_else(value, indent, separators, ascii_only):
    text = json.dumps(value, indent=indent, separators=separators, ensure_ascii=ascii_only)
    assert json.loads(rewrite(text, PLAN)) == changed(value, PLAN) == applied(value, PLAN)
    assert rewrite(text, {}) == text
    assert rewrite(text, {"a": {"b": {"z": None}}, "*": {"y": "1"}}) == text


def test_rewrite_leaves_every_other_byte():
    text = (
        ' { "a" : 1e-07 , "ids":[1, 2,\n3], "ü":"\\u00fc\\/" ,"choices" :[ {"logprobs":{"x":[{}]} , "t":"}]" } ] } \n'
    )
    plan = {"ids": "null", "choices": {"*": {"logprobs": "null"}}}
    assert rewrite(text, plan) == text.replace("[1, 2,\n3]", "null").replace('{"x":[{}]}', "null")
    assert rewrite(text, {"a": None}) == text.replace(' "a" : 1e-07 , "ids"', ' "ids"')
    assert rewrite(text, {"choices": {"*": {"logprobs": None, "t": None}}}).endswith('"choices" :[ { } ] } \n')


@pytest.mark.parametrize(
    "text",
    ["", "{", '{"a"', '{"a":}', '{"a":1,}', "[1,]", '{"a":1} x', "{'a':1}", '{"a" 1}', '{"a":1 "b":2}', "[" * 10**5],
)
def test_rewrite_refuses_what_is_not_json(text):
    with pytest.raises(ValueError):
        rewrite(text, {"a": {"*": "1"}, "*": {"*": {}}})


def test_loads_refuses_what_json_has_not():
    for text in ('{"a":NaN}', "[-Infinity]", "[" * 10**5):
        with pytest.raises(ValueError):
            loads(text)


@given(
    st.dictionaries(st.sampled_from("abcd"), JSON), st.dictionaries(st.sampled_from("abcxy"), st.booleans(), max_size=3)
)
def test_members_are_set_where_they_are_or_at_the_end(value, members):
    text = with_members(json.dumps(value), value, members)
    assert json.loads(text) == {**value, **members}
    assert list(json.loads(text)) == [*value, *(key for key in members if key not in value)]


STREAM = 'event: a\r\ndata: {"x": "é"}\r\n\r\n: alive\n\ndata:two\ndata: lines\nid: 7\n\ndata: [DONE]\n\nrest'.encode()


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_do_not_depend_on_how_the_bytes_arrive(cuts):
    splitter, events = Splitter(), []
    edges = [0, *sorted(cuts), len(STREAM)]
    for lo, hi in itertools.pairwise(edges):
        events += splitter.feed(STREAM[lo:hi])
    assert b"".join(events) + splitter.rest() == STREAM
    assert splitter.rest() == b"rest"
    parsed = [read(event) for event in events]
    assert parsed == [Event("a", '{"x": "é"}'), None, Event("", "two\nlines"), Event("", "[DONE]")]


def test_data_is_replaced_and_the_rest_of_an_event_stays():
    assert with_data(b"event: a\r\ndata: 1\r\nid: 7\r\n\r\n", "ü") == "event: a\r\ndata: ü\r\nid: 7\r\n\r\n".encode()
    assert with_data(b"data:1\n\n", "2") == b"data:2\n\n"
    assert read(with_data(b"data: a\ndata: b\n\n", "c")) == Event("", "c")


def test_redaction_names_fields_by_path_and_by_name():
    value = {
        "user": "u",
        "messages": [{"name": "n", "content": "c"}, {"content": [{"text": "t"}]}],
        "metadata": {"user": 1},
    }

    def paths(*fields):
        return redaction.redacted(value, [redaction.pattern(field) for field in fields])[1]

    assert paths("user") == {"user", "metadata.user"}
    assert paths("metadata.user") == {"metadata.user"}
    assert paths("messages.*.content") == paths("messages[*].content") == {"messages.0.content", "messages.1.content"}
    assert paths("messages[1].**.te*") == {"messages.1.content.0.text"}
    assert paths("messages.**") == {"messages.0", "messages.1"} and paths("**") == set(value)
    assert paths("user.x", "nothing") == set()
    for field in ("user", "metadata.user", "messages[1].**.te*", "messages.**", "**", "user.x", "nothing"):
        matched = any(redaction.names(redaction.pattern(field), path) for path in paths("user", field))
        assert matched == bool(paths(field)), field
    hidden, _ = redaction.redacted(value, [redaction.pattern("messages.*.content")])
    assert hidden["messages"] == [{"name": "n", "content": "[redacted]"}, {"content": "[redacted]"}]
    assert value["messages"][0]["content"] == "c"
    assert redaction.hides_text({"messages.0.content"}) and redaction.hides_text({"choices.0.message.content"})
    assert not redaction.hides_text({"user", "metadata.user", "response.usage"})
    with pytest.raises(ValueError, match="--redact"):
        redaction.pattern("a..b")


def test_a_session_is_named_by_what_was_chosen_then_by_the_harness_then_by_key():
    key = {"authorization": "Bearer sk-1234567890abcdef"}
    own = {**key, "x-session-id": "s", "mine": "m"}
    assert sessions.session(own, "p", ("mine",)) == ("m", "header mine")
    assert sessions.session(own, "p") == ("p", "path")
    assert sessions.session(own, None) == ("s", "header x-session-id")
    assert sessions.session({**key, "session_id": "s", "mine": "m"}, None, ("mine",)) == ("m", "header mine")
    assert sessions.session(key, "p") == ("p", "path")
    by_key = sessions.session(key, None)
    assert by_key.source == "key" and by_key.name and by_key.name.startswith("key-")
    assert by_key == sessions.session({"x-api-key": "sk-1234567890abcdef"}, None)
    assert by_key != sessions.session({"x-api-key": "sk-1234567890abcdeg"}, None)
    assert sessions.session({}, None) == (None, "none")
    assert sessions.without_prefix("/session/a%20b/v1/messages?beta=true") == ("/v1/messages?beta=true", "a b")
    assert sessions.without_prefix("/v1/session/x/y") == ("/v1/session/x/y", None)
    assert (
        sessions.kept_target("/v1/messages?beta=true&key=sk-secret&api-version=1")
        == "/v1/messages?beta=true&api-version=1"
    )


@pytest.mark.parametrize(
    ("coding", "encode"),
    [
        ("identity", bytes),
        ("gzip", gzip.compress),
        ("deflate", zlib.compress),
        ("br", brotli.compress),
        ("zstd", zstandard.compress),
        ("gzip, br", lambda text: brotli.compress(gzip.compress(text))),
        # Pieces that are packed each by itself, as a server does that packs every event.
        ("gzip", lambda text: gzip.compress(text[:99]) + gzip.compress(b"") + gzip.compress(text[99:])),
        ("zstd", lambda text: zstandard.compress(text[:99]) + zstandard.compress(text[99:])),
    ],
)
def test_content_codings_are_undone_at_once_and_in_pieces(coding, encode):
    text = b"some text, some text, some other text" * 100
    packed = encode(text)
    assert content_codings.decoded(packed, coding) == text
    decode = content_codings.decoder(coding.upper())
    assert b"".join(decode(packed[at : at + 7]) for at in range(0, len(packed), 7)) == text and decode(b"") == b""
    if coding != "identity":
        with pytest.raises(ValueError, match="coding"):
            content_codings.decoded(b"certainly not packed", coding)


def test_an_unknown_content_coding_is_refused():
    with pytest.raises(ValueError, match="compress"):
        content_codings.decoded(b"", "compress")


def test_a_cut_off_stream_gives_what_had_arrived():
    chunk = {
        "id": "c",
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": {"role": "assistant", "content": "He"}}],
    }
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "look", "arguments": ""}}
    pieces = [
        {"content": "llo"},
        {"tool_calls": [call]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]},
    ]
    chunks = [chunk, *({"choices": [{"index": 0, "delta": each}]} for each in pieces)]
    function = {"name": "look", "arguments": '{"a":'}
    message = {
        "role": "assistant",
        "content": "Hello",
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
    }
    assert assembled("chat.completions", chunks) == {
        "id": "c",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": message}],
    }

    events = [
        {"type": "response.created", "response": {"id": "r", "status": "in_progress", "output": []}},
        {"type": "response.output_item.added", "output_index": 0, "item": {"type": "message", "content": []}},
        {"type": "response.output_text.delta", "output_index": 0, "content_index": 0, "delta": "He"},
        {"type": "response.output_text.delta", "output_index": 0, "content_index": 0, "delta": "llo"},
        {"type": "response.output_item.added", "output_index": 1, "item": {"type": "function_call", "arguments": ""}},
        {"type": "response.function_call_arguments.delta", "output_index": 1, "delta": "{"},
    ]
    items = [
        {"type": "message", "content": [{"type": "output_text", "text": "Hello"}]},
        {"type": "function_call", "arguments": "{"},
    ]
    assert assembled("responses", events) == {"id": "r", "status": "in_progress", "output": items}

    events = [
        {
            "type": "message_start",
            "message": {"id": "m", "content": [], "usage": {"input_tokens": 3, "output_tokens": 1}},
        },
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "thinking", "thinking": "", "signature": ""},
        },
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "Hm"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "s1"}},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "tool_use", "input": {}}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '{"a": [1'}},
    ]
    thinking = {"type": "thinking", "thinking": "Hm", "signature": "s1"}
    message = {
        "id": "m",
        "content": [thinking, {"type": "tool_use", "input": {}, "partial_json": '{"a": [1'}],
        "usage": {"input_tokens": 3, "output_tokens": 1},
    }
    assert assembled("messages", events) == message
    # What a server did to the context is part of the answer.
    edits = {"applied_edits": [{"type": "clear_tool_uses_20250919", "cleared_tool_uses": 2}]}
    delta = {"type": "compaction_delta", "content": "Summary", "encrypted_content": None}
    events += [
        {"type": "content_block_start", "index": 2, "content_block": {"type": "compaction", "content": ""}},
        {"type": "content_block_delta", "index": 2, "delta": delta},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn"},
            "usage": {"output_tokens": 8},
            "context_management": edits,
        },
    ]
    compaction = {"type": "compaction", "content": "Summary", "encrypted_content": None}
    assert assembled("messages", events) == {
        **message,
        "content": [*message["content"], compaction],
        "usage": {"input_tokens": 3, "output_tokens": 8},
        "stop_reason": "end_turn",
        "context_management": edits,
    }

    calls = [{"id": str(n), "type": "function", "function": {"name": "look", "arguments": "{}"}} for n in range(2)]
    chunks = [{"choices": [{"index": 0, "delta": {"tool_calls": [each]}}]} for each in calls]  # as Gemini sends them
    assert assembled("chat.completions", chunks) == {"choices": [{"index": 0, "message": {"tool_calls": calls}}]}

    for endpoint in ("chat.completions", "responses", "messages"):
        assert assembled(endpoint, []) is None
        assert not (assembled(endpoint, [None, 3, {"type": "ping"}, {"choices": 5}]) or {}).get("choices")


@pytest.mark.parametrize(
    "choice",
    [
        {"message": "text", "delta": {"content": "text"}},
        {"delta": {"tool_calls": ["text"]}},
        {"delta": {"tool_calls": "text"}},
        {"logprobs": "text"},
    ],
)
def test_chunks_of_odd_shapes_take_nothing_from_those_beside_them(choice):
    whole = {"delta": {"tool_calls": [{"index": 0, "id": "c"}]}, "token_ids": [1], "logprobs": {"content": [{"a": 1}]}}
    made = assembled("chat.completions", [{"choices": [each]} for each in (choice, whole, whole)])
    assert made is not None
    (found,) = made["choices"]
    assert found["token_ids"] == [1, 1] and found["logprobs"] == {"content": [{"a": 1}, {"a": 1}]}
    assert {"id": "c"} in found["message"]["tool_calls"]
    assert whole["token_ids"] == [1], "the events are as they were"


@pytest.mark.parametrize(
    ("upstream", "own"),
    [
        *(("http://127.0.0.1:8000", False), ("https://host/v1", False), ("https://host/openai/v1/", False)),
        *(("https://host/vllm", False), ("https://v4.host", False)),
        *(("https://host/api/v3", True), ("https://host/paas/v4/", True), ("https://host/v1beta/openai", True)),
    ],
)
def test_which_addresses_have_a_version_in_the_place_of_v1(upstream, own):
    assert has_own_version(upstream) == own
