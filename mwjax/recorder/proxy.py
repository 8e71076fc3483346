"""The HTTP side: takes a call from the harness, passes it to the engine, passes the answer back as it arrives.

A recorded call ends for the harness when its line is in the file, so that a recorder that is killed has lost no call
that ended: an answer with a known length waits with its last piece, a stream with its end, not with its events.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from mwjax.recorder import sessions
from mwjax.recorder.additions import Engine, additions, stripped_body, stripped_event
from mwjax.recorder.calls import Body, Exchange
from mwjax.recorder.content_codings import decoded, decoder
from mwjax.recorder.endpoints import Endpoint, endpoint_of, error_body
from mwjax.recorder.json_text import loads, with_members
from mwjax.recorder.log import CallLog
from mwjax.recorder.server_events import Splitter

# RFC 9110, section 7.6.1: these concern one connection, not the message. Expect is answered here.
HOP_BY_HOP = frozenset(
    (
        "connection",
        "expect",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
HEADER_BYTES = 1 << 16
# Engines close an idle connection after 5 s (uvicorn's default): never send on one that is about to be closed.
IDLE_CONNECTION_SECONDS = 3.0
PROBE_SECONDS = 5.0
REFUSAL_BYTES = 10_000
REFUSALS = (400, 404, 422)  # how engines answer a request member that they do not accept


@dataclass(frozen=True)
class Settings:
    """``upstream``: base URL of the engine; a final ``/v1`` may be given or left out. ``engine`` "auto" asks
    ``/v1/models`` of the first call's upstream. Times in seconds, 0 for none."""

    upstream: str
    engine: Engine | Literal["auto"] = "auto"
    session_headers: tuple[str, ...] = ()
    max_body_bytes: int = 64 << 20
    connect_timeout: float = 30.0
    idle_timeout: float = 3600.0


# Writes the call down, the first time; what it gives is done when the line is in the file.
_Record = Callable[[], asyncio.Future[None]]


class _HarnessLeft(Exception):
    """The harness closed its connection."""


