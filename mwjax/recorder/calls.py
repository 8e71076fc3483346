"""One call as one line of ``calls.jsonl``. The format, version 1; what is null or empty is left out:

``format``          "mwjax-call/1"
``id``              32 hexadecimal digits, unique
``started``, ``first_byte``, ``finished``   seconds since 1970, UTC: request here, first byte of the answer, its end
``endpoint``        "chat.completions", "responses" or "messages"
``path``            as the harness sent it, without a session prefix; of the query only harmless parameters
``session``, ``session_from``   name, and "header NAME", "path", "key" (a hash of the API key) or "none"
``request``         the harness's payload, as JSON; where it was not JSON, ``request_text`` or ``request_base64``
``request_headers`` those on a short list; never credentials
``engine``          "vllm", "sglang" or "none"
``asked``           {body, headers}: members and headers set in what went upstream and not in ``request``; all else was
                    sent unchanged
``asked_refused``   {status, text}: the engine refused the call with ``asked``, so it went once more, unchanged
``status``          HTTP status that the harness got; none where it got no answer
``response_headers``  those on a short list
``response``        the payload that the harness got, as JSON; of a stream, the assembled message; where it was not
                    JSON, ``response_text`` or ``response_base64``, as the engine sent it
``stream``          true where the answer was an event stream
``events``          the stream's bytes as the engine sent them, what was ``asked`` included: base64 of Zstandard; none
                    with redaction, and none where they hold a credential
``prompt_ids``      token ids of the prompt, as the engine gave them
``completions``     [{index, completion_ids, logprobs}]: what was sampled, per choice
``engine_info``     SGLang's meta_info per choice, without what is in ``completions``
``usage``           token counts, in the names of the API
``error``           {kind, message}, and ``malformed_events``, their number
``truncated``       {request: bytes, response: bytes}: true sizes of bodies of which only the beginning is here
``redacted``        paths of redacted fields; with redaction, what an engine says of an error is "[redacted]", for it
                    may quote them
``ids_withheld``    true where ids and log-probs went with text that was redacted or holds a credential

Kinds of error: ``upstream_refused``, ``upstream_disconnected`` (no answer), ``upstream_timeout``, ``upstream_cut_off``
(the answer broke off), ``client_disconnected``, ``shutdown``, ``http_status``, ``reported`` (by the answer or by an
event), ``malformed_response``, ``malformed_events``, ``incomplete_stream`` (no event that ends it).
"""

from __future__ import annotations

import base64
import codecs
import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import zstandard

from mwjax.recorder.additions import Additions, Engine, as_record, stripped_payload
from mwjax.recorder.content_codings import decoded
from mwjax.recorder.endpoints import Endpoint, ends_stream, error_in, usage_of
from mwjax.recorder.json_text import loads
from mwjax.recorder.redaction import SPELLS_TEXT, Pattern, hides_text, redacted
from mwjax.recorder.sessions import (
    HIDDEN_SECRET,
    SHORTEST_SECRET,
    Session,
    carried_secrets,
    carried_secrets_in_text,
    without_secrets,
)
from mwjax.rollouts import server_events
from mwjax.rollouts.assembly import assembled
from mwjax.rollouts.engine_ids import choices_of, prompt_ids, sampled
from mwjax.rollouts.http_calls import FORMAT, REDACTED

HOLDS_IDS = ("events", "prompt_ids", "completions", "engine_info")  # what spells the text: it goes when text goes


class Body:
    """The first ``limit`` bytes of a body, and how many there were."""

    def __init__(self, limit: int) -> None:
        self.size = 0
        self._limit = limit
        self._parts: list[bytes] = []

    def add(self, data: bytes) -> None:
        if self.size < self._limit:
            self._parts.append(data[: self._limit - self.size])
        self.size += len(data)

    @property
    def truncated(self) -> bool:
        return self.size > self._limit

    def data(self) -> bytes:
        return b"".join(self._parts)


@dataclass
class Exchange:
    """What the proxy saw of one call, as it went on. ``response`` holds the engine's bytes before anything is taken out
    of them. ``secrets`` are never written."""

    endpoint: Endpoint
    path: str
    session: Session
    request_headers: dict[str, str]
    request: Body
    response: Body
    secrets: Sequence[str]
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    started: float = field(default_factory=time.time)
    first_byte: float | None = None
    finished: float | None = None
    engine: Engine = "none"
    asked: Additions | None = None
    asked_refused: tuple[int, bytes] | None = None
    status: int | None = None
    response_headers: dict[str, str] = field(default_factory=dict)
    stream: bool = False
    error: tuple[str, str] | None = None

    @property
    def failed(self) -> bool:
        """Whether the status is none that comes with an answer."""
        return self.status is not None and not 200 <= self.status < 300

    def fail(self, kind: str, message: str) -> None:
        """Keeps the first thing that went wrong."""
        if self.error is None:
            self.error = (kind, message)


