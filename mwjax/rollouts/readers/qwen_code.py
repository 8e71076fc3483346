"""Sessions of Qwen Code: ``~/.qwen/projects/PROJECT/chats/ID.jsonl``.

Lines have ``uuid, parentUuid, type, message {role, parts}`` (QwenLM/qwen-code, packages/core: chatRecordingService);
parts are ``{text, thought}``, ``{functionCall}`` and ``{functionResponse}``; ``usageMetadata`` has an answer's counts.
A ``chat_compression`` line's ``systemPayload.compressedHistory`` replaces all before it. Sub-agents are in
``subagents/ID/agent-*.jsonl`` beside ``chats``, lines marked ``isSidechain``; they are read with their session. The
system prompt, the tools, the context that is put before the first message, and the calls for summaries are not in the
files.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mwjax.rollouts.errors import RecordError, Refusal
from mwjax.rollouts.readers import chat
from mwjax.rollouts.readers.linked import Links, parent_of
from mwjax.rollouts.readers.reader import Head, Item, Options, Remark
from mwjax.rollouts.readers.records import json_records
from mwjax.rollouts.readers.rendered import rendering_for, rollout_items, seconds, with_causes
from mwjax.rollouts.readers.seen import Seen
from mwjax.rollouts.readers.supplied import BEFORE, GAP, SYSTEM, TOOLS
from mwjax.rollouts.record import MAIN_CHAIN

NAME = "qwen-code"
DESCRIPTION = "session files of Qwen Code (no ids: rendered)"

_USAGE = "usageMetadata"  # an engine sends it at the end, so an answer that broke off has none
_MESSAGES = ("user", "assistant", "tool_result")


def looks_like(head: Head) -> bool:
    lines = [each for each in head.records if isinstance(each, dict)]
    return any(
        {"uuid", "parentUuid", "sessionId"} <= each.keys()
        and isinstance(each.get("message"), dict)
        and isinstance(each["message"].get("parts"), list)
        for each in lines
    )


def read(path: str, options: Options) -> Iterator[Item]:
    rendering = rendering_for(NAME, options)
    calls: list[Seen] = []
    missing = [SYSTEM, TOOLS, BEFORE]
    records = 0
    name = Path(path).name.partition(".")[0]
    for number, (file, chain) in enumerate(_files(path)):
        links = Links()
        for record in json_records(file, options if file == path else Options()):
            if isinstance(record, Refusal):
                yield record
                continue
            value = record.value
            if not isinstance(value, dict) or not isinstance(value.get("uuid"), str):
                yield record.refusal(file, "uuid", "missing: this is no line of a Qwen Code session")
            elif links.add(value["uuid"], parent_of(value), value, record.line):
                records += 1
                name = str(value.get("sessionId") or name) if number == 0 else name
            else:
                yield Remark("merged", file, record.line, "a line with the same uuid is there already")
        counted = any(links.entries[uuid].get(_USAGE) for uuid in links)
        for uuid in links:
            entry = links.entries[uuid]
            if entry.get("type") != "assistant" or not isinstance(entry.get("message"), dict):
                continue
            try:
                call = _call(links, uuid, chain)
            except RecordError as error:
                yield Refusal(file, links.lines[uuid], error.field, error.reason)
                records -= 1
                continue
            if call is None:
                yield Remark("empty", file, links.lines[uuid], "the answer is empty")
                records -= 1
            else:
                calls.append(dataclasses.replace(call, cut_off=counted and not entry.get(_USAGE)))
                missing += [] if links.begins(uuid) or GAP in missing else [GAP]
    calls = sorted(calls, key=lambda call: (call.time or 0.0, call.chain != MAIN_CHAIN))
    yield from rollout_items(
        path,
        name,
        with_causes(calls),
        options,
        rendering,
        missing=missing,
        records=records,
        meta={"program": "qwen-code"},
    )


def _files(path: str) -> Iterator[tuple[str, str]]:
    yield path, MAIN_CHAIN
    place = Path(path).expanduser()
    beside = place.parent.parent / "subagents" / place.name.partition(".")[0]
    for number, file in enumerate(sorted(beside.glob("*.jsonl")) if place.parent.name == "chats" else (), start=1):
        yield str(file), f"subagent-{number}"


def _call(links: Links, uuid: str, chain: str) -> Seen | None:
    """The call that wrote this line; None where it wrote nothing. Raises RecordError."""
    entry = links.entries[uuid]
    answers = _messages(entry["message"], "message")
    if len(answers) != 1 or not (answers[0]["content"] or answers[0].get("tool_calls")):
        return None
    history: list[chat.Message] = []
    detail = None
    for name in links.before(uuid):
        before = links.entries[name]
        if before.get("subtype") == "chat_compression":
            history, detail = _compressed(before, history), "compaction"
        elif before.get("type") in _MESSAGES and isinstance(before.get("message"), dict):
            history += _messages(before["message"], "message")
            detail = None if before["type"] == "assistant" else detail
    return Seen(
        tuple(_joined(history)),
        answers[0],
        identity=uuid,
        line=links.lines[uuid],
        chain=chain,
        detail=detail,
        time=seconds(entry.get("timestamp")),
    )


def _compressed(entry: Mapping[str, Any], before: list[chat.Message]) -> list[chat.Message]:
    """The history after a compression. Results of tools that came just before it are sent after it, and are not in what
    it wrote down."""
    payload = entry.get("systemPayload")
    listed = payload.get("compressedHistory") if isinstance(payload, dict) else None
    if not isinstance(listed, list):
        raise RecordError("systemPayload.compressedHistory", "missing: what the model saw after it is not in the log")
    history = [
        each
        for place, content in enumerate(listed)
        for each in _messages(content, f"systemPayload.compressedHistory[{place}]")
    ]
    waiting = [call["id"] for call in history[-1].get("tool_calls", ())] if history else []
    return history + [each for each in before if each.get("tool_call_id") in waiting]


def _joined(history: list[chat.Message]) -> list[chat.Message]:
    """User messages that follow one another as one, which is how the program sends them."""
    result: list[chat.Message] = []
    for each in history:
        if result and each["role"] == result[-1]["role"] == "user":
            result[-1] = chat.message("user", f"{result[-1]['content']}\n{each['content']}")
        else:
            result.append(each)
    return result


def _messages(content: Any, field: str) -> list[chat.Message]:
    """The chat messages of one content in Gemini's form."""
    parts = content.get("parts") if isinstance(content, dict) else None
    if not isinstance(parts, list):
        raise RecordError(f"{field}.parts", "is no list of parts")
    texts: list[str] = []
    thoughts: list[str] = []
    calls, results = [], []
    for place, part in enumerate(parts):
        where = f"{field}.parts[{place}]"
        if not isinstance(part, dict):
            raise RecordError(where, "is no part of a message")
        if isinstance(part.get("functionCall"), dict):
            made = part["functionCall"]
            calls.append(chat.tool_call(made.get("id"), made.get("name"), made.get("args")))
        elif isinstance(part.get("functionResponse"), dict):
            given = part["functionResponse"]
            results.append(chat.message("tool", _output(given.get("response")), tool_call_id=given.get("id")))
        elif isinstance(part.get("text"), str):
            (thoughts if part.get("thought") else texts).append(part["text"])
        elif part.keys() - {"thoughtSignature", "thought"}:
            raise RecordError(where, f"holds {', '.join(part)}; only text can become token ids")
    role = "assistant" if content.get("role") == "model" else "user"
    if role == "user" and results and not texts:
        return results
    joined = "".join(texts) if role == "assistant" else "\n".join(texts)
    return [*results, chat.message(role, joined, reasoning="".join(thoughts), calls=calls)]


def _output(response: Any) -> str:
    if isinstance(response, dict):
        for key in ("output", "error"):
            if isinstance(response.get(key), str):
                return response[key]
    return response if isinstance(response, str) else json.dumps(response, ensure_ascii=False)