class Proxy:
    """Use as an asynchronous context manager; ``handle`` is the handler of an aiohttp ``web.Server``."""

    def __init__(self, settings: Settings, log: CallLog) -> None:
        """Raises ValueError if the upstream is no http or https URL or a session header could hold a credential."""
        self.settings = settings
        self.log = log
        self.open = 0  # requests under way
        self.sessions: set[str | None] = set()
        self.stopping = False
        self._base = _base(settings.upstream)
        self._extra_headers = tuple(name.lower() for name in settings.session_headers)
        for name in self._extra_headers:
            if name in sessions.KEY_HEADERS:
                raise ValueError(f"--session-header {name}: holds a credential, which is never written down")
        self._engine: Engine | None = None if settings.engine == "auto" else settings.engine
        self._probing = asyncio.Lock()
        self._probed = float("-inf")
        self._refused: set[tuple[Endpoint, bool]] = set()
        self._client: aiohttp.ClientSession

    async def __aenter__(self) -> Proxy:
        settings = self.settings
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_SECONDS),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=settings.connect_timeout or None, sock_read=settings.idle_timeout or None
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
            max_line_size=HEADER_BYTES,
            max_field_size=HEADER_BYTES,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        target, name = sessions.without_prefix(_target(request))
        endpoint = endpoint_of(request.method, target)
        if self.stopping:
            return _answer(endpoint, 503, "mwjax record is stopping")
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.open += 1
        try:
            if endpoint is None:
                return await self._pass_on(request, target)
            return await self._record(request, target, name, endpoint)
        except _HarnessLeft:
            _cut(request)
            return web.Response()
        finally:
            self.open -= 1

    # ---- what is not recorded

    async def _pass_on(self, request: web.BaseRequest, target: str) -> web.StreamResponse:
        body = request.content if request.body_exists else None
        try:
            upstream = await self._send(request.method, target, _passed(request.headers), body)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            status, _, message = _no_answer(error)
            return _answer(None, status, message)
        async with _closing(upstream):
            response = web.StreamResponse(
                status=upstream.status, reason=upstream.reason, headers=_passed(upstream.headers)
            )
            await _write_head(request, response)
            try:
                async for chunk in upstream.content.iter_any():
                    await _write(response, chunk)
            except (aiohttp.ClientError, TimeoutError):
                _cut(request)
        return response

    # ---- what is recorded

    async def _record(
        self, request: web.BaseRequest, target: str, name: str | None, endpoint: Endpoint
    ) -> web.StreamResponse:
        headers = {key.lower(): value for key, value in request.headers.items()}
        session = sessions.session(headers, name, self._extra_headers)
        secrets = [*sessions.secrets(headers), *sessions.query_secrets(target)]
        kept_headers = (*sessions.KEPT_REQUEST_HEADERS, *sessions.SESSION_HEADERS, *self._extra_headers)
        exchange = Exchange(
            endpoint=endpoint,
            path=sessions.kept_target(target),
            session=session,
            request_headers=sessions.kept(headers, kept_headers),
            request=Body(self.settings.max_body_bytes),
            response=Body(self.settings.max_body_bytes),
            secrets=[secret for secret in secrets if len(secret) >= sessions.SHORTEST_SECRET],
        )
        self.sessions.add(session.name)
        written: asyncio.Future[None] | None = None

        def record() -> asyncio.Future[None]:
            nonlocal written
            if written is None:
                exchange.finished = time.time()
                written = self.log.write(exchange)
            return written

        try:
            return await self._exchange(request, target, headers, exchange, record)
        except asyncio.CancelledError:
            if self.stopping:
                exchange.fail("shutdown", "mwjax record was stopped during this call")
            else:
                exchange.fail("client_disconnected", "the harness closed its connection before the answer was whole")
            raise
        except _HarnessLeft:
            exchange.fail("client_disconnected", "the harness closed its connection before the answer was whole")
            raise
        finally:
            record()

    async def _exchange(
        self, request: web.BaseRequest, target: str, headers: Mapping[str, str], exchange: Exchange, record: _Record
    ) -> web.StreamResponse:
        try:
            upstream = await self._ask(request, target, headers, exchange)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            status, kind, message = _no_answer(error)
            exchange.fail(kind, message)
            await record()
            return _answer(exchange.endpoint, status, message)
        async with _closing(upstream):
            exchange.status = upstream.status
            given = {key.lower(): value for key, value in upstream.headers.items()}
            exchange.response_headers = sessions.kept(given, sessions.KEPT_RESPONSE_HEADERS)
            exchange.stream = given.get("content-type", "").lower().startswith("text/event-stream")
            response = web.StreamResponse(
                status=upstream.status, reason=upstream.reason, headers=_passed(upstream.headers)
            )
            strips = exchange.asked is not None and upstream.status < 400
            coding = given.get("content-encoding", "")
            try:
                if strips and exchange.stream and decoder(coding) is not None:
                    await self._relay_events(request, response, upstream, exchange, coding)
                elif strips and not exchange.stream:
                    await self._relay_body(request, response, upstream, exchange, coding, record)
                else:
                    await self._relay(request, response, upstream, exchange, record)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                kind = "upstream_timeout" if isinstance(error, TimeoutError) else "upstream_cut_off"
                exchange.fail(kind, f"the answer broke off: {_words(error)}")
                await record()
                _cut(request)
                return response
            await record()
            return response

    async def _ask(
        self, request: web.BaseRequest, target: str, headers: Mapping[str, str], exchange: Exchange
    ) -> aiohttp.ClientResponse:
        """Sends the call, with the additions where there are any, and without them where these are refused."""
        start, whole = await _read(request, self.settings.max_body_bytes)
        exchange.request.add(start)
        passed = _passed(request.headers)
        exchange.engine = await self._engine_of(headers)
        if not whole:
            return await self._send(request.method, target, passed, _rest(request, start, exchange))
        try:
            text = decoded(start, headers.get("content-encoding", "")).decode("utf-8")
            payload = loads(text) if exchange.engine != "none" else None
        except ValueError:
            payload = None
        asked = additions(exchange.endpoint, exchange.engine, payload, headers)
        kind = (exchange.endpoint, bool(isinstance(payload, dict) and payload.get("stream")))
        if asked is None or kind in self._refused or not isinstance(payload, dict):
            return await self._send(request.method, target, passed, start)

        changed = passed.copy()
        changed.popall("Content-Encoding", None)
        changed.popall("Content-Length", None)
        changed["Accept-Encoding"] = "identity"
        changed.update(asked.headers)
        exchange.asked = asked
        body = with_members(text, payload, asked.body).encode("utf-8")
        upstream = await self._send(request.method, target, changed, body)
        if upstream.status not in REFUSALS:
            return upstream
        async with _closing(upstream):
            refusal = await upstream.read()
        exchange.asked, exchange.asked_refused = None, (upstream.status, refusal[:REFUSAL_BYTES])
        upstream = await self._send(request.method, target, passed, start)
        if upstream.status < 400:
            self._refused.add(kind)
            print(
                f"mwjax: this engine refuses to be asked for token ids on {exchange.endpoint}"
                f"{' streams' if kind[1] else ''} ({exchange.asked_refused[0]}): recording without them",
                file=sys.stderr,
            )
        return upstream

    async def _relay(
        self,
        request: web.BaseRequest,
        response: web.StreamResponse,
        upstream: aiohttp.ClientResponse,
        exchange: Exchange,
        record: _Record,
    ) -> None:
        """Every byte as it came."""
        await _write_head(request, response)
        left = response.content_length
        async for chunk in upstream.content.iter_any():
            _received(exchange, chunk)
            if left is not None:
                left -= len(chunk)
                if left <= 0:
                    await record()
            await _write(response, chunk)

    async def _relay_events(
        self,
        request: web.BaseRequest,
        response: web.StreamResponse,
        upstream: aiohttp.ClientResponse,
        exchange: Exchange,
        coding: str,
    ) -> None:
        """Event by event, without what was asked beyond the harness's own request."""
        decode, splitter, asked = decoder(coding), Splitter(), exchange.asked
        assert decode is not None and asked is not None
        response.headers.popall("Content-Encoding", None)
        response.headers.popall("Content-Length", None)
        await _write_head(request, response)
        try:
            async for chunk in upstream.content.iter_any():
                _received(exchange, chunk)
                events = splitter.feed(decode(chunk))
                if out := b"".join([stripped_event(event, asked) for event in events]):
                    await _write(response, out)
        except ValueError as error:
            raise aiohttp.ClientPayloadError(str(error)) from None
        finally:
            if rest := splitter.rest():
                with contextlib.suppress(_HarnessLeft):
                    await _write(response, stripped_event(rest, asked))

    async def _relay_body(
        self,
        request: web.BaseRequest,
        response: web.StreamResponse,
        upstream: aiohttp.ClientResponse,
        exchange: Exchange,
        coding: str,
        record: _Record,
    ) -> None:
        """The whole body, without what was asked beyond the harness's own request."""
        parts = []
        try:
            async for chunk in upstream.content.iter_any():
                _received(exchange, chunk)
                parts.append(chunk)
        except (aiohttp.ClientError, TimeoutError, OSError):
            await _write_head(request, response)  # as much as came: what broke off is no JSON and cannot be stripped
            await _write(response, b"".join(parts))
            raise
        body = b"".join(parts)
        assert exchange.asked is not None
        try:
            stripped = stripped_body(decoded(body, coding).decode("utf-8"), exchange.asked).encode("utf-8")
        except ValueError:
            pass  # not JSON: nothing to take out
        else:
            if stripped != body:
                body = stripped
                response.headers.popall("Content-Encoding", None)
        response.content_length = len(body)
        await record()
        await _write_head(request, response)
        await _write(response, body)

    async def _send(self, method: str, target: str, headers: CIMultiDict[str], body: object) -> aiohttp.ClientResponse:
        url = URL(self._base + target, encoded=True)
        return await self._client.request(method, url, headers=headers, data=body, allow_redirects=False)

    async def _engine_of(self, headers: Mapping[str, str]) -> Engine:
        """What the upstream is, found once; "none" for this call where it cannot be found out."""
        async with self._probing:
            if self._engine is None and time.monotonic() - self._probed > PROBE_SECONDS:
                self._probed = time.monotonic()
                self._engine = await self._probe({k: v for k, v in headers.items() if k in sessions.KEY_HEADERS})
                if self._engine is not None:
                    print(f"mwjax: the engine is {_described(self._engine)}", file=sys.stderr)
            return self._engine or "none"

    async def _probe(self, headers: Mapping[str, str]) -> Engine | None:
        """By the owner that the engines give their models in ``/v1/models``; None if nobody answers."""
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                upstream = await self._send("GET", "/v1/models", CIMultiDict(headers), None)
                async with _closing(upstream):
                    body = decoded(await upstream.read(), upstream.headers.get("Content-Encoding", ""))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None
        if upstream.status >= 500:
            return None
        try:
            owners = {model["owned_by"] for model in loads(body)["data"]}
        except (ValueError, TypeError, KeyError):
            return "none"
        return "vllm" if "vllm" in owners else "sglang" if "sglang" in owners else "none"


