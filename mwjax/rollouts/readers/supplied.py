"""What session files lack of their contexts and a user may have: the system prompt, what the program put before the
first message, and the tools."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mwjax.rollouts.errors import RecordError, file_error
from mwjax.rollouts.readers import chat
from mwjax.rollouts.readers.reader import Options
from mwjax.rollouts.readers.seen import Seen
from mwjax.rollouts.record import MAIN_CHAIN

SYSTEM, TOOLS, BEFORE = "system prompt", "tool list", "context before the first message"
GIVEN_BY = {SYSTEM: "--system", BEFORE: "--system", TOOLS: "--tools"}
GAP = "messages before a line that is missing"  # nobody can give these


def opening_in(path: str) -> tuple[chat.Message, ...]:
    """``Options.opening`` from a file: the text of the system prompt, or a JSON list of messages that begins with it
    and goes on with what the program put before the first message of the log. Raises ValueError."""
    text = _text(path)
    listed = _json(text)
    if not isinstance(listed, list):
        if not text.strip():
            raise ValueError(f"{path} is empty: it must hold the system prompt, or a JSON list of messages")
        return (chat.message("system", text),)
    try:
        found = tuple(chat.from_openai(each, f"[{place}]") for place, each in enumerate(listed))
    except RecordError as error:
        raise ValueError(f"{path}: {error}") from None
    if not found or found[0]["role"] != "system":
        raise ValueError(f"{path}: a list of messages must begin with that of the system")
    return found


def tools_in(path: str) -> tuple[dict[str, Any], ...]:
    """``Options.tools`` from a file: a JSON list of tools in the form of either API, or a request that has one. Raises
    ValueError."""
    value = _json(_text(path))
    listed = value.get("tools") if isinstance(value, dict) else value
    if not isinstance(listed, list):
        raise ValueError(f"{path} must be a JSON list of tools, in OpenAI's form or Anthropic's")
    for place, tool in enumerate(listed):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{path}: [{place}] is no tool: it has no name")
    return chat.function_tools(listed)


def completed(
    calls: Sequence[Seen], missing: Sequence[str], options: Options, *, always_before: bool
) -> tuple[list[Seen], list[str], list[str]]:
    """The calls with what the user gave of what is ``missing``; what is still missing; and what was given.

    Only the main chain is completed: sub-agents have prompts of their own, so where something was given for the main
    chain they are context only. always_before: what was put before the first message stays there after a compaction.
    """
    system = [dict(each) for each in options.opening if each["role"] == "system"]
    before = [dict(each) for each in options.opening if each["role"] != "system"]
    had = {SYSTEM: bool(system), BEFORE: bool(before), TOOLS: options.tools is not None}
    given = [what for what in missing if had.get(what)]
    if not given or not any(call.chain == MAIN_CHAIN for call in calls):
        return list(calls), list(missing), []
    result: list[Seen] = []
    compacted = False
    for call in calls:
        if call.chain != MAIN_CHAIN:
            result.append(dataclasses.replace(call, trainable=False))
            continue
        compacted = compacted or call.detail == "compaction"
        messages = list(call.messages)
        if SYSTEM in given and messages and messages[0]["role"] == "system":
            del messages[0]
        if BEFORE in given and (always_before or not compacted):
            messages = _put_before(before, messages)
        messages = [*(system if SYSTEM in given else ()), *messages]
        tools = (options.tools or ()) if TOOLS in given else call.tools
        result.append(dataclasses.replace(call, messages=tuple(messages), tools=tools))
    return result, [what for what in missing if what not in given], given


def _put_before(before: Sequence[chat.Message], messages: list[chat.Message]) -> list[chat.Message]:
    """Two user messages that meet are one, as programs send them."""
    count = next((place for place, each in enumerate(messages) if each["role"] != "system"), len(messages))
    head, rest = messages[:count], messages[count:]
    if rest and before[-1]["role"] == rest[0]["role"] == "user":
        joined = chat.message("user", f"{before[-1]['content']}\n{rest[0]['content']}")
        return [*head, *before[:-1], joined, *rest[1:]]
    return [*head, *before, *rest]


def _text(path: str) -> str:
    try:
        return Path(path).expanduser().read_text("utf-8")
    except OSError as error:
        raise ValueError(str(file_error("read", path, error))) from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
