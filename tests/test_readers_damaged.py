"""Whatever is in a file, readers of messages give no traceback: what cannot be read is refused with its reason."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path

import pytest

from mwjax.rollouts import Refusal
from mwjax.rollouts.readers import Found, Remark, atif, chat_log, claude_code, codex, har, opencode, qwen_code
from tests.test_readers_atif import trajectory
from tests.test_readers_claude_code import compacted, text, use
from tests.test_readers_requests import GO, READ, anthropic, archive, chat, entry, events, responses, said, text_item
from tests.test_readers_sessions import OPTIONS, SESSIONS

JUNK = (None, 7, -1.5, True, "", "junk", [], {}, [[]], [None], {"type": "junk"}, [{"type": "text"}], {"text": 3})


def lines(path):
    return [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]


def claude_session():
    session = compacted(preservedSegment={"headUuid": "a2", "anchorUuid": "c1", "tailUuid": "u2"})
    return session.said("a3", "m3", text("More."), use("t2", path="b")).result("r2", "t2", "second").lines


def logs():
    use_block = {"type": "tool_use", "id": "t1", "name": "read", "input": {"path": "a"}}
    return [
        chat(GO, said("Rope.", tool_calls=[{"id": "c", "type": "function", "function": READ["function"]}]), "r1"),
        anthropic([{"role": "user", "content": [{"type": "text", "text": "Go"}]}], [use_block], "m1"),
        responses([{"role": "user", "content": "Go"}], [text_item("Rope.")], "r2"),
    ]


def seeds():
    (qwen,) = (SESSIONS / "qwen-code" / "chats").glob("*.jsonl")
    delegating = trajectory(subagent_trajectories=[trajectory(trajectory_id="s")])
    delegating["steps"][2]["observation"]["results"][0]["subagent_trajectory_ref"] = [{"trajectory_id": "s"}]
    stream = events({"id": "r1", "choices": [{"index": 0, "delta": {"role": "assistant", "content": "Rope."}}]})
    return {
        "codex": (codex, lines(SESSIONS / "codex.jsonl")[:14]),
        "qwen": (qwen_code, lines(qwen)[:14]),
        "claude": (claude_code, claude_session()),
        "opencode": (opencode, [json.loads((SESSIONS / "opencode-export.json").read_text("utf-8"))]),
        "atif": (atif, [delegating]),
        "chat": (chat_log, logs()),
        "har": (har, [archive(entry("/chat/completions", {"model": "m", "messages": GO}, stream, 1))]),
    }


def places(value, path=()):
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for key, inner in enumerate(value):
            yield from places(inner, (*path, key))


def damaged(value, chance):
    """A copy in which one to three places are gone or something else."""
    value = copy.deepcopy(value)
    for _ in range(chance.randint(1, 3)):
        path = chance.choice([path for path in places(value) if path] or [()])
        inner = value
        for key in path[:-1]:
            inner = inner[key]
        if path and isinstance(inner, dict) and chance.random() < 0.3:
            del inner[path[-1]]
        elif path:
            inner[path[-1]] = copy.deepcopy(chance.choice(JUNK))
    return value


@pytest.mark.parametrize("name", ["codex", "qwen", "claude", "opencode", "atif", "chat", "har"])
def test_damage_is_refused_and_never_a_traceback(tmp_path, name):
    reader, records = seeds()[name]
    path = tmp_path / "log.jsonl"
    chance = random.Random(0)
    for _ in range(100):
        path.write_text("".join(json.dumps(each) + "\n" for each in damaged(records, chance)))
        for item in reader.read(str(path), OPTIONS):
            assert isinstance(item, (Found, Refusal, Remark))
