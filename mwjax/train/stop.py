"""Leaving a run in order when the machine asks for it."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import NoReturn


class StoppedEarly(BaseException):
    """SIGTERM before training began. status: what a process ends with that is stopped so."""

    status = 128 + signal.SIGTERM


def stop_early() -> None:
    """From here on SIGTERM raises StoppedEarly, but for what `StopOnSignal` makes of it. For a program that is one run
    and nothing else."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _stop_early)


def _stop_early(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `timeout`, for one, sends it twice: not into what this one began
    raise StoppedEarly("SIGTERM came before the first step: nothing new to save; give the same command again")


class StopOnSignal:
    """While used as a context manager, SIGTERM and the first Ctrl-C only set ``requested``; a second Ctrl-C interrupts.

    What a signal did before it does again afterwards; only, after `stop_early` a SIGTERM is no longer heard: all is
    saved, and the process about to end by itself. Outside the main thread, where Python lets nobody catch signals, it
    does nothing.
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
            signal.signal(number, signal.SIG_IGN if handler is _stop_early else handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
