"""Lines of a text file, plain, gzip or Zstandard (told apart by their first bytes), as a stream."""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple

import zstandard
from etils import epath

from mwjax.rollouts.errors import file_error
from mwjax.rollouts.storage import is_local

CHUNK_BYTES = 1 << 18
GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


class Line(NamedTuple):
    """``number`` counts from 1; ``data`` without its newline starts at byte ``offset`` of the decompressed file."""

    number: int
    offset: int
    data: bytes


class DamagedFile(Exception):
    """The compressed data is broken or cut off after line ``last``."""

    def __init__(self, last: int, reason: str) -> None:
        super().__init__(last, reason)
        self.last = last
        self.reason = reason


def lines(path: epath.PathLike) -> Iterator[Line]:
    """Every line of the file in turn. Raises RolloutFileError if it cannot be opened or read, DamagedFile when its
    compression is broken, after the last line that is whole."""
    number, offset = 0, 0
    pending: list[bytes] = []
    try:
        with open_binary(path) as handle:
            for chunk in _chunks(handle):
                *whole, rest = chunk.split(b"\n")
                for end in whole:
                    data = b"".join([*pending, end])
                    pending.clear()
                    number += 1
                    yield Line(number, offset, data)
                    offset += len(data) + 1
                pending.append(rest)
    except (zlib.error, zstandard.ZstdError, EOFError) as error:
        raise DamagedFile(number, f"the compressed data is damaged or cut off here ({error})") from None
    except OSError as error:
        raise file_error("read", path, error) from error
    if any(pending):
        yield Line(number + 1, offset, b"".join(pending))


def is_compressed(path: epath.PathLike) -> bool:
    try:
        with open_binary(path) as handle:
            return handle.read(4).startswith((GZIP_MAGIC, ZSTD_MAGIC))
    except OSError as error:
        raise file_error("read", path, error) from error


def is_pipe(path: epath.PathLike) -> bool:
    """Whether this is no file but a pipe or a device, which gives what it holds only once."""
    if not is_local(path):
        return False
    try:
        mode = os.stat(os.path.expanduser(path)).st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def open_binary(path: epath.PathLike) -> IO[Any]:
    """Raises OSError, also where the package for this kind of storage is not installed."""
    try:
        return epath.Path(path).expanduser().open("rb")
    except ImportError as error:
        raise OSError(str(error)) from None


def _chunks(handle: IO[Any]) -> Iterator[bytes]:
    first = handle.read(CHUNK_BYTES)
    if first.startswith(GZIP_MAGIC):
        yield from _decompressed(first, handle, lambda: zlib.decompressobj(wbits=31))
    elif first.startswith(ZSTD_MAGIC):
        decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)
        yield from _decompressed(first, handle, decompressor.decompressobj)
    else:
        while first:
            yield first
            first = handle.read(CHUNK_BYTES)


def _decompressed(chunk: bytes, handle: IO[Any], start: Callable[[], Any]) -> Iterator[bytes]:
    """Decompresses any number of members (frames) that follow one another."""
    member = None
    while chunk:
        if member is None:
            chunk = chunk.lstrip(b"\0")  # gzip pads with zeros between and after members
            member = start() if chunk else None
        if member is not None:
            yield member.decompress(chunk)
            chunk = member.unused_data if member.eof else b""
            member = None if member.eof else member
        chunk = chunk or handle.read(CHUNK_BYTES)
    if member is not None:
        raise EOFError("the end is missing")
