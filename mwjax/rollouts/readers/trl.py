"""Rows of TRL as JSON Lines: what a ``rollout_func`` returns, one completion a line or a batch a line.

Fields as trl 1.16.0 has them (trl/trainer/grpo_trainer.py, ``RolloutFunc`` and ``_generate``): ``prompt_ids``,
``completion_ids``, ``logprobs`` and any of ``tool_mask``, ``env_mask`` and ``completion_mask`` (1 for what the model
wrote). Log-probs may be lists with the sampled one first, as vLLM gives them there. A rollout that is several rows, as
with a harness that edits its context, has a field of ``rows.ROLLOUT`` beside them; ``reward`` and ``group`` are the
user's.

The parquet files of ``log_completions`` hold text only. TRL runs vLLM with ``processed_logprobs``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mwjax.rollouts.errors import RecordError
from mwjax.rollouts.fields import described
from mwjax.rollouts.readers.reader import Head, Item, Options
from mwjax.rollouts.readers.records import Record, json_records
from mwjax.rollouts.readers.rows import ROLLOUT, Row, first, flat, read_rows
from mwjax.rollouts.readers.settings import sampling_settings

NAME = "trl"
DESCRIPTION = "rows of TRL as JSON Lines: prompt_ids, completion_ids, logprobs, tool_mask or env_mask"

MASKS = ("tool_mask", "env_mask", "completion_mask")


def looks_like(head: Head) -> bool:
    return any(
        isinstance(record, dict) and {"prompt_ids", "completion_ids"} <= record.keys() and "completions" not in record
        for record in head.records
    )


def read(path: str, options: Options) -> Iterator[Item]:
    yield from read_rows(path, json_records(path, options), lambda record: _rows(record, options), options)


def _rows(record: Record, options: Options) -> Iterator[Row]:
    value = record.value
    if not isinstance(value, dict):
        raise RecordError("", f"is {described(value)}, must be an object")
    prompts = flat(value.get("prompt_ids"), "prompt_ids")
    completions = flat(value.get("completion_ids"), "completion_ids")
    count = len(completions)
    batched = count > 1 or (bool(completions) and isinstance(value["completion_ids"][0], list))
    if len(prompts) != count:
        raise RecordError("prompt_ids", f"has {len(prompts)} rows for {count} of completion_ids")
    mask_name = next((name for name in MASKS if value.get(name) is not None), None)
    masks = [[1] * len(ids) for ids in completions] if mask_name is None else flat(value[mask_name], mask_name)
    logprobs = _logprobs(value.get("logprobs"), count, batched)
    for name, column in ((mask_name or "tool_mask", masks), ("logprobs", logprobs)):
        for ids, entries in zip(completions, column):
            if len(column) != count or (entries is not None and len(entries) != len(ids)):
                raise RecordError(name, f"has not one entry for each of {len(ids)} completion ids")
    for place in range(count):
        prompt, completion, own = prompts[place], completions[place], logprobs[place]
        name, group, reward = (
            _of_row(first(value, names), place, batched)
            for names in (ROLLOUT, ("group", "group_id"), ("reward", "rewards"))
        )
        yield Row(
            ids=[*prompt, *completion],
            mask=[*[0] * len(prompt), *masks[place]],
            logprobs=None if own is None else [*[0.0] * len(prompt), *own],
            rollout=None if name is None else str(name),
            group=None if group is None else str(group),
            reward=reward,
            sampling=sampling_settings(value, options, logprobs="processed", field=""),
            names=("prompt_ids + completion_ids", mask_name or "tool_mask", "logprobs"),
        )


def _logprobs(value: Any, count: int, batched: bool) -> list[Any]:
    if value is None:
        return [None] * count
    rows = value if batched else [value]
    return [
        None if row is None else [each[0] if isinstance(each, list) and each else each for each in row] for row in rows
    ]


def _of_row(value: Any, place: int, batched: bool) -> Any:
    return value[place] if batched and isinstance(value, list) and place < len(value) else value
