"""Conversations in messages, one a line: sets for supervised fine-tuning, and what trainers log of their completions.

A record has ``messages``, or ``prompt`` and ``completion`` (TRL's conversational form, the parquet of its
``log_completions``, trl/trainer/grpo_trainer.py of trl 1.16.0, written as JSON Lines, and verifiers' ``results.jsonl``
without trajectories), each a list of chat messages; ``tools`` (also as the text of their JSON; verifiers' are
``tool_defs``) and ``chat_template_kwargs`` where there are any. Every answer in
``messages`` or ``completion`` is a call whose prompt is all before it; one of ``weight`` 0 (OpenAI's fine-tuning form)
is context only. Plain text is refused: its ids cannot be told.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from mwjax.rollouts.errors import RecordError, Refusal
from mwjax.rollouts.fields import described
from mwjax.rollouts.readers import chat
from mwjax.rollouts.readers.reader import Head, Item, Options, Remark
from mwjax.rollouts.readers.records import Record, json_records
from mwjax.rollouts.readers.rendered import of_one_record, rendering_for, rollout_items
from mwjax.rollouts.readers.seen import Seen
from mwjax.rollouts.readers.sessions import at, group_and_reward
from mwjax.rollouts.readers.supplied import TOOLS

NAME = "conversation"
DESCRIPTION = "conversations, one a line: messages, or prompt and completion (no ids: rendered)"

_OTHERS = ("request", "response", "choices", "trajectory", "nodes")  # of formats that have messages too


def looks_like(head: Head) -> bool:
    first = head.records[0] if head.records else None
    if not isinstance(first, dict) or first.keys() & set(_OTHERS):
        return False
    return _is_messages(first.get("messages")) or (
        (_is_messages(first.get("prompt")) and _is_messages(first.get("completion"))) or _is_text(first)
    )


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(at(each, "role"), str) for each in value)


def _is_text(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("prompt", "completion"))


def read(path: str, options: Options) -> Iterator[Item]:
    rendering = rendering_for(NAME, options)
    options = dataclasses.replace(options, reward=options.reward or "reward")
    stem = os.path.basename(path).partition(".")[0]
    for record in json_records(path, options):
        if isinstance(record, Refusal):
            yield record
            continue
        try:
            calls = _calls(record)
            group, reward = group_and_reward(record.value, options)
        except RecordError as error:
            yield record.refusal(path, error.field, error.reason)
            continue
        if not calls:
            yield Remark("empty", path, record.line, "the conversation has no answer")
            continue
        without_tools = not calls[0].tools and any("tool_calls" in call.answer for call in calls)
        items = rollout_items(
            path,
            f"{stem}:{record.line}{record.place}",
            calls,
            options,
            rendering,
            missing=[TOOLS] if without_tools else [],
            group=group,
            reward=reward,
        )
        yield from of_one_record(items)


def _calls(record: Record) -> list[Seen]:
    """Raises RecordError."""
    value = record.value
    if _is_text(value):
        raise RecordError("completion", "is text, of which the template and so the ids cannot be told; save messages")
    if not isinstance(value, dict):
        raise RecordError("", f"is {described(value)}, must be an object with messages")
    calls: list[Seen] = []
    history: list[chat.Message] = []
    tools, options = _tools(value), value.get("chat_template_kwargs")
    for field in ("messages",) if "messages" in value else ("prompt", "completion"):
        listed = value.get(field)
        if not isinstance(listed, list):
            raise RecordError(field, f"is {described(listed)}, must be a list of messages")
        for place, each in enumerate(listed):
            message = chat.from_openai(each, f"{field}[{place}]")
            if message["role"] == "assistant" and field != "prompt" and history:
                calls.append(
                    Seen(
                        tuple(history),
                        message,
                        tools,
                        line=record.line,
                        trainable=each.get("weight") != 0,
                        options=options if isinstance(options, dict) else {},
                    )
                )
            history.append(message)
    return calls


def _tools(value: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    given = value.get("tools")
    if not isinstance(given, str) or not given.strip():
        return chat.tools_of(value) or chat.function_tools(value.get("tool_defs"))
    try:
        listed = json.loads(given)
    except ValueError:
        listed = None
    if not isinstance(listed, list):
        raise RecordError("tools", f"is {described(given)}, must be a list of tools or the JSON of one")
    return chat.function_tools(listed)
