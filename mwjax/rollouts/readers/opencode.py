"""Sessions of OpenCode: its SQLite database (``opencode.db``) and what ``opencode export ID`` prints.

Tables ``session`` (``id, parent_id``), ``message`` and ``part``, whose ``data`` is JSON; an export has the same
objects, ``{info, messages: [{info, parts}]}`` (sst/opencode, packages/opencode/src/session/message-v2.ts). One step of
an assistant message is one call of the model. A ``compaction`` part in a user message, followed by an assistant message
with ``summary``, makes the history: a question, the summary, the messages from ``tail_start_id`` on. A tool result with
``time.compacted`` was cleared at that time. System prompt, tools, and the calls for titles and summaries are not
stored; in the database a sub-agent is a session of its own, with ``parent_id``.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mwjax.rollouts.errors import RecordError, Refusal, RolloutFileError, file_error
from mwjax.rollouts.fields import described
from mwjax.rollouts.lines import is_compressed
from mwjax.rollouts.readers import chat
from mwjax.rollouts.readers.reader import Head, Item, Options, Remark
from mwjax.rollouts.readers.records import head, json_records
from mwjax.rollouts.readers.rendered import rendering_for, rollout_items, with_causes
from mwjax.rollouts.readers.seen import Seen
from mwjax.rollouts.readers.sessions import at
from mwjax.rollouts.readers.supplied import SYSTEM, TOOLS
from mwjax.rollouts.record import MAIN_CHAIN

NAME = "opencode"
DESCRIPTION = "OpenCode's database or an exported session (no ids: rendered)"

SQLITE = b"SQLite format 3\x00"
CLEARED = "[Old tool result content cleared]"
INTERRUPTED = "[Tool execution was interrupted]"
ASKED_FOR_SUMMARY = "What did we do so far?"
LOCKED_SECONDS = 5.0  # in which a program that writes to the database may be done with it

Session = Mapping[str, Any]  # {"info": ..., "messages": [{"info": ..., "parts": [...]}]}


def looks_like(head: Head) -> bool:
    if head.data.startswith(SQLITE):
        return True
    first = head.records[0] if head.records else None
    return (
        isinstance(first, dict)
        and isinstance(first.get("info"), dict)
        and isinstance(first.get("messages"), list)
        and all(isinstance(each, dict) and "info" in each and "parts" in each for each in first["messages"][:3])
    )


def read(path: str, options: Options) -> Iterator[Item]:
    rendering = rendering_for(NAME, options)
    with open(os.path.expanduser(path), "rb") as file:
        database = file.read(len(SQLITE)) == SQLITE
    sessions: list[Session] = []
    if database:
        sessions, lost = _stored(path)
        yield from [Refusal(path, 1, "message.session_id", "names a session that is not in the database")] * lost
    elif is_compressed(path) and head(path).data.startswith(SQLITE):
        raise RolloutFileError(f"cannot read {path}: it is a compressed database; decompress it first")
    else:
        for record in json_records(path, options):
            if isinstance(record, Refusal):
                yield record
            elif not isinstance(record.value, dict) or not isinstance(record.value.get("messages"), list):
                yield record.refusal(path, "messages", f"is {described(record.value)}, must be an exported session")
            else:
                try:
                    sessions.append(_checked(record.value))
                except RecordError as error:
                    yield record.refusal(path, error.field, error.reason)
    children: dict[str, list[Session]] = {}
    known = {_name(session) for session in sessions} - {""}
    for session in sessions:
        if (parent := _name(session, "parentID")) in known:
            children.setdefault(parent, []).append(session)
    for number, session in enumerate(sessions, start=1):
        if _name(session, "parentID") in known:
            continue  # a sub-agent, part of its parent's rollout
        calls: list[Seen] = []
        empty: list[str] = []
        refused: list[RecordError] = []
        records = 0
        for chain, member in _family(session, children):
            records += len(member["messages"])
            try:
                calls += _calls(_checked(member), chain, empty, refused)
            except RecordError as error:
                refused += [error] * len(member["messages"])
        for each in refused:
            yield Refusal(path, number, each.field, f"{each.reason} (session {_name(session)})")
        order = sorted(range(len(calls)), key=lambda at: (calls[at].time or 0.0, at))
        calls = with_causes([calls[at] for at in order])
        for reason in empty:
            yield Remark("empty", path, number, reason)
        yield from rollout_items(
            path,
            str(session["info"].get("id")),
            calls,
            options,
            rendering,
            missing=[SYSTEM, TOOLS],
            records=records - len(empty) - len(refused),
            meta={"program": f"opencode {session['info'].get('version')}"},
        )


def _name(session: Session, key: str = "id") -> str:
    """Its id, or its parent's; empty where it has none."""
    return str(session["info"].get(key) or "")


