"""Requests and responses of the OpenAI and Anthropic APIs without token ids, one exchange a line.

A record holds the request and the response as in :mod:`engine_log`, and the rollout of a call is named as there. The
log of ``mwjax record`` is read too, for its messages.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from mwjax.rollouts.errors import Refusal
from mwjax.rollouts.fields import described
from mwjax.rollouts.http_calls import FORMAT
from mwjax.rollouts.readers import calls_log, engine_log
from mwjax.rollouts.readers.engine_log import exchange_in
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
        recorded = record.value.get("format") == FORMAT
        yield Exchange(
            number,
            record.line,
            request,
            response,
            record.value,
            _session(record.value, options),
            time_in(record.value, *TIMES),
            one=options.session_by is not None or not recorded or calls_log.names_an_episode(record.value),
            cut_off=recorded and calls_log.broke_off(record.value),
        )


def _session(record: Mapping[str, Any], options: Options) -> str | None:
    fields = (options.session_by,) if options.session_by is not None else engine_log.SESSION
    return name_in(record, *fields)
