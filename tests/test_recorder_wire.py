"""The recorder against an engine that sends raw bytes: what is not as HTTP or as an engine should be."""

import contextlib
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mwjax.recorder.proxy import Proxy
from mwjax.recorder.upstream import Settings
from tests.scripted_engine import call, recording

PATH = "/v1/chat/completions"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "one two"}]}
VLLM = b'{"data": [{"id": "m", "owned_by": "vllm"}]}'
ANSWER = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]}


def response(body=b"", status=b"200 OK", headers=b""):
    return b"HTTP/1.1 %b\r\nConnection: close\r\n%bContent-Length: %d\r\n\r\n%b" % (status, headers, len(body), body)


class Wire:
    """``answer`` and ``models`` give the bytes to send for a request line, then the connection is closed. ``seen``: the
    request lines."""

    def __init__(self, server):
        self.url = f"http://127.0.0.1:{server.getsockname()[1]}"
        self.seen = []
        self.answer = lambda line: response(json.dumps(ANSWER).encode(), headers=b"Content-Type: application/json\r\n")
        self.models = lambda line: response(VLLM)
        self._server = server

    def run(self):
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._one, args=(connection,), daemon=True).start()

    def _one(self, connection):
        with connection, contextlib.suppress(OSError), connection.makefile("rb") as lines:
            line, size = lines.readline().decode(), 0
            while (header := lines.readline().lower()).strip():
                if header.startswith(b"content-length:"):
                    size = int(header.split(b":")[1])
            lines.read(size)
            if not line.startswith("GET /v1/models"):
                self.seen.append(line.rsplit(" ", 1)[0])
            connection.sendall((self.models if line.startswith("GET /v1/models") else self.answer)(line))
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)


@pytest.fixture
def wire():
    with socket.create_server(("127.0.0.1", 0)) as server:
        engine = Wire(server)
        threading.Thread(target=engine.run, daemon=True).start()
        yield engine


def raw(recorder, sent):
    """What comes back for these bytes until the recorder closes the connection."""
    with socket.create_connection(("127.0.0.1", int(recorder.url.rsplit(":", 1)[1])), timeout=5) as connection:
        connection.sendall(sent)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_calls_that_wait_for_the_same_answer_ask_once_what_the_engine_is(wire, tmp_path, monkeypatch):
    monkeypatch.setattr("mwjax.recorder.upstream.PROBE_SECONDS", 0.4)
    asked = []

    def silent(line):
        asked.append(line)
        time.sleep(2)
        return b""

    wire.models = silent
    with recording(wire.url, tmp_path) as recorder, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: call(recorder.url, PATH, CHAT).status, range(8)))
        assert answers == [200] * 8 and len(asked) == 1
        wire.models = lambda line: response(VLLM)
        recorder.proxy._upstream._probed = float("-inf")  # as if the time until the next question were over
        call(recorder.url, PATH, CHAT)
        assert [each["engine"] for each in recorder.calls()] == ["none"] * 8 + ["vllm"]


@pytest.mark.parametrize(
    ("status", "settled"),
    [(b"401 Unauthorized", False), (b"429 Too Many", False), (b"503 Busy", False), (b"404 Not Found", True)],
)
def test_only_an_engine_that_answers_is_known(wire, status, settled, tmp_path):
    wire.models = lambda line: response(b"{}", status)
    with recording(wire.url, tmp_path) as recorder:
        call(recorder.url, PATH, CHAT)
        wire.models = lambda line: response(VLLM)
        recorder.proxy._upstream._probed = float("-inf")
        call(recorder.url, PATH, CHAT)
        assert [each["engine"] for each in recorder.calls()] == ["none", "none" if settled else "vllm"]


def test_a_redirection_leads_back_to_the_recorder(wire, tmp_path):
    with recording(wire.url, tmp_path) as recorder:

        def moved(location):
            wire.answer = lambda line: response(b"", b"307 Temporary Redirect", f"Location: {location}\r\n".encode())
            return call(recorder.url, f"/session/a%20b{PATH}/", CHAT).headers["location"]

        for location in (wire.url + PATH, PATH, "../completions"):
            assert moved(location) == f"{recorder.url}/session/a%20b{PATH}"
        assert moved("http://127.0.0.1:1/v1/x") == "http://127.0.0.1:1/v1/x"
        assert {each["error"]["message"] for each in recorder.calls()} == {"status 307"}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"SSH-2.0-a private banner\r\n\r\n", "Bad status line"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: private\r\n\r\n{}", "Invalid character in Content-Length"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"private" * 10_000 + b"\r\n\r\n", "Got more than 65536 bytes when reading"),
    ],
)
def test_an_answer_that_is_not_http_is_told_and_not_quoted(wire, answer, reason, tmp_path):
    wire.answer = lambda line: answer
    with recording(wire.url, tmp_path) as recorder:
        told = call(recorder.url, f"{PATH}?key=short", CHAT)
        (recorded,) = recorder.calls()
        written = recorder.path.read_text()
    assert told.status == 502 and reason in json.loads(told.body)["error"]["message"]
    assert recorded["error"]["message"].endswith(reason) and "private" not in written and "short" not in written


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("http://user:long-password-123@127.0.0.1:1", "without user, password"),
        ("http://127.0.0.1:1/v1?key=long-password-123", "without user, password"),
        ("http://127.0.0.1:1/v1/chat/completions", "base URL"),
        ("http://127.0.0.1:99999", "99999: Port"),
        ("127.0.0.1:8000", "http://HOST:PORT"),
    ],
)
def test_an_address_that_cannot_be_an_engines_is_refused(address, reason):
    with pytest.raises(ValueError, match=reason) as refused:
        Proxy(Settings(address), None)
    assert "password-123" not in str(refused.value)


@pytest.mark.parametrize("line", ["OPTIONS *", "CONNECT example.com:443"])
def test_it_is_no_proxy_for_other_hosts(wire, line, tmp_path):
    with recording(wire.url, tmp_path) as recorder:
        answer = raw(recorder, f"{line} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 400 ") and b"one engine" in answer and wire.seen == []
        # As a client asks that takes it for a proxy: the engine answers, no other host.
        absolute = "GET http://example.com/v1/other HTTP/1.1\r\nHost: example.com\r\nConnection: close\r\n\r\n"
        assert raw(recorder, absolute.encode()).startswith(b"HTTP/1.1 200 ") and wire.seen == ["GET /v1/other"]


@pytest.mark.parametrize(
    "head",
    [
        b"Authorization: Bearer sk-long-secret-123\x00",
        b"Authorization Bearer sk-long-secret-123",
        b"X: \r\n sk-long-secret",
    ],
)
def test_a_request_that_cannot_be_read_is_not_quoted_on_stderr(wire, head, tmp_path, caplog):
    with recording(wire.url, tmp_path) as recorder:
        answer = raw(recorder, f"POST {PATH} HTTP/1.1\r\nHost: x\r\n".encode() + head + b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.0 400 ")
    assert "Error handling request from 127.0.0.1: BadHttpMessage" in caplog.text and "secret" not in caplog.text
