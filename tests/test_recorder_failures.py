"""What goes wrong upstream or downstream is passed on as it was and recorded as what it was."""

import json
import socket
import time
from http.client import BadStatusLine, HTTPConnection, RemoteDisconnected

import pytest

from mwjax.recorder.calls import Body, Exchange, as_object
from mwjax.recorder.sessions import Session
from mwjax.rollouts.errors import RolloutFileError
from tests.scripted_engine import call, pieces, prompt_token_ids, recording, reply_to, running, token_id

PATH = "/v1/chat/completions"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "one two three four"}]}
STREAM = {**CHAT, "stream": True}


@pytest.fixture(scope="module", params=["vllm", "plain"])
def engine(request):
    with running(request.param) as engine:
        yield engine


def through(recorder, payload, script, path=PATH):
    return call(recorder.url, path, payload, headers={"x-script": script})


def wait_for(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.01)


def test_a_refusal_passes_with_its_headers(engine, tmp_path):
    with recording(engine.url, tmp_path) as recorder:
        answer = through(recorder, CHAT, "refuse")
        (recorded,) = recorder.calls()
    assert (answer.status, answer.headers["retry-after"]) == (429, "7")
    assert json.loads(answer.body) == {"error": {"message": "too much"}} == recorded["response"]
    assert recorded["error"] == {"kind": "http_status", "message": "too much"} and recorded["status"] == 429


@pytest.mark.parametrize("script", ["not-json", "nan"])
def test_a_body_that_is_not_json_passes_and_is_kept_as_text(engine, script, tmp_path):
    with recording(engine.url, tmp_path) as recorder:
        answer = through(recorder, CHAT, script)
        (recorded,) = recorder.calls()
    assert answer == call(engine.url, PATH, CHAT, headers={"x-script": script})._replace(headers=answer.headers)
    assert recorded["response_text"].encode() == answer.body
    assert recorded["error"]["kind"] == "malformed_response"


def test_malformed_events_pass_and_are_counted(engine, tmp_path):
    with recording(engine.url, tmp_path) as recorder:
        answer = through(recorder, STREAM, "malformed")
        (recorded,) = recorder.calls()
    direct = call(engine.url, PATH, STREAM, headers={"x-script": "malformed"})
    assert answer.body == direct.body and b"{this is not JSON" in answer.body and b": a comment" in answer.body
    assert recorded["error"]["kind"] == "malformed_events" and recorded["malformed_events"] == 1
    assert recorded["response"]["choices"][0]["message"]["content"] == reply_to(CHAT)


def test_an_error_in_the_middle_of_a_stream_is_recorded(engine, tmp_path):
    with recording(engine.url, tmp_path) as recorder:
        answer = through(recorder, STREAM, "error-event")
        (recorded,) = recorder.calls()
    assert b"engine died" in answer.body and answer.whole
    assert recorded["error"] == {"kind": "reported", "message": "engine died"} and recorded["status"] == 200


@pytest.mark.parametrize("payload", [CHAT, STREAM], ids=["whole", "stream"])
def test_an_answer_that_breaks_off_breaks_off(engine, payload, tmp_path):
    with recording(engine.url, tmp_path) as recorder:
        answer = through(recorder, payload, "cut")
        (recorded,) = recorder.calls()
    direct = call(engine.url, PATH, payload, headers={"x-script": "cut"})
    assert not direct.whole and not answer.whole
    if payload is STREAM or engine.flavour == "plain":  # a body that breaks off cannot be stripped
        assert direct.body.startswith(answer.body)  # the engine breaks off after three events, hidden ones included
        assert len(answer.body) == len(direct.body) or engine.flavour == "vllm"
    assert recorded["error"]["kind"] == "upstream_cut_off" and recorded["status"] == 200
    if payload is STREAM:
        assert recorded["response"]["choices"][0]["message"]["content"] == "".join(
            pieces(reply_to(CHAT))[: 2 if engine.flavour == "plain" else 1]
        )