def _checked(session: Any) -> Session:
    """An exported session, if it has the shape of one. Raises RecordError."""
    if not isinstance(session.get("info"), dict):
        raise RecordError("info", "is no object: this is no exported session")
    for place, each in enumerate(session["messages"]):
        field = f"messages[{place}]"
        if not isinstance(each, dict) or not isinstance(each.get("info"), dict):
            raise RecordError(f"{field}.info", "is no object")
        parts = each.get("parts")
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise RecordError(f"{field}.parts", "is no list of parts")
        for number, part in enumerate(parts):
            if part.get("type") == "tool" and not isinstance(part.get("state"), dict):
                raise RecordError(f"{field}.parts[{number}].state", "is no object")
    return session


def _stored(path: str) -> tuple[list[Session], int]:
    """The sessions of a database, oldest first, not checked yet; and how many messages belong to none. Raises
    RolloutFileError."""
    place = Path(path).expanduser().resolve()
    try:
        # The program may have it open, or have left its write-ahead log beside it.
        with contextlib.closing(
            sqlite3.connect(f"{place.as_uri()}?mode=ro", timeout=LOCKED_SECONDS, uri=True)
        ) as connection:
            found = connection.execute(
                "SELECT id, parent_id, version FROM session ORDER BY time_created, id"
            ).fetchall()
            sessions: dict[str, dict[str, Any]] = {
                each[0]: {"info": {"id": each[0], "parentID": each[1], "version": each[2]}, "messages": []}
                for each in found
            }
            messages: dict[str, dict[str, Any]] = {}
            lost = 0
            rows = connection.execute("SELECT id, session_id, data FROM message ORDER BY time_created, id")
            for name, session, data in rows:
                messages[name] = {"info": _with_id(data, name), "parts": []}
                if session in sessions:
                    sessions[session]["messages"].append(messages[name])
                else:
                    lost += 1
            for name, message, data in connection.execute(
                "SELECT id, message_id, data FROM part ORDER BY message_id, id"
            ):
                if message in messages:
                    messages[message]["parts"].append(_with_id(data, name))
    except (sqlite3.Error, ValueError) as error:
        locked = "locked" in str(error)
        advice = "; a program writes to it: close that, or import a copy" if locked else "; is it OpenCode 1.x's?"
        raise file_error("read", path, error, advice) from None
    return list(sessions.values()), lost


def _with_id(data: Any, name: str) -> dict[str, Any] | None:
    """A row's JSON object; None where it is none."""
    try:
        value = json.loads(data)
    except (TypeError, ValueError, RecursionError):
        return None
    return {**value, "id": name} if isinstance(value, dict) else None


def _family(session: Session, children: Mapping[str, list[Session]]) -> Iterator[tuple[str, Session]]:
    """(chain, session) of a session and all below it."""
    yield MAIN_CHAIN, session
    below = list(children.get(_name(session), ()))
    number = 0
    while below:
        child = below.pop(0)
        number += 1
        yield f"subagent-{number}", child
        below += children.get(_name(child), ())


def _calls(session: Session, chain: str, empty: list[str], refused: list[RecordError]) -> list[Seen]:
    """The calls of one session; ``empty`` and ``refused`` take what is to be said of the other answers."""
    messages = sorted(session["messages"], key=lambda each: (_created(each), str(each["info"].get("id"))))
    calls: list[Seen] = []
    detail = None
    for place, each in enumerate(messages):
        info = each["info"]
        if info.get("role") != "assistant":
            continue
        if info.get("summary"):
            detail = "compaction"
            continue
        steps = [
            step for step in _steps(each) if step["content"] or "tool_calls" in step or "reasoning_content" in step
        ]
        if not steps:
            empty.append(f"the answer is empty{': ' + _error(info) if info.get('error') else ''}")
            continue
        now = _created(each)
        try:
            history = _history(messages[:place], now)
        except RecordError as error:
            refused.append(error)
            continue
        results = {str(part.get("callID")): _result(part, now) for part in each["parts"] if part.get("type") == "tool"}
        for number, step in enumerate(steps):
            calls.append(
                Seen(
                    tuple(history),
                    step,
                    line=1,
                    chain=chain,
                    detail=detail,
                    cut_off=bool(info.get("error")) and number == len(steps) - 1,
                    identity=(str(info["id"]), number) if info.get("id") else None,
                    finish_reason=info.get("finish") if number == len(steps) - 1 else "tool-calls",
                    time=now / 1000 + number * 1e-6,
                )
            )
            detail = None
            history += [step, *(results[call["id"]] for call in step.get("tool_calls", ()))]
    return calls


