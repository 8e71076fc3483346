"""How a call of the three APIs is known when it goes over HTTP, and by what harnesses name its session."""

from __future__ import annotations

from mwjax.rollouts.engine_ids import Endpoint

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
