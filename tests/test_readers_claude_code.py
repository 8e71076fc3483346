"""Sessions of Claude Code.

The program is not open; these are the shapes that public sources name. Lines, their parents, blocks of one response,
``compact_boundary`` with ``logicalParentUuid``, ``isCompactSummary``, side chains: microsoft/amplifier at d28b3180,
ai_working/claude_code_logging/session_format_specification.md. ``compactMetadata`` with ``preservedSegment {headUuid,
anchorUuid, tailUuid}`` and ``preservedMessages {anchorUuid, uuids}``: in snake case in sdk.d.ts of npm
@anthropic-ai/claude-agent-sdk 0.3.332 (SDKCompactBoundaryMessage).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mwjax import rollouts
from mwjax.rollouts import Refusal
from mwjax.rollouts.readers import Found, Remark, claude_code, detect, import_files
from mwjax.tree import build
from tests.test_readers_sessions import OPTIONS, seen_by


class Session:
    """Writes lines as the program does; ``last`` is the uuid of the one before."""

    def __init__(self):
        self.lines, self.last, self.clock = [], None, 0

    def add(self, uuid, parent="last", **entry):
        self.clock += 1
        line = {
            "parentUuid": self.last if parent == "last" else parent,
            "isSidechain": False,
            "sessionId": "s1",
            "version": "2.1.81",
            "uuid": uuid,
            "timestamp": f"2026-01-01T00:00:{self.clock:02d}.000Z",
            **entry,
        }
        self.lines.append(line)
        self.last = uuid
        return self

    def user(self, uuid, content, **more):
        return self.add(uuid, type="user", message={"role": "user", "content": content}, **more)

    def said(self, uuid, name, *blocks, **more):
        message = {"id": name, "role": "assistant", "model": "claude-x", "content": list(blocks), "stop_reason": None}
        return self.add(uuid, type="assistant", message=message, requestId=f"req-{name}", **more)

    def result(self, uuid, tool, text, **more):
        return self.user(uuid, [{"type": "tool_result", "tool_use_id": tool, "content": text}], **more)

    def boundary(self, uuid, **details):
        before = self.last
        metadata = {"trigger": "auto", "preTokens": 100, **details}
        return self.add(
            uuid, None, type="system", subtype="compact_boundary", logicalParentUuid=before, compactMetadata=metadata
        )

    def summary(self, uuid, text):
        return self.user(uuid, text, isCompactSummary=True, isVisibleInTranscriptOnly=True)

    def write(self, tmp_path, name="s1.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        return str(path)


def text(value):
    return {"type": "text", "text": value}


def use(name, **arguments):
    return {"type": "tool_use", "id": name, "name": "Read", "input": arguments}


def short(messages):
    return [
        f"{each['role'][0]}:{each['content'] or '+'.join(c['id'] for c in each['tool_calls'])}" for each in messages
    ]


def read(path, monkeypatch):
    calls, items = seen_by(claude_code, path, monkeypatch)
    found = [item for item in items if isinstance(item, Found)]
    return calls, items, found[0].rollout if found else None


def test_blocks_of_one_response_are_one_call_and_parallel_results_are_all_there(tmp_path, monkeypatch):
    session = Session().user("u1", "Go")
    session.said("a1", "m1", {"type": "thinking", "thinking": "I look.", "signature": "x"})
    session.said("a2", "m1", use("t1", path="a"))
    session.said("a3", "m1", use("t2", path="b"))
    session.result("r1", "t1", "first", parent="a2").result("r2", "t2", "second", parent="a3")
    session.said("a4", "m2", text("Done."))
    path = session.write(tmp_path)
    calls, _, rollout = read(path, monkeypatch)
    assert [short(call.messages) for call in calls] == [["u:Go"], ["u:Go", "a:t1+t2", "t:first", "t:second"]]
    assert calls[0].answer["reasoning_content"] == "I look."
    assert not build(rollout).junctions
    assert detect(path).NAME == "claude-code"


def compacted(**details):
    session = Session().user("u1", "Go").said("a1", "m1", use("t1", path="a")).result("r1", "t1", "first")
    session.said("a2", "m2", text("One is read.")).user("u2", "Go on")
    session.boundary("b1", **details).summary("c1", "Summary: one was read.")
    return session


def test_a_compaction_begins_with_its_summary(tmp_path, monkeypatch):
    session = compacted().said("a3", "m3", text("More."))
    calls, items, rollout = read(session.write(tmp_path), monkeypatch)
    assert short(calls[-1].messages) == ["u:Summary: one was read."]
    (junction,) = build(rollout).junctions
    assert (junction.turn, junction.detail) == (2, "compaction")
    reasons = [item.reason for item in items if isinstance(item, Remark)]
    assert any("summary was sampled in a call that the log does not hold" in reason for reason in reasons)
    assert any(reason.endswith("inspect and audit only, unless --system and --tools give it") for reason in reasons)
    assert rollout.meta["context_incomplete"] == ["system prompt", "context before the first message", "tool list"]


@pytest.mark.parametrize(
    "details",
    [
        {"preservedSegment": {"headUuid": "a2", "anchorUuid": "c1", "tailUuid": "u2"}},
        {"preservedMessages": {"anchorUuid": "c1", "uuids": ["a2", "u2"]}},
    ],
)
def test_messages_that_a_compaction_kept_follow_the_summary(tmp_path, monkeypatch, details):
    session = compacted(**details).said("a3", "m3", text("More."))
    calls, _, _ = read(session.write(tmp_path), monkeypatch)
    assert short(calls[-1].messages) == ["u:Summary: one was read.", "a:One is read.", "u:Go on"]


def test_lines_written_again_after_a_second_compaction_count_once_and_hang_where_they_are(tmp_path, monkeypatch):
    session = compacted().said("a3", "m3", text("More is read."))
    session.user("u3", "And?").boundary("b2").summary("c2", "Summary: two were read.")
    again = [line for line in session.lines if line["uuid"] in ("a3", "u3")]
    session.lines += [{**again[0], "parentUuid": "c2"}, again[1]]
    session.last = "u3"
    session.said("a4", "m4", text("Done."))
    calls, items, rollout = read(session.write(tmp_path), monkeypatch)
    assert [short(call.messages) for call in calls][2:] == [
        ["u:Summary: one was read."],
        ["u:Summary: two were read.", "a:More is read.", "u:And?"],
    ]
    assert len(rollout.turns) == 4
    merged = [item for item in items if isinstance(item, Remark) and item.kind == "merged"]
    assert [item.line for item in merged] == [12, 13]


def test_cleared_tool_results_are_a_pruning(tmp_path, monkeypatch):
    session = Session().user("u1", "Go").said("a1", "m1", use("t1", path="a")).result("r1", "t1", "first " * 9)
    session.said("a2", "m2", use("t2", path="b")).result("r2", "t2", "second")
    found = {"trigger": "auto", "compactedToolIds": ["t1"]}
    session.add("b1", type="system", subtype="microcompact_boundary", microcompactMetadata=found)
    session.said("a3", "m3", text("Done."))
    calls, _, rollout = read(session.write(tmp_path), monkeypatch)
    assert [each["content"] for each in calls[-1].messages if each["role"] == "tool"] == [claude_code.CLEARED, "second"]
    (junction,) = build(rollout).junctions
    assert (junction.turn, junction.detail) == (2, "pruned_tool_result")


@pytest.mark.parametrize("apart", [False, True])
def test_side_chains_are_sub_agents_and_name_who_called_them(tmp_path, monkeypatch, apart):
    side = Session()
    side.clock = 2
    task = "Count all the villages."
    more = {"isSidechain": True, "agentId": "abc"}
    side.user("x1", task, **more).said("x2", "n1", text("Two."), **more)
    session = Session().user("u1", "Go")
    session.said("a1", "m1", {"type": "tool_use", "id": "t1", "name": "Task", "input": {"prompt": task}})
    session.clock = 9
    session.result("r1", "t1", "Two.").said("a2", "m2", text("Done."))
    if apart:
        side.write(tmp_path, "s1/subagents/agent-abc.jsonl")
    else:
        session.lines[2:2] = side.lines
    _, _, rollout = read(session.write(tmp_path), monkeypatch)
    assert [(turn.chain, turn.cause_turn) for turn in rollout.turns] == [
        ("main", None),
        ("subagent-1", 0),
        ("main", None),
    ]


def test_what_no_model_wrote_is_not_sampled(tmp_path, monkeypatch):
    session = Session().user("u1", "Go").said("a1", "m1", text("Overloaded"), isApiErrorMessage=True)
    session.user("u2", "Again").said("a2", "m2", text("Done."))
    calls, items, _ = read(session.write(tmp_path), monkeypatch)
    assert [short(call.messages) for call in calls] == [["u:Go", "u:Again"]]
    assert [item.line for item in items if isinstance(item, Remark) and item.kind == "empty"] == [2]


def test_a_message_sent_again_otherwise_is_a_branch(tmp_path, monkeypatch):
    session = Session().user("u1", "Go").said("a1", "m1", text("First."))
    session.user("u2", "North", parent="a1").said("a2", "m2", text("Cold."))
    session.user("u3", "South", parent="a1").said("a3", "m3", text("Warm."))
    calls, _, rollout = read(session.write(tmp_path), monkeypatch)
    assert short(calls[-1].messages) == ["u:Go", "a:First.", "u:South"]
    assert [junction.turn for junction in build(rollout).junctions] == [2]


def test_copies_of_a_forked_session_are_context_only(tmp_path, monkeypatch):
    fork = {"forkedFrom": {"sessionId": "s0", "messageUuid": "a1"}}
    session = Session().user("u1", "Go", **fork).said("a1", "m1", text("First."), **fork)
    session.user("u2", "North").said("a2", "m2", text("Cold."))
    _, _, rollout = read(session.write(tmp_path), monkeypatch)
    assert [turn.trainable for turn in rollout.turns] == [False, True]


def test_thinking_of_which_only_the_signature_is_kept_is_said(tmp_path, monkeypatch):
    session = Session().user("u1", "Go")
    session.said("a1", "m1", {"type": "thinking", "thinking": "", "signature": "x"}).said("a2", "m1", text("Done."))
    _, _, rollout = read(session.write(tmp_path), monkeypatch)
    assert rollout.meta["context_incomplete"][-1].startswith("thinking")


def test_an_image_refuses_the_calls_that_saw_it(tmp_path, monkeypatch):
    session = Session().user("u1", "Go").said("a1", "m1", text("Which?"))
    session.user("u2", [{"type": "image", "source": {}}]).said("a2", "m2", text("A cat."))
    _, items, rollout = read(session.write(tmp_path), monkeypatch)
    (refusal,) = [item for item in items if isinstance(item, Refusal)]
    assert refusal.line == 4 and "only text can become token ids" in refusal.reason
    assert len(rollout.turns) == 1


def test_a_session_that_was_resumed_in_another_file_trains_its_answers_once(tmp_path):
    old = Session().user("u1", "Go").said("a1", "m1", text("First answer."))
    resumed = Session().user("u1", "Go").said("a1", "m1", text("First answer."))
    resumed.user("u2", "More").said("a2", "m2", text("Second answer."))
    for line in resumed.lines:
        line["sessionId"] = "s2"
    files = [str(old.write(tmp_path)), str(resumed.write(tmp_path, "s2.jsonl"))]
    done = import_files(files, tmp_path / "out.jsonl", options=OPTIONS)
    trained = [[turn.trainable for turn in rollout.turns] for rollout in rollouts.read(tmp_path / "out.jsonl").rollouts]
    assert trained == [[True], [False, True]] and done.records == done.used == 6
    done = import_files(files[::-1], tmp_path / "out.jsonl", options=OPTIONS, overwrite=True)
    (rollout,) = rollouts.read(tmp_path / "out.jsonl").rollouts
    assert [turn.trainable for turn in rollout.turns] == [True, True]
    assert (done.used, done.merged, done.records) == (4, 2, 6)


def incomplete(path, monkeypatch):
    return read(path, monkeypatch)[2].meta["context_incomplete"][3:]


def test_a_line_that_is_lost_or_was_never_written_makes_the_context_incomplete(tmp_path, monkeypatch):
    session = Session().user("u1", "Go").said("a1", "m1", text("First.")).user("u2", "On").said("a2", "m2", text("So."))
    assert incomplete(session.write(tmp_path), monkeypatch) == []
    lost = session.lines.pop(1)
    assert incomplete(session.write(tmp_path), monkeypatch) == ["messages before a line that is missing"]
    # The last line of a program that was killed is half a line, and nothing was seen after it.
    path = tmp_path / "s1.jsonl"
    session.lines.insert(1, lost)
    path.write_text(Path(session.write(tmp_path)).read_text() + '{"parentUuid": "a2", "uuid": "u3", "mess')
    assert incomplete(str(path), monkeypatch) == []


def test_attachments_of_which_the_file_has_no_words_make_the_context_incomplete(tmp_path, monkeypatch):
    session = Session().user("u1", "Go").said("a1", "m1", use("t1", path="a")).result("r1", "t1", "first")
    session.add("x1", type="attachment", attachment={"type": "queued_command", "prompt": "and the oil"})
    assert incomplete(session.write(tmp_path), monkeypatch) == []  # no call saw it
    session.said("a2", "m2", text("Done."))
    assert incomplete(session.write(tmp_path), monkeypatch) == ["text of attachments"]


@pytest.mark.parametrize(
    ("attachment", "shown"),
    [
        ({"type": "hook_non_blocking_error", "stderr": "no such file"}, False),
        ({"type": "hook_success", "hookEvent": "PostToolUse", "content": "formatted"}, False),
        ({"type": "hook_success", "hookEvent": "SessionStart", "content": ""}, False),
        ({"type": "hook_success", "hookEvent": "SessionStart", "content": "Speak Latin."}, True),
        ({"type": "of a later version"}, True),
    ],
)
def test_attachments_that_no_model_sees_leave_the_context_complete(attachment, shown, tmp_path, monkeypatch):
    session = Session().user("u1", "Go").add("x1", type="attachment", attachment=attachment)
    session.said("a1", "m1", text("Done."))
    assert incomplete(session.write(tmp_path), monkeypatch) == (["text of attachments"] if shown else [])


@pytest.mark.parametrize("after", ["", " for tool use"])
def test_an_answer_that_the_user_interrupted_is_context_only(after, tmp_path, monkeypatch):
    session = Session().user("u1", "Go").said("a1", "m1", text("I begin"))
    session.user("u2", [text(f"[Request interrupted by user{after}]")]).user("u3", "On").said("a2", "m2", text("So."))
    _, items, rollout = read(session.write(tmp_path), monkeypatch)
    assert [turn.trainable for turn in rollout.turns] == [bool(after), True]
    assert rollout.meta.get("cut_off_turns") == (None if after else [0])
    assert any("the answer broke off" in item.reason for item in items if isinstance(item, Remark)) is not bool(after)


def test_a_session_without_an_answer_and_one_that_begins_with_titles(tmp_path, monkeypatch):
    session = Session().user("u1", "Go")
    _, items, _ = read(session.write(tmp_path), monkeypatch)
    assert [(item.kind, item.reason) for item in items] == [
        ("empty", "its session has no answer of a model that can be used")
    ]
    session.said("a1", "m1", text("First."))
    session.lines[:0] = [{"type": "summary", "summary": f"Topic {k}", "leafUuid": f"x{k}"} for k in range(60)]
    assert detect(session.write(tmp_path)).NAME == "claude-code"
