"""A stream's events put together into the response that the same call would have got without streaming."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mwjax.rollouts.engine_ids import Endpoint, choices_of

# What a later chunk continues; any other field of a delta is said once, or anew.
_CONTINUED = frozenset({"arguments", "content", "reasoning", "reasoning_content", "refusal", "text", "thinking"})


def assembled(endpoint: Endpoint, payloads: Sequence[Any]) -> dict[str, Any] | None:
    """``payloads``: the parsed data of the events, in order. A stream that was cut off gives what had arrived; None
    where that is nothing."""
    objects = [payload for payload in payloads if isinstance(payload, dict)]
    if endpoint == "chat.completions":
        return _chat(objects)
    return _responses(objects) if endpoint == "responses" else _messages(objects)


def _chat(chunks: list[dict[str, Any]]) -> dict[str, Any] | None:
    result: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        if "choices" not in chunk:
            continue
        for key, value in chunk.items():
            if key == "sglext" and isinstance(value, dict):
                result[key] = {**_object(result.get(key)), **value}
            elif key != "choices" and (value is not None or key not in result):
                result[key] = value
        for choice in choices_of(chunk):
            index = choice.get("index")
            _add_choice(choices.setdefault(index if isinstance(index, int) else 0, {}), choice)
    if not result and not choices:
        return None
    if result.get("object") == "chat.completion.chunk":
        result["object"] = "chat.completion"
    for choice in choices.values():
        calls = _object(choice.get("message")).get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            _object(call).pop("index", None)
    return {**result, "choices": [choices[index] for index in sorted(choices)]}


def _add_choice(whole: dict[str, Any], choice: dict[str, Any]) -> None:
    for key, value in choice.items():
        if key == "delta":
            if isinstance(value, dict):
                message = whole["message"] = _object(whole.get("message"))
                _add_delta(message, value)
        elif key == "token_ids" and isinstance(value, list):
            whole[key] = _extended(whole.get(key), value)
        elif key == "logprobs" and isinstance(value, dict):
            before = _object(whole.get(key))
            whole[key] = {
                name: _extended(before.get(name), part) if isinstance(part, list) else part
                for name, part in value.items()
            }
        elif value is not None or key not in whole:
            whole[key] = value


def _object(value: Any) -> dict[str, Any]:
    """The object itself; an empty one where a server sends something else."""
    return value if isinstance(value, dict) else {}


def _extended(before: Any, more: list[Any]) -> list[Any]:
    """A list of our own with both: the same one again, since a copy at every token would take quadratic time."""
    if not isinstance(before, list):
        return list(more)
    before.extend(more)
    return before


def _add_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for key, value in delta.items():
        before = message.get(key)
        if isinstance(value, str) and isinstance(before, str) and key in _CONTINUED:
            message[key] = before + value
        elif isinstance(value, list) and all(isinstance(each, dict) and "index" in each for each in value):
            parts = message[key] = before if isinstance(before, list) else []
            for part in value:
                known = next((each for each in parts if _object(each).get("index") == part["index"]), None)
                if known is None:
                    parts.append(known := {})
                _add_delta(known, part)
        elif isinstance(value, list):
            message[key] = _extended(before, value)  # without indices each is whole
        elif isinstance(value, dict):
            message[key] = _object(before)
            _add_delta(message[key], value)
        elif value is not None or key not in message:
            message[key] = value


def _responses(events: list[dict[str, Any]]) -> dict[str, Any] | None:
    result: dict[str, Any] | None = None
    items: dict[int, dict[str, Any]] = {}
    for event in events:
        kind, index = str(event.get("type")), event.get("output_index")
        if isinstance(event.get("response"), dict):
            result = event["response"]
            if kind in ("response.completed", "response.incomplete", "response.failed"):
                return result
        elif kind.startswith("response.output_item.") and isinstance(event.get("item"), dict):
            items[index if isinstance(index, int) else 0] = json.loads(json.dumps(event["item"]))
        elif kind.endswith(".delta") and isinstance(index, int) and isinstance(event.get("delta"), str):
            _add_output_text(items.setdefault(index, {"content": []}), kind, event)
    if result is None and not items:
        return None
    return {**(result or {}), "output": [items[index] for index in sorted(items)]}


def _add_output_text(item: dict[str, Any], kind: str, event: dict[str, Any]) -> None:
    delta = event["delta"]
    if "arguments" in kind or "input" in kind:
        field = "input" if "custom_tool" in kind else "arguments"
        item[field] = (item.get(field) or "") + delta
        return
    place = event.get("content_index", event.get("summary_index", 0))
    name = "summary" if "summary" in kind else "content"
    parts = item[name] = item.get(name) or []
    while isinstance(place, int) and len(parts) <= place < len(parts) + 64:
        parts.append({"type": "refusal" if "refusal" in kind else kind.split(".")[1], "text": ""})
    if isinstance(place, int) and 0 <= place < len(parts) and isinstance(parts[place], dict):
        parts[place]["text"] = (parts[place].get("text") or "") + delta


def _messages(events: list[dict[str, Any]]) -> dict[str, Any] | None:
    message: dict[str, Any] | None = None
    blocks: dict[int, dict[str, Any]] = {}
    arguments: dict[int, str] = {}
    for event in events:
        kind = event.get("type")
        index = event["index"] if isinstance(event.get("index"), int) else 0
        raw = event.get("delta")
        delta: dict[str, Any] = raw if isinstance(raw, dict) else {}
        if kind == "message_start" and isinstance(event.get("message"), dict):
            message = dict(event["message"])
        elif kind == "content_block_start" and isinstance(event.get("content_block"), dict):
            blocks[index] = dict(event["content_block"])
        elif kind == "content_block_delta":
            block = blocks.setdefault(index, {})
            if delta.get("type") == "input_json_delta":
                arguments[index] = arguments.get(index, "") + str(delta.get("partial_json") or "")
            elif delta.get("type") == "citations_delta":
                block["citations"] = [*(block.get("citations") or ()), delta.get("citation")]
            else:
                for key, value in delta.items():
                    if key in ("text", "thinking") and isinstance(value, str):
                        block[key] = (block.get(key) or "") + value
                    elif key != "type":  # said once: a signature, what a compaction on the server left
                        block[key] = value
        elif kind == "message_delta":
            beside = {key: value for key, value in event.items() if key not in ("type", "delta", "usage")}
            message = {**(message or {}), **delta, **{key: value for key, value in beside.items() if value is not None}}
            if isinstance(event.get("usage"), dict):
                given = {key: value for key, value in event["usage"].items() if value is not None}
                message["usage"] = {**(message.get("usage") or {}), **given}
    for index, text in arguments.items():
        try:
            blocks[index]["input"] = json.loads(text) if text else blocks[index].get("input", {})
        except ValueError:
            blocks[index]["partial_json"] = text  # cut off in the middle
    if message is None and not blocks:
        return None
    return {**(message or {}), "content": [blocks[index] for index in sorted(blocks)]}
