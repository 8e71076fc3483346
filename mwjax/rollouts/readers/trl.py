"""Rows of TRL as JSON Lines: a GRPO batch's rows, or what a ``rollout_func`` returns; one completion or a batch a line.

Fields as trl 1.16.0 has them (trl/trainer/grpo_trainer.py): of ``_generate_and_score_completions`` ``prompt_ids``,
``prompt_mask`` (0 where padded, on the left), ``completion_ids``, ``completion_mask`` (0 where padded, on the right),
``tool_mask`` (1 for what the model wrote), ``sampling_per_token_logps`` or ``old_per_token_logps``; of ``RolloutFunc``
``prompt_ids``, ``completion_ids``, ``logprobs`` (a number for each id, or a list with the sampled one first), and
``env_mask`` as the tool mask. A rollout that is several rows, as with a harness that edits its context, has a field of
``rows.ROLLOUT`` beside them; ``reward`` and ``group`` are the user's.

The parquet files of ``log_completions`` hold messages or text (:mod:`conversation`). TRL runs vLLM with
``processed_logprobs``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mwjax.rollouts.errors import RecordError
from mwjax.rollouts.fields import described
from mwjax.rollouts.readers.reader import Head, Item, Options
from mwjax.rollouts.readers.records import Record, json_records
from mwjax.rollouts.readers.rows import ROLLOUT, Row, entries, first, flat, read_rows
from mwjax.rollouts.readers.settings import sampling_settings

NAME = "trl"
DESCRIPTION = "rows of TRL as JSON Lines: prompt_ids, completion_ids, logprobs, tool_mask or env_mask"

WRITTEN = ("tool_mask", "env_mask")
LOGPROBS = ("logprobs", "sampling_per_token_logps", "old_per_token_logps")


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
    completions = flat(value.get("completion_ids"), "completion_ids")
    count = len(completions)
    prompts = _column(value, ("prompt_ids",), count)
    written, logprobs = _column(value, WRITTEN, count), _column(value, LOGPROBS, count)
    unpadded = _column(value, ("completion_mask",), count), _column(value, ("prompt_mask",), count)
    for place, completion in enumerate(completions):
        prompt, mask, own = prompts[place] or [], written[place], logprobs[place]
        real, real_prompt = (column[place] for column in unpadded)
        for name, ids in (("completion_ids", completion), ("prompt_ids", prompt)):
            entries(ids, name, ids)
        for name, given, ids in (
            ("tool_mask", mask, completion),
            ("logprobs", own, completion),
            ("completion_mask", real, completion),
            ("prompt_mask", real_prompt, prompt),
        ):
            entries(given, name, ids)
        if own is not None:
            own = [each[0] if isinstance(each, list) and each else each for each in own]
        keep = [k for k in range(len(completion)) if real is None or real[k]]
        kept_prompt = [each for k, each in enumerate(prompt) if real_prompt is None or real_prompt[k]]
        name, group, reward = (
            _of_row(value, names, place, count) for names in (ROLLOUT, ("group", "group_id"), ("reward", "rewards"))
        )
        yield Row(
            ids=[*kept_prompt, *(completion[k] for k in keep)],
            mask=[*[0] * len(kept_prompt), *(1 if mask is None else mask[k] for k in keep)],
            logprobs=None if own is None else [*[0.0] * len(kept_prompt), *(own[k] for k in keep)],
            rollout=None if name is None else str(name),
            group=None if group is None else str(group),
            reward=reward,
            sampling=sampling_settings(value, options, logprobs="processed", field=""),
            names=("prompt_ids + completion_ids", "tool_mask", "logprobs"),
        )


def _column(value: dict[str, Any], names: tuple[str, ...], count: int) -> list[Any]:
    """One entry for each completion: of a batch its own, of a single row the whole field; None where there is none."""
    name = next((name for name in names if value.get(name) is not None), None)
    if name is None:
        return [None] * count
    given = value[name]
    if not isinstance(given, list):
        raise RecordError(name, f"is {described(given)}, must be a list")
    rows = given if value["completion_ids"] and isinstance(value["completion_ids"][0], list) else [given]
    if len(rows) != count:
        raise RecordError(name, f"has {len(rows)} rows for {count} of completion_ids")
    return rows


def _of_row(value: dict[str, Any], names: tuple[str, ...], place: int, count: int) -> Any:
    """What the first of these fields says of one of ``count`` rows: its entry, or what is said of all."""
    given = first(value, names)
    if not isinstance(given, list):
        return given
    if len(given) != count:
        raise RecordError(names[0], f"has {len(given)} entries for {count} of completion_ids")
    return given[place]
