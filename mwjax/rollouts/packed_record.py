"""One rollout as the bytes of one ArrayRecord record: its JSON form without the numbers, then the numbers as arrays.

Layout: uint32 length of the header; the header, JSON ``[type of the log-probs, rollout]`` in the ``extends`` form, with
a count in place of every array; all token ids, int32; all log-probs, float32 where that loses nothing, else
float64. Everything little-endian, arrays in the order of their counts.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from mwjax.rollouts.record import Rollout
from mwjax.rollouts.validate import from_json
from mwjax.rollouts.write import as_object

IDS = ("prompt_ids", "append_ids", "completion_ids", "replacement_ids")
LOGPROBS = "logprobs"
TYPES: dict[str, np.dtype] = {"float32": np.dtype("<f4"), "float64": np.dtype("<f8")}


def encode(rollout: Rollout) -> bytes:
    """The record of a valid rollout; :func:`decode` gives back an equal one, log-probs to the bit."""
    value = as_object(rollout)
    ids, logprobs = [np.zeros(0, np.int32)], [np.zeros(0)]
    for holder, key in _places(value):
        (logprobs if key == LOGPROBS else ids).append(holder[key])
        holder[key] = len(holder[key])
    floats = np.concatenate(logprobs)
    kind = "float32" if np.array_equal(floats.astype(np.float32), floats) else "float64"
    header = json.dumps([kind, value], separators=(",", ":"), allow_nan=False).encode("ascii")
    numbers = np.concatenate(ids).astype("<i4").tobytes() + floats.astype(TYPES[kind]).tobytes()
    return len(header).to_bytes(4, "little") + header + numbers


def decode(record: bytes, *, vocab_size: int | None = None) -> Rollout:
    """The rollout of a record. Raises RecordError for an id outside the vocabulary, ValueError where the bytes are no
    record."""
    end = 4 + int.from_bytes(record[:4], "little")
    kind, value = json.loads(record[4:end])
    places = _places(value)
    count = sum(holder[key] for holder, key in places if key != LOGPROBS)
    ids = np.frombuffer(record, np.dtype("<i4"), count, end)
    floats = np.frombuffer(record, TYPES[kind], -1, end + 4 * count)
    for holder, key in places:
        count = holder[key]
        if key == LOGPROBS:
            holder[key], floats = floats[:count], floats[count:]
        else:
            holder[key], ids = ids[:count], ids[count:]
    return from_json(value, vocab_size=vocab_size)


def largest_id(rollout: Rollout) -> int:
    """The largest token id in it; -1 where there is none."""
    arrays = [ids for turn in rollout.turns for ids in (turn.prompt_ids, turn.completion_ids)]
    return max(int(ids.max(initial=-1)) for ids in arrays + [edit.replacement_ids for edit in rollout.edits])


def _places(value: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Where a rollout's JSON form has arrays, in order."""
    holders = [*value["turns"], *value.get("edits", [])]
    return [(holder, key) for holder in holders for key in holder if key in IDS or key == LOGPROBS]
