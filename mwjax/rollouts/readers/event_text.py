"""The text of a body as the response that it is: JSON, or the events of a stream put together."""

from __future__ import annotations

import json
from typing import Any

from mwjax.rollouts.assembly import assembled
from mwjax.rollouts.engine_ids import Endpoint
from mwjax.rollouts.server_events import Splitter, read


def response_in(text: str) -> dict[str, Any] | None:
    """None where it is neither, or holds nothing."""
    try:
        value = json.loads(text)
    except ValueError:
        pass
    else:
        return value if isinstance(value, dict) else None
    splitter = Splitter()
    raw = splitter.feed(text.encode())
    payloads = []
    for piece in [*raw, splitter.rest()]:
        event = read(piece)
        if event is None or event.data.strip() == "[DONE]":
            continue
        try:
            payloads.append(json.loads(event.data))
        except ValueError:
            continue
    kinds = [str(each.get("type")) for each in payloads if isinstance(each, dict)]
    endpoint: Endpoint = "chat.completions"
    if any(kind.startswith("response.") for kind in kinds):
        endpoint = "responses"
    elif "message_start" in kinds:
        endpoint = "messages"
    return assembled(endpoint, payloads)