@pytest.mark.parametrize("payload", [CHAT, STREAM], ids=["whole", "stream"])
def test_an_engine_that_hangs_up_is_a_502(engine, payload, tmp_path):
    with recording(engine.url, tmp_path) as recorder:
        answer = through(recorder, payload, "hang-up")
        (recorded,) = recorder.calls()
    assert answer.status == 502 and "closed the connection" in json.loads(answer.body)["error"]["message"]
    assert recorded["error"]["kind"] == "upstream_disconnected" and "status" not in recorded


def test_an_engine_that_is_not_there_is_a_502_in_the_shape_of_the_api(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with recording(f"http://127.0.0.1:{taken.getsockname()[1]}", tmp_path) as recorder:
            chat, messages = call(recorder.url, PATH, CHAT), call(recorder.url, "/v1/messages", CHAT)
            other = call(recorder.url, "/v1/models", method="GET")
            calls = recorder.calls()
    assert (chat.status, messages.status, other.status) == (502, 502, 502)
    assert "cannot reach the engine" in json.loads(chat.body)["error"]["message"]
    assert json.loads(messages.body)["type"] == "error"
    assert [each["error"]["kind"] for each in calls] == ["upstream_refused"] * 2
    assert calls[0]["request"] == CHAT


def test_stalls_end_when_the_time_is_over(engine, tmp_path):
    with recording(engine.url, tmp_path, idle_timeout=0.3) as recorder:
        whole = through(recorder, CHAT, "stall")
        stream = through(recorder, STREAM, "stall-stream")
        calls = recorder.calls()
    assert whole.status == 504 and stream.status == 200 and not stream.whole and stream.body.startswith(b"data: ")
    assert [each["error"]["kind"] for each in calls] == ["upstream_timeout"] * 2
    assert calls[1]["response"]["choices"][0]["message"]["role"] == "assistant"


def test_a_refusal_that_the_harness_does_not_read_is_still_one():
    body = Body(1000)
    body.add(b'{"error": {"message": "too much"}}')
    session, request = Session(None, "none"), Body(1000)
    exchange = Exchange("chat.completions", PATH, session, {}, request, body, (), status=429)
    exchange.fail("client_disconnected", "the harness closed its connection before the answer was whole")
    assert as_object(exchange)["error"] == {"kind": "http_status", "message": "too much"}


@pytest.mark.parametrize("script", ["stall", "stall-stream"])
def test_a_harness_that_leaves_is_recorded_and_the_engine_is_told(engine, script, tmp_path):
    payload = CHAT if script == "stall" else STREAM
    with recording(engine.url, tmp_path) as recorder:
        left = len(engine.left)
        connection = HTTPConnection(recorder.url.removeprefix("http://"), timeout=10)
        connection.request("POST", PATH, json.dumps(payload), {"x-script": script})
        if script == "stall-stream":
            response = connection.getresponse()
            for _ in range(2):  # the role, the first piece of text
                assert response.readline().startswith(b"data: ") and response.readline() == b"\n"
        else:
            wait_for(lambda: recorder.proxy.open == 1 and engine.seen[-1][0].get("x-script") == "stall")
        connection.close()
        wait_for(lambda: recorder.calls())
        (recorded,) = recorder.calls()
        wait_for(lambda: len(engine.left) == left + 1)
    assert recorded["error"]["kind"] == "client_disconnected" and recorded["request"] == payload
    if script == "stall-stream" and engine.flavour == "vllm":
        assert recorded["prompt_ids"] == prompt_token_ids(CHAT)
        assert recorded["completions"][0]["completion_ids"][0] == token_id(pieces(reply_to(CHAT))[0])


def test_a_harness_that_leaves_after_the_last_event_has_had_it_all(engine, tmp_path):
    with recording(engine.url, tmp_path) as recorder:
        connection = HTTPConnection(recorder.url.removeprefix("http://"), timeout=10)
        connection.request("POST", PATH, json.dumps(STREAM))
        response = connection.getresponse()
        while b"[DONE]" not in response.readline():
            pass
        connection.close()
        wait_for(lambda: recorder.calls())
        (recorded,) = recorder.calls()
    assert "error" not in recorded and recorded["status"] == 200


def test_a_stream_without_an_end_is_recorded_as_such():
    exchange = Exchange("messages", "/v1/messages", Session(None, "none"), {}, Body(100), Body(10**6), [])
    exchange.stream, exchange.status = True, 200
    exchange.response.add(b'event: ping\ndata: {"type":"ping"}\n\n')
    assert as_object(exchange)["error"]["kind"] == "incomplete_stream"
    exchange.response.add(b'data: {"type":"message_stop"}\n\n')
    assert "error" not in as_object(exchange)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b'"text"', b"[1]", b'{"stream": tru', b"[" * 100_000])
