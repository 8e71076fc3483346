"""The recorder between a client and scripted engines: the client sees what it would have seen, the log holds it all."""

import base64
import contextlib
import gzip
import itertools
import json
import statistics
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection

import brotli
import pytest
import zstandard

from mwjax.recorder.additions import SGLANG_ID_HEADERS
from mwjax.recorder.proxy import Proxy
from mwjax.recorder.upstream import Settings
from tests.scripted_engine import (
    KEY,
    call,
    logprob,
    pieces,
    prompt_token_ids,
    recording,
    reply_to,
    running,
    token_id,
)

CHAT = {"model": "m", "messages": [{"role": "user", "content": "one two  three é"}]}
RESPONSES = {"model": "m", "input": "one two three", "store": False}
MESSAGES = {"model": "m", "max_tokens": 9, "system": "s", "messages": [{"role": "user", "content": "one two"}]}
PATHS = {
    "chat": ("/v1/chat/completions", CHAT),
    "responses": ("/v1/responses", RESPONSES),
    "messages": ("/v1/messages", MESSAGES),
}
FLAVOURS = ["vllm", "sglang", "sglang-0.5", "strict", "plain"]


@pytest.fixture(scope="module")
def engines():
    with contextlib.ExitStack() as stack:
        yield {flavour: stack.enter_context(running(flavour)) for flavour in FLAVOURS}


def raw_events(recorded):
    return zstandard.decompress(base64.b64decode(recorded["events"]))


def same_answer(direct, through):
    varying = {"date", "server", "content-length", "transfer-encoding"}
    assert through.status == direct.status and through.body == direct.body and through.whole == direct.whole
    assert {k: v for k, v in through.headers.items() if k not in varying} == {
        k: v for k, v in direct.headers.items() if k not in varying
    }


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("api", PATHS)
def test_the_client_sees_what_it_would_have_seen(engines, flavour, api, tmp_path):
    engine = engines[flavour]
    path, payload = PATHS[api]
    variants = [{}, {"stream": True}]
    if api == "chat" and flavour != "strict":
        own = [{"logprobs": True}, {"return_token_ids": True}, {"n": 2}, {"logprobs": False, "top_logprobs": 0}]
        own += [{"stream_options": {"include_usage": True, "continuous_usage_stats": True}}, {"logprobs": None}]
        own += [{"logprobs": True, "return_token_ids": True}, {"return_cached_tokens_details": True}]
        if flavour.startswith("sglang"):
            own += [{"return_meta_info": True}, {"return_prompt_token_ids": True}, {"return_routed_experts": True}]
        variants += [{**each, "stream": stream} for each in own for stream in (False, True)]
    with recording(engine.url, tmp_path) as recorder:
        for count, variant in enumerate(variants, 1):
            asked = {**payload, **variant}
            through = call(recorder.url, path, asked)
            sent_upstream = json.loads(engine.seen[-1][1])
            same_answer(call(engine.url, path, asked), through)
            calls = recorder.calls()
            assert len(calls) == count
            recorded = calls[-1]
            assert recorded["request"] == asked
            assert sent_upstream == {**asked, **recorded.get("asked", {"body": {}})["body"]}
            assert recorded["status"] == 200 and "error" not in recorded
            if not variant.get("stream"):
                assert recorded["response"] == json.loads(through.body)
            else:
                assert recorded["stream"] is True and (api != "chat" or b"[DONE]" in raw_events(recorded))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("flavour", ["vllm", "sglang"])
def test_ids_and_logprobs_are_recorded_as_the_engine_gave_them(engines, flavour, stream, tmp_path):
    with recording(engines[flavour].url, tmp_path) as recorder:
        call(recorder.url, "/v1/chat/completions", {**CHAT, "n": 2, "stream": stream})
        (recorded,) = recorder.calls()
    sampled = pieces(reply_to(CHAT))
    if stream:  # the engine's parser swallows one token, which is sampled all the same
        sampled.insert(1, "<tool>")
    assert recorded["engine"] == flavour
    assert recorded["prompt_ids"] == prompt_token_ids(CHAT)
    assert recorded["completions"] == [
        {"index": n, "completion_ids": [token_id(p) for p in sampled], "logprobs": [logprob(p) for p in sampled]}
        for n in (0, 1)
    ]
    assert recorded["response"]["choices"][1]["message"]["content"] == reply_to(CHAT)
    text = json.dumps(recorded["response"])
    assert "meta_info" not in text and "sglext" not in text and str(token_id(sampled[0])) not in text


