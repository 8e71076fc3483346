"""JSON records of a file: JSON Lines, one array, or one document; plain, gzip or Zstandard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from mwjax.rollouts.errors import RecordError, Refusal, file_error
from mwjax.rollouts.lines import GZIP_MAGIC, ZSTD_MAGIC, DamagedFile, Line, lines, open_binary
from mwjax.rollouts.read import json_value
from mwjax.rollouts.readers.reader import Head, Options

HEAD_RECORDS = 200  # session files may begin with many lines of what is no message
HEAD_BYTES = 1 << 22
HEAD_DATA = 1 << 12


class Record(NamedTuple):
    """One record. ``line`` counts from 1. ``place`` is "[3]" for the fourth element of an array, otherwise "": what the
    path of a field begins with."""

    line: int
    place: str
    value: Any

    def field(self, path: str) -> str:
        return f"{self.place}.{path}" if self.place and path and not path.startswith("[") else self.place + path

    def refusal(self, file: str, path: str, reason: str) -> Refusal:
        return Refusal(file, self.line, self.field(path), reason)


def json_records(path: str, options: Options = Options()) -> Iterator[Record | Refusal]:  # noqa: B008
    """Every record of a file in turn, and a refusal for each line that is not JSON.

    JSON Lines are read line by line. Read whole: an array, whose elements are the records, and a document that is
    spread over several lines. Raises RolloutFileError if the file cannot be read.
    """
    try:
        for line, value in _values(lines(path)):
            if isinstance(value, RecordError):
                yield Refusal(path, line.number, value.field, value.reason)
            elif isinstance(value, _Array):
                yield from (Record(line.number, f"[{place}]", each) for place, each in enumerate(value.elements))
            else:
                yield Record(line.number, "", value)
            if options.progress is not None:
                options.progress(path, line.offset + len(line.data) + 1)
    except DamagedFile as error:
        reason = f"{error.reason}; whatever followed line {error.last} is lost"
        yield Refusal(path, error.last + 1, "", reason)


def head(path: str) -> Head:
    """The beginning of a file, for :mod:`detect`. Raises RolloutFileError if it cannot be read."""
    records: list[Any] = []
    try:
        with open_binary(path) as handle:
            data = handle.read(HEAD_DATA)
    except OSError as error:
        raise file_error("read", path, error) from error
    compressed = data.startswith((GZIP_MAGIC, ZSTD_MAGIC))
    data, damage = b"" if compressed else data, ""
    try:
        for line, value in _values(lines(path)):
            if compressed:
                data, compressed = line.data[:HEAD_DATA], False
            if isinstance(value, _Array):
                records += value.elements[:HEAD_RECORDS]
            elif isinstance(value, RecordError):
                damage = damage or f"line {line.number} {value.reason}"
            else:
                records.append(value)
            if len(records) >= HEAD_RECORDS or line.offset + len(line.data) > HEAD_BYTES:
                break
    except DamagedFile as error:
        damage = damage or error.reason
    return Head(path, data, tuple(records), damage)


class _Array(NamedTuple):
    elements: list[Any]


def _values(stream: Iterator[Line]) -> Iterator[tuple[Line, Any]]:
    """Every line that is not blank and its value: parsed JSON, RecordError, or _Array for a file that is an array."""
    line = next((line for line in stream if line.data.strip()), None)
    if line is None:
        return
    value = _parsed(line)
    if isinstance(value, list):
        value = _Array(value)
    elif isinstance(value, RecordError) and line.data.lstrip(b"\xef\xbb\xbf \t").startswith((b"[", b"{")):
        rest = list(stream)
        whole = _parsed(line._replace(data=b"\n".join([line.data, *(each.data for each in rest)])))
        if isinstance(whole, RecordError):
            stream = iter(rest)
        else:
            end = rest[-1] if rest else line
            line = Line(line.number, end.offset, end.data)
            value, stream = _Array(whole) if isinstance(whole, list) else whole, iter(())
    yield line, value
    yield from ((line, _parsed(line)) for line in stream if line.data.strip())


def _parsed(line: Line) -> Any:
    try:
        return json_value(line)
    except RecordError as error:
        return error