def _base(upstream: str) -> str:
    url = URL(upstream)
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"{upstream}: give the engine's address as http://HOST:PORT or https://HOST/PATH")
    return str(url.with_query(None).with_fragment(None)).rstrip("/").removesuffix("/v1")


def _target(request: web.BaseRequest) -> str:
    """Path and query as they were sent, also where a client sends a whole URL."""
    raw = request.raw_path
    return raw if raw.startswith("/") else request.rel_url.raw_path_qs


def _passed(headers: Mapping[str, str]) -> CIMultiDict[str]:
    named = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    return CIMultiDict(
        [(key, value) for key, value in headers.items() if key.lower() not in HOP_BY_HOP and key.lower() not in named]
    )


async def _read(request: web.BaseRequest, limit: int) -> tuple[bytes, bool]:
    """The body's beginning, more than ``limit`` bytes of it only if it is not whole."""
    parts: list[bytes] = []
    size = 0
    while size <= limit:
        part = await request.content.readany()
        if not part:
            return b"".join(parts), True
        parts.append(part)
        size += len(part)
    return b"".join(parts), False


async def _rest(request: web.BaseRequest, start: bytes, exchange: Exchange) -> AsyncIterator[bytes]:
    yield start
    async for part in request.content.iter_any():
        exchange.request.add(part)
        yield part


