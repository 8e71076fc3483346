"""Sessions of Claude Code: ``~/.claude/projects/PROJECT/SESSION.jsonl``.

Lines have ``uuid, parentUuid, type, message, isSidechain``. One response is several lines, a block each, that share
``message.id``; the results of parallel tool calls hang on the line of their own call, so the line of ancestors alone
misses some of them. ``system`` lines of subtype ``compact_boundary`` (``parentUuid`` null, ``logicalParentUuid``,
``compactMetadata`` with ``preservedSegment {headUuid, anchorUuid, tailUuid}`` or ``preservedMessages {uuids}`` where
messages were kept) begin a new root, whose first message is ``isCompactSummary``; ``microcompact_boundary`` clears the
tool results in ``microcompactMetadata.compactedToolIds``. After a further compaction kept lines can be written again
under the same uuid and another parent. Sub-agents are side chains, in the same file or in
``SESSION/subagents/agent-*.jsonl``. System prompt, tools, the reminder that is put before the first message, and the
calls for summaries are not in the file. ``attachment`` lines tell of what the program put between messages (what a
user typed meanwhile, changed files, reminders), but not in which words. A session that was resumed may repeat, in
another file, what came before.
"""

from __future__ import annotations

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
from mwjax.rollouts.readers.sessions import at
from mwjax.rollouts.readers.supplied import BEFORE, GAP, SYSTEM, TOOLS
from mwjax.rollouts.record import MAIN_CHAIN

NAME = "claude-code"
DESCRIPTION = "session files of Claude Code (no ids: rendered)"

CLEARED = "[Old tool result content cleared]"
NOT_SAMPLED = "<synthetic>"
INTERRUPTED = "[Request interrupted by user]"  # while the model answered
# Attachments of which no model is told.
_UNSEEN = frozenset(
    (
        "already_read_file",
        "command_permissions",
        "edited_image_file",
        "hook_cancelled",
        "hook_error_during_execution",
        "hook_non_blocking_error",
        "hook_permission_decision",
        "hook_system_message",
        "structured_output",
    )
)
_TOLD_HOOKS = ("SessionStart", "UserPromptSubmit")  # of whose success, and what they said, a model is told


def looks_like(head: Head) -> bool:
    lines = [each for each in head.records if isinstance(each, dict)]
    return any(
        {"uuid", "parentUuid", "sessionId"} <= each.keys()
        and each.get("type") in ("user", "assistant")
        and isinstance(each.get("message"), dict)
        and "content" in each["message"]
        for each in lines
    )


def read(path: str, options: Options) -> Iterator[Item]:
    rendering = rendering_for(NAME, options)
    session = _Session()
    records, name = 0, Path(path).name.partition(".")[0]
    for file in _files(path):
        for record in json_records(file, options if file == path else Options()):
            if isinstance(record, Refusal):
                yield record
                continue
            value = record.value
            if not isinstance(value, dict):
                yield record.refusal(file, "", "is no line of a Claude Code session")
                continue
            if not session.add(value, record.line, file):
                yield Remark("merged", file, record.line, "a line with the same uuid is there already")
                continue
            records += 1
            if file == path and value.get("sessionId"):
                name = str(value["sessionId"])
    calls: list[Seen] = []
    missing = [SYSTEM, BEFORE, TOOLS]
    for uuids in session.blocks.values():
        first = uuids[0]
        line, file = session.links.lines[first], session.files[first]
        try:
            call = session.call(first, uuids)
        except RecordError as error:
            yield Refusal(file, line, error.field, error.reason)
            records -= 1
            continue
        if call is None:
            yield Remark("empty", file, line, "the answer is empty or was written by the program")
            records -= 1
            continue
        missing += [what for what in session.lacks(first, uuids) if what not in missing]
        calls.append(call)
    calls.sort(key=lambda call: call.time or 0.0)
    yield from rollout_items(
        path,
        name,
        with_causes(calls),
        options,
        rendering,
        always_before=True,
        missing=missing,
        records=records,
        meta={"program": f"claude-code {session.version}"},
    )


def _files(path: str) -> Iterator[str]:
    yield path
    place = Path(path).expanduser()
    yield from map(str, sorted((place.parent / place.name.partition(".")[0] / "subagents").glob("*.jsonl")))


