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
``events``          the stream's bytes as the engine sent them, what was ``asked`` included: base64 of Zstandard. With
                    redaction: a list of {event, data} instead
``prompt_ids``      token ids of the prompt, as the engine gave them
``completions``     [{index, completion_ids, logprobs}]: what was sampled, per choice
``engine_info``     SGLang's meta_info per choice, without what is in ``completions``
``usage``           token counts, in the names of the API
``error``           {kind, message}, and ``malformed_events``, their number
``truncated``       {request: bytes, response: bytes}: true sizes of bodies of which only the beginning is here
``redacted``        paths of redacted fields; ``ids_withheld`` is true where ids and log-probs went with the text

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
from mwjax.recorder.redaction import REDACTED, SPELLS_TEXT, Pattern, hides_text, redacted
from mwjax.recorder.sessions import SHORTEST_SECRET, Session, carried_secrets, carried_secrets_in_text
from mwjax.rollouts import server_events
from mwjax.rollouts.assembly import assembled
from mwjax.rollouts.engine_ids import prompt_ids, sampled

FORMAT = "mwjax-call/1"


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

    def fail(self, kind: str, message: str) -> None:
        """Keeps the first thing that went wrong."""
        if self.error is None:
            self.error = (kind, message)


def as_object(exchange: Exchange, patterns: Sequence[Pattern] = ()) -> dict[str, Any]:
    """The call as the JSON object of its line."""
    hits: set[str] = set()
    exchange.secrets = [*exchange.secrets, *_carried_secrets(exchange)]
    request = _payload("request", exchange.request, exchange.request_headers, exchange.secrets, patterns, hits)
    response, errors = _response(exchange, patterns, hits)
    left_at_the_end = exchange.stream and not errors and not exchange.response.truncated
    failed = exchange.status is not None and exchange.status >= 400
    left = exchange.error is not None and exchange.error[0] == "client_disconnected"
    # A harness may leave a refusal unread, or a stream once it has seen its end.
    if exchange.error is not None and not (left and (failed or left_at_the_end)):
        errors.insert(0, exchange.error)
    elif failed:
        message = errors[0][1] if errors and errors[0][0] == "reported" else f"status {exchange.status}"
        errors.insert(0, ("http_status", message))
    withheld = hides_text(hits)
    if withheld:
        for derived in ("prompt_ids", "completions", "engine_info"):
            response.pop(derived, None)
        response = {key: redacted(value, SPELLS_TEXT)[0] for key, value in response.items()}
    refused = exchange.asked_refused
    value = {
        "format": FORMAT,
        "id": exchange.id,
        "started": round(exchange.started, 6),
        "first_byte": None if exchange.first_byte is None else round(exchange.first_byte, 6),
        "finished": None if exchange.finished is None else round(exchange.finished, 6),
        "endpoint": exchange.endpoint,
        "path": _clean_text(exchange.path, exchange.secrets),
        "session": _clean_text(exchange.session.name, exchange.secrets),
        "session_from": exchange.session.source,
        **request,
        "request_headers": {k: _clean_text(v, exchange.secrets) for k, v in exchange.request_headers.items()},
        "engine": exchange.engine,
        "asked": None if exchange.asked is None else as_record(exchange.asked),
        "asked_refused": None
        if refused is None
        else {"status": refused[0], "text": REDACTED if patterns else _text(_clean(refused[1], exchange.secrets))},
        "status": exchange.status,
        "response_headers": {k: _clean_text(v, exchange.secrets) for k, v in exchange.response_headers.items()},
        **response,
        "stream": exchange.stream or None,
        "error": {"kind": errors[0][0], "message": _clean_text(errors[0][1], exchange.secrets)} if errors else None,
        "truncated": {
            name: body.size
            for name, body in (("request", exchange.request), ("response", exchange.response))
            if body.truncated
        },
        "redacted": sorted(hits),
        "ids_withheld": withheld or None,
    }
    # A redacted field of the line itself: ids and completions have no other home.
    value.update(redacted({k: value[k] for k in ("prompt_ids", "completions") if value.get(k)}, patterns)[0])
    return {key: entry for key, entry in value.items() if entry is not None and entry != {} and entry != []}