def as_object(exchange: Exchange, patterns: Sequence[Pattern] = (), *, opaque: bool = False) -> dict[str, Any]:
    """The call as the JSON object of its line; ``opaque``: without a look into its bodies."""
    hits: set[str] = set()
    secrets = [*exchange.secrets, *_carried_secrets(exchange)]
    request = _payload("request", exchange.request, exchange.request_headers, secrets, patterns, hits, opaque)
    response, errors = _response(exchange, secrets, patterns, hits, opaque)
    left_at_the_end = exchange.stream and not errors and not exchange.response.truncated
    left = exchange.error is not None and exchange.error[0] == "client_disconnected"
    # A harness may leave a refusal unread, or a stream once it has seen its end.
    if exchange.error is not None and not (left and (exchange.failed or left_at_the_end)):
        errors.insert(0, exchange.error)
    elif exchange.failed:
        message = errors[0][1] if errors and errors[0][0] == "reported" else f"status {exchange.status}"
        errors.insert(0, ("http_status", message))
    refused = exchange.asked_refused
    value = {
        "format": FORMAT,
        "id": exchange.id,
        "started": round(exchange.started, 6),
        "first_byte": None if exchange.first_byte is None else round(exchange.first_byte, 6),
        "finished": None if exchange.finished is None else round(exchange.finished, 6),
        "endpoint": exchange.endpoint,
        "path": exchange.path,
        "session": exchange.session.name,
        "session_from": exchange.session.source,
        **request,
        "request_headers": exchange.request_headers,
        "engine": exchange.engine,
        "asked": None if exchange.asked is None else as_record(exchange.asked),
        "asked_refused": None
        if refused is None
        else {"status": refused[0], "text": REDACTED if patterns else refused[1].decode("utf-8", "replace")},
        "status": exchange.status,
        "response_headers": exchange.response_headers,
        **response,
        "stream": exchange.stream or None,
        "error": {"kind": errors[0][0], "message": errors[0][1]} if errors else None,
        "truncated": {
            name: body.size
            for name, body in (("request", exchange.request), ("response", exchange.response))
            if body.truncated
        },
    }
    said = without_secrets({name: part for name, part in value.items() if name not in HOLDS_IDS}, secrets)
    spelled = any(said.get(name) != value.get(name) for name in ("request", "response"))
    value.update(said)
    # These are copies of what a pattern may name, or have no other home.
    own = ("prompt_ids", "completions", "engine_info", "usage")
    shown, found = redacted({name: value[name] for name in own if value.get(name)}, patterns)
    value.update(shown, redacted=without_secrets(sorted(hits | found), secrets))
    if hides_text(hits) or spelled:
        for name in HOLDS_IDS:
            value.pop(name, None)
        value = {**value, **redacted({"response": value.get("response")}, SPELLS_TEXT)[0], "ids_withheld": True}
    return {key: entry for key, entry in value.items() if entry is not None and entry != {} and entry != []}