class _Session:
    def __init__(self) -> None:
        self.links = Links()
        self.files: dict[str, str] = {}
        self.version = ""
        self.blocks: dict[str, list[str]] = {}  # message.id -> its lines
        self.results: dict[str, str] = {}  # tool_use id -> the line with its result
        self.chains: dict[str, str] = {}  # root of a side chain, or agentId -> name of the chain
        self.interrupted: set[str] = set()  # lines after which the user interrupted the answer

    def add(self, value: Mapping[str, Any], line: int, file: str) -> bool:
        """False for a copy of a line that is there already. Lines without a uuid (titles, snapshots) say nothing."""
        uuid = value.get("uuid")
        if not isinstance(uuid, str):
            return True
        if not self.links.add(uuid, parent_of(value), value, line):
            return False
        self.files[uuid] = file
        self.version = str(value.get("version") or self.version)
        message = value.get("message")
        if value.get("type") == "assistant" and isinstance(message, dict):
            self.blocks.setdefault(str(message.get("id") or uuid), []).append(uuid)
        elif isinstance(message, dict) and isinstance(message.get("content"), list):
            for block in message["content"]:
                if isinstance(block, dict) and block.get("type") == "tool_result":
                    self.results.setdefault(str(block.get("tool_use_id")), uuid)
        if at(message, "content.0.text") == INTERRUPTED or at(message, "content") == INTERRUPTED:
            self.interrupted.add(str(parent_of(value)))
        return True

    def call(self, first: str, uuids: list[str]) -> Seen | None:
        """The call that wrote these lines; None where no model did. Raises RecordError."""
        entry = self.links.entries[first]
        if entry.get("isApiErrorMessage") or entry["message"].get("model") == NOT_SAMPLED:
            return None
        answer = self._answer(uuids)
        if not (answer["content"] or answer.get("tool_calls")):
            return None
        path = self._path(first)
        boundary = max((at for at, name in enumerate(path) if self._is(name, "compact_boundary")), default=None)
        since = path[boundary:] if boundary is not None else []
        compacted = boundary is not None and not any(
            self.links.entries[name].get("type") == "assistant" for name in since
        )
        last = self.links.entries[uuids[-1]]["message"]
        return Seen(
            tuple(self._history(path)),
            answer,
            line=self.links.lines[first],
            chain=self._chain(first),
            detail="compaction" if compacted else None,
            trainable="forkedFrom" not in entry,
            cut_off=not self.interrupted.isdisjoint(uuids),
            identity=last.get("id") if isinstance(last.get("id"), str) else None,
            finish_reason=last.get("stop_reason"),
            time=seconds(entry.get("timestamp")),
        )

    def lacks(self, first: str, uuids: list[str]) -> Iterator[str]:
        """What of the context of the call that wrote these lines, or of its answer, is not in the file."""
        if any(
            block.get("type") == "redacted_thinking" or (block.get("type") == "thinking" and not block.get("thinking"))
            for name in uuids
            for block in self._content(name)
        ):
            yield "thinking (only its signature is kept)"
        if not self.links.begins(first):
            yield GAP
        if any(_is_shown(self.links.entries[name]) for name in self._path(first)):
            yield "text of attachments"

    def _answer(self, uuids: list[str]) -> chat.Message:
        blocks = [block for name in uuids for block in self._content(name)]
        return chat.from_anthropic({"role": "assistant", "content": blocks}, "message")[-1]

    def _content(self, name: str) -> list[Any]:
        content = self.links.entries[name]["message"].get("content")
        return content if isinstance(content, list) else [{"type": "text", "text": str(content or "")}]

    def _path(self, first: str) -> list[str]:
        """The lines before a response, with the messages that a compaction kept put where it hung them."""
        path = self.links.before(first)
        boundary = self.links.entries[path[0]] if path else {}
        if boundary.get("subtype") != "compact_boundary":
            return path
        segment = at(boundary, "compactMetadata.preservedSegment")
        listed = at(boundary, "compactMetadata.preservedMessages")
        kept: list[str] = []
        anchor: Any = path[0]
        if isinstance(listed, dict) and isinstance(listed.get("uuids"), list):
            kept = [name for name in map(str, listed["uuids"]) if name in self.links.entries]
            anchor = listed.get("anchorUuid")
        elif isinstance(segment, dict):
            kept = self.links.path(str(segment.get("tailUuid")), 0)
            head, anchor = segment.get("headUuid"), segment.get("anchorUuid")
            kept = kept[kept.index(head) :] if head in kept else []
        if not kept or kept[-1] in path:
            return path
        place = path.index(anchor) + 1 if anchor in path else len(path)
        return [*path[:place], *kept, *path[place:]]

    def _history(self, path: list[str]) -> list[chat.Message]:
        cleared: set[str] = set()
        for name in path:
            if self._is(name, "microcompact_boundary"):
                found = at(self.links.entries[name], "microcompactMetadata.compactedToolIds")
                cleared.update(map(str, found if isinstance(found, list) else ()))
        result: list[chat.Message] = []
        answered: set[str] = set()
        given: set[str] = set()
        for name in path:
            entry = self.links.entries[name]
            message = entry.get("message")
            if not isinstance(message, dict) or entry.get("isApiErrorMessage"):
                continue
            if entry.get("type") == "assistant":
                key = str(message.get("id") or name)
                if key in answered or message.get("model") == NOT_SAMPLED:
                    continue
                answered.add(key)
                answer = self._answer(self.blocks[key])
                result.append(answer)
                for made in answer.get("tool_calls", ()):
                    line = self.results.get(made["id"])
                    if line is not None:
                        given.add(line)
                        result += self._user(line, cleared, only=made["id"])
            elif entry.get("type") == "user" and not entry.get("isVisibleInTranscriptOnly", False):
                result += self._user(name, cleared, without_results=name in given)
            elif entry.get("isCompactSummary"):
                result += self._user(name, cleared)
        return result

    def _user(
        self, name: str, cleared: set[str], *, only: str | None = None, without_results: bool = False
    ) -> list[chat.Message]:
        found = chat.from_anthropic({**self.links.entries[name]["message"], "role": "user"}, "message")
        result = []
        for each in found:
            if each["role"] == "tool":
                if without_results or (only is not None and each.get("tool_call_id") != only):
                    continue
                each = {**each, "content": CLEARED} if each.get("tool_call_id") in cleared else each
            elif only is not None:
                continue
            result.append(each)
        return result

    def _is(self, name: str, subtype: str) -> bool:
        return self.links.entries[name].get("subtype") == subtype

    def _chain(self, name: str) -> str:
        entry = self.links.entries[name]
        if not entry.get("isSidechain"):
            return MAIN_CHAIN
        key = str(entry.get("agentId") or (self.links.before(name) or [name])[0])
        return self.chains.setdefault(key, f"subagent-{len(self.chains) + 1}")


def _is_shown(entry: Mapping[str, Any]) -> bool:
    """Whether a line is an attachment that the program puts into the context."""
    if entry.get("type") != "attachment":
        return False
    kind = at(entry, "attachment.type")
    if kind == "hook_success":
        return at(entry, "attachment.hookEvent") in _TOLD_HOOKS and at(entry, "attachment.content") != ""
    return kind not in _UNSEEN
