"""Whatever is in a file, readers give no traceback: what cannot be read is refused with its reason, and every record of
formats with token ids is accounted for."""

from __future__ import annotations

import contextlib
import copy
import json
import random
from pathlib import Path

import pytest

from mwjax.rollouts import Refusal
from mwjax.rollouts.errors import RolloutFileError
from mwjax.rollouts.readers import (
    Found,
    Options,
    Remark,
    atif,
    chat_log,
    claude_code,
    codex,
    detect,
    har,
    import_files,
    opencode,
    qwen_code,
)
from tests.test_readers_atif import trajectory
from tests.test_readers_claude_code import compacted, text, use
from tests.test_readers_formats import FIXTURES
from tests.test_readers_requests import GO, READ, anthropic, archive, chat, entry, events, responses, said, text_item
from tests.test_readers_sessions import OPTIONS, SESSIONS

JUNK = (
    *(None, 7, -1.5, True, "", "junk", [], {}, [[]], [None], {"type": "junk"}, [{"type": "text"}], {"text": 3}),
    *(float("nan"), float("inf"), 10**30, [0.5], [[1, 2], [3]], "\ud800", [10**12], "[1, 2", {"a": {"b": {}}}),
)


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
    for _ in range(30):
        path.write_text("".join(json.dumps(each) + "\n" for each in damaged(records, chance)))
        for item in reader.read(str(path), OPTIONS):
            assert isinstance(item, (Found, Refusal, Remark))


def recorded():
    """A log of mwjax record, and one of an engine."""
    messages = [{"role": "user", "content": "Go on then and do it"}]
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Yes"}}
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    call = {
        "format": "mwjax-call/1",
        **{"id": "c1", "session": "s", "session_from": "header x-session-id", "started": 1.0},
        **{"endpoint": "chat.completions", "engine": "vllm", "prompt_ids": [1, 2, 3], "usage": usage},
        "completions": [{"index": 0, "completion_ids": [4, 5], "logprobs": [-0.1, -0.2]}],
        "request": {"messages": messages, "temperature": 1.0, "tools": [READ]},
        "response": {"id": "r1", "choices": [choice]},
        **{"engine_info": {"0": {"weight_version": "3"}}, "error": None, "truncated": {}},
    }
    logprobs = {"content": [{"logprob": -0.1}, {"logprob": -0.2}]}
    response = {
        "id": "r1",
        "prompt_token_ids": [1, 2, 3],
        "choices": [{**choice, "token_ids": [4, 5], "logprobs": logprobs}],
        "usage": usage,
    }
    exchange = {"session": "s", "started": 1.0, "request": {"messages": messages}, "response": response}
    return {"mwjax": [call, {**call, "id": "c2"}], "engine": [exchange, exchange]}


IDS = (
    "agent_lightning_events.jsonl",
    "agent_lightning_spans.jsonl",
    "agent_lightning_triplets.jsonl",
    "areal_rows.jsonl",
    "trl_rollout_func.jsonl",
    "trl_rows.jsonl",
    "verifiers_steps.jsonl",
    "verifiers_traces.jsonl",
    "verl_rows.jsonl",
)


@pytest.mark.parametrize("name", ["mwjax", "engine", *IDS])
def test_damaged_records_with_ids_are_all_accounted_for(tmp_path, name):
    form, records = (detect(str(FIXTURES / name)).NAME, lines(FIXTURES / name)) if name in IDS else (name, None)
    records = recorded()[name] if records is None else records
    path = tmp_path / "log.jsonl"
    chance = random.Random(0)
    checked = 0
    for _ in range(30):
        broken = damaged(records, chance)
        path.write_text("".join(json.dumps(each) + "\n" for each in broken))
        try:
            done = import_files([str(path)], tmp_path / "out.jsonl", format=form, options=Options(), overwrite=True)
        except RolloutFileError:
            continue
        # A first line that is a list is an array of records, and an episode of verifiers may hold several traces.
        if not isinstance(broken[0], list) and name != "verifiers_traces.jsonl":
            assert done.records == len(broken), done.account()
            checked += 1
    assert checked > 5 or name == "verifiers_traces.jsonl"


MEMBERS = (
    *("choices", "completion", "data", "event_type", "log", "messages", "meta_info", "nodes", "output_ids", "payload"),
    *("prompt", "prompt_ids", "request", "response", "samples", "text", "traces", "trajectory", "triplets", "tokens"),
)


def test_what_a_file_is_is_found_out_without_a_traceback(tmp_path):
    path = tmp_path / "log.jsonl"
    chance = random.Random(0)
    single = [{name: junk} for name in MEMBERS for junk in JUNK]
    for record in [*single, *({name: chance.choice(JUNK) for name in chance.sample(MEMBERS, 5)} for _ in range(300))]:
        path.write_text(json.dumps(record) + "\n")
        with contextlib.suppress(RolloutFileError):
            detect(str(path))
