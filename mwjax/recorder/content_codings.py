"""Content-Encoding (RFC 9110, section 8.4.1), undone: at once, or as the bytes arrive."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import zstandard

PIECE = 1 << 16
Decoder = Callable[[bytes], bytes]


def decoder(coding: str) -> Decoder | None:
    """A function that takes the next bytes and gives back what they decode to; None for a coding not known here. The
    function raises ValueError where the bytes are not in that coding."""
    # Named in the order in which they were applied.
    steps = [_decoder(name.strip()) for name in reversed(coding.lower().split(","))]
    known = [step for step in steps if step is not None]
    if len(known) < len(steps):
        return None

    def decode(data: bytes) -> bytes:
        for step in known:
            data = step(data)
        return data

    return decode


def decoded(data: bytes, coding: str) -> bytes:
    """Raises ValueError if the coding is unknown or the bytes are not in it."""
    decode = decoder(coding)
    if decode is None:
        raise ValueError(f"content coding {coding!r} is not known here")
    return decode(data)


def _decoder(coding: str) -> Decoder | None:
    if coding in ("", "identity"):
        return bytes
    if coding in ("gzip", "x-gzip"):
        return _members(lambda: zlib.decompressobj(wbits=31), zlib.error)
    if coding == "deflate":
        return _members(zlib.decompressobj, zlib.error)
    if coding == "zstd":
        return _members(lambda: zstandard.ZstdDecompressor().decompressobj(), zstandard.ZstdError)
    if coding == "br":
        try:
            import brotli
        except ImportError:
            return None
        return _refusing(brotli.Decompressor().process, brotli.error)
    return None


def _members(new: Callable[[], Any], failure: type[Exception]) -> Decoder:
    """A coding of which several may follow one another: an engine may pack every piece of an answer by itself."""
    current = new()

    def run(data: bytes) -> bytes:
        nonlocal current
        out = []
        for start in range(0, len(data), PIECE):  # a member copies what follows it: not all the rest each time
            piece = data[start : start + PIECE]
            while piece:
                if current.eof:
                    current = new()
                out.append(current.decompress(piece))
                piece = current.unused_data
        return b"".join(out)

    return _refusing(run, failure)


def _refusing(decode: Decoder, failure: type[Exception]) -> Decoder:
    def run(data: bytes) -> bytes:
        try:
            return decode(data)
        except failure as error:
            raise ValueError(f"not in the content coding it claims: {error}") from None

    return run
