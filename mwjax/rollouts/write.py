"""Rollout files out: validated, compact, and all or nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import numpy as np
from etils import epath

from mwjax.rollouts.errors import RecordError
from mwjax.rollouts.extends import Shortener
from mwjax.rollouts.fields import described, token_ids
from mwjax.rollouts.record import Edit, Rollout, Sampling, Turn
from mwjax.rollouts.storage import replacing
from mwjax.rollouts.validate import from_json


def write(path: epath.PathLike, rollouts: Iterable[Rollout], *, extends: bool = True) -> int:
    """Writes rollouts as JSON Lines and returns how many; ``.gz`` and ``.zst`` are compressed.

    The file appears only when it is complete; on any error an older file of that name stays as it was. With
    ``extends`` a prompt that continues an earlier turn is written as the difference. ``read`` gives back equal
    rollouts, floats to the bit. Raises RecordError for a rollout that ``read`` would refuse, RolloutFileError if the
    file cannot be written.
    """
    seen: dict[str, int] = {}
    with replacing(path) as out:
        for k, rollout in enumerate(rollouts):
            try:
                value = _validated(rollout, extends)
                if rollout.id in seen:
                    raise RecordError("id", f"{rollout.id!r} is also the id of rollouts[{seen[rollout.id]}]")
            except RecordError as error:
                field = f"rollouts[{k}]{'.' if error.field else ''}{error.field}"
                name = getattr(rollout, "id", None)
                raise RecordError(field, f"{error.reason} (rollout {name!r}; {path} is not written)") from None
            seen[rollout.id] = k
            out.write(as_line(value))
    return len(seen)


def to_json(rollout: Rollout, *, extends: bool = True) -> dict[str, Any]:
    """The rollout as plain JSON values; what equals a default is left out. Raises RecordError if it is not valid."""
    return json.loads(as_line(_validated(rollout, extends)))


def as_line(value: dict[str, Any]) -> bytes:
    """One line of a file, newline included. Arrays may stand for lists."""
    # ASCII only: a lone surrogate in a string has no UTF-8 form but has an escape.
    return json.dumps(value, separators=(",", ":"), allow_nan=False, default=_plain).encode("ascii") + b"\n"


def _validated(rollout: Rollout, extends: bool) -> dict[str, Any]:
    """The JSON object with arrays in place of lists, after the checks that reading it would make."""
    value = as_object(rollout, extends=extends)
    from_json(value)
    return value


def as_object(rollout: Rollout, *, extends: bool = True) -> dict[str, Any]:
    """``to_json`` with the arrays left as they are, and without most of its checks."""
    _expect(rollout, Rollout, "")
    _expect(rollout.turns, (tuple, list), "turns")
    _expect(rollout.edits, (tuple, list), "edits")
    result: dict[str, Any] = {"id": rollout.id}
    if rollout.group is not None:
        result["group"] = rollout.group
    if rollout.reward is not None:
        result["reward"] = rollout.reward
    shortener = Shortener() if extends else None
    result["turns"] = [_turn(turn, f"turns[{k}]", shortener) for k, turn in enumerate(rollout.turns)]
    if len(rollout.edits):
        result["edits"] = [_edit(edit, f"edits[{k}]") for k, edit in enumerate(rollout.edits)]
    if rollout.meta:
        result["meta"] = rollout.meta
    return result


def _turn(turn: Turn, field: str, shortener: Shortener | None) -> dict[str, Any]:
    _expect(turn, Turn, field)
    prompt = token_ids(turn.prompt_ids, f"{field}.prompt_ids")
    completion = token_ids(turn.completion_ids, f"{field}.completion_ids")
    piece = shortener.add(prompt, completion) if shortener is not None else None
    ids: dict[str, Any] = {"prompt_ids": prompt}
    if piece is not None and piece.extends is not None:
        ids = {"extends": piece.extends, "append_ids": piece.head}
    rest = _changed_fields(turn, field, ("prompt_ids", "completion_ids", "sampling"))
    sampling = sampling_object(turn.sampling, f"{field}.sampling")
    return {**ids, "completion_ids": completion, **rest, **({"sampling": sampling} if sampling else {})}


def sampling_object(sampling: Sampling, field: str) -> dict[str, Any]:
    _expect(sampling, Sampling, field)
    return _changed_fields(sampling, field, ())


def _edit(edit: Edit, field: str) -> dict[str, Any]:
    _expect(edit, Edit, field)
    result = {"before_turn": edit.before_turn, **_changed_fields(edit, field, ("before_turn", "replacement_ids"))}
    replacement = token_ids(edit.replacement_ids, f"{field}.replacement_ids")
    return {**result, "replacement_ids": replacement} if replacement.size else result


def _changed_fields(value: Turn | Edit | Sampling, where: str, apart: tuple[str, ...]) -> dict[str, Any]:
    """The fields that differ from their default, without those in ``apart``."""
    result = {}
    for field in fields(value):
        entry = getattr(value, field.name)
        if field.name in apart or (entry is None and field.default is None):
            continue
        if entry is None:  # in a file null means the default, which is not what this says
            raise RecordError(f"{where}.{field.name}", "is None; leave it out to get the default")
        if isinstance(entry, np.ndarray) or entry != field.default:
            result[field.name] = entry
    return result


def _expect(value: Any, kind: type | tuple[type, ...], field: str) -> None:
    if not isinstance(value, kind):
        name = " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
        raise RecordError(field, f"is {described(value)}, must be a {name}")


def _plain(value: Any) -> Any:
    return value.tolist()
