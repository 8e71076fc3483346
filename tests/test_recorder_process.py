"""`mwjax record` as a program: its lines, its end, its death, and real clients through it."""

import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import anthropic
import openai
import pytest

from mwjax.cli import main
from tests.scripted_engine import KEY, call, pieces, prompt_token_ids, recording, reply_to, running, token_id

PATH = "/v1/chat/completions"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "one two three four"}]}


@pytest.fixture(scope="module")
def engine():
    with running("vllm") as engine:
        yield engine


@contextmanager
def program(upstream, folder, *options, before=(), **environment):
    """The program's base URL and its process, killed at the end if it still runs. ``before``: what to run it by."""
    command = [sys.executable, "-m", "mwjax", "record", upstream, "--port", "0", "--run-dir", str(folder), *options]
    process = subprocess.Popen(
        [*before, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        lines = [process.stdout.readline() for _ in range(3)]
        assert all(lines), process.stderr.read()
        base = re.fullmatch(r"OPENAI_BASE_URL=(http://127\.0\.0\.1:\d+)/v1\n", lines[1]).group(1)
        assert lines[0] == f"recording {base} -> {upstream} in {folder}/calls.jsonl\n"
        assert lines[2] == f"ANTHROPIC_BASE_URL={base}\n"
        yield base, process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def calls_in(folder):
    return [json.loads(line) for line in (folder / "calls.jsonl").read_bytes().splitlines()]


def slow_stream(base):
    """An open stream of which the first event has arrived."""
    connection = HTTPConnection(base.removeprefix("http://"), timeout=20)
    connection.request("POST", PATH, json.dumps({**CHAT, "stream": True}), {"x-script": "slow"})
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    return connection, response


def listening_on(process):
    """The addresses on which a process listens, as hexadecimal digits."""
    inodes = {os.readlink(link)[8:-1] for link in Path(f"/proc/{process.pid}/fd").iterdir() if link.is_symlink()}
    tables = [Path(f"/proc/{process.pid}/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}


@pytest.mark.skipif(not os.path.exists("/proc/self/net/tcp"), reason="reads the listening sockets as Linux shows them")
def test_a_killed_recorder_loses_the_open_call_only_and_goes_on(engine, tmp_path):
    with program(engine.url, tmp_path) as (base, process):
        for number in range(3):
            assert call(base, PATH, CHAT, headers={"x-session-id": str(number)}).status == 200
        connection, _ = slow_stream(base)
        assert listening_on(process) == {"0100007F"}  # 127.0.0.1, as Linux prints it
        assert len(calls_in(tmp_path)) == 3  # every answered call is there while the recorder still runs
        process.send_signal(signal.SIGKILL)
        process.wait()
        connection.close()
    assert [each["session"] for each in calls_in(tmp_path)] == ["0", "1", "2"]

    with (tmp_path / "calls.jsonl").open("ab") as log:
        log.write(b'{"format": "mwjax-call/1", "id": "cut sh')
    with program(engine.url, tmp_path) as (base, process):
        call(base, PATH, CHAT, headers={"x-session-id": "3"})
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=10)
    assert "cut short" in stderr and process.returncode == 0
    assert stdout == f"{tmp_path}/calls.jsonl: calls 1, sessions 1, failed 0\n"
    calls = calls_in(tmp_path)
    assert [each["session"] for each in calls] == ["0", "1", "2", "3"] and len({each["id"] for each in calls}) == 4


def test_it_goes_on_when_nobody_reads_its_messages(engine, tmp_path):
    with program(engine.url, tmp_path) as (base, process):
        process.stderr.close()
        for _ in range(2):  # the first says what the engine is, the second that it is recorded as text only
            body = b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": 1e999}'
            assert call(base, PATH, body=body, timeout=10).status == 200
        assert [each["engine"] for each in calls_in(tmp_path)] == ["vllm"] * 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_recorder_finishes_open_calls(engine, number, tmp_path):
    with program(engine.url, tmp_path) as (base, process):
        connection, response = slow_stream(base)
        process.send_signal(number)
        assert b"[DONE]" in response.read()
        connection.close()
        _, stderr = process.communicate(timeout=10)
    assert process.returncode == 0 and "finishing 1 open call" in stderr
    (recorded,) = calls_in(tmp_path)
    assert "error" not in recorded and recorded["response"]["choices"][0]["finish_reason"] == "stop"


def test_an_open_call_that_outlasts_the_grace_is_recorded_as_cut_short(engine, tmp_path):
    with program(engine.url, tmp_path, "--grace", "0.1") as (base, process):
        connection = HTTPConnection(base.removeprefix("http://"), timeout=20)
        connection.request("POST", PATH, json.dumps({**CHAT, "stream": True}), {"x-script": "stall-stream"})
        response = connection.getresponse()
        assert response.readline().startswith(b"data: ")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=10)
        connection.close()
    (recorded,) = calls_in(tmp_path)
    assert recorded["error"]["kind"] == "shutdown" and recorded["prompt_ids"] == prompt_token_ids(CHAT)


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="lowers the limit with prlimit")
def test_more_calls_can_be_open_than_a_system_allows_files_at_first(engine, tmp_path):
    with program(engine.url, tmp_path, before=("prlimit", "--nofile=64:4096")) as (base, _):
        streams = [slow_stream(base) for _ in range(40)]
        assert all(b"[DONE]" in response.read() for _, response in streams)
        for connection, _ in streams:
            connection.close()
    assert len(calls_in(tmp_path)) == 40 and not any("error" in each for each in calls_in(tmp_path))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_an_engine_behind_tls_must_be_one_that_is_trusted(tmp_path):
    certificate, key = str(tmp_path / "certificate.pem"), str(tmp_path / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run([*command, *names], check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    with running("vllm", context) as engine:
        with program(engine.url, tmp_path / "trusted", SSL_CERT_FILE=certificate) as (base, _):
            assert json.loads(call(base, PATH, CHAT).body)["choices"][0]["message"]["content"] == reply_to(CHAT)
        with recording(engine.url, tmp_path / "unknown") as recorder:
            answer = call(recorder.url, PATH, CHAT)
    assert answer.status == 502 and "certificate" in json.loads(answer.body)["error"]["message"]
    (recorded,) = calls_in(tmp_path / "trusted")
    assert recorded["prompt_ids"] == prompt_token_ids(CHAT)


def test_mistakes_are_told_in_words(engine, tmp_path, capfd, monkeypatch):
    def run(*arguments):
        with pytest.raises(SystemExit) as left:
            main(["record", *arguments])
        return left.value.code, capfd.readouterr().err

    folder = ("--run-dir", str(tmp_path / "a"))
    with recording(engine.url, tmp_path / "a") as recorder:
        status, said = run(engine.url, *folder, "--port", "0")
        assert status == 2 and "another recorder has it open" in said
        port = recorder.url.rsplit(":", 1)[1]
        status, said = run(engine.url, "--run-dir", str(tmp_path / "b"), "--port", port)
        assert status == 2 and "--port 0" in said and "Traceback" not in said
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        own = str(taken.getsockname()[1])
    status, said = run(f"http://localhost:{own}/v1", *folder, "--port", own)
    assert status == 2 and "is where this recorder listens" in said
    status, said = run("ftp://x", *folder)
    assert status == 2 and "http://HOST:PORT" in said
    status, said = run(engine.url, *folder, "--host", "no.such.host.invalid")
    assert status == 2 and "cannot listen there" in said and "--port" not in said
    status, said = run(engine.url, *folder, "--max-body-mb", "inf")
    assert status == 2 and "--max-body-mb" in said and "Traceback" not in said
    monkeypatch.chdir(tmp_path)
    status, said = run(engine.url, "--run-dir", "gs://bucket/runs")
    assert status == 2 and "an object store has no append" in said and not (tmp_path / "gs:").exists()
    for name, reason in (("a: b", "no name of a header"), ("X-Auth-Token", "never written down")):
        status, said = run(engine.url, *folder, "--session-header", name)
        assert status == 2 and reason in said
    status, said = run(engine.url, *folder, "--redact", "a..b")
    assert status == 2 and "metadata.user_id" in said


def test_a_field_to_redact_that_no_call_had_is_said_at_the_end(engine, tmp_path):
    fields = ("messages.*.content", "metdata.note", "prompt_ids")
    options = [word for field in fields for word in ("--redact", field)]
    with program(engine.url, tmp_path, *options) as (base, process):
        assert call(base, PATH, CHAT).status == 200
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    told = [line for line in said.splitlines() if "--redact" in line]
    assert len(told) == 1 and "--redact metdata.note: no call had such a field" in told[0]


def test_the_openai_client_sees_no_difference(engine, tmp_path):
    with recording(engine.url, tmp_path) as recorder:
        seen = []
        for url in (engine.url, recorder.url):
            client = openai.OpenAI(base_url=url + "/v1", api_key=KEY, max_retries=0)
            whole = client.chat.completions.create(model="m", messages=CHAT["messages"])
            chunks = list(client.chat.completions.create(model="m", messages=CHAT["messages"], stream=True))
            answer = client.responses.create(model="m", input="one two", store=False)
            events = list(client.responses.create(model="m", input="one two", store=False, stream=True))
            seen.append([each.model_dump() for each in (whole, *chunks, answer, *events)])
    assert seen[0] == seen[1]
    calls = calls_in(tmp_path)
    assert [each["endpoint"] for each in calls] == ["chat.completions"] * 2 + ["responses"] * 2
    assert all(each["completions"][0]["completion_ids"] and "error" not in each for each in calls)
    assert [token_id(piece) for piece in pieces(reply_to(CHAT))] == calls[0]["completions"][0]["completion_ids"]
    assert KEY.encode() not in (tmp_path / "calls.jsonl").read_bytes()


def test_the_anthropic_client_sees_no_difference(engine, tmp_path):
    with recording(engine.url, tmp_path) as recorder:
        seen = []
        for url in (engine.url, recorder.url):
            client = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)
            asked = {"model": "m", "max_tokens": 99, "messages": CHAT["messages"]}
            whole = client.messages.create(**asked)
            with client.messages.stream(**asked) as stream:
                last = stream.get_final_message()
            seen.append([whole.model_dump(), last.model_dump()])
    assert seen[0] == seen[1]
    calls = calls_in(tmp_path)
    assert [each["endpoint"] for each in calls] == ["messages"] * 2 and not any("error" in each for each in calls)
    recorded = calls[1]["response"]
    assert recorded["content"][1]["input"] == {"where": "Dünen"} == seen[1][1]["content"][1]["input"]
    assert recorded["usage"]["output_tokens"] == seen[1][1]["usage"]["output_tokens"]
    assert KEY.encode() not in (tmp_path / "calls.jsonl").read_bytes()
