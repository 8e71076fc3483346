"""HTTP Archive 1.2 (``log.entries``) as browsers and proxies such as mitmproxy write it: the calls of the OpenAI and
Anthropic APIs in it, streams included. Other entries are none of a model's and are counted as such."""

from __future__ import annotations

import base64
import gzip
import os
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import zstandard

from mwjax.rollouts.errors import Refusal
from mwjax.rollouts.http_calls import SESSION_HEADERS, endpoint_of
from mwjax.rollouts.lines import GZIP_MAGIC, ZSTD_MAGIC
from mwjax.rollouts.readers.event_text import response_in
from mwjax.rollouts.readers.reader import Head, Item, Options, Remark
from mwjax.rollouts.readers.records import json_records
from mwjax.rollouts.readers.rendered import rendering_for, seconds
from mwjax.rollouts.readers.requests import Exchange, rollouts_of
from mwjax.rollouts.readers.sessions import at

NAME = "har"
DESCRIPTION = "HTTP archives with calls of OpenAI's and Anthropic's APIs (no ids: rendered)"


def looks_like(head: Head) -> bool:
    first = head.records[0] if head.records else None
    return isinstance(first, dict) and isinstance(at(first, "log.entries"), list)


def read(path: str, options: Options) -> Iterator[Item]:
    name = os.path.basename(path).partition(".")[0]
    yield from rollouts_of(path, name, _exchanges(path, options), rendering_for(NAME, options), options)


def _exchanges(path: str, options: Options) -> Iterator[Exchange | Item]:
    others = 0
    for record in json_records(path, options):
        if isinstance(record, Refusal):
            yield record
            continue
        entries = at(record.value, "log.entries")
        for place, entry in enumerate(entries if isinstance(entries, list) else ()):
            # A HAR is one document: its entries are told apart by number, not by line.
            number = place + 1
            if endpoint_of(str(at(entry, "request.method")), str(at(entry, "request.url"))) is None:
                others += 1
                continue
            field = f"log.entries[{place}]"
            status = at(entry, "response.status")
            if isinstance(status, int) and (status >= 400 or status == 0):
                yield Remark("empty", path, number, f"the call failed (status {status})")
                continue
            request = response_in(_text(at(entry, "request.postData")))
            if request is None:
                yield Refusal(path, number, f"{field}.request.postData", "is no JSON: what the model saw is not here")
                continue
            response = response_in(_text(at(entry, "response.content")))
            if response is None:
                reason = "is neither JSON nor a stream of events; save the archive with its contents, not in Brotli"
                yield Refusal(path, number, f"{field}.response.content", reason)
                continue
            session = _session(entry, request, options)
            started = seconds(at(entry, "startedDateTime"))
            yield Exchange(number, number, request, response, entry, session, started)
    if others:
        yield Remark("warning", path, 0, f"{others} other entries, which are no calls of a model")


def _text(content: Any) -> str:
    """The text of a content or of post data, which may be in base64, and compressed as it went over the wire."""
    text = str(at(content, "text") or "")
    if at(content, "encoding") != "base64":
        return text
    try:
        return _decompressed(base64.b64decode(text)).decode("utf-8", "replace")
    except (ValueError, OSError, EOFError, zlib.error, zstandard.ZstdError):
        return ""


def _decompressed(data: bytes) -> bytes:
    if data.startswith(GZIP_MAGIC):
        return gzip.decompress(data)
    if data.startswith(ZSTD_MAGIC):
        return zstandard.ZstdDecompressor().decompressobj().decompress(data)
    # zlib, as "deflate" is on the wire: 32,768 bytes of window, and a header divisible by 31
    deflated = len(data) > 1 and data[0] & 0x0F == 8 and int.from_bytes(data[:2], "big") % 31 == 0
    return zlib.decompress(data) if deflated else data


def _session(entry: Mapping[str, Any], request: Mapping[str, Any], options: Options) -> str | None:
    if options.session_by is not None:
        found = at(entry, options.session_by)
        found = at(request, options.session_by) if found is None else found
        return None if found is None else str(found)
    listed = at(entry, "request.headers")
    headers = {
        str(each.get("name")).lower(): str(each.get("value"))
        for each in (listed if isinstance(listed, list) else ())
        if isinstance(each, dict)
    }
    return next((headers[name] for name in SESSION_HEADERS if headers.get(name)), None)
