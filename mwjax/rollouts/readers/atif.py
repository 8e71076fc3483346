"""Agent trajectories in ATIF, versions 1.0 to 1.8: one document, or one a line.

Harbor's specification (harbor-framework/harbor, rfcs/0001-trajectory-format.md): ``steps`` of source system, user or
agent; an agent step is one answer with ``tool_calls`` and their ``observation``. With ``metrics.prompt_token_ids`` and
``completion_token_ids`` in all of them the ids are taken as they are; otherwise the steps are rendered. Tools are
``agent.tool_definitions`` (1.5). Steps that are ``is_copied_context``, or that no model wrote (``llm_call_count`` 0),
are context only; ``subagent_trajectories`` (1.7) are chains of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mwjax.rollouts.errors import RecordError, Refusal
from mwjax.rollouts.fields import described, log_probabilities, token_ids
from mwjax.rollouts.readers import chat
from mwjax.rollouts.readers.reader import Found, Head, Item, Options, Remark
from mwjax.rollouts.readers.records import json_records
from mwjax.rollouts.readers.rendered import of_one_record, rendering_for, rollout_items, seconds
from mwjax.rollouts.readers.seen import Seen
from mwjax.rollouts.readers.sessions import at, check_usage, group_and_reward
from mwjax.rollouts.readers.supplied import SYSTEM, TOOLS
from mwjax.rollouts.record import MAIN_CHAIN, Rollout, Turn

NAME = "atif"
DESCRIPTION = "agent trajectories of Harbor and others, ATIF (rendered, unless they hold ids)"


def looks_like(head: Head) -> bool:
    first = head.records[0] if head.records else None
    return isinstance(first, dict) and str(first.get("schema_version", "")).startswith("ATIF-v")


def read(path: str, options: Options) -> Iterator[Item]:
    for record in json_records(path, options):
        if isinstance(record, Refusal):
            yield record
            continue
        value = record.value
        if not isinstance(value, dict) or not isinstance(value.get("steps"), list):
            yield record.refusal(path, "steps", f"missing in {described(value)}: this is no ATIF trajectory")
            continue
        try:
            group, reward = group_and_reward(value, options)
            name = str(value.get("trajectory_id") or value.get("session_id") or f"line-{record.line}")
            calls, metrics = _calls(value, MAIN_CHAIN, record.line, {})
            if not calls:
                yield Remark("empty", path, record.line, "the trajectory has no answer of a model")
                continue
            meta = {"program": f"{at(value, 'agent.name')} {at(value, 'agent.version')}"}
            if all(_has_ids(each) for each, call in zip(metrics, calls) if call.trainable) and any(
                map(_has_ids, metrics)
            ):
                turns = _turns(calls, metrics, options)
                yield Found(Rollout(name, turns, (), group, reward, meta), record.line, 1)
                continue
        except RecordError as error:
            yield record.refusal(path, error.field, error.reason)
            continue
        if any(map(_has_ids, metrics)):
            reason = "some steps have token ids and some have none: all are rendered"
            yield Remark("warning", path, record.line, reason)
        if value.get("continued_trajectory_ref"):
            reason = "the trajectory goes on in another file (continued_trajectory_ref): that is a rollout of its own"
            yield Remark("warning", path, record.line, reason)
        missing = [] if any(each["role"] == "system" for each in calls[0].messages) else [SYSTEM]
        missing += [] if calls[0].tools or not any("tool_calls" in call.answer for call in calls) else [TOOLS]
        items = rollout_items(
            path,
            name,
            calls,
            options,
            rendering_for(NAME, options),
            missing=missing,
            records=1,
            group=group,
            reward=reward,
            meta=meta,
        )
        yield from of_one_record(items)


def _calls(
    value: Mapping[str, Any], chain: str, line: int, taken: dict[str, int]
) -> tuple[list[Seen], list[Mapping[str, Any]]]:
    """The calls of a trajectory, and of its sub-agents after the step that delegated to them; with the metrics of each.
    ``taken``: how many sub-agents were named. Raises RecordError."""
    if not isinstance(value.get("steps"), list):
        raise RecordError("subagent_trajectories.steps", f"is {described(value.get('steps'))}, must be a list")
    calls: list[Seen] = []
    metrics: list[Mapping[str, Any]] = []
    history: list[chat.Message] = []
    tools = chat.function_tools(at(value, "agent.tool_definitions"))
    embedded = {
        str(each.get("trajectory_id") or each.get("session_id")): each
        for each in chat.listed(value.get("subagent_trajectories"))
        if isinstance(each, dict)
    }
    for place, step in enumerate(value["steps"]):
        field = f"steps[{place}]"
        source = step.get("source") if isinstance(step, dict) else None
        if source not in ("system", "user", "agent"):
            raise RecordError(f"{field}.source", f"is {described(source)}, must be system, user or agent")
        text = chat.text_of(step.get("message"), f"{field}.message")
        if source != "agent":
            history.append(chat.message(source, text))
            history += _observed(step, field)
            continue
        made = [
            chat.tool_call(each.get("tool_call_id"), each.get("function_name"), each.get("arguments"))
            for each in chat.listed(step.get("tool_calls"))
            if isinstance(each, dict)
        ]
        answer = chat.message("assistant", text, reasoning=step.get("reasoning_content"), calls=made)
        count = step.get("llm_call_count")
        numbers = step.get("metrics") if isinstance(step.get("metrics"), dict) else {}
        at_call = len(calls)
        if count != 0:
            calls.append(
                Seen(
                    tuple(history),
                    answer,
                    tools,
                    line=line,
                    chain=chain,
                    trainable=not step.get("is_copied_context") and count in (None, 1),
                    time=seconds(step.get("timestamp")),
                )
            )
            metrics.append(numbers)
        history += [answer, *_observed(step, field)]
        for name in _delegated(step):
            if name in embedded:
                taken["subagent"] = taken.get("subagent", 0) + 1
                inner, inner_metrics = _calls(embedded.pop(name), f"subagent-{taken['subagent']}", line, taken)
                calls += _shifted(inner, len(calls), at_call if count != 0 else None)
                metrics += inner_metrics
    return calls, metrics


def _shifted(calls: Sequence[Seen], by: int, opened_by: int | None) -> list[Seen]:
    """Calls of a sub-agent at their place after ``by`` others; the first names the call that delegated."""
    return [
        dataclasses.replace(call, cause=call.cause + by if call.cause is not None else opened_by if not k else None)
        for k, call in enumerate(calls)
    ]


def _observed(step: Mapping[str, Any], field: str) -> list[chat.Message]:
    """What came back: a result of a tool call is a tool message, anything else the environment's word, as a user."""
    found = []
    results = at(step, "observation.results")
    for place, each in enumerate(results if isinstance(results, list) else ()):
        where = f"{field}.observation.results[{place}]"
        if not isinstance(each, dict):
            raise RecordError(where, f"is {described(each)}, must be an object")
        text = chat.text_of(each.get("content"), f"{where}.content")
        call = each.get("source_call_id")
        found.append(chat.message("tool", text, tool_call_id=str(call)) if call else chat.message("user", text))
    return found