def _response(
    exchange: Exchange, secrets: Sequence[str], patterns: Sequence[Pattern], hits: set[str], opaque: bool
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The members of the line that come from the answer, and what is wrong with it."""
    body, headers = exchange.response, exchange.response_headers
    if not body.size:
        return {}, []
    if opaque:
        error = ("malformed_response", "something in request or answer has no place in JSON")
        return _opaque("response", body.data(), secrets, bool(patterns)), [error]
    if not exchange.stream:
        value = _payload("response", body, headers, secrets, (), hits)
        if "response" not in value:
            hidden = dict.fromkeys(value, REDACTED) if patterns else value
            return hidden, [] if body.truncated else [("malformed_response", "the body is not JSON")]
        whole = value["response"]
        message = error_in(whole)
        if patterns and (message or exchange.failed):  # what an engine says of an error quotes what it was sent
            return {"response": REDACTED}, [("reported", REDACTED)]
        return _members(exchange, whole, whole, patterns, hits), [("reported", message)] if message else []

    raw = body.data()
    try:
        raw = decoded(raw, headers.get("content-encoding", ""))
    except ValueError as error:
        return _opaque("response", raw, secrets, bool(patterns)), [("malformed_response", str(error))]
    payloads, malformed, ended, errors = _read_events(exchange.endpoint, raw, body.truncated)
    whole = assembled(exchange.endpoint, payloads)
    shown = whole
    if patterns:
        errors = [(kind, REDACTED) for kind, _ in errors]
        parts = [redacted(payload, patterns) for payload in payloads]
        for _, found in parts:
            hits |= found
        shown = assembled(exchange.endpoint, [part for part, _ in parts])
    members = {} if whole is None else _members(exchange, whole, shown, patterns, hits)
    if not patterns and not any(form in raw for secret in secrets for form in _forms(secret)):
        members["events"] = base64.b64encode(zstandard.compress(raw)).decode("ascii")
    if malformed:
        members["malformed_events"] = malformed
        errors.append(("malformed_events", f"{malformed} event(s) of the stream are not JSON"))
    if not ended and not body.truncated:
        errors.append(("incomplete_stream", "the stream has no event that ends it"))
    return members, errors


def _members(exchange: Exchange, whole: Any, shown: Any, patterns: Sequence[Pattern], hits: set[str]) -> dict[str, Any]:
    """``shown`` is what may be seen of ``whole``; ids are of the whole."""
    seen, found = redacted(stripped_payload(shown, exchange.asked), patterns)
    hits |= found
    completions = [
        {"index": each.choice, "completion_ids": each.completion_ids, "logprobs": each.logprobs}
        for each in sampled(exchange.endpoint, whole)
    ]
    return {
        "response": seen,
        "prompt_ids": prompt_ids(exchange.endpoint, whole),
        "completions": [{k: v for k, v in each.items() if v is not None} for each in completions],
        "engine_info": _engine_info(whole) if exchange.asked is not None else None,
        "usage": usage_of(whole),
    }


def _engine_info(whole: Any) -> list[Any] | None:
    infos = [choice.get("meta_info") for choice in choices_of(whole)]
    kept = [
        {k: v for k, v in info.items() if not k.endswith("_token_logprobs")} if isinstance(info, dict) else None
        for info in infos
    ]
    return kept if any(info is not None for info in kept) else None


def _read_events(endpoint: Endpoint, raw: bytes, truncated: bool) -> tuple[list[Any], int, bool, list[tuple[str, str]]]:
    """The parsed data of every event that is JSON; the number that are not; whether one ends the stream; and the errors
    that events report."""
    splitter = server_events.Splitter()
    pieces = splitter.feed(raw)
    if (rest := splitter.rest().strip()) and not truncated:
        pieces.append(rest)
    payloads: list[Any] = []
    malformed, ended = 0, False
    errors: list[tuple[str, str]] = []
    for piece in pieces:
        payload = None
        try:
            event = server_events.read(piece)
            if event is None:
                continue
            if event.data.strip() != "[DONE]":
                payload = loads(event.data)
                payloads.append(payload)
        except ValueError:
            malformed += 1
            continue
        ended = ended or ends_stream(endpoint, event.data, payload)
        if message := error_in(payload):
            errors.append(("reported", message))
            ended = True
    return payloads, malformed, ended, errors


def _payload(
    name: str,
    body: Body,
    headers: dict[str, str],
    secrets: Sequence[str],
    patterns: Sequence[Pattern],
    hits: set[str],
    opaque: bool = False,
) -> dict[str, Any]:
    raw = body.data()
    if not raw:
        return {}
    try:
        raw = decoded(raw, headers.get("content-encoding", ""))
        if body.truncated or opaque:
            raise ValueError("not to be read")
        value, found = redacted(loads(raw), patterns)
    except ValueError:
        return _opaque(name, raw, secrets, bool(patterns))
    hits |= found
    return {name: value}


def _opaque(name: str, raw: bytes, secrets: Sequence[str], hidden: bool) -> dict[str, Any]:
    """Bytes that are not JSON; with redaction they could hold what must not be written."""
    if hidden:
        return {f"{name}_text": REDACTED}
    for form in (form for secret in secrets for form in _forms(secret)):
        raw = raw.replace(form, HIDDEN_SECRET.encode())
    try:
        # A character that the size limit cuts in two is left out.
        return {f"{name}_text": codecs.getincrementaldecoder("utf-8")().decode(raw)}
    except ValueError:
        return {f"{name}_base64": base64.b64encode(raw).decode("ascii")}


def _carried_secrets(exchange: Exchange) -> list[str]:
    try:
        raw = decoded(exchange.request.data(), exchange.request_headers.get("content-encoding", ""))
    except ValueError:
        return []
    if b'"mcp' not in raw:
        return []
    try:
        found = carried_secrets(loads(raw))
    except ValueError:  # cut off by the size limit, for instance
        found = carried_secrets_in_text(raw.decode("utf-8", "replace"))
    return [secret for secret in found if len(secret) >= SHORTEST_SECRET]


def _forms(secret: str) -> set[bytes]:
    """A secret as it may stand in a text, or escaped in a JSON string."""
    spelled = {secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]}
    return {each.encode("utf-8", "surrogateescape") for each in spelled}
