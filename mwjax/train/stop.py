"""Leaving a run in order when the machine asks for it."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class StopOnSignal:
    """While used as a context manager, SIGTERM and the first Ctrl-C only set ``requested``; a second Ctrl-C interrupts.

    Outside the main thread, where Python lets nobody catch signals, it does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, signal.Handlers | int | None] = {}

    def __enter__(self) -> StopOnSignal:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._request)  # type: ignore[assignment]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