def test_requests_that_are_no_json_object_pass_as_they_are(engine, body, tmp_path):
    with recording(engine.url, tmp_path) as recorder:
        call(recorder.url, PATH, body=body, headers={"x-script": "refuse"})
        (recorded,) = recorder.calls()
    assert engine.seen[-1][1] == body and "asked" not in recorded


def test_what_follows_garbage_on_the_wire_still_works(engine, tmp_path):
    with recording(engine.url, tmp_path) as recorder:
        with socket.create_connection(("127.0.0.1", int(recorder.url.rsplit(":", 1)[1]))) as wire:
            wire.sendall(b"certainly not HTTP\r\n\r\n")
            assert b"400" in wire.recv(1000)
        assert call(recorder.url, PATH, CHAT).status == 200
        assert len(recorder.calls()) == 1


def test_a_full_disk_is_said_and_the_calls_go_on(engine, tmp_path, capfd, monkeypatch):
    with recording(engine.url, tmp_path) as recorder:
        log = recorder.proxy.log

        def full(_):
            raise RolloutFileError("the disk is full")

        with monkeypatch.context() as patched:
            patched.setattr(log._journal, "append_soon", full)
            assert call(recorder.url, PATH, CHAT).status == 200
        assert call(recorder.url, PATH, CHAT).status == 200
        assert (log.lost, log.written, len(recorder.calls())) == (1, 1, 1)
    assert "not recorded: the disk is full" in capfd.readouterr().err


def test_an_expectation_is_answered(engine, tmp_path):
    with recording(engine.url, tmp_path) as recorder:
        body = json.dumps(CHAT).encode()
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", int(recorder.url.rsplit(":", 1)[1])), timeout=5) as wire:
            wire.sendall(head.encode())
            assert wire.recv(100).startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
            wire.sendall(body)
            assert wire.recv(1000).startswith(b"HTTP/1.1 200 OK")


def test_a_stopping_recorder_takes_no_new_call(engine, tmp_path):
    with recording(engine.url, tmp_path) as recorder:
        recorder.proxy.stopping = True
        answer = call(recorder.url, "/v1/messages", CHAT)
        assert answer.status == 503 and json.loads(answer.body)["error"]["message"] == "mwjax record is stopping"
        assert recorder.calls() == []


def test_direct_calls_break_as_the_tests_say(engine):
    with pytest.raises((RemoteDisconnected, BadStatusLine, ConnectionError)):
        call(engine.url, PATH, CHAT, headers={"x-script": "hang-up"})


def test_every_line_is_synced_to_the_disk(engine, tmp_path, monkeypatch):
    with recording(engine.url, tmp_path) as recorder:
        journal = recorder.proxy.log._journal
        sizes, sync = [], journal.sync
        monkeypatch.setattr(journal, "sync", lambda: (sizes.append(recorder.path.stat().st_size), sync()))
        call(recorder.url, PATH, CHAT)
        wait_for(lambda: sizes and sizes[-1] == recorder.path.stat().st_size)
        for _ in range(5):
            call(recorder.url, PATH, CHAT)
    assert sizes[-1] == recorder.path.stat().st_size and len(recorder.calls()) == 6
    assert len(sizes) <= 8
