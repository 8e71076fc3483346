"""How a call of the three APIs is known over HTTP, by what harnesses name its session, and what the recorder and the
readers of its log must call alike."""

from __future__ import annotations

from mwjax.rollouts.engine_ids import Endpoint

FORMAT = "mwjax-call/1"  # of the lines of `mwjax record`, described in mwjax/recorder/calls.py
REDACTED = "[redacted]"  # what stands there in place of a field

# In this order: the general names, then those of Codex, Claude Code, LiteLLM and Helicone.
SESSION_HEADERS = (
    "x-session-id",
    "session-id",
    "session_id",
    "x-conversation-id",
    "conversation_id",
    "x-claude-code-session-id",
    "x-litellm-session-id",
    "helicone-session-id",
)

_ENDS: tuple[tuple[str, Endpoint], ...] = (
    ("/chat/completions", "chat.completions"),
    ("/responses", "responses"),
    ("/messages", "messages"),
)


def endpoint_of(method: str, target: str) -> Endpoint | None:
    """The API that a request is a call of; None for any other. ``target``: its URL, or path and query."""
    path = target.partition("?")[0].rstrip("/")
    return next((name for end, name in _ENDS if method == "POST" and path.endswith(end)), None)
