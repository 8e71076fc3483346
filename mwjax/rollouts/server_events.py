"""Server-sent events (WHATWG HTML, section 9.2): cut into events as they arrive, and read."""

from __future__ import annotations

import re
from typing import NamedTuple

_END = re.compile(rb"\r\n\r\n|\n\n|\r\r|\n\r\n|\r\n\n")


class Event(NamedTuple):
    """``name`` is the event field ("" where there is none), ``data`` its data lines joined."""

    name: str
    data: str


class Splitter:
    """Gives back whole events, each with the blank line that ends it; joined they are what was fed."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        text = self._rest + chunk
        events, start = [], 0
        for end in _END.finditer(text, max(0, len(self._rest) - 3)):
            if end.start() < start:
                continue
            events.append(text[start : end.end()])
            start = end.end()
        self._rest = text[start:]
        return events

    def rest(self) -> bytes:
        """What was fed after the last whole event."""
        return self._rest


def read(event: bytes) -> Event | None:
    """None for an event without data, such as a comment that keeps the connection alive. Raises ValueError if it is
    not UTF-8."""
    name, data = "", []
    for line in re.split(r"\r\n|\n|\r", event.decode("utf-8")):
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            name = value
        elif field == "data":
            data.append(value)
    return Event(name, "\n".join(data)) if data else None


def with_data(event: bytes, data: str) -> bytes:
    """The event with other data; nothing else in it changes."""
    lines = re.split(rb"(\r\n|\n|\r)", event)
    out: list[bytes] = []
    written = False
    for line, ending in zip(lines[::2], [*lines[1::2], b""]):
        if line.startswith(b"data:"):
            if written:
                continue
            written = True
            space = b" " if line[5:6] == b" " else b""
            line = b"data:" + space + data.encode("utf-8")
        out += [line, ending]
    return b"".join(out)
