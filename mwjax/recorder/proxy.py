"""The HTTP side: takes a call from the harness, passes it to the engine, passes the answer back as it arrives.

A recorded call ends for the harness when its line is in the file, so that a recorder that is killed has lost no call
that ended: an answer with a known length waits with its last piece, a stream with its end, not with its events.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping

import aiohttp
from aiohttp import web

from mwjax.recorder import sessions
from mwjax.recorder.additions import additions, stripped_body, stripped_event
from mwjax.recorder.calls import Body, Exchange
from mwjax.recorder.content_codings import decoded, decoder
from mwjax.recorder.endpoints import error_body
from mwjax.recorder.json_text import loads, with_members
from mwjax.recorder.log import CallLog
from mwjax.recorder.stderr import tell
from mwjax.recorder.upstream import FAILURES, Settings, Upstream, closing, no_answer, passed, words
from mwjax.rollouts.engine_ids import Endpoint
from mwjax.rollouts.http_calls import SESSION_HEADERS, endpoint_of
from mwjax.rollouts.server_events import Splitter

REFUSALS = (400, 404, 422)  # how engines answer a request member that they do not accept
REFUSAL_BYTES = 10_000  # of such an answer that are written down
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+")  # RFC 9110, section 5.6.2
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
        self._upstream = Upstream(settings)
        self._extra_headers = tuple(name.lower() for name in settings.session_headers)
        for name in self._extra_headers:
            if sessions.secrets({name: "value"}):
                raise ValueError(f"--session-header {name}: holds a credential, which is never written down")
            if not _HEADER_NAME.fullmatch(name):
                raise ValueError(f"--session-header {name!r}: is no name of a header")
        self._refused: set[tuple[Endpoint, bool]] = set()

    async def __aenter__(self) -> Proxy:
        await self._upstream.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._upstream.__aexit__()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        target, name = sessions.without_prefix(_target(request))
        if not target.startswith("/") or request.method == "CONNECT":
            return _answer(None, 400, "mwjax record stands before one engine, it is no proxy for other hosts")
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

    def _begun(self, request: web.BaseRequest, target: str, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
        """The answer to the harness, its head as the engine's."""
        headers = passed(upstream.headers)
        if "Location" in headers:
            own = f"http://{request.host}{_target(request).removesuffix(target)}"
            headers["Location"] = self._upstream.own_location(headers["Location"], target, own)
        return web.StreamResponse(status=upstream.status, reason=upstream.reason, headers=headers)

    async def _pass_on(self, request: web.BaseRequest, target: str) -> web.StreamResponse:
        body = request.content if request.body_exists else None
        try:
            upstream = await self._upstream.send(request.method, target, passed(request.headers), body)
        except FAILURES as error:
            status, _, message = no_answer(error)
            return _answer(None, status, message)
        async with closing(upstream):
            response = self._begun(request, target, upstream)
            await _write_head(request, response)
            try:
                async for chunk in upstream.content.iter_any():
                    await _write(response, chunk)
            except (aiohttp.ClientError, TimeoutError):
                _cut(request)
        return response

    async def _record(
        self, request: web.BaseRequest, target: str, name: str | None, endpoint: Endpoint
    ) -> web.StreamResponse:
        headers = {key.lower(): value for key, value in request.headers.items()}
        session = sessions.session(headers, name, self._extra_headers)
        secrets = [*sessions.secrets(headers), *sessions.query_secrets(target)]
        kept_headers = (*sessions.KEPT_REQUEST_HEADERS, *SESSION_HEADERS, *self._extra_headers)
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
        except FAILURES as error:
            status, kind, message = no_answer(error)
            exchange.fail(kind, message)
            await record()
            return _answer(exchange.endpoint, status, message)
        async with closing(upstream):
            exchange.status = upstream.status
            given = {key.lower(): value for key, value in upstream.headers.items()}
            exchange.response_headers = sessions.kept(given, sessions.KEPT_RESPONSE_HEADERS)
            exchange.stream = given.get("content-type", "").lower().startswith("text/event-stream")
            response = self._begun(request, target, upstream)
            strips = exchange.asked is not None and upstream.status < 400
            coding = given.get("content-encoding", "")
            try:
                if strips and exchange.stream and decoder(coding) is not None:
                    await self._relay_events(request, response, upstream, exchange, coding)
                elif strips and not exchange.stream:
                    await self._relay_body(request, response, upstream, exchange, coding, record)
                else:
                    await self._relay(request, response, upstream, exchange, record)
            except FAILURES as error:
                kind = "upstream_timeout" if isinstance(error, TimeoutError) else "upstream_cut_off"
                exchange.fail(kind, f"the answer broke off: {words(error)}")
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
        unchanged = passed(request.headers)
        exchange.engine = await self._upstream.engine(headers)
        if not whole:
            return await self._upstream.send(request.method, target, unchanged, _rest(request, start, exchange))
        try:
            text = decoded(start, headers.get("content-encoding", "")).decode("utf-8")
            payload = loads(text) if exchange.engine != "none" else None
        except ValueError:
            payload = None
        asked = additions(exchange.endpoint, exchange.engine, payload, headers)
        kind = (exchange.endpoint, bool(isinstance(payload, dict) and payload.get("stream")))
        if asked is None or kind in self._refused or not isinstance(payload, dict):
            return await self._upstream.send(request.method, target, unchanged, start)

        changed = unchanged.copy()
        changed.popall("Content-Encoding", None)
        changed.popall("Content-Length", None)
        changed["Accept-Encoding"] = "identity"
        changed.update(asked.headers)
        exchange.asked = asked
        body = with_members(text, payload, asked.body).encode("utf-8")
        upstream = await self._upstream.send(request.method, target, changed, body)
        if upstream.status not in REFUSALS:
            return upstream
        async with closing(upstream):
            refusal = await upstream.read()
        exchange.asked, exchange.asked_refused = None, (upstream.status, refusal[:REFUSAL_BYTES])
        upstream = await self._upstream.send(request.method, target, unchanged, start)
        if upstream.status < 400:
            self._refused.add(kind)
            tell(
                f"this engine refuses to be asked for token ids on {exchange.endpoint}"
                f"{' streams' if kind[1] else ''} ({exchange.asked_refused[0]}): recording without them"
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
        except FAILURES:
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


def _target(request: web.BaseRequest) -> str:
    """Path and query as they were sent, also where a client sends a whole URL."""
    raw = request.raw_path
    return raw if raw.startswith("/") else request.rel_url.raw_path_qs


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


def _cut(request: web.BaseRequest) -> None:
    """Closes the harness's connection without the end that a whole answer has."""
    if request.transport is not None:
        request.transport.close()


def _answer(endpoint: Endpoint | None, status: int, message: str) -> web.Response:
    return web.Response(status=status, body=error_body(endpoint, message), content_type="application/json")
