"""The growing file of calls, written by threads of its own."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Sequence
from typing import NamedTuple

from mwjax.recorder.calls import Exchange, as_object
from mwjax.recorder.redaction import Pattern, names
from mwjax.recorder.stderr import tell
from mwjax.rollouts.errors import RolloutFileError, file_error
from mwjax.rollouts.journal import Journal
from mwjax.rollouts.storage import is_local
from mwjax.rollouts.write import as_line

BATCH = 64
SYNC_SECONDS = 0.05


class _Item(NamedTuple):
    exchange: Exchange
    written: asyncio.Future[None]


class CallLog:
    """One line per call in ``FOLDER/calls.jsonl``; an existing file is continued. When the future that ``write``
    returns is done, the line is in the file, whatever becomes of this process, and within SYNC_SECONDS on its way to
    the disk; or else ``lost`` counts it and a message on stderr says why. ``failed`` counts the written calls that
    have an error. ``unmatched``: the patterns that named no field of any call so far."""

    def __init__(self, folder: str, patterns: Sequence[Pattern] = ()) -> None:
        """Raises RolloutFileError if the file cannot be opened or another recorder holds it."""
        folder = os.path.expanduser(folder)
        if is_local(folder):  # what is not, the journal refuses
            try:
                os.makedirs(folder, exist_ok=True)
            except OSError as error:
                raise file_error("write", folder, error) from error
        self.path = os.path.join(folder, "calls.jsonl")
        self.written = 0
        self.failed = 0
        self.lost = 0
        self._patterns = tuple(patterns)
        self.unmatched = set(patterns)
        self._journal = Journal(self.path)
        self.torn = self._journal.torn
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._unsynced = threading.Event()
        self._ended = threading.Event()
        self._writing = threading.Thread(target=self._run, name="mwjax-call-log", daemon=True)
        self._syncing = threading.Thread(target=self._sync, name="mwjax-call-log-sync", daemon=True)
        self._writing.start()
        self._syncing.start()

    def write(self, exchange: Exchange) -> asyncio.Future[None]:
        """Hands a finished call to the thread; to be called on an event loop."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.put(_Item(exchange, written))
        return written

    def close(self) -> None:
        """Writes what is left and ends the file."""
        self._queue.put(None)
        self._writing.join()
        self._ended.set()
        self._unsynced.set()
        self._syncing.join()
        try:
            self._journal.sync()
        finally:
            self._journal.close()

    def _run(self) -> None:
        more = True
        while more:
            items = [self._queue.get()]
            while len(items) < BATCH and not self._queue.empty():
                items.append(self._queue.get())
            more = None not in items
            self._append([item for item in items if item is not None])
            self._unsynced.set()

    def _sync(self) -> None:
        """Apart from the writing, so that no call waits for the disk of the one before: a lone call goes to the disk at
        once, of many the later ones together."""
        while not self._ended.is_set():
            self._unsynced.wait()
            self._unsynced.clear()
            try:
                self._journal.sync()
            except RolloutFileError as error:
                tell(str(error))
            self._ended.wait(SYNC_SECONDS)

    def _append(self, items: list[_Item]) -> None:
        described = [self._described(item.exchange) for item in items]
        lines = [line for line, _ in described if line]
        failed = sum(failed for _, failed in described)
        self.lost += len(described) - len(lines)
        if lines:
            try:
                self._journal.append_soon(b"".join(lines))
                self.written += len(lines)
                self.failed += failed
            except RolloutFileError as error:
                self.lost += len(lines)
                tell(f"{len(lines)} call(s) not recorded: {error}")
        for loop in {item.written.get_loop() for item in items}:
            done = [item.written for item in items if item.written.get_loop() is loop]
            try:
                loop.call_soon_threadsafe(_resolve, done)
            except RuntimeError:  # the loop is closed: nobody waits
                continue

    def _described(self, exchange: Exchange) -> tuple[bytes, bool]:
        """The line of a call and whether it has an error. Whatever an engine sends must not end the recording: what has
        no place in JSON, such as an infinite number, is kept as text."""
        for opaque in (False, True):
            try:
                value = as_object(exchange, self._patterns, opaque=opaque)
                paths = value.get("redacted", ())
                self.unmatched -= {each for each in self.unmatched if any(names(each, path) for path in paths)}
                return as_line(value), "error" in value
            except Exception as error:
                done = "not recorded" if opaque else "recorded as text only"
                tell(f"a call is {done}: {type(error).__name__}")
        return b"", False


def _resolve(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
