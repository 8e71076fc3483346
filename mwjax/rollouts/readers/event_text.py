"""The text of a body as the response that it is: JSON, or the events of a stream put together."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

from mwjax.rollouts.assembly import assembled
from mwjax.rollouts.engine_ids import Endpoint
from mwjax.rollouts.server_events import Splitter, read


def response_in(text: str) -> dict[str, Any] | None:
    """None where it is neither, or holds nothing."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(text)
        return from_payloads(value) if isinstance(value, list) else value if isinstance(value, dict) else None
    splitter = Splitter()
    whole = splitter.feed(text.encode("utf-8", "replace"))
    payloads = []
    for piece in [*whole, splitter.rest()]:
        event = read(piece)
        if event is None or event.data.strip() == "[DONE]":
            continue
        try:
            payloads.append(json.loads(event.data))
        except (ValueError, RecursionError):
            continue
    return from_payloads(payloads)


def from_payloads(payloads: Sequence[Any]) -> dict[str, Any] | None:
    """The response that the parsed data of a stream's events make."""
    kinds = [str(each.get("type")) for each in payloads if isinstance(each, dict)]
    endpoint: Endpoint = "chat.completions"
    if any(kind.startswith("response.") for kind in kinds):
        endpoint = "responses"
    elif "message_start" in kinds:
        endpoint = "messages"
    return assembled(endpoint, payloads)
