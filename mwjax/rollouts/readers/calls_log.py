"""The log of ``mwjax record``: ``mwjax-call/1``, described in ``mwjax/recorder/calls.py``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, cast

from mwjax.rollouts.engine_ids import Endpoint
from mwjax.rollouts.errors import RecordError, Refusal
from mwjax.rollouts.fields import described
from mwjax.rollouts.http_calls import FORMAT
from mwjax.rollouts.readers.engine_call import Call
from mwjax.rollouts.readers.exchange import Completion, calls_of
from mwjax.rollouts.readers.reader import Head, Item, Options, Remark
from mwjax.rollouts.readers.records import Record, json_records
from mwjax.rollouts.readers.sessions import Session, at, members, name_in, refused, rollouts_of, time_in

NAME = "mwjax"
DESCRIPTION = "calls.jsonl of mwjax record, with the engine's token ids"

# The answer ended early, for whatever reason: what there is of it was sampled, but nobody acted on it.
BROKEN_OFF = (
    "upstream_cut_off",
    "upstream_timeout",
    "client_disconnected",
    "shutdown",
    "reported",
    "incomplete_stream",
)


class _Nothing(Exception):
    """Nothing was sampled in this call; the message says why."""


def looks_like(head: Head) -> bool:
    return bool(head.records) and isinstance(head.records[0], dict) and head.records[0].get("format") == FORMAT


def read(path: str, options: Options) -> Iterator[Item]:
    sessions: dict[str, Session] = {}
    for number, record in enumerate(json_records(path, options), start=1):
        if isinstance(record, Refusal):
            yield record
            continue
        value = record.value
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            found = value.get("format") if isinstance(value, dict) else value
            yield record.refusal(path, "format", f'is {described(found)}, must be "{FORMAT}"')
            continue
        session = _session(path, value, sessions, options)
        try:
            calls = _calls(record, number, options)
            session.note(record, options)
        except _Nothing as reason:
            yield Remark("empty", path, record.line, str(reason))
        except RecordError as error:
            yield refused(path, session, record, error)
        else:
            session.calls += calls
    yield from rollouts_of(path, sessions, options)


def _session(path: str, value: Mapping[str, Any], sessions: dict[str, Session], options: Options) -> Session:
    given = at(value, options.session_by) if options.session_by is not None else None
    if given is not None:
        name, one = str(given), True
    else:
        name = name_in(value, "session") or os.path.basename(path).partition(".")[0]
        one = names_an_episode(value)
    return sessions.setdefault(name, Session(name, one))


def names_an_episode(value: Mapping[str, Any]) -> bool:
    """A key is shared by all that a harness does; only a header or path tells episodes apart."""
    return str(value.get("session_from", "")).startswith(("header", "path"))


def broke_off(value: Mapping[str, Any]) -> bool:
    return at(value, "error.kind") in BROKEN_OFF


def _calls(record: Record, number: int, options: Options) -> list[Call]:
    """The calls of one record, one for each choice. Raises RecordError, or _Nothing."""
    value = record.value
    error = members(value.get("error"))
    completions = value.get("completions") or []
    if not isinstance(completions, list):
        raise RecordError("completions", f"is {described(completions)}, must be a list")
    if not completions and error:
        raise _Nothing(f"the call failed ({error.get('kind')})")
    if value.get("ids_withheld"):
        raise RecordError("ids_withheld", "is true: the ids were redacted with the text that they spell")
    if "response" in members(value.get("truncated")):
        raise RecordError("truncated.response", "the answer was larger than --max-body-mb; its ids are not all here")
    if error.get("kind") == "malformed_events":
        raise RecordError("malformed_events", "events of the stream could not be read; ids may be missing")
    endpoint = cast(Endpoint, value.get("endpoint"))
    if "prompt_ids" not in value or not completions:
        field = "completions" if "prompt_ids" in value else "prompt_ids"
        engine = value.get("engine", "none")
        advice = "import the log with --format chat and --tokenizer MODEL to have its messages rendered instead"
        raise RecordError(field, f"there are no token ids (engine {engine}, {endpoint}); {advice}")
    response = members(value.get("response"))
    found = []
    for place, entry in enumerate(map(members, completions)):
        field = f"completions[{place}].completion_ids"
        choice = entry["index"] if type(entry.get("index")) is int else place
        version = str(at(value, f"engine_info.{choice}.weight_version"))
        found.append(
            Completion(
                field,
                choice,
                entry.get("completion_ids"),
                entry.get("logprobs"),
                policy_version=int(version) if version.isdecimal() else None,
            )
        )
    return calls_of(
        number,
        record.line,
        value["prompt_ids"],
        found,
        endpoint=endpoint,
        request=members(value.get("request")),
        response=response,
        engine=str(value.get("engine", "none")),
        options=options,
        usage=value.get("usage"),
        time=time_in(value, "started") or 0.0,
        name=name_in(response, "id") or name_in(value, "id"),
        cut_off=broke_off(value),
    )