def test_an_older_sglang_gives_ids_in_its_meta_info(engines, tmp_path):
    with recording(engines["sglang-0.5"].url, tmp_path) as recorder:
        call(recorder.url, "/v1/chat/completions", CHAT)
        (recorded,) = recorder.calls()
    sampled = pieces(reply_to(CHAT))
    assert recorded["prompt_ids"] == prompt_token_ids(CHAT)
    assert recorded["completions"][0]["completion_ids"] == [token_id(p) for p in sampled]
    assert recorded["completions"][0]["logprobs"] == [logprob(p) for p in sampled]
    assert recorded["engine_info"] == [{"weight_version": "w3"}]


@pytest.mark.parametrize("stream", [False, True])
def test_vllm_responses_give_ids_where_nothing_is_stored(engines, stream, tmp_path):
    engine = engines["vllm"]
    with recording(engine.url, tmp_path) as recorder:
        call(recorder.url, "/v1/responses", {**RESPONSES, "stream": stream})
        call(recorder.url, "/v1/responses", {"model": "m", "input": "x", "stream": stream})
        first, second = recorder.calls()
    assert first["prompt_ids"] == prompt_token_ids(RESPONSES)
    assert first["completions"] == [{"index": 0, "completion_ids": [token_id(p) for p in pieces(reply_to(RESPONSES))]}]
    assert first["response"]["output_messages"] is None and first["usage"]["output_tokens"] == 5
    assert "asked" not in second and "prompt_ids" not in second


def test_an_engine_that_refuses_additions_is_asked_once_more_without_them(engines, tmp_path, capfd):
    engine = engines["strict"]
    with recording(engine.url, tmp_path) as recorder:
        before = len(engine.seen)
        for _ in range(3):
            assert call(recorder.url, "/v1/chat/completions", CHAT).status == 200
        bad = call(recorder.url, "/v1/chat/completions", {**CHAT, "stream": True, "typo": 1})
        first, second, _, wrong = recorder.calls()
    sent = [sorted(body) for body in engine.bodies[before:]]
    plain, more = ["messages", "model"], ["logprobs", "messages", "model", "return_token_ids"]
    assert sent[:4] == [more, plain, plain, plain]
    assert first["asked_refused"]["status"] == 400 and "asked" not in first and "asked_refused" not in second
    assert bad.status == 400 and b"typo" in bad.body and b"logprobs" not in bad.body
    assert wrong["error"] == {"kind": "http_status", "message": "unknown: ['typo']"}
    assert "refuses" in capfd.readouterr().err


def test_streams_are_assembled_and_kept_as_they_came(engines, tmp_path):
    with recording(engines["plain"].url, tmp_path) as recorder:
        answers = [call(recorder.url, path, {**payload, "stream": True}) for path, payload in PATHS.values()]
        chat, responses, messages = recorder.calls()
    assert [raw_events(each) for each in (chat, responses, messages)] == [answer.body for answer in answers]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": reply_to(CHAT)},
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert chat["response"]["choices"] == [choice]
    assert responses["response"]["output"][0]["content"][0]["text"] == reply_to(RESPONSES)
    assert messages["response"]["content"] == [
        {"type": "text", "text": reply_to(MESSAGES)},
        {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"where": "Dünen"}},
    ]
    assert messages["response"]["stop_reason"] == "tool_use"
    count = len(pieces(reply_to(MESSAGES)))
    assert messages["usage"] == {"input_tokens": len(prompt_token_ids(MESSAGES)), "output_tokens": count}
    assert chat["started"] <= chat["first_byte"] <= chat["finished"]


