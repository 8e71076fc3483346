"""Rollout files of Codex: ``~/.codex/sessions/YYYY/MM/DD/rollout-*.jsonl``.

Every line is ``{timestamp, type, payload}`` (openai/codex, codex-rs/protocol: RolloutItem). ``session_meta`` opens the
file with ``base_instructions``; ``response_item`` is an item of the responses API, in the order in which the model saw
or wrote it; ``compacted`` puts ``replacement_history`` in place of all items so far; an event ``thread_rolled_back``
takes the last ``num_turns`` user turns back; ``turn_aborted`` before an answer's token count says that it broke off.
Tools and the instruction to summarise are not in the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mwjax.rollouts.errors import RecordError, Refusal
from mwjax.rollouts.readers import chat
from mwjax.rollouts.readers.reader import Head, Item, Options
from mwjax.rollouts.readers.records import Record, json_records
from mwjax.rollouts.readers.rendered import rendering_for, rollout_items, seconds
from mwjax.rollouts.readers.seen import Seen
from mwjax.rollouts.readers.sessions import at
from mwjax.rollouts.readers.supplied import GAP, SYSTEM, TOOLS

NAME = "codex"
DESCRIPTION = "rollout files of Codex (no ids: rendered)"

UNREADABLE = "items that are no text"

_WRITTEN = ("reasoning", "function_call", "custom_tool_call", "local_shell_call")
_OWN = ("ghost_snapshot", "other")  # the program's own notes, which no model sees
_ENCRYPTED = ("compaction", "compaction_summary", "context_compaction")


def looks_like(head: Head) -> bool:
    first = head.records[0] if head.records else None
    return (
        isinstance(first, dict)
        and first.get("type") == "session_meta"
        and isinstance(first.get("payload"), dict)
        and "timestamp" in first
    )


def read(path: str, options: Options) -> Iterator[Item]:
    rendering = rendering_for(NAME, options)
    session = _Session("\n\n".join(each["content"] for each in options.opening if each["role"] == "system"))
    read_lines = 0
    for record in json_records(path, options):
        if isinstance(record, Refusal):
            yield record
            session.skip()
            continue
        try:
            session.take(record)
            read_lines += 1
        except RecordError as error:
            yield record.refusal(path, error.field, error.reason)
    session.answered()
    for line, reason in session.refused:
        yield Refusal(path, line, "payload", reason)
    read_lines -= len(session.refused)
    # Codex leaves out of its base instructions what is about tools that it does not offer.
    missing = [*([] if session.given else [SYSTEM]), TOOLS, *session.unseen]
    meta = {**session.meta, **({"supplied": [SYSTEM]} if session.given else {})}
    yield from rollout_items(
        path, session.name, session.calls, options, rendering, missing=missing, records=read_lines, meta=meta
    )


class _Session:
    """What the file has told so far. ``given``: the system prompt that the user gave in place of the file's. ``items``:
    the history as the model sees it; ``open``: where its answer under way begins, None between answers."""

    def __init__(self, given: str = "") -> None:
        self.name = "codex"
        self.given = given
        self.system = given
        self.forked: str | None = None
        self.items: list[dict[str, Any]] = []
        self.open: int | None = None
        self.line = 0
        self.time: str | None = None
        self.detail: str | None = None
        self.summing_up = False
        self.calls: list[Seen] = []
        self.unseen: list[str] = []
        self.meta: dict[str, Any] = {}
        self.lost = False
        self.gap = False  # a line since the latest compaction could not be read
        self.refused: list[tuple[int, str]] = []

    def take(self, record: Record) -> None:
        value = record.value
        kind = value.get("type") if isinstance(value, dict) else None
        payload = value.get("payload") if isinstance(value, dict) else None
        if not isinstance(kind, str) or not isinstance(payload, dict):
            self.skip()
            raise RecordError("", "is no line of a Codex rollout: it has no type and payload")
        if kind == "session_meta":
            self._open(value, payload)
        elif kind == "compacted":
            self.answered()
            self._compact(payload)
        elif kind == "event_msg" and payload.get("type") == "thread_rolled_back":
            self.answered()
            self._roll_back(payload.get("num_turns"))
        elif kind == "event_msg" and payload.get("type") == "turn_aborted":
            self.answered(cut_off=True)
        elif kind == "token_usage_record" or payload.get("type") == "token_count":
            self.answered()
        elif kind == "response_item":
            self._item(record.line, value, payload)

    def _open(self, value: Mapping[str, Any], payload: Mapping[str, Any]) -> None:
        if self.meta:
            return  # a fork repeats the lines of the session that it goes on from
        self.name = str(payload.get("id") or payload.get("session_id") or "codex")
        given = payload.get("base_instructions")
        own = str(given.get("text") or "") if isinstance(given, dict) else str(given or "")
        self.system = self.given or own
        self.forked = str(value.get("timestamp")) if payload.get("forked_from_id") else None
        self.meta = {
            "program": f"codex {payload.get('cli_version')}",
            **({"source": payload["source"]} if isinstance(payload.get("source"), dict) else {}),
        }

    def _item(self, line: int, value: Mapping[str, Any], item: dict[str, Any]) -> None:
        kind = item.get("type")
        if kind in _ENCRYPTED:
            self.answered()
            self._lose("payload")
        if kind in _OWN:
            return
        written = kind in _WRITTEN or (kind == "message" and item.get("role") == "assistant")
        try:
            chat.from_responses([item], "payload")
        except RecordError:
            self.unseen += [] if UNREADABLE in self.unseen else [UNREADABLE]
            raise
        if not written:
            self.answered()
        elif self.open is None:
            self.open = len(self.items)
        if written:
            self.line, self.time = line, str(value.get("timestamp"))
            self.summing_up = bool(at(value, "metadata.compaction_output"))
        self.items.append(item)

    def skip(self) -> None:
        """A line that cannot be read: from here on the history may lack something."""
        self.answered()
        self.gap = True

    def answered(self, *, cut_off: bool = False) -> None:
        """Ends the answer under way: a call."""
        if self.open is None:
            return
        history, written = self.items[: self.open], self.items[self.open :]
        self.open = None
        if self.summing_up:
            del self.items[-len(written) :]
            return
        if self.lost:
            reason = "follows an encrypted compaction: what the model saw is not in the log"
            self.refused.append((self.line, reason))
            return
        try:
            messages = chat.from_responses(history, "")
        except RecordError as error:  # a compaction can put anything into it
            self.refused.append((self.line, f"what the model saw before it cannot be rendered: {error}"))
            return
        if self.system:
            messages.insert(0, chat.message("system", self.system))
        answer = chat.joined(chat.from_responses(written, ""))
        hidden = any(item.get("encrypted_content") and not item.get("content") for item in written)
        for what, found in (("reasoning (it is encrypted)", hidden), (GAP, self.gap)):
            if found and what not in self.unseen:
                self.unseen.append(what)
        self.calls.append(
            Seen(
                chat.merged_system(messages),
                answer,
                line=self.line,
                detail=self.detail,
                cut_off=cut_off,
                trainable=self.forked is None or str(self.time) >= self.forked,
                time=seconds(self.time),
            )
        )
        self.detail = None

    def _compact(self, payload: Mapping[str, Any]) -> None:
        replaced = payload.get("replacement_history")
        if isinstance(replaced, list):
            self.items, self.lost, self.gap = [], False, False
            for place, item in enumerate(replaced):
                if isinstance(item, dict) and item.get("type") in _ENCRYPTED:
                    self._lose(f"payload.replacement_history[{place}]")
                self.items.append(item)
        else:
            # Earlier versions write the summary alone; the history then is what users said, and it.
            kept = [item for item in self.items if item.get("type") == "message" and item.get("role") != "assistant"]
            said = {"type": "message", "role": "user", "content": str(payload.get("message") or "")}
            self.items = [*kept, said]
            if "history after a compaction" not in self.unseen:
                self.unseen.append("history after a compaction")
        self.detail = "compaction"

    def _lose(self, field: str) -> None:
        self.lost = True
        raise RecordError(
            field, "is an encrypted compaction made on the server: what the model saw from here on is not in the log"
        )

    def _roll_back(self, turns: Any) -> None:
        users = [at for at, item in enumerate(self.items) if item.get("role") == "user"]
        count = turns if isinstance(turns, int) and turns > 0 else 1
        if users:
            del self.items[users[max(0, len(users) - count)] :]