def _history(messages: list[dict[str, Any]], now: float) -> list[chat.Message]:
    """What a call at ``now`` saw of the messages before it."""
    start, question, summary = 0, None, None
    for place, each in enumerate(messages):
        asked = next((part for part in each["parts"] if part.get("type") == "compaction"), None)
        if asked is None or each["info"].get("role") != "user":
            continue
        done = next((m for m in messages[place + 1 :] if m["info"].get("parentID") == each["info"].get("id")), None)
        if done is None or not done["info"].get("summary") or done["info"].get("error"):
            continue
        tail = asked.get("tail_start_id")
        names = [m["info"].get("id") for m in messages]
        start = names.index(tail) if tail in names else names.index(done["info"].get("id")) + 1
        question, summary = each, done
    result: list[chat.Message] = []
    if question is not None and summary is not None:
        result = [chat.message("user", ASKED_FOR_SUMMARY), *_assistant(summary, now)]
    for each in messages[start:]:
        if each is question or each is summary:
            continue
        result += _assistant(each, now) if each["info"].get("role") == "assistant" else _user(each)
    return result


def _user(message: Mapping[str, Any]) -> list[chat.Message]:
    texts = []
    for place, part in enumerate(message["parts"]):
        kind = part.get("type")
        if kind == "text" and not part.get("ignored"):
            texts.append(str(part.get("text") or ""))
        elif kind == "compaction":
            texts.append(ASKED_FOR_SUMMARY)
        elif kind == "subtask":
            texts.append("The following tool was executed by the user")
        elif kind == "file" and part.get("mime") not in ("text/plain", "application/x-directory"):
            raise RecordError(
                f"parts[{place}]", f"is a file of kind {part.get('mime')}; only text can become token ids"
            )
    return [chat.message("user", "\n".join(texts))] if texts else []


def _assistant(message: Mapping[str, Any], now: float) -> list[chat.Message]:
    results = {str(part.get("callID")): _result(part, now) for part in message["parts"] if part.get("type") == "tool"}
    return [
        each
        for step in _steps(message)
        if step["content"] or "tool_calls" in step
        for each in (step, *(results[call["id"]] for call in step.get("tool_calls", ())))
    ]


def _steps(message: Mapping[str, Any]) -> list[chat.Message]:
    steps: list[chat.Message] = [chat.message("assistant")]
    for part in message["parts"]:
        kind, step = part.get("type"), steps[-1]
        if kind == "step-start" and len(step) > 2:
            steps.append(chat.message("assistant"))
        elif kind == "text":
            step["content"] += str(part.get("text") or "")
        elif kind == "reasoning" and part.get("text"):
            step["reasoning_content"] = step.get("reasoning_content", "") + str(part["text"])
        elif kind == "tool":
            made = chat.tool_call(part.get("callID"), part.get("tool"), part["state"].get("input"))
            step.setdefault("tool_calls", []).append(made)
    return steps


def _result(part: Mapping[str, Any], now: float) -> chat.Message:
    state = part["state"]
    cleared = at(state, "time.compacted")
    if state.get("status") == "completed":
        text = CLEARED if isinstance(cleared, (int, float)) and cleared <= now else str(state.get("output") or "")
    else:
        text = str(state.get("error") or INTERRUPTED)
    return chat.message("tool", text, tool_call_id=str(part.get("callID")))


def _created(message: Mapping[str, Any]) -> float:
    created = at(message["info"], "time.created")
    return float(created) if isinstance(created, (int, float)) else 0.0


def _error(info: Mapping[str, Any]) -> str:
    error = info.get("error")
    return str(error.get("name") if isinstance(error, dict) else error)