def _response(
    exchange: Exchange, patterns: Sequence[Pattern], hits: set[str]
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The members of the line that come from the answer, and what is wrong with it."""
    if not exchange.response.size:
        return {}, []
    if not exchange.stream:
        value = _payload("response", exchange.response, exchange.response_headers, exchange.secrets, (), hits)
        whole = value.get("response")
        if whole is None:
            hidden = dict.fromkeys(value, REDACTED) if patterns else value
            return hidden, [] if exchange.response.truncated else [("malformed_response", "the body is not JSON")]
        message = error_in(whole)
        members = _members(exchange, whole, patterns, hits)
        return members, [("reported", message)] if message else []

    raw = exchange.response.data()
    try:
        raw = _clean(decoded(raw, exchange.response_headers.get("content-encoding", "")), exchange.secrets)
    except ValueError as error:
        return _opaque("response", raw, bool(patterns)), [("malformed_response", str(error))]
    payloads, malformed, ended, errors = _read_events(exchange.endpoint, raw, exchange.response.truncated)
    whole = assembled(exchange.endpoint, [payload for _, _, payload in payloads])
    members = {} if whole is None else _members(exchange, whole, patterns, hits)
    members["events"] = base64.b64encode(zstandard.compress(raw)).decode("ascii")
    if patterns:
        members["events"] = []
        for name, data, payload in payloads:
            shown, found = redacted(payload, patterns)
            hits |= found
            plain = shown if payload is not None else data if data.strip() == "[DONE]" else REDACTED
            members["events"].append({"event": name, "data": plain} if name else {"data": plain})
    if malformed:
        members["malformed_events"] = malformed
        errors.append(("malformed_events", f"{malformed} event(s) of the stream are not JSON"))
    if not ended and not exchange.response.truncated:
        errors.append(("incomplete_stream", "the stream has no event that ends it"))
    return members, errors


def _members(exchange: Exchange, whole: Any, patterns: Sequence[Pattern], hits: set[str]) -> dict[str, Any]:
    seen, found = redacted(stripped_payload(whole, exchange.asked), patterns)
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
    choices = whole.get("choices") if isinstance(whole, dict) else None
    infos = [choice.get("meta_info") for choice in choices or () if isinstance(choice, dict)]
    kept = [
        {k: v for k, v in info.items() if not k.endswith("_token_logprobs")} if isinstance(info, dict) else None
        for info in infos
    ]
    return kept if any(info is not None for info in kept) else None


def _read_events(
    endpoint: Endpoint, raw: bytes, truncated: bool
) -> tuple[list[tuple[str, str, Any]], int, bool, list[tuple[str, str]]]:
    """Name, data and parsed data (None where it is not JSON) of every event; the number that are not JSON; whether one
    ends the stream; and the errors that events report."""
    splitter = server_events.Splitter()
    pieces = splitter.feed(raw)
    if (rest := splitter.rest().strip()) and not truncated:
        pieces.append(rest)
    payloads: list[tuple[str, str, Any]] = []
    malformed, ended = 0, False
    errors: list[tuple[str, str]] = []
    for piece in pieces:
        try:
            event = server_events.read(piece)
        except ValueError:
            payloads.append(("", piece.decode("utf-8", "replace"), None))
            malformed += 1
            continue
        if event is None:
            continue
        payload = None
        if event.data.strip() != "[DONE]":
            try:
                payload = loads(event.data)
            except ValueError:
                malformed += 1
        payloads.append((event.name, event.data, payload))
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
) -> dict[str, Any]:
    raw = body.data()
    if not raw:
        return {}
    try:
        raw = _clean(decoded(raw, headers.get("content-encoding", "")), secrets)
        if body.truncated:
            raise ValueError("truncated")
        value, found = redacted(loads(raw), patterns)
    except ValueError:
        return _opaque(name, _clean(raw, secrets), bool(patterns))
    hits |= found
    return {name: value}


def _opaque(name: str, raw: bytes, hidden: bool) -> dict[str, Any]:
    """Bytes that are not JSON; with redaction they could hold what must not be written."""
    if hidden:
        return {f"{name}_text": REDACTED}
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
    return [form for secret in found if len(secret) >= SHORTEST_SECRET for form in (secret, json.dumps(secret)[1:-1])]


def _clean(raw: bytes, secrets: Sequence[str]) -> bytes:
    for secret in secrets:
        raw = raw.replace(secret.encode("utf-8", "surrogateescape"), b"[credential]")
    return raw


def _clean_text(text: Any, secrets: Sequence[str]) -> Any:
    if isinstance(text, str):
        for secret in secrets:
            text = text.replace(secret, "[credential]")
    return text


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