def _received(exchange: Exchange, chunk: bytes) -> None:
    if exchange.first_byte is None:
        exchange.first_byte = time.time()
    exchange.response.add(chunk)


async def _write_head(request: web.BaseRequest, response: web.StreamResponse) -> None:
    try:
        await response.prepare(request)
    except ConnectionError:
        raise _HarnessLeft from None


async def _write(response: web.StreamResponse, data: bytes) -> None:
    try:
        await response.write(data)
    except ConnectionError:
        raise _HarnessLeft from None


@contextlib.asynccontextmanager
async def _closing(upstream: aiohttp.ClientResponse) -> AsyncIterator[None]:
    """A response read to its end gives its connection back; any other closes it, which tells the engine to stop."""
    try:
        yield
    finally:
        if upstream.content.at_eof():
            upstream.release()
        else:
            upstream.close()


def _cut(request: web.BaseRequest) -> None:
    """Closes the harness's connection without the end that a whole answer has."""
    if request.transport is not None:
        request.transport.close()


def _answer(endpoint: Endpoint | None, status: int, message: str) -> web.Response:
    return web.Response(status=status, body=error_body(endpoint, message), content_type="application/json")


def _no_answer(error: BaseException) -> tuple[int, str, str]:
    """Status to answer with, kind of error, and message, where the upstream gave no answer."""
    if isinstance(error, TimeoutError):
        return 504, "upstream_timeout", f"the engine did not answer in time: {_words(error)}"
    if isinstance(error, aiohttp.ClientConnectorError):
        return 502, "upstream_refused", f"cannot reach the engine: {_words(error)}"
    return 502, "upstream_disconnected", f"the engine closed the connection without an answer: {_words(error)}"


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _described(engine: Engine) -> str:
    if engine == "none":
        return "neither vLLM nor SGLang: recording without token ids"
    return {"vllm": "vLLM", "sglang": "SGLang"}[engine]
