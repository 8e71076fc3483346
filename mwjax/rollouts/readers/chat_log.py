"""Requests and responses of the OpenAI and Anthropic APIs without token ids, one exchange a line.

A record holds the request and the response under any of the names of :mod:`engine_log`; a response may be the text of
an event stream. The rollout of a call is named as there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from mwjax.rollouts.errors import Refusal
from mwjax.rollouts.fields import described
from mwjax.rollouts.readers import calls_log, engine_log
from mwjax.rollouts.readers.event_text import response_in
from mwjax.rollouts.readers.reader import Head, Item, Options
from mwjax.rollouts.readers.records import json_records
from mwjax.rollouts.readers.rendered import rendering_for, seconds
from mwjax.rollouts.readers.requests import Exchange, endpoint_of, rollouts_of
from mwjax.rollouts.readers.sessions import at

NAME = "chat"
DESCRIPTION = "requests and responses of OpenAI's and Anthropic's APIs (no ids: rendered)"


def looks_like(head: Head) -> bool:
    if any(engine_log.has_ids(each) for each in head.records):
        return False
    found = [
        exchange_in(each) for each in head.records if isinstance(each, dict) and each.get("format") != calls_log.FORMAT
    ]
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
        yield Exchange(
            number, record.line, request, response, record.value, _session(record.value, options), _time(record.value)
        )


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
    return request, {}


def _session(record: Mapping[str, Any], options: Options) -> str | None:
    fields = (options.session_by,) if options.session_by is not None else engine_log.SESSION
    found = (at(record, each) for each in fields)
    return next((str(each) for each in found if isinstance(each, (str, int)) and each != ""), None)


def _time(record: Mapping[str, Any]) -> float | None:
    for key in ("started", "timestamp", "time", "created_at"):
        value = record.get(key)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        if isinstance(value, str) and (read_ := seconds(value)) is not None:
            return read_
    return None