def _delegated(step: Mapping[str, Any]) -> Iterator[str]:
    results = at(step, "observation.results")
    for each in results if isinstance(results, list) else ():
        refs = each.get("subagent_trajectory_ref") if isinstance(each, dict) else None
        for ref in refs if isinstance(refs, list) else [refs]:
            if isinstance(ref, dict):
                yield str(ref.get("trajectory_id") or ref.get("session_id"))


def _has_ids(metrics: Mapping[str, Any]) -> bool:
    return bool(metrics.get("prompt_token_ids")) and isinstance(metrics.get("completion_token_ids"), list)


def _turns(calls: Sequence[Seen], metrics: Sequence[Mapping[str, Any]], options: Options) -> tuple[Turn, ...]:
    """The turns of steps with ids; those without are context only, in the prompts of others. Raises RecordError."""
    turns: list[Turn] = []
    place: dict[int, int] = {}
    for k, (call, numbers) in enumerate(zip(calls, metrics)):
        if not _has_ids(numbers):
            continue
        field = f"metrics of call {k + 1}"
        prompt = token_ids(numbers["prompt_token_ids"], f"{field}.prompt_token_ids", options.vocab_size)
        sampled = token_ids(numbers["completion_token_ids"], f"{field}.completion_token_ids", options.vocab_size)
        check_usage(numbers, len(prompt), len(sampled))
        given = numbers.get("logprobs")
        place[k] = len(turns)
        turns.append(
            Turn(
                prompt_ids=prompt,
                completion_ids=sampled,
                logprobs=None if given is None else log_probabilities(given, f"{field}.logprobs", len(sampled)),
                chain=call.chain,
                trainable=call.trainable,
                sampling=options.sampling,
                cause_turn=place.get(call.cause) if call.cause is not None else None,
            )
        )
    return tuple(turns)