@pytest.mark.parametrize("script", ["gzip", "br", "gzip-stream", "bytewise", "slow"])
@pytest.mark.parametrize("flavour", ["vllm", "plain"])
def test_codings_and_chunking_do_not_matter(engines, flavour, script, tmp_path):
    stream = script not in ("gzip", "br")
    headers = {"x-script": script, "Accept-Encoding": "gzip, br"}
    asked = {**CHAT, "stream": stream}
    with recording(engines[flavour].url, tmp_path) as recorder:
        direct = call(engines[flavour].url, "/v1/chat/completions", asked, headers=headers)
        through = call(recorder.url, "/v1/chat/completions", asked, headers=headers)
        (recorded,) = recorder.calls()
    undo = {"gzip": gzip.decompress, "br": brotli.decompress, "": bytes}

    def plain(answer):
        return undo[answer.headers.get("content-encoding", "")](answer.body)

    assert plain(through) == plain(direct)
    if flavour == "plain":
        assert through.body == direct.body
    assert recorded["response"]["choices"][0]["message"]["content"] == reply_to(CHAT)
    assert "error" not in recorded


def test_events_are_passed_on_as_they_arrive(engines, tmp_path):
    for flavour in ("vllm", "plain"):
        with recording(engines[flavour].url, tmp_path / flavour) as recorder:
            connection = HTTPConnection(recorder.url.removeprefix("http://"), timeout=10)
            body = json.dumps({**CHAT, "stream": True})
            connection.request("POST", "/v1/chat/completions", body, {"x-script": "slow"})
            response = connection.getresponse()
            arrivals = []
            while line := response.readline():
                if line.startswith(b"data:"):
                    arrivals.append(time.monotonic())
            connection.close()
        assert len(arrivals) >= 6
        gaps = [later - sooner for sooner, later in itertools.pairwise(arrivals)]
        assert statistics.median(gaps) > 0.02  # sent 0.05 s apart; on a busy machine some arrive together


def test_a_packed_request_is_read_and_passed_on(engines, tmp_path):
    body = gzip.compress(json.dumps(CHAT).encode(), mtime=0)
    for flavour in ("plain", "vllm"):
        engine = engines[flavour]
        with recording(engine.url, tmp_path / flavour) as recorder:
            answer = call(recorder.url, "/v1/chat/completions", body=body, headers={"Content-Encoding": "gzip"})
            (recorded,) = recorder.calls()
        assert answer.status == 200 and recorded["request"] == CHAT
        headers, sent = engine.seen[-1]
        assert (headers.get("content-encoding"), sent == body) == (
            ("gzip", True) if flavour == "plain" else (None, False)
        )


def test_other_paths_pass_untouched_and_are_not_recorded(engines, tmp_path):
    engine = engines["plain"]
    with recording(engine.url + "/v1/", tmp_path) as recorder:
        models = call(recorder.url, "/v1/models", method="GET")
        assert json.loads(models.body)["data"][0]["owned_by"] == "plain" and models.headers["x-probe"] == "1"
        for method in ("PUT", "DELETE", "POST"):
            other = call(recorder.url, "/any/%2Fthing?x=%20y&z", method=method, body=b"abc")
            same_answer(call(engine.url, "/any/%2Fthing?x=%20y&z", method=method, body=b"abc"), other)
            assert other.body == b"cba" and other.headers["x-method"] == method
        head = call(recorder.url, "/v1/models", method="HEAD")
        assert (
            head.status == 200
            and head.body == b""
            and head.headers["content-length"] == models.headers["content-length"]
        )
        assert call(recorder.url, "/session/s1/other", method="GET").headers["x-path"] == "/other"
        assert recorder.calls() == []


def test_sessions_are_kept_apart(engines, tmp_path):
    with recording(engines["plain"].url, tmp_path, session_headers=("X-Run",)) as recorder:
        path = "/v1/chat/completions"
        call(recorder.url, path, CHAT, headers={"x-session-id": "a"})
        call(recorder.url, path, CHAT, headers={"x-session-id": "a", "x-run": "b"})
        call(recorder.url, "/session/c%20d" + path, CHAT)
        call(recorder.url, path, CHAT)
        call(recorder.url, path, CHAT, headers={"Authorization": "Bearer another-key-0123"})
        calls = recorder.calls()
    names = [each["session"] for each in calls]
    assert names[:3] == ["a", "b", "c d"] and len(set(names)) == 5
    assert [each["session_from"] for each in calls] == ["header x-session-id", "header x-run", "path", "key", "key"]
    assert {each["path"] for each in calls} == {path}
    assert len({each["id"] for each in calls}) == 5
    with pytest.raises(ValueError, match="authorization"):
        Proxy(Settings("http://127.0.0.1:1", session_headers=("Authorization",)), None)


