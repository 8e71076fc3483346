"""The three APIs that are recorded: a stream's end, an error, and the usage."""

from __future__ import annotations

import json
from typing import Any

from mwjax.rollouts.engine_ids import Endpoint, choices_of


def ends_stream(endpoint: Endpoint, data: str, payload: Any) -> bool:
    """Whether this event is the last one that says something: a stream without it was cut off."""
    if endpoint == "chat.completions":
        return data.strip() == "[DONE]" or any(choice.get("finish_reason") for choice in choices_of(payload))
    kind = payload.get("type") if isinstance(payload, dict) else None
    if endpoint == "messages":
        return kind == "message_stop"
    return kind in ("response.completed", "response.incomplete", "response.failed")


def error_in(payload: Any) -> str | None:
    """The message of an error that a body or an event reports, in the shapes of the three APIs and of the engines."""
    if not isinstance(payload, dict):
        return None
    inner = payload.get("response")
    error = payload.get("error") or (inner.get("error") if isinstance(inner, dict) else None)
    if not error and (payload.get("type") == "error" or payload.get("object") == "error"):
        error = payload
    if not error:
        return None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else json.dumps(error)


def usage_of(payload: Any) -> dict[str, Any] | None:
    """The token counts of a whole response, in the names of its API."""
    usage = payload.get("usage") if isinstance(payload, dict) else None
    return usage if isinstance(usage, dict) else None


def error_body(endpoint: Endpoint | None, message: str) -> bytes:
    """What to answer where the upstream gave no answer that could be passed on."""
    detail = {"message": message, "type": "api_error"}
    body = {"type": "error", "error": detail} if endpoint == "messages" else {"error": {**detail, "code": None}}
    return json.dumps(body).encode()
