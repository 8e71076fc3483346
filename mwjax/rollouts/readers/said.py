"""What was asked and answered at a call with token ids, as far as it tells conversations apart."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from mwjax.rollouts.engine_ids import Endpoint
from mwjax.rollouts.errors import RecordError
from mwjax.rollouts.readers import chat

THINK_END = "</think>"


class Said(NamedTuple):
    """One message. ``text`` is without thinking; ``thinking`` says whether there was any. ``calls``: (name, arguments
    as text) of tool calls; ``answers``: the id of the tool call that this is the result of."""

    role: str
    text: str
    thinking: bool = False
    calls: tuple[tuple[str, str], ...] = ()
    answers: str | None = None

    def same(self, other: Said) -> bool:
        """Whether both say the same, however tool arguments are spelt and with or without the thinking."""
        mine, theirs = ((said.role, said.text.strip(), [_plain(call) for call in said.calls]) for said in (self, other))
        return mine == theirs


class Asked(NamedTuple):
    """A request: the system text, the messages after it, and the names of the tools."""

    system: str
    messages: tuple[Said, ...]
    tools: tuple[str, ...]

    @property
    def first_user(self) -> str:
        return next((each.text for each in self.messages if each.role == "user"), "")

    def same_root(self, other: Asked) -> bool:
        """Whether the tools are the same and so are half of the system's lines, or more: it may hold the date, or what
        was read so far."""
        if self.tools != other.tools or self.system == other.system:
            return self.tools == other.tools
        lines, others = (set(each.system.splitlines()) for each in (self, other))
        return 2 * len(lines & others) >= max(len(lines), len(others))


def asked(endpoint: Endpoint, request: Mapping[str, Any]) -> Asked | None:
    """None where the messages cannot be read as text, or are not those of this API."""
    try:
        if endpoint == "responses":
            found = chat.from_responses(request.get("input"), "input")
            opening = request.get("instructions") or ""
        else:
            found = _messages(endpoint, request.get("messages"))
            opening = chat.text_of(request.get("system"), "system")
    except RecordError:
        return None
    if not found:
        return None
    system = [each["content"] for each in found if each["role"] in ("system", "developer")]
    rest = [_said(each) for each in found if each["role"] not in ("system", "developer")]
    tools = [str(tool["function"].get("name")) for tool in chat.tools_of(request)]
    return Asked("\n".join(filter(None, [opening, *system])), tuple(rest), tuple(sorted(tools)))


def answered(endpoint: Endpoint, response: Mapping[str, Any], choice: int = 0) -> Said | None:
    """The message of a response; None as in ``asked``."""
    try:
        if endpoint == "responses":
            found = chat.from_responses(response.get("output"), "output")
        elif endpoint == "messages":
            found = chat.from_anthropic({"role": "assistant", "content": response.get("content")}, "content")
        else:
            found = _messages(endpoint, [each.get("message") for each in choices(response, choice)])
    except RecordError:
        return None
    return _said(found[-1]) if found else None


def choices(response: Mapping[str, Any], choice: int) -> list[Mapping[str, Any]]:
    """The choice of that index, in a list; an empty one where there is none."""
    listed = response.get("choices")
    found = [each for each in listed if isinstance(each, Mapping)] if isinstance(listed, list) else []
    return [each for place, each in enumerate(found) if each.get("index", place) == choice][:1]


def _messages(endpoint: Endpoint, listed: Any) -> list[chat.Message]:
    found: list[chat.Message] = []
    for place, each in enumerate(listed if isinstance(listed, list) else ()):
        field = f"messages[{place}]"
        if endpoint == "messages":
            found += chat.from_anthropic(each, field)
        else:
            found.append(chat.from_openai(each, field))
    return found


def _said(message: chat.Message) -> Said:
    text = message["content"]
    thinking = bool(message.get("reasoning_content"))
    if message["role"] == "assistant":
        thought, end, rest = text.partition(THINK_END)
        if end:
            text, thinking = rest, thinking or bool(thought.replace("<think>", "").strip())
    calls = tuple(
        (str(call["function"]["name"]), _text(call["function"]["arguments"])) for call in message.get("tool_calls", ())
    )
    return Said(message["role"], text, thinking, calls, message.get("tool_call_id"))


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _plain(call: tuple[str, str]) -> tuple[str, str]:
    """With arguments spelt in one way."""
    name, arguments = call
    with contextlib.suppress(ValueError):
        arguments = json.dumps(json.loads(arguments), sort_keys=True)
    return name, arguments
