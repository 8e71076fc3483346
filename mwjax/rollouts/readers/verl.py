"""Rows of verl as JSON Lines: an agent loop's outputs, or a batch's rows.

Fields as verl 0.9.1 has them: ``prompt_ids``, ``response_ids``, ``response_mask`` (1 for what the model wrote),
``response_logprobs``, ``reward_score``, ``num_turns``, ``extra_fields``
(verl/experimental/agent_loop/agent_loop.py, AgentLoopOutput); in a batch the same are ``prompts`` and ``responses``,
padded, with ``attention_mask`` over both, ``response_mask``, ``rollout_log_probs``, ``token_level_scores`` or
``rm_scores``, ``uid`` (of the question) and ``request_id``. A key of the form SAMPLE_ROLLOUT_OUTPUT, which verl gives
the outputs of one rollout (trainer/ppo/v1), says which rows belong together; otherwise a field of ``rows.ROLLOUT``.

The files of ``trainer.rollout_data_dir`` hold text without special tokens, from which ids cannot be had again; they are
refused. verl runs its engines so that log-probs are of what was sampled from (``processed``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from mwjax.rollouts.errors import RecordError
from mwjax.rollouts.fields import described, number
from mwjax.rollouts.readers.reader import Head, Item, Options
from mwjax.rollouts.readers.records import Record, json_records
from mwjax.rollouts.readers.rows import ROLLOUT, Row, entries, first, read_rows
from mwjax.rollouts.readers.settings import sampling_settings

NAME = "verl"
DESCRIPTION = "rows of verl as JSON Lines: prompt_ids, response_ids, response_mask, response_logprobs, uid"

# SAMPLE is a UUID there; the names that users give their questions may end in numbers too.
_KEY = re.compile(r"([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})_(\d+)_\d+")


def looks_like(head: Head) -> bool:
    return any(_has_ids(record) or _is_text(record) for record in head.records)


def _has_ids(record: Any) -> bool:
    names = ({"prompt_ids", "response_ids"}, {"prompts", "responses"})
    return isinstance(record, dict) and "response_mask" in record and any(pair <= record.keys() for pair in names)


def _is_text(record: Any) -> bool:
    return isinstance(record, dict) and {"input", "output", "gts", "score", "step"} <= record.keys()


def read(path: str, options: Options) -> Iterator[Item]:
    yield from read_rows(path, json_records(path, options), lambda record: [_row(record, options)], options)


def _row(record: Record, options: Options) -> Row:
    value = record.value
    if _is_text(value):
        reason = "is decoded text without special tokens, from which ids cannot be had; save the batch's rows instead"
        raise RecordError("output", reason)
    if not isinstance(value, dict):
        raise RecordError("", f"is {described(value)}, must be an object")
    padded = "prompt_ids" not in value
    names = ("prompts", "responses") if padded else ("prompt_ids", "response_ids")
    prompt, response = (_list(value.get(name), name) for name in names)
    mask = _list(value.get("response_mask"), "response_mask")
    logprobs = first(value, ("response_logprobs", "rollout_log_probs"))
    for name, given in (("response_mask", mask), ("response_logprobs", logprobs)):
        entries(given, name, response)
    real = value.get("attention_mask")
    if real is None and padded:
        raise RecordError("attention_mask", f"missing: {names[0]} and {names[1]} are padded, and only it says how far")
    ids = [*prompt, *response]
    entries(real, "attention_mask", ids)
    keep = [k for k in range(len(ids)) if real is None or real[k]]
    whole_mask = [*[0] * len(prompt), *mask]
    whole_logprobs = None if logprobs is None else [*[0.0] * len(prompt), *logprobs]
    uid = first(value, ("uid", "index"))
    name, group = first(value, ROLLOUT), uid
    if name is None and (match := _KEY.fullmatch(str(uid))) is not None:
        name, group = f"{match.group(1)}_{match.group(2)}", match.group(1)
    return Row(
        ids=[ids[k] for k in keep],
        mask=[whole_mask[k] for k in keep],
        logprobs=None if whole_logprobs is None else [whole_logprobs[k] for k in keep],
        rollout=None if name is None else str(name),
        group=None if group is None else str(group),
        reward=_reward(value),
        sampling=sampling_settings(value, options, logprobs="processed", field=""),
        finish_reason=value.get("stop_reason") or value.get("finish_reason"),
        names=(f"{names[0]} + {names[1]}", "response_mask", "response_logprobs"),
    )


def _list(value: Any, field: str) -> list[Any]:
    if not isinstance(value, list):
        raise RecordError(field, f"is {described(value)}, must be a list")
    return value


def _reward(value: dict[str, Any]) -> float | None:
    """A rollout's reward, or the sum of what verl spreads over the response's ids."""
    whole = first(value, ("reward_score", "score", "reward"))
    spread = first(value, ("token_level_scores", "rm_scores", "token_level_rewards"))
    if whole is not None or not isinstance(spread, list):
        return whole
    return sum(number(each, "token_level_scores") for each in spread)
