"""``traces.jsonl`` of verifiers and prime-rl: a rollout as a graph of messages, each with the ids it adds.

As verifiers 0.4.0 writes it (verifiers/v1/graph.py, trace.py, episode.py, utils/trace_store.py). A record is an episode
with ``traces``, or one trace. Of a trace are used: ``nodes`` (``parent``, ``message``, ``sampled``, ``token_ids``,
``mask``, ``logprobs`` of the sampled ids, ``semantic_parents``, the roots' ``tools``), ``calls`` (``node``,
``sampling``, ``finish_reason``, ``usage``), ``rewards`` (the sum of score x weight) and ``agent.trainable``; of an
episode ``group`` and ``run.work.policy``. The path from a root to a sampled node, up to its sampled ids, is the prompt
of its call.

Log-probs are written with four decimals. Which distribution they are of is not written down. A ``compaction_attempt``
that no ``compaction`` followed is context only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mwjax.rollouts.errors import RecordError, Refusal
from mwjax.rollouts.fields import described, log_probabilities, number, token_ids
from mwjax.rollouts.readers import chat
from mwjax.rollouts.readers.engine_call import Call
from mwjax.rollouts.readers.masked import sampled_runs
from mwjax.rollouts.readers.reader import Found, Head, Item, Options, Remark
from mwjax.rollouts.readers.records import Record, json_records
from mwjax.rollouts.readers.said import Asked, answered, asked
from mwjax.rollouts.readers.sessions import Session, at, check_usage, members, rollouts_of
from mwjax.rollouts.readers.settings import sampling_settings

NAME = "verifiers"
DESCRIPTION = "traces.jsonl of verifiers and prime-rl: graphs of messages with token ids"
ROUNDED = "log-probs are rounded to four decimals, as verifiers writes them: a ratio is off by up to 0.005 %"


def looks_like(head: Head) -> bool:
    return any(_is_trace(trace) for record in head.records for trace in _traces(record))


def read(path: str, options: Options) -> Iterator[Item]:
    """A record here is a trace: an episode of several agents holds several."""
    for record in json_records(path, options):
        if isinstance(record, Refusal):
            yield record
            continue
        traces = _traces(record.value)
        if not traces and isinstance(record.value, dict) and record.value.get("errors"):
            yield Remark("empty", path, record.line, "the episode failed before its first call")
        elif not traces:
            yield record.refusal(path, "traces", "there are none; a line is an episode with traces, or one trace")
        for place, trace in enumerate(traces):
            where = "" if trace is record.value else f"traces[{place}]"
            try:
                session = _session(record, trace, options)
            except RecordError as error:
                field = f"{where}.{error.field}" if where and error.field else where + error.field
                yield record.refusal(path, field, error.reason)
                continue
            if not session.calls:
                yield Remark("empty", path, record.line, "the trace has no sampled message")
            for item in rollouts_of(path, {session.name: session}, options):
                if isinstance(item, Found):
                    yield Found(item.rollout, record.line, 1)
                    if any(turn.logprobs is not None for turn in item.rollout.turns):
                        yield Remark("warning", path, record.line, ROUNDED)
                else:
                    yield item


def _traces(value: Any) -> list[Any]:
    if isinstance(value, dict) and isinstance(value.get("traces"), list):
        return value["traces"]
    return [value] if _is_trace(value) else []


def _is_trace(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("nodes"), list) and ("task" in value or "calls" in value)


def _session(record: Record, trace: Any, options: Options) -> Session:
    """A trace as a session of calls. Raises RecordError."""
    if not _is_trace(trace):
        raise RecordError("nodes", "missing: this is no trace")
    nodes = trace["nodes"]
    name = trace.get("id") or f"line {record.line}"
    session = Session(str(name), one=True)
    session.group = _group(record.value, trace)
    session.reward = _reward(trace)
    session.note(record, options)
    calls = {call["node"]: call for call in chat.listed(trace.get("calls")) if type(at(call, "node")) is int}
    linked = (link for node in nodes for link in _links(node) if link.get("type") == "compaction")
    accepted = {link["node"] for link in linked if type(link.get("node")) is int}
    ids = [_checked(node, f"nodes[{k}]", options) for k, node in enumerate(nodes)]
    policy = members(at(record.value, "run.work.policy"))
    version = policy.get("end") if policy.get("start") == policy.get("end") else None
    for k, node in enumerate(nodes):
        if not node.get("sampled"):
            continue
        route = _route(nodes, k)
        before = [ids[n] for n in route[:-1]]
        own = ids[k]
        runs = sampled_runs(node.get("mask") or [], len(own), f"nodes[{k}].mask")
        if not runs:
            raise RecordError(f"nodes[{k}].mask", "has no sampled id: this message was not recorded with token ids")
        if len(runs) > 1:
            raise RecordError(f"nodes[{k}].mask", "the sampled ids of one message must be in one piece")
        first, end = runs[0]
        sampled = own[first:end]
        logprobs = node.get("logprobs") or None
        call = calls.get(k, {})
        usage = call.get("usage")
        prompt = np.concatenate([*before, own[:first]])
        if isinstance(usage, dict):
            counts = (usage.get("prompt_tokens"), usage.get("cached_input_tokens") or 0)
            if all(type(count) is int for count in counts):
                usage = {**usage, "prompt_tokens": sum(counts)}
            try:
                check_usage(usage, len(prompt), len(sampled))
            except RecordError as error:
                raise RecordError(f"calls of node {k}: {error.field}", error.reason) from None
        attempt = any(link.get("type") == "compaction_attempt" for link in _links(node))
        session.calls.append(
            Call(
                record=k + 1,
                line=record.line,
                prompt_ids=prompt,
                completion_ids=sampled,
                logprobs=None
                if logprobs is None
                else log_probabilities(logprobs, f"nodes[{k}].logprobs", len(sampled)),
                sampling=sampling_settings(
                    members(call.get("sampling")), options, logprobs="raw", field=f"calls of node {k}: sampling"
                ),
                finish_reason=call.get("finish_reason"),
                policy_version=version,
                asked=_asked([nodes[n] for n in route[:-1]]),
                answer=answered("chat.completions", {"choices": [{"message": node.get("message")}]}),
                trainable=at(trace, "agent.trainable") is not False and (not attempt or k in accepted),
            )
        )
    return session


def _checked(node: Any, field: str, options: Options) -> np.ndarray:
    """The ids that a node adds."""
    if not isinstance(node, dict):
        raise RecordError(field, f"is {described(node)}, must be an object")
    return token_ids(node.get("token_ids") or [], f"{field}.token_ids", options.vocab_size)


def _route(nodes: list[dict[str, Any]], k: int) -> list[int]:
    """From the root to node ``k``."""
    route = [k]
    while (parent := nodes[route[-1]].get("parent")) is not None:
        if type(parent) is not int or not 0 <= parent < route[-1]:
            raise RecordError(f"nodes[{route[-1]}].parent", f"is {described(parent)}, must be an earlier node")
        route.append(parent)
    return route[::-1]


def _links(node: Any) -> list[dict[str, Any]]:
    return [link for link in chat.listed(at(node, "semantic_parents")) if isinstance(link, dict)]


def _asked(route: list[dict[str, Any]]) -> Asked | None:
    found = asked("chat.completions", {"messages": [node.get("message") for node in route]})
    tools = tuple(sorted(str(at(tool, "name")) for tool in chat.listed(route[0].get("tools")))) if route else ()
    return None if found is None else found._replace(tools=tools)


def _reward(trace: Mapping[str, Any]) -> float | None:
    given = trace.get("rewards") or {}
    if not isinstance(given, dict):
        raise RecordError("rewards", f"is {described(given)}, must be an object")
    total = 0.0
    scores = {name: reward for name, reward in given.items() if reward is not None}
    for name, reward in scores.items():
        if not isinstance(reward, dict):
            raise RecordError(f"rewards.{name}", f"is {described(reward)}, must be an object with a score")
        weight = number(reward.get("weight", 1.0), f"rewards.{name}.weight")
        total += weight * number(reward.get("score"), f"rewards.{name}.score")
    return total if scores else None


def _group(episode: Mapping[str, Any], trace: Mapping[str, Any]) -> str | None:
    found = at(episode, "group.id") or at(trace, "task.key") or at(trace, "task.hash") or at(trace, "task.data.id")
    return None if found is None else str(found)
