"""An engine on loopback that answers as vLLM, SGLang or a plain server would, without a model; a recorder before it.

The reply echoes the last message, one piece a token. What a call asks for decides what it gets, so the same call with
and without the recorder shows what the recorder changes. The header ``x-script`` makes the engine misbehave.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import re
import ssl
import threading
import zlib
from collections.abc import Iterator
from http.client import HTTPConnection, IncompleteRead
from pathlib import Path
from typing import Any, NamedTuple

import brotli
from aiohttp import web

from mwjax.recorder.log import CallLog
from mwjax.recorder.proxy import Proxy
from mwjax.recorder.redaction import pattern
from mwjax.recorder.run import listening
from mwjax.recorder.upstream import Settings

KEY = "sk-secret-0123456789abcdef"
STALL_SECONDS = 30.0


def pieces(text: str) -> list[str]:
    return re.findall(r"\s*\S+", text) or [""]


def token_id(piece: str) -> int:
    return zlib.crc32(piece.encode()) % 150_000


def logprob(piece: str) -> float:
    return -(token_id(piece) % 997) / 991


def prompt_token_ids(payload: dict[str, Any]) -> list[int]:
    return list(json.dumps(payload.get("messages", payload.get("input"))).encode())


def reply_to(payload: dict[str, Any]) -> str:
    messages = payload.get("messages", payload.get("input"))
    content = messages if isinstance(messages, str) else messages[-1]["content"]
    return f'Échö "{content}" done'


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


class Engine:
    """``flavour``: "vllm", "sglang" (whose streams give ids on request), "sglang-0.5" (which ignores the newer fields
    and headers), "strict" (which refuses members it does not know) or "plain". ``seen``: headers and body of every
    request."""

    def __init__(self, flavour: str) -> None:
        self.flavour = flavour
        self.seen: list[tuple[dict[str, str], bytes]] = []
        self.left: list[str] = []
        self.url = ""

    @property
    def bodies(self) -> list[Any]:
        return [json.loads(body) for _, body in self.seen if body]

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        if request.path == "/v1/models":
            owner = {"strict": "vllm", "sglang-0.5": "sglang"}.get(self.flavour, self.flavour)
            return web.json_response({"data": [{"id": "m", "owned_by": owner}]}, headers={"x-probe": "1"})
        self.seen.append(({key.lower(): value for key, value in request.headers.items()}, body))
        if not request.path.startswith("/v1/"):
            return web.Response(body=body[::-1], headers={"x-path": request.path_qs, "x-method": request.method})
        if request.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        payload = json.loads(body)
        script = request.headers.get("x-script", "")
        try:
            return await self._answer(request, payload, script)
        except (asyncio.CancelledError, ConnectionError):
            self.left.append(script)
            raise

    async def _answer(self, request: web.BaseRequest, payload: dict[str, Any], script: str) -> web.StreamResponse:
        if script == "refuse":
            return web.Response(
                status=429, text=dumps({"error": {"message": "too much"}}), headers={"retry-after": "7"}
            )
        if script == "stall":
            await asyncio.sleep(STALL_SECONDS)
        if script == "hang-up":
            request.transport.close()
            return web.Response()
        known = {"model", "messages", "stream", "stream_options", "input", "max_tokens", "n", "store", "system"}
        if self.flavour == "strict" and (unknown := sorted(set(payload) - known)):
            return web.json_response({"error": {"message": f"unknown: {unknown}"}}, status=400)
        if not payload.get("stream"):
            return await self._body(request, self._whole(request, payload), script)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "x-kept": "yes"})
        if script == "gzip-stream":
            response.headers["Content-Encoding"] = "gzip"
        await response.prepare(request)
        packer = zlib.compressobj(wbits=31)
        events = list(self._events(request, payload))
        if script == "malformed":
            events.insert(2, "data: {this is not JSON\n\n")
            events.insert(3, ": a comment\r\n\r\n")
        if script == "error-event":
            events[2:] = ['data: {"error":{"message":"engine died","code":500}}\n\n']
        for count, event in enumerate(events):
            if script == "cut" and count == 3:
                await response.write(event.encode()[:20])
                request.transport.close()
                return response
            if script == "stall-stream" and count == 3:
                await asyncio.sleep(STALL_SECONDS)
            if script == "slow":
                await asyncio.sleep(0.05)
            data = event.encode()
            if script == "gzip-stream":
                data = packer.compress(data) + packer.flush(zlib.Z_SYNC_FLUSH)
            if script == "bytewise":
                for at in range(len(data)):
                    await response.write(data[at : at + 1])
            else:
                await response.write(data)
        if script == "gzip-stream":
            await response.write(packer.flush())
        await response.write_eof()
        return response

    async def _body(self, request: web.BaseRequest, value: Any, script: str) -> web.StreamResponse:
        body, headers = dumps(value).encode(), {"Content-Type": "application/json", "x-kept": "yes"}
        if script == "not-json":
            body = b"<html>no</html>"
        if script == "nan":
            body = b'{"choices":[{"index":0,"value":NaN}]}'
        if script == "gzip":
            body, headers["Content-Encoding"] = gzip.compress(body, mtime=0), "gzip"
        if script == "br":
            body, headers["Content-Encoding"] = brotli.compress(body), "br"
        if script == "cut":
            headers["Content-Length"] = str(len(body) + 100)
            response = web.StreamResponse(headers=headers)
            await response.prepare(request)
            await response.write(body)
            request.transport.close()
            return response
        return web.Response(body=body, headers=headers)

    # ---- whole answers

    def _whole(self, request: web.BaseRequest, payload: dict[str, Any]) -> dict[str, Any]:
        text = reply_to(payload)
        if request.path.endswith("/messages"):
            return {
                "id": "msg_1",
                "type": "message",
                "role": "assistant",
                "model": "m",
                "content": [{"type": "text", "text": text}],
                "stop_reason": "end_turn",
                "stop_sequence": None,
                "usage": {"input_tokens": len(prompt_token_ids(payload)), "output_tokens": len(pieces(text))},
            }
        if request.path.endswith("/responses"):
            return self._response(payload, "completed")
        choices = [self._choice(payload, index, text) for index in range(payload.get("n", 1))]
        whole: dict[str, Any] = {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": choices,
            "usage": self._usage(payload, text),
        }
        if self.flavour == "vllm":
            whole["prompt_logprobs"] = None
            whole["prompt_token_ids"] = prompt_token_ids(payload) if payload.get("return_token_ids") else None
            whole["kv_transfer_params"] = None
        if extension := self._extension(request, payload, text):
            whole["sglext"] = extension
        return whole

    def _choice(self, payload: dict[str, Any], index: int, text: str) -> dict[str, Any]:
        choice = {
            "index": index,
            "message": {"role": "assistant", "content": text},
            "logprobs": self._logprobs(payload, pieces(text)),
            "finish_reason": "stop",
        }
        ids = [token_id(piece) for piece in pieces(text)]
        if self.flavour == "vllm":
            choice["stop_reason"] = None
            choice["token_ids"] = ids if payload.get("return_token_ids") else None
        if self.flavour.startswith("sglang"):
            choice["matched_stop"] = 7
            if payload.get("return_prompt_token_ids") or (payload.get("return_token_ids") and self.flavour == "sglang"):
                choice["prompt_token_ids"] = prompt_token_ids(payload)
            if payload.get("return_token_ids") and self.flavour == "sglang":
                choice["token_ids"] = ids
            if payload.get("return_meta_info"):
                triples = [[logprob(piece), token_id(piece), None] for piece in pieces(text)]
                choice["meta_info"] = {"weight_version": "w3"} | (
                    {"output_token_logprobs": triples} if payload.get("logprobs") else {}
                )
        return choice

    def _logprobs(self, payload: dict[str, Any], parts: list[str]) -> Any:
        if not payload.get("logprobs") or self.flavour == "plain":
            return None
        return {"content": [{"token": part, "logprob": logprob(part), "top_logprobs": []} for part in parts]}

    def _extension(self, request: web.BaseRequest, payload: dict[str, Any], text: str) -> dict[str, Any]:
        extension: dict[str, Any] = {}
        if self.flavour == "sglang":
            if payload.get("return_cached_tokens_details"):
                extension["cached_tokens_details"] = {"device": 5}
            if request.headers.get("x-sglext-return-input-ids") == "1":
                extension["input_ids"] = prompt_token_ids(payload)
            if request.headers.get("x-sglext-return-output-ids") == "1":
                extension["output_ids"] = [[token_id(piece) for piece in pieces(text)]] * payload.get("n", 1)
        return extension

    def _usage(self, payload: dict[str, Any], text: str) -> dict[str, int]:
        prompt, sampled = len(prompt_token_ids(payload)), len(pieces(text))
        return {"prompt_tokens": prompt, "total_tokens": prompt + sampled, "completion_tokens": sampled}

    def _response(self, payload: dict[str, Any], status: str) -> dict[str, Any]:
        text = reply_to(payload)
        done = status == "completed"
        part = {"annotations": [], "text": text, "type": "output_text", "logprobs": None}
        item = {"id": "msg_1", "content": [part], "role": "assistant", "status": status, "type": "message"}
        usage = {"input_tokens": len(prompt_token_ids(payload)), "output_tokens": len(pieces(text))}
        response = {"id": "resp_1", "object": "response", "status": status, "output": [item] if done else []}
        response["usage"] = usage if done else None
        if self.flavour == "vllm":
            shown = done and payload.get("enable_response_messages")
            raw = {"message": "", "tokens": prompt_token_ids(payload), "type": "raw_message_tokens"}
            response["input_messages"] = [raw] if shown else None
            response["output_messages"] = (
                [{**raw, "tokens": [token_id(piece)]} for piece in pieces(text)] if shown else None
            )
        return response

    # ---- streams

    def _events(self, request: web.BaseRequest, payload: dict[str, Any]) -> Iterator[str]:
        if request.path.endswith("/messages"):
            yield from self._message_events(payload)
        elif request.path.endswith("/responses"):
            yield from self._response_events(payload)
        else:
            yield from self._chunks(request, payload)

    def _message_events(self, payload: dict[str, Any]) -> Iterator[str]:
        text = reply_to(payload)
        usage = {"input_tokens": len(prompt_token_ids(payload)), "output_tokens": 0}
        message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [], "usage": usage}
        message |= {"stop_reason": None, "stop_sequence": None}
        events: list[dict[str, Any]] = [{"type": "message_start", "message": message}, {"type": "ping"}]
        block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        events.append(block)
        for piece in pieces(text):
            delta = {"type": "text_delta", "text": piece}
            events.append({"type": "content_block_delta", "index": 0, "delta": delta})
        events.append({"type": "content_block_stop", "index": 0})
        tool = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
        events.append({"type": "content_block_start", "index": 1, "content_block": tool})
        for part in ('{"where": "D', 'ünen"}'):
            delta = {"type": "input_json_delta", "partial_json": part}
            events.append({"type": "content_block_delta", "index": 1, "delta": delta})
        events.append({"type": "content_block_stop", "index": 1})
        ending = {"stop_reason": "tool_use", "stop_sequence": None}
        counts = {"output_tokens": len(pieces(text))}
        events += [{"type": "message_delta", "delta": ending, "usage": counts}, {"type": "message_stop"}]
        for event in events:
            yield f"event: {event['type']}\ndata: {dumps(event)}\n\n"

    def _response_events(self, payload: dict[str, Any]) -> Iterator[str]:
        running, done = self._response(payload, "in_progress"), self._response(payload, "completed")
        item = {**done["output"][0], "content": [], "status": "in_progress"}
        events: list[dict[str, Any]] = [
            {"type": "response.created", "response": running},
            {"type": "response.output_item.added", "output_index": 0, "item": item},
        ]
        for piece in pieces(reply_to(payload)):
            place = {"output_index": 0, "content_index": 0, "item_id": "msg_1"}
            events.append({"type": "response.output_text.delta", **place, "delta": piece, "logprobs": []})
        events.append({"type": "response.output_item.done", "output_index": 0, "item": done["output"][0]})
        events.append({"type": "response.completed", "response": done})
        for number, event in enumerate(events):
            yield f"event: {event['type']}\ndata: {dumps({**event, 'sequence_number': number})}\n\n"

    def _chunks(self, request: web.BaseRequest, payload: dict[str, Any]) -> Iterator[str]:
        text = reply_to(payload)
        options = payload.get("stream_options") or {}
        ids, count = payload.get("return_token_ids") and self.flavour == "vllm", payload.get("n", 1)
        head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}

        def chunk(index: int, delta: dict[str, Any], parts: list[str], **more: Any) -> str:
            choice = {"index": index, "delta": delta, "logprobs": self._logprobs(payload, parts) if parts else None}
            choice["finish_reason"] = more.pop("finish_reason", None)
            if self.flavour == "vllm" and parts:
                choice["token_ids"] = [token_id(part) for part in parts] if ids else None
            return f"data: {dumps({**head, 'choices': [choice], **more})}\n\n"

        for index in range(count):
            first: dict[str, Any] = {}
            if self.flavour == "vllm":
                first["prompt_token_ids"] = prompt_token_ids(payload) if ids else None
            yield chunk(index, {"role": "assistant", "content": ""}, [], **first)
        for index in range(count):
            *most, last = pieces(text)
            for place, piece in enumerate(most):
                if place == 1 and self.flavour != "plain":
                    # A token that the parser swallows: its chunk exists for its ids and log-probs only.
                    hidden = "<tool>"
                    if ids or payload.get("logprobs"):
                        usage = {"usage": self._usage(payload, text)} if options.get("continuous_usage_stats") else {}
                        yield chunk(index, {}, [hidden], **usage)
                yield chunk(index, {"content": piece}, [piece])
            yield chunk(index, {"content": last}, [last], finish_reason="stop")
        extension = self._extension(request, payload, text)
        own = {key: value for key, value in extension.items() if not key.endswith("put_ids")}
        id_lists = {key: value for key, value in extension.items() if key.endswith("put_ids")}
        if "output_ids" in id_lists:
            order = pieces(text)
            order.insert(1, "<tool>")
            id_lists["output_ids"] = [[token_id(piece) for piece in order]] * count
        framed = request.headers.get("x-sglext-ids-framed") == "1"
        if own or (id_lists and not framed):
            yield f"data: {dumps({**head, 'choices': [], 'sglext': own if framed else {**own, **id_lists}})}\n\n"
        if id_lists and framed:
            yield f"event: sglext_ids\ndata: {dumps({**head, 'choices': [], 'sglext': id_lists})}\n\n"
        if options.get("include_usage"):
            yield f"data: {dumps({**head, 'choices': [], 'usage': self._usage(payload, text)})}\n\n"
        yield "data: [DONE]\n\n"


class Answer(NamedTuple):
    """``body``: what arrived; ``whole`` is False where the connection broke off."""

    status: int
    headers: dict[str, str]
    body: bytes
    whole: bool


def call(
    base: str,
    path: str,
    payload: Any = None,
    *,
    method: str = "POST",
    headers: dict[str, str] | None = None,
    body: bytes | None = None,
    timeout: float = 20.0,
) -> Answer:
    """One request, on a connection of its own."""
    connection = HTTPConnection(base.removeprefix("http://"), timeout=timeout)
    try:
        data = json.dumps(payload).encode() if body is None and payload is not None else body
        given = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}", **(headers or {})}
        connection.request(method, path, data, given)
        response = connection.getresponse()
        found = {key.lower(): value for key, value in response.getheaders()}
        try:
            return Answer(response.status, found, response.read(), True)
        except IncompleteRead as error:
            return Answer(response.status, found, error.partial, False)
    finally:
        connection.close()


@contextlib.contextmanager
def on_a_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextlib.contextmanager
def running(flavour: str, ssl_context: ssl.SSLContext | None = None) -> Iterator[Engine]:
    """The engine, listening."""
    engine = Engine(flavour)

    async def start() -> web.ServerRunner:
        server = web.Server(engine.handle, access_log=None, handler_cancellation=True, auto_decompress=False)
        runner = web.ServerRunner(server, handle_signals=False, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=ssl_context).start()
        return runner

    with on_a_loop() as loop:
        runner = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
        engine.url = f"http{'s' if ssl_context else ''}://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield engine
        finally:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)


class Recording(NamedTuple):
    url: str
    proxy: Proxy
    path: Path

    def calls(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_bytes().splitlines()]


@contextlib.contextmanager
def recording(upstream: str, folder: Path, redact: tuple[str, ...] = (), **settings: Any) -> Iterator[Recording]:
    """The recorder, listening, in this process."""
    log = CallLog(str(folder), [pattern(each) for each in redact])

    async def begin() -> tuple[contextlib.AsyncExitStack, Proxy, int]:
        stack = contextlib.AsyncExitStack()
        proxy = Proxy(Settings(upstream, **settings), log)
        port, _ = await stack.enter_async_context(listening(proxy, "127.0.0.1", 0))
        return stack, proxy, port

    with on_a_loop() as loop:
        stack, proxy, port = asyncio.run_coroutine_threadsafe(begin(), loop).result(10)
        try:
            yield Recording(f"http://127.0.0.1:{port}", proxy, Path(log.path))
        finally:
            asyncio.run_coroutine_threadsafe(stack.aclose(), loop).result(10)
            log.close()
