"""``mwjax record``: the proxy as a program, from its first line to the last call after Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from rich.console import Console

from mwjax.recorder.log import CallLog
from mwjax.recorder.redaction import pattern
from mwjax.recorder.stderr import tell

if TYPE_CHECKING:
    from aiohttp import web

    from mwjax.recorder.proxy import Proxy
    from mwjax.recorder.upstream import Settings

REFRESH_SECONDS = 0.5
OPEN_FILES = 1 << 16  # two for every open call


class Recorded(NamedTuple):
    """``calls`` lines written, of which ``failed`` have an error; ``lost`` calls that could not be written."""

    path: str
    calls: int
    failed: int
    lost: int
    sessions: int

    def summary(self) -> str:
        lost = f", not recorded {self.lost}" if self.lost else ""
        return f"{self.path}: calls {self.calls}, sessions {self.sessions}, failed {self.failed}{lost}"


def require_http() -> None:
    """Raises ValueError if the HTTP library is not installed."""
    if find_spec("aiohttp") is None:
        raise ValueError('mwjax record needs aiohttp: pip install "mwjax[record]"')


def run(
    settings: Settings,
    folder: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8787,
    redact: Sequence[str] = (),
    grace: float = 30.0,
    say: Callable[[str], None] = print,
) -> Recorded:
    """Records until SIGTERM or Ctrl-C; then open calls have ``grace`` seconds. ``say`` gets the lines for stdout.

    Raises ValueError for settings that cannot be, RolloutFileError if the log cannot be opened, OSError if the port is
    taken.
    """
    from mwjax.recorder.proxy import Proxy

    patterns = [pattern(field) for field in redact]
    log = CallLog(folder, patterns)
    try:
        proxy = Proxy(settings, log)
        if log.torn:
            tell(log.torn)
        _allow_many_files()
        switch = sys.getswitchinterval()
        sys.setswitchinterval(0.0005)  # the thread that writes calls down must not hold up the streams
        try:
            asyncio.run(_serve(proxy, host, port, grace, say))
        finally:
            sys.setswitchinterval(switch)
    finally:
        log.close()
    for field, steps in zip(redact, patterns):
        if log.written and steps in log.unmatched:
            tell(f"--redact {field}: no call had such a field; is it spelled as in the calls in {log.path}?")
    return Recorded(log.path, log.written, log.failed, log.lost, len(proxy.sessions))


@contextlib.asynccontextmanager
async def listening(proxy: Proxy, host: str, port: int) -> AsyncIterator[tuple[int, web.TCPSite]]:
    """Serves while the block runs; gives the port, and the site to stop for new connections. Raises OSError."""
    from aiohttp import web

    from mwjax.recorder.upstream import HEADER_BYTES

    logger = logging.getLogger(__name__)
    logger.addFilter(_name_only)
    server = web.Server(
        proxy.handle,
        handler_cancellation=True,
        access_log=None,
        logger=logger,
        auto_decompress=False,
        max_line_size=HEADER_BYTES,
        max_field_size=HEADER_BYTES,
    )
    runner = web.ServerRunner(server, handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    async with proxy:
        try:
            site = web.TCPSite(runner, host, port)
            try:
                await site.start()
            except OSError as error:
                advice = "; --port 0 takes a free port" if error.errno == errno.EADDRINUSE else ""
                reason = f"cannot listen there ({_reason(error)}){advice}"
                raise OSError(error.errno, reason, f"{host}:{port}") from None
            yield runner.addresses[0][1], site
        finally:
            await runner.cleanup()


async def _serve(proxy: Proxy, host: str, port: int, grace: float, say: Callable[[str], None]) -> None:
    stop, now = asyncio.Event(), asyncio.Event()
    async with listening(proxy, host, port) as (bound, site):
        engine = urlsplit(proxy.settings.upstream)
        if engine.port == bound and _is_loopback(engine.hostname or ""):
            raise ValueError(f"{proxy.settings.upstream} is where this recorder listens; give the engine's own address")
        with _signals(lambda: (now if stop.is_set() else stop).set()):
            for text in _greeting(proxy, host, bound):
                say(text)
            sys.stdout.flush()
            if not _is_loopback(host):
                tell(f"whoever can reach {host}:{bound} can use the engine")
            counter = asyncio.create_task(_count(proxy))
            await stop.wait()
            counter.cancel()
            await site.stop()
            proxy.stopping = True
            if proxy.open:
                tell(f"finishing {proxy.open} open call(s); again to stop at once")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    while proxy.open and not now.is_set():
                        await asyncio.sleep(0.02)


def _greeting(proxy: Proxy, host: str, port: int) -> list[str]:
    from mwjax.recorder.upstream import has_own_version

    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    base = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}"
    return [
        f"recording {base} -> {proxy.settings.upstream} in {proxy.log.path}",
        f"OPENAI_BASE_URL={base}{'' if has_own_version(proxy.settings.upstream) else '/v1'}",
        f"ANTHROPIC_BASE_URL={base}",
    ]


async def _count(proxy: Proxy) -> None:
    """A line that counts, where stderr is a terminal."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        return
    with console.status("waiting for calls") as status:
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            log = proxy.log
            status.update(
                f"calls {log.written}, sessions {len(proxy.sessions)}, failed {log.failed}, open {proxy.open}"
            )


@contextlib.contextmanager
def _signals(stop: Callable[[], object]) -> Iterator[None]:
    """SIGTERM and Ctrl-C call ``stop``, where the system lets a loop catch them."""
    loop = asyncio.get_running_loop()
    caught = []
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(number, stop)
            caught.append(number)
    try:
        yield
    finally:
        for number in caught:
            loop.remove_signal_handler(number)


def _allow_many_files() -> None:
    """As many as the system lets this process have without asking: its usual 1,024 end at 500 open calls."""
    try:
        import resource
    except ImportError:  # not a POSIX system: there is no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _name_only(record: logging.LogRecord) -> bool:
    """What the HTTP server says of a request that it cannot read quotes the request, which may hold a key."""
    if record.exc_info and record.exc_info[0] is not None:
        record.msg, record.args = f"{record.getMessage()}: {record.exc_info[0].__name__}", None
        record.exc_info = None
    return True


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).rsplit(": ", 1)[-1]