def test_keys_never_reach_the_disk(engines, tmp_path):
    secret = "another-secret-98765"
    carriers = [
        {"Authorization": f"Bearer {secret}"},
        {"x-api-key": secret},
        {"api-key": secret},
        {"Cookie": f"token={secret}"},
        {"x-goog-api-key": secret, "User-Agent": f"agent {secret}", "x-session-id": f"s-{secret}"},
    ]
    said = {**CHAT, "messages": [{"role": "user", "content": f"my key is {secret}"}]}
    with recording(engines["vllm"].url, tmp_path) as recorder:
        for headers in carriers:
            for stream in (False, True):
                name = "token=" + secret if "Cookie" in headers else secret
                text = {**said, "messages": [{"role": "user", "content": f"my key is {name}"}], "stream": stream}
                answer = call(recorder.url, f"/v1/chat/completions?key={secret}", text, headers=headers)
                assert secret.encode() in answer.body
        calls = recorder.calls()
        written = recorder.path.read_bytes()
    assert len(calls) == 10
    assert secret.encode() not in written and KEY.encode() not in written
    assert all(secret.encode() not in raw_events(each) for each in calls if "events" in each)
    assert "[credential]" in calls[0]["request"]["messages"][0]["content"]
    assert calls[-1]["session"] == "s-[credential]"


def test_keys_for_other_servers_in_a_payload_never_reach_the_disk(engines, tmp_path):
    tool = {"type": "mcp", "server_url": "http://127.0.0.1:1", "authorization": "oauth-token-0123456789"}
    tool["headers"] = {"X-Api-Key": "Bearer mcp-secret-9876543210", "Accept": "application/json"}
    server = {"type": "url", "authorization_token": 'quoted-"token"-0123456789'}
    payload = {**RESPONSES, "input": "say oauth-token-0123456789", "tools": [tool], "mcp_servers": [server]}
    size = len(json.dumps(payload))
    with recording(engines["plain"].url, tmp_path / "cut", max_body_bytes=size - 10) as recorder:
        call(recorder.url, "/v1/responses", payload)
        (recorded,) = recorder.calls()
        assert recorded["truncated"]["request"] == size and "mcp" in recorded["request_text"]
        assert all(secret not in recorder.path.read_text() for secret in ("oauth-token", "mcp-secret"))
    with recording(engines["plain"].url, tmp_path) as recorder:
        call(recorder.url, "/v1/responses", payload)
        (recorded,) = recorder.calls()
        written = recorder.path.read_text()
    assert "0123456789" not in written and "9876543210" not in written
    assert recorded["request"]["tools"][0]["headers"] == {
        "X-Api-Key": "Bearer [credential]",
        "Accept": "application/json",
    }
    assert recorded["request"]["mcp_servers"] == [{"type": "url", "authorization_token": "[credential]"}]


@pytest.mark.parametrize("stream", [False, True])
def test_redacted_fields_never_reach_the_disk(engines, stream, tmp_path):
    private = {**CHAT, "stream": stream, "user": "Ada-private", "metadata": {"note": "private-note", "kept": 1}}
    with recording(engines["vllm"].url, tmp_path / "a", redact=("user", "metadata.note", "created")) as recorder:
        call(recorder.url, "/v1/chat/completions", private)
        (outside,) = recorder.calls()
        assert b"private" not in recorder.path.read_bytes()
    assert outside["request"]["metadata"] == {"note": "[redacted]", "kept": 1}
    assert outside["prompt_ids"] == prompt_token_ids(CHAT) and outside["response"]["created"] == "[redacted]"
    assert {"user", "metadata.note", "created"} == set(outside["redacted"])

    fields = ("messages.*.content", "choices.*.message.content")
    with recording(engines["vllm"].url, tmp_path / "b", redact=fields) as recorder:
        call(recorder.url, "/v1/chat/completions", private)
        (text,) = recorder.calls()
        written = recorder.path.read_text()
    assert "three" not in written and text["request"]["messages"][0]["content"] == "[redacted]"
    assert text["ids_withheld"] is True and "prompt_ids" not in text and "completions" not in text
    for piece in pieces(reply_to(CHAT)):
        assert str(token_id(piece)) not in written and str(logprob(piece)) not in written
    assert "events" not in text and json.dumps(reply_to(CHAT))[1:6] not in written


