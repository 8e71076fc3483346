"""Trajectories of AReaL as JSON: the tensors that a workflow returns, as lists.

Fields as areal 1.0.4 has them (areal/experimental/openai/types.py, InteractionWithTokenLogpReward.to_tensor_dict;
areal/workflow): ``input_ids``, ``loss_mask``, ``logprobs`` (aligned with the ids, 0 where nothing was sampled),
``versions`` (-1 there), ``attention_mask``, ``rewards``; each with a leading batch dimension or without. A record is
one such dictionary; with the style "individual" a session has one for every call, with "concat" one for every leaf,
and the user's ``session_id``, ``rollout_id`` or ``traj_id`` beside them says which belong together.

The ``rollout/VERSION/TASK.jsonl`` files that AReaL itself dumps hold decoded text only, which is refused.
Log-probs: AReaL's engines report them of what was sampled from, with the temperature applied.
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

NAME = "areal"
DESCRIPTION = "trajectories of AReaL as JSON Lines: input_ids, loss_mask, logprobs, versions, rewards"


def looks_like(head: Head) -> bool:
    return any(
        (isinstance(record, dict) and {"input_ids", "loss_mask"} <= record.keys()) or _is_text(record)
        for record in head.records
    )


def _is_text(record: Any) -> bool:
    return isinstance(record, dict) and {"task_id", "sample_idx", "head_version", "completion"} <= record.keys()


def read(path: str, options: Options) -> Iterator[Item]:
    yield from read_rows(path, json_records(path, options), lambda record: _rows(record, options), options)


def _rows(record: Record, options: Options) -> Iterator[Row]:
    value = record.value
    if _is_text(value):
        raise RecordError("completion", "is decoded text without token ids; save the trajectory's input_ids instead")
    if not isinstance(value, dict):
        raise RecordError("", f"is {described(value)}, must be an object")
    ids, masks = flat(value.get("input_ids"), "input_ids"), flat(value.get("loss_mask"), "loss_mask")
    if len(masks) != len(ids):
        raise RecordError("loss_mask", f"has {len(masks)} rows for {len(ids)} of input_ids")
    columns: dict[str, list[Any]] = {}
    for name in ("logprobs", "versions", "attention_mask"):
        given = value.get(name)
        columns[name] = [None] * len(ids) if given is None else flat(given, name)
        if len(columns[name]) != len(ids):
            raise RecordError(name, f"has {len(columns[name])} rows for {len(ids)} of input_ids")
    rewards = first(value, ("rewards", "reward"))
    rewards = rewards if isinstance(rewards, list) else [rewards] * len(ids)
    if len(rewards) != len(ids):
        raise RecordError("rewards", f"has {len(rewards)} entries for {len(ids)} rows")
    name, group = first(value, ROLLOUT), first(value, ("group_id", "group", "task_id", "query_id"))
    for place, own in enumerate(ids):
        cut = {key: entries(column[place], key, own) for key, column in columns.items()}
        entries(masks[place], "loss_mask", own)
        real = cut["attention_mask"]
        keep = [k for k in range(len(own)) if real is None or real[k]]
        yield Row(
            ids=[own[k] for k in keep],
            mask=[masks[place][k] for k in keep],
            logprobs=None if cut["logprobs"] is None else [cut["logprobs"][k] for k in keep],
            versions=None if cut["versions"] is None else [cut["versions"][k] for k in keep],
            rollout=None if name is None else str(name),
            group=None if group is None else str(group),
            reward=rewards[place],
            sampling=sampling_settings(value, options, logprobs="processed", field=""),
        )
