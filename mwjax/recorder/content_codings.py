"""Content-Encoding (RFC 9110, section 8.4.1), undone: at once, or as the bytes arrive."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import zstandard

Decoder = Callable[[bytes], bytes]


def decoder(coding: str) -> Decoder | None:
    """A function that takes the next bytes and gives back what they decode to; None for a coding not known here. The
    function raises ValueError where the bytes are not in that coding."""
    coding = coding.strip().lower()
    if coding in ("", "identity"):
        return lambda data: data
    if coding in ("gzip", "x-gzip"):
        return _refusing(zlib.decompressobj(wbits=31).decompress, zlib.error)
    if coding == "deflate":
        return _refusing(zlib.decompressobj().decompress, zlib.error)
    if coding == "zstd":
        return _refusing(zstandard.ZstdDecompressor().decompressobj().decompress, zstandard.ZstdError)
    if coding == "br":
        try:
            import brotli
        except ImportError:
            return None
        return _refusing(brotli.Decompressor().process, brotli.error)
    return None


def decoded(data: bytes, coding: str) -> bytes:
    """Raises ValueError if the coding is unknown or the bytes are not in it."""
    decode = decoder(coding)
    if decode is None:
        raise ValueError(f"content coding {coding!r} is not known here")
    return decode(data)


def _refusing(decode: Decoder, failure: type[Exception]) -> Decoder:
    def run(data: bytes) -> bytes:
        try:
            return decode(data)
        except failure as error:
            raise ValueError(f"not in the content coding it claims: {error}") from None

    return run
