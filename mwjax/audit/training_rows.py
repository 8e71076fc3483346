"""A user's own training rows: JSON Lines, one row a line.

``input_ids``: token ids. ``loss_mask``: one entry per id, not 0 where that token is a target, predicted from the tokens
before it. ``rollout_id`` (or ``id``): the rollout it was made from. ``position_ids``, optional: a value that does not
rise, such as 0 after the first token, starts a new packed segment, which sees nothing before it. ``attention_mask``,
optional: 0 where a token is not seen at all (padding). Within a segment attention is taken to be causal. Other keys are
left alone, and named in the result.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from etils import epath

from mwjax.rollouts.errors import RecordError
from mwjax.rollouts.fields import described, name, token_ids
from mwjax.rollouts.lines import DamagedFile, lines
from mwjax.rollouts.read import Refusal

KNOWN_KEYS = ("input_ids", "loss_mask", "position_ids", "attention_mask", "rollout_id", "id")


@dataclass(frozen=True, eq=False)
class TrainingRow:
    """One row. ids: int32 [N], those that are seen; loss: bool [N]; index: int64 [N], their places in ``input_ids``.

    starts: int64 [S], where the packed segments begin. first_gap: int64 [S], how many leading tokens of a segment have
    the position ids 0, 1, 2, ...
    """

    line: int
    ids: np.ndarray
    loss: np.ndarray
    index: np.ndarray
    starts: np.ndarray
    first_gap: np.ndarray


@dataclass(frozen=True)
class TrainingRows:
    """A whole file of rows, by rollout id, in file order."""

    file: str
    of_rollout: dict[str, list[TrainingRow]]
    refused: tuple[Refusal, ...]
    ignored_keys: tuple[str, ...]


def read_rows(path: epath.PathLike) -> TrainingRows:
    """Read training rows (``.jsonl``, also gzip or Zstandard compressed). A bad line is refused, the rest is kept.

    Raises:
        RolloutFileError: the file cannot be read at all.
    """
    file = str(path)
    of_rollout: dict[str, list[TrainingRow]] = {}
    refused: list[Refusal] = []
    ignored: dict[str, None] = {}
    try:
        for line in lines(path):
            if not line.data.strip():
                continue
            try:
                value = _parse(line.data)
                rollout_id, row = _row(value, line.number)
            except RecordError as error:
                refused.append(Refusal(file, line.number, error.field, error.reason))
                continue
            ignored.update(dict.fromkeys(key for key in value if key not in KNOWN_KEYS))
            of_rollout.setdefault(rollout_id, []).append(row)
    except DamagedFile as error:
        reason = f"{error.reason}; whatever followed line {error.last} is lost"
        refused.append(Refusal(file, error.last + 1, "", reason))
    return TrainingRows(file, of_rollout, tuple(refused), tuple(ignored))


def _parse(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise RecordError("", f"is not UTF-8 text (byte {error.start + 1})") from None
    except json.JSONDecodeError as error:
        raise RecordError("", f"is not JSON ({error.msg} at column {error.colno}); write one row a line") from None
    except (RecursionError, ValueError) as error:
        raise RecordError("", f"is not readable JSON: {error}") from None
    if not isinstance(value, dict):
        raise RecordError("", f"is {described(value)}, must be an object with input_ids, loss_mask and rollout_id")
    return value


def _row(value: dict[str, Any], line: int) -> tuple[str, TrainingRow]:
    """Check and convert one row.

    Raises:
        RecordError: a field is missing or wrong.
    """
    key = "rollout_id" if value.get("rollout_id") is not None else "id"
    if value.get(key) is None:
        raise RecordError("rollout_id", "missing: say which rollout this row was made from")
    rollout_id = name(value[key], key)
    for required in ("input_ids", "loss_mask"):
        if value.get(required) is None:
            raise RecordError(required, "missing")
    ids = token_ids(value["input_ids"], "input_ids")
    if not len(ids):
        raise RecordError("input_ids", "is empty")
    loss = _numbers(value["loss_mask"], "loss_mask", len(ids)) > 0
    positions = np.arange(len(ids))
    if value.get("position_ids") is not None:
        positions = token_ids(value["position_ids"], "position_ids").astype(np.int64)
        if len(positions) != len(ids):
            raise RecordError("position_ids", f"has {len(positions)}, must have one per input id ({len(ids)})")
    index = np.arange(len(ids))
    if value.get("attention_mask") is not None:
        mask = _numbers(value["attention_mask"], "attention_mask", len(ids))
        if not np.isin(mask, (0, 1)).all():
            at = int((~np.isin(mask, (0, 1))).argmax())
            advice = "must be 0 or 1; packed segments are told apart by position_ids"
            raise RecordError(f"attention_mask[{at}]", f"is {mask[at]:g}, {advice}")
        index = np.flatnonzero(mask)
        hidden = np.flatnonzero(loss & (mask == 0))
        if len(hidden):
            raise RecordError(f"loss_mask[{hidden[0]}]", "is set where attention_mask is 0")
        if value.get("position_ids") is None:
            positions[index] = np.arange(len(index))
    ids, loss, positions = ids[index], loss[index], positions[index]
    starts = np.flatnonzero(np.concatenate([[True], np.diff(positions) <= 0])) if len(ids) else np.zeros(0, np.int64)
    ends = np.append(starts[1:], len(ids))
    relative = np.arange(len(ids)) - np.repeat(starts, ends - starts)
    wrong = np.where(positions == relative, len(ids), relative)
    first_gap = np.minimum(np.minimum.reduceat(wrong, starts), ends - starts) if len(ids) else np.zeros(0, np.int64)
    return rollout_id, TrainingRow(line, ids, loss, index, starts, first_gap)


def _numbers(value: Any, field: str, count: int) -> np.ndarray:
    """A list of ``count`` finite numbers, none negative, or of booleans: float64 [count]."""
    if not isinstance(value, list):
        raise RecordError(field, f"is {described(value)}, must be a list with one entry per input id")
    if len(value) != count:
        raise RecordError(field, f"has {len(value)}, must have one per input id ({count})")
    if not set(map(type, value)) <= {int, float, bool}:
        at = next(k for k, entry in enumerate(value) if type(entry) not in (int, float, bool))
        raise RecordError(f"{field}[{at}]", f"is {described(value[at])}, must be 0 or 1")
    try:
        numbers = np.array(value, np.float64)
    except OverflowError:
        raise RecordError(field, "holds a number beyond float64, must be 0 or 1") from None
    bad = ~(np.isfinite(numbers) & (numbers >= 0))
    if bad.any():
        at = int(bad.argmax())
        raise RecordError(f"{field}[{at}]", f"is {described(value[at])}, must be 0 or 1")
    return numbers
