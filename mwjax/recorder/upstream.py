"""The side towards the engine: one HTTP client, and what the engine is."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urljoin, urlsplit

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from mwjax.recorder.additions import Engine
from mwjax.recorder.content_codings import decoded
from mwjax.recorder.json_text import loads
from mwjax.recorder.sessions import KEY_HEADERS
from mwjax.recorder.stderr import tell
from mwjax.rollouts.http_calls import endpoint_of

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
# What a request can meet instead of an answer.
FAILURES = (aiohttp.ClientError, TimeoutError, OSError)
_OTHER_VERSION = re.compile(r"/v(?!1/?\Z)\d+\w*(/openai)?/?\Z")
_QUOTED = re.compile(r"""\n|\\n|\bb\\?['"]|https?://""")


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


class Upstream:
    """Use as an asynchronous context manager."""

    def __init__(self, settings: Settings) -> None:
        """Raises ValueError if the address is no http or https URL."""
        self._settings = settings
        self._base = _base(settings.upstream)
        self._engine: Engine | None = None if settings.engine == "auto" else settings.engine
        self._probing = asyncio.Lock()
        self._probed = float("-inf")
        self._client: aiohttp.ClientSession

    async def __aenter__(self) -> Upstream:
        settings = self._settings
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

    async def send(self, method: str, target: str, headers: CIMultiDict[str], body: object) -> aiohttp.ClientResponse:
        """``target``: path and query. Raises one of FAILURES if there is no answer; its status may be anything."""
        url = URL(self._base + target, encoded=True)
        return await self._client.request(method, url, headers=headers, data=body, allow_redirects=False)

    def own_location(self, location: str, target: str, own: str) -> str:
        """Where a redirection of ``target`` leads, with ``own`` in place of the engine's address, so that a harness
        that follows it does not get past the recorder."""
        base = self._base + "/"
        whole = urljoin(self._base + target, location)
        return f"{own}/{whole.removeprefix(base)}" if whole.startswith(base) else location

    async def engine(self, headers: Mapping[str, str]) -> Engine:
        """What the upstream is, found once; "none" for this call where it cannot be found out."""
        async with self._probing:
            if self._engine is None and time.monotonic() - self._probed > PROBE_SECONDS:
                self._engine = await self._probe({k: v for k, v in headers.items() if k in KEY_HEADERS})
                self._probed = time.monotonic()  # whoever waited for this answer does not ask again
                if self._engine is not None:
                    tell(f"the engine is {_described(self._engine)}")
            return self._engine or "none"

    async def _probe(self, headers: Mapping[str, str]) -> Engine | None:
        """By the owner that the engines give their models in ``/v1/models``; None if nobody says: no answer in time, a
        wrong key, too many calls."""
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                upstream = await self.send("GET", "/v1/models", CIMultiDict(headers), None)
                async with closing(upstream):
                    body = decoded(await upstream.read(), upstream.headers.get("Content-Encoding", ""))
        except (*FAILURES, ValueError):
            return None
        if upstream.status != 200:
            return "none" if upstream.status in (404, 405) else None
        try:
            owners = {model["owned_by"] for model in loads(body)["data"]}
        except (ValueError, TypeError, KeyError):
            return "none"
        return "vllm" if "vllm" in owners else "sglang" if "sglang" in owners else "none"


def passed(headers: Mapping[str, str]) -> CIMultiDict[str]:
    named = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    return CIMultiDict(
        [(key, value) for key, value in headers.items() if key.lower() not in HOP_BY_HOP and key.lower() not in named]
    )


@contextlib.asynccontextmanager
async def closing(upstream: aiohttp.ClientResponse) -> AsyncIterator[None]:
    """A response read to its end gives its connection back; any other closes it, which tells the engine to stop."""
    try:
        yield
    finally:
        if upstream.content.at_eof():
            upstream.release()
        else:
            upstream.close()


def no_answer(error: BaseException) -> tuple[int, str, str]:
    """Status to answer with, kind of error, and message, where the upstream gave no answer."""
    if isinstance(error, TimeoutError):
        return 504, "upstream_timeout", f"the engine did not answer in time: {words(error)}"
    if isinstance(error, aiohttp.ClientConnectorError):
        return 502, "upstream_refused", f"cannot reach the engine: {words(error)}"
    return 502, "upstream_disconnected", f"the engine closed the connection without an answer: {words(error)}"


def words(error: BaseException) -> str:
    """What the error says, without what it quotes: the answer's bytes and the URL may hold what is never written."""
    text = error.message if isinstance(error, aiohttp.ClientResponseError) else str(error)
    return _QUOTED.split(text.strip())[0].rstrip(" :") or type(error).__name__


def _described(engine: Engine) -> str:
    if engine == "none":
        return "neither vLLM nor SGLang: recording without token ids"
    return {"vllm": "vLLM", "sglang": "SGLang"}[engine]


def has_own_version(upstream: str) -> bool:
    """Whether an engine's address ends in another version than ``/v1``, which is then in the place of that."""
    return _OTHER_VERSION.search(urlsplit(upstream).path) is not None


def _base(upstream: str) -> str:
    try:
        url = URL(upstream)
    except ValueError as error:
        raise ValueError(f"{upstream}: {error}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"{upstream}: give the engine's address as http://HOST:PORT or https://HOST/PATH")
    if url.user is not None or url.query_string or url.fragment:
        raise ValueError(
            f"{url.origin()}: give the engine's address without user, password, query and fragment; the recorder "
            "passes on the keys that the harness sends"
        )
    if endpoint := endpoint_of("POST", url.path):
        raise ValueError(f"{upstream}: give the engine's base URL, not that of its {endpoint}")
    return str(url).rstrip("/").removesuffix("/v1")