def test_large_bodies_pass_whole_and_are_recorded_in_part(engines, tmp_path):
    large = {**CHAT, "messages": [{"role": "user", "content": "word " * 12_000}]}
    with recording(engines["vllm"].url, tmp_path, max_body_bytes=50_000) as recorder:
        for stream in (False, True):
            direct = call(engines["vllm"].url, "/v1/chat/completions", {**large, "stream": stream})
            through = call(recorder.url, "/v1/chat/completions", {**large, "stream": stream})
            same_answer(direct, through)
        small = {**CHAT, "n": 400}
        same_answer(
            call(engines["vllm"].url, "/v1/chat/completions", small), call(recorder.url, "/v1/chat/completions", small)
        )
        whole, stream, answer = recorder.calls()
    body = json.dumps({**large, "stream": False}).encode()
    assert whole["truncated"]["request"] == len(body) and whole["request_text"] == body[:50_000].decode()
    assert "request" not in whole and stream["truncated"]["response"] > 50_000
    assert len(raw_events(stream)) == 50_000 and "error" not in stream
    assert (
        answer["request"] == small
        and set(answer["truncated"]) == {"response"}
        and 49_997 <= len(answer["response_text"].encode()) <= 50_000
    )
    assert "error" not in answer


def test_fifty_streams_at_once_stay_apart(engines, tmp_path):
    def one(number):
        payload = {**CHAT, "stream": True, "messages": [{"role": "user", "content": f"stream number {number} " * 20}]}
        return payload, call(recorder.url, "/v1/chat/completions", payload, headers={"x-session-id": f"s{number}"})

    for flavour in ("vllm", "sglang"):
        with recording(engines[flavour].url, tmp_path / flavour) as recorder:
            with ThreadPoolExecutor(50) as pool:
                answers = list(pool.map(one, range(50)))
            calls = {each["session"]: each for each in recorder.calls()}
        assert len(calls) == 50
        for number, (payload, answer) in enumerate(answers):
            recorded = calls[f"s{number}"]
            text = "".join(
                choice["delta"].get("content", "")
                for line in answer.body.decode().splitlines()
                if line.startswith("data: {")
                for choice in json.loads(line[6:])["choices"]
            )
            assert text == reply_to(payload) == recorded["response"]["choices"][0]["message"]["content"]
            sampled = pieces(reply_to(payload))
            sampled.insert(1, "<tool>")
            assert recorded["completions"][0]["completion_ids"] == [token_id(p) for p in sampled]
            assert recorded["prompt_ids"] == prompt_token_ids(payload)


def test_a_harness_that_asks_sglang_itself_gets_its_ids(engines, tmp_path):
    engine = engines["sglang"]
    headers = {SGLANG_ID_HEADERS[0]: "1", SGLANG_ID_HEADERS[1]: "1"}
    with recording(engine.url, tmp_path) as recorder:
        for stream in (False, True):
            asked = {**CHAT, "stream": stream}
            through = call(recorder.url, "/v1/chat/completions", asked, headers=headers)
            same_answer(call(engine.url, "/v1/chat/completions", asked, headers=headers), through)
            assert b"output_ids" in through.body
        assert all(each["prompt_ids"] == prompt_token_ids(CHAT) for each in recorder.calls())


def test_with_engine_none_nothing_is_asked(engines, tmp_path):
    engine = engines["vllm"]
    with recording(engine.url, tmp_path, engine="none") as recorder:
        body = b'{ "model":"m", "messages" :[{"role":"user","content":"a\\u00e9"}] ,"logprobs":false}'
        call(recorder.url, "/v1/chat/completions", body=body)
        (recorded,) = recorder.calls()
    assert engine.seen[-1][1] == body and "asked" not in recorded and recorded["engine"] == "none"


def test_scripted_ids_are_what_the_tests_say():
    assert token_id("a") == zlib.crc32(b"a") % 150_000 and pieces("a b  c") == ["a", " b", "  c"]
