"""Without what Orbax tells of an error beside raising it."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

_before = sys.unraisablehook


def _not_of_orbax(event: Any) -> None:
    """The hook inside `quiet`. A function of the module, without a closure: CPython (at least up to 3.13.0) calls the
    hook without holding it, and its last reference would go when another thread leaves `quiet` just then."""
    # Its coroutines, and those they awaited, whose event loop it has closed.
    awaited = event.object is None and str(event.exc_value) == "Event loop is closed"
    if not awaited and "orbax" not in getattr(getattr(event.object, "cr_code", None), "co_filename", ""):
        _before(event)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Neither a traceback for each of Orbax's threads that fails, nor kilobytes for each read that it gives up. What
    else cannot be raised is told as before. May be nested; one thread at a time enters and leaves it."""
    global _before
    if sys.unraisablehook is _not_of_orbax:
        yield
        return
    loggers = {name: logging.getLogger(name) for name in ("absl", "asyncio")}
    levels = {name: logger.level for name, logger in loggers.items()}
    _before = sys.unraisablehook
    try:
        for logger in loggers.values():
            logger.setLevel(logging.CRITICAL)
        sys.unraisablehook = _not_of_orbax
        yield
    finally:
        sys.unraisablehook = _before
        for name, logger in loggers.items():
            logger.setLevel(levels[name])
