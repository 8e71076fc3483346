"""``results.jsonl`` of verifiers 0.1 and rollouts of older prime-rl: a rollout as steps, each with the ids of its call.

As verifiers 0.1.14 writes it where ``state_columns`` has "trajectory" (verifiers/types.py: RolloutOutput,
TrajectoryStep, TrajectoryStepTokens; utils/save_utils.py). Of a record are used ``trajectory``, ``reward``,
``example_id``, ``task`` and ``sampling_args``; of a step ``tokens`` (``prompt_ids``, ``completion_ids``,
``completion_mask``, ``completion_logprobs``, ``is_truncated``), ``prompt`` and ``completion``, ``response`` (``usage``,
``message.finish_reason``) and ``trajectory_id``. With ``is_truncated``, ids beyond a limit are cut off: what is left of
a completion was sampled, and a prompt that was cut has no completion.
"""

from __future__ import annotations

import os
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
from mwjax.rollouts.readers.said import Said, asked
from mwjax.rollouts.readers.sessions import Session, at, check_usage, rollouts_of
from mwjax.rollouts.readers.settings import sampling_settings

NAME = "verifiers-steps"
DESCRIPTION = "results.jsonl of verifiers 0.1 and of older prime-rl: trajectories of steps with token ids"


def looks_like(head: Head) -> bool:
    return any(
        isinstance(step, dict) and "tokens" in step and "trajectory_id" in step
        for record in head.records
        if isinstance(record, dict)
        for step in chat.listed(record.get("trajectory"))
    )


def read(path: str, options: Options) -> Iterator[Item]:
    stem = os.path.basename(path).partition(".")[0]
    for record in json_records(path, options):
        if isinstance(record, Refusal):
            yield record
            continue
        try:
            session = _session(record, stem, options)
        except RecordError as error:
            yield record.refusal(path, error.field, error.reason)
            continue
        if not session.calls:
            failed = f" ({at(record.value, 'error.error')})" if record.value.get("error") else ""
            yield Remark("empty", path, record.line, f"the rollout has no step{failed}")
        for item in rollouts_of(path, {session.name: session}, options):
            yield Found(item.rollout, record.line, 1) if isinstance(item, Found) else item


def _session(record: Record, stem: str, options: Options) -> Session:
    value = record.value
    steps = value.get("trajectory") if isinstance(value, dict) else None
    if not isinstance(steps, list):
        raise RecordError("trajectory", f"is {described(steps)}, must be a list of steps: save this state column too")
    first = next((step.get("trajectory_id") for step in steps if isinstance(step, dict)), None)
    session = Session(str(first or f"{stem}:{record.line}"), one=True)
    example, task = value.get("example_id"), value.get("task")
    if example is not None:
        session.group = f"{task}/{example}" if isinstance(task, str) and task else str(example)
    if value.get("reward") is not None:
        session.reward = number(value["reward"], "reward")
    session.note(record, options)
    settings = value.get("sampling_args")
    sampling = sampling_settings(
        settings if isinstance(settings, dict) else {}, options, logprobs="raw", field="sampling_args"
    )
    for place, step in enumerate(steps):
        field = f"trajectory[{place}]"
        tokens = step.get("tokens") if isinstance(step, dict) else None
        if not isinstance(tokens, dict):
            raise RecordError(f"{field}.tokens", f"is {described(tokens)}: this step was recorded without token ids")
        prompt = token_ids(tokens.get("prompt_ids"), f"{field}.tokens.prompt_ids", options.vocab_size)
        ids = token_ids(tokens.get("completion_ids"), f"{field}.tokens.completion_ids", options.vocab_size)
        mask = tokens.get("completion_mask")
        runs = sampled_runs([1] * len(ids) if mask is None else mask, len(ids), f"{field}.tokens.completion_mask")
        logprobs = tokens.get("completion_logprobs")
        if logprobs is not None:
            logprobs = log_probabilities(logprobs, f"{field}.tokens.completion_logprobs", len(ids))
        cut = bool(tokens.get("is_truncated"))
        if not cut:
            try:
                check_usage(at(step, "response.usage"), len(prompt), len(ids))
            except RecordError as error:
                raise RecordError(f"{field}.response.{error.field}", error.reason) from None
        reason = "length" if cut else at(step, "response.message.finish_reason")
        said = asked("chat.completions", {"messages": step.get("prompt"), "tools": value.get("tool_defs")})
        for lo, hi in runs:
            session.calls.append(
                Call(
                    record=place + 1,
                    line=record.line,
                    prompt_ids=np.concatenate([prompt, ids[:lo]]),
                    completion_ids=ids[lo:hi],
                    logprobs=None if logprobs is None else logprobs[lo:hi],
                    sampling=sampling,
                    finish_reason=reason if hi == len(ids) else None,
                    asked=said,
                    answer=_answer(step),
                )
            )
    return session


def _answer(step: Mapping[str, Any]) -> Said | None:
    found = asked("chat.completions", {"messages": step.get("completion")})
    return found.messages[-1] if found is not None and found.messages else None
