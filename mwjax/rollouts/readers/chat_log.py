"""Requests and responses of the OpenAI and Anthropic APIs without token ids, one exchange a line.

A record holds the request and the response under any of the names of :mod:`engine_log`; a response may be the text of
an event stream, or the list of its chunks. The rollout of a call is named as there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from mwjax.rollouts.errors import Refusal
from mwjax.rollouts.fields import described
from mwjax.rollouts.http_calls import FORMAT
from mwjax.rollouts.readers import engine_log
from mwjax.rollouts.readers.event_text import from_payloads, response_in
from mwjax.rollouts.readers.reader import Head, Item, Options, Remark
from mwjax.rollouts.readers.records import json_records
from mwjax.rollouts.readers.rendered import rendering_for
from mwjax.rollouts.readers.requests import Exchange, endpoint_of, rollouts_of
from mwjax.rollouts.readers.sessions import name_in, time_in

NAME = "chat"
DESCRIPTION = "requests and responses of OpenAI's and Anthropic's APIs (no ids: rendered)"

TIMES = ("started", "timestamp", "time", "created_at")


def looks_like(head: Head) -> bool:
    if any(engine_log.has_ids(each) for each in head.records):
        return False
    found = [exchange_in(each) for each in head.records if isinstance(each, dict) and each.get("format") != FORMAT]
    return any(request and response and endpoint_of(request, response) is not None for request, response in found)


def read(path: str, options: Options) -> Iterator[Item]:
    name = os.path.basename(path).partition(".")[0]
    yield from rollouts_of(path, name, _exchanges(path, options), rendering_for(NAME, options), options)


def _exchanges(path: str, options: Options) -> Iterator[Exchange | Item]:
    for number, record in enumerate(json_records(path, options), start=1):
        if isinstance(record, Refusal):
            yield record
            continue
        if not isinstance(record.value, dict):
            yield record.refusal(path, "", f"is {described(record.value)}, must be a request with its response")
            continue
        request, response = exchange_in(record.value)
        if not request:
            yield record.refusal(path, "request", "missing: what the model saw is not in this record")
            continue
        key = next((key for key in engine_log.RESPONSE if record.value.get(key) is not None), None)
        if key is None:
            yield Remark("empty", path, record.line, "there is no response")
            continue
        if not response and record.value[key]:
            yield record.refusal(path, key, "is no response: neither an object, nor a stream's text or chunks")
            continue
        session, time = _session(record.value, options), time_in(record.value, *TIMES)
        yield Exchange(number, record.line, request, response, record.value, session, time)


def exchange_in(record: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Request and response of a record; empty where it has none."""
    request: Mapping[str, Any] = next(
        (record[key] for key in engine_log.REQUEST if isinstance(record.get(key), dict)), {}
    )
    for key in engine_log.RESPONSE:
        given = record.get(key)
        if isinstance(given, dict):
            return request, given["body"] if isinstance(given.get("body"), dict) else given
        if isinstance(given, str) and (response := response_in(given)) is not None:
            return request, response
        if isinstance(given, list) and (response := from_payloads(given)) is not None:
            return request, response
    return request, {}


def _session(record: Mapping[str, Any], options: Options) -> str | None:
    fields = (options.session_by,) if options.session_by is not None else engine_log.SESSION
    return name_in(record, *fields)
