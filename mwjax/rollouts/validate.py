"""From a JSON object to a Rollout: every rule of the record is checked here and nowhere else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, cast

import numpy as np

from mwjax.rollouts.errors import RecordError
from mwjax.rollouts.extends import Piece, join
from mwjax.rollouts.fields import (
    described,
    flag,
    integer,
    json_value,
    known_keys,
    log_probabilities,
    name,
    number,
    ranges,
    text,
    token_ids,
)
from mwjax.rollouts.record import MAIN_CHAIN, Edit, Rollout, Sampling, Turn

Checked = TypeVar("Checked")

ROLLOUT_KEYS = ("id", "group", "reward", "turns", "edits", "meta")
TURN_KEYS = ("extends", "append_ids", *(f.name for f in dataclasses.fields(Turn)))
EDIT_KEYS = tuple(f.name for f in dataclasses.fields(Edit))
SAMPLING_KEYS = tuple(f.name for f in dataclasses.fields(Sampling))


def from_json(value: Any, *, vocab_size: int | None = None) -> Rollout:
    """The Rollout of one parsed JSON object, in either form (``prompt_ids``, or ``extends`` + ``append_ids``).

    Arrays are read-only; prompts that extend one another share memory. With ``vocab_size`` every id must be below it.
    Whether the edits agree with the prompts is for ``tree`` to say. Raises RecordError on the first broken rule.
    """
    if not isinstance(value, dict):
        raise RecordError("", f"this is {described(value)}, must be one JSON object, a rollout")
    if "turns" not in value:
        raise RecordError("turns", "missing: this is no rollout; mwjax import makes rollouts of logs of other formats")
    given = known_keys(value, ROLLOUT_KEYS, "")
    rollout_id = name(_required(given, "id", ""), "id")
    listed = _list(value["turns"], "turns")
    if not listed:
        raise RecordError("turns", "there are no turns")
    pieces, bare = [], []
    for index, entry in enumerate(listed):
        piece, turn = parse_turn(entry, index, vocab_size)
        pieces.append(piece)
        bare.append(turn)
    turns = tuple(
        dataclasses.replace(turn, prompt_ids=prompt, completion_ids=completion)
        for turn, (prompt, completion) in zip(bare, join(pieces))
    )
    completions = [turn.completion_ids for turn in turns]
    edits = tuple(
        parse_edit(entry, f"edits[{k}]", completions, len(turns), vocab_size)
        for k, entry in enumerate(_list(given.get("edits", []), "edits"))
    )
    meta = given.get("meta", {})
    if not isinstance(meta, dict):
        raise RecordError("meta", f"is {described(meta)}, must be an object")
    json_value(meta, "meta")
    return Rollout(
        id=rollout_id,
        turns=turns,
        edits=edits,
        group=_optional(name, given, "group", ""),
        reward=_optional(number, given, "reward", ""),
        meta=meta,
    )


def parse_turn(value: Any, index: int, vocab_size: int | None = None) -> tuple[Piece, Turn]:
    """Turn ``index`` of a rollout: its new ids, and the Turn, whose ``prompt_ids`` hold only the piece's head."""
    field = f"turns[{index}]"
    given = known_keys(value, TURN_KEYS, field)
    extends, head = _prompt(given, index, field, vocab_size)
    sampled = _required(given, "completion_ids", field, " ([] when nothing was sampled)")
    completion = token_ids(sampled, f"{field}.completion_ids", vocab_size)
    logprobs = None
    if "logprobs" in given:
        logprobs = log_probabilities(given["logprobs"], f"{field}.logprobs", len(completion))
        logprobs = _frozen(logprobs, given["logprobs"])
    turn = Turn(
        prompt_ids=head,
        completion_ids=completion,
        logprobs=logprobs,
        chain=name(given.get("chain", MAIN_CHAIN), f"{field}.chain"),
        purpose=text(given.get("purpose", "act"), f"{field}.purpose"),
        trainable=flag(given.get("trainable", True), f"{field}.trainable"),
        finish_reason=_optional(text, given, "finish_reason", field),
        sampling=parse_sampling(given.get("sampling", {}), f"{field}.sampling"),
        policy_version=_optional(integer, given, "policy_version", field),
        cause_turn=_earlier(given["cause_turn"], index, f"{field}.cause_turn") if "cause_turn" in given else None,
    )
    return Piece(extends, head, completion), turn


def parse_sampling(value: Any, field: str) -> Sampling:
    given = known_keys(value, SAMPLING_KEYS, field)
    temperature = number(given.get("temperature", 1.0), f"{field}.temperature")
    if temperature < 0:
        raise RecordError(f"{field}.temperature", f"is {temperature}, must not be negative")
    top_p = number(given.get("top_p", 1.0), f"{field}.top_p")
    if not 0 < top_p <= 1:
        raise RecordError(f"{field}.top_p", f"is {top_p}, must be above 0 and at most 1 (1 turns it off)")
    top_k = integer(given.get("top_k", 0), f"{field}.top_k")
    if top_k < 0:
        raise RecordError(f"{field}.top_k", f"is {top_k}, must not be negative (0 turns it off)")
    kind = given.get("logprobs", "raw")
    if kind not in ("raw", "processed"):
        raise RecordError(f"{field}.logprobs", f'is {described(kind)}, must be "raw" or "processed"')
    return Sampling(temperature, top_p, top_k, cast(Literal["raw", "processed"], kind))


def parse_edit(
    value: Any, field: str, completions: Sequence[np.ndarray], turns: int, vocab_size: int | None = None
) -> Edit:
    """One edit of a rollout with ``turns`` turns, whose sampled ids are ``completions``."""
    given = known_keys(value, EDIT_KEYS, field)
    before = integer(_required(given, "before_turn", field), f"{field}.before_turn")
    if before == 0:
        raise RecordError(f"{field}.before_turn", "is 0, but before the first turn there is no context to edit")
    if not 0 < before < turns:
        raise RecordError(f"{field}.before_turn", f"is {before}, but the turns are 0 to {turns - 1}")
    replacement = token_ids(given.get("replacement_ids", []), f"{field}.replacement_ids", vocab_size)
    inserted_at = None
    if "inserted_at" in given:
        inserted_at = integer(given["inserted_at"], f"{field}.inserted_at")
        if inserted_at < 0:
            raise RecordError(f"{field}.inserted_at", f"is {inserted_at}, must not be negative")
    elif replacement.size:
        raise RecordError(f"{field}.inserted_at", "missing: say where in the live view replacement_ids went")
    source = None
    if "replacement_from" in given:
        source = _sampled_from(given["replacement_from"], f"{field}.replacement_from", before, completions, replacement)
    return Edit(
        before_turn=before,
        evicted=ranges(given.get("evicted", []), f"{field}.evicted"),
        inserted_at=inserted_at,
        replacement_ids=_frozen(replacement, given.get("replacement_ids")),
        replacement_from=source,
        restored=ranges(given.get("restored", []), f"{field}.restored"),
        author=_optional(text, given, "author", field),
        trigger=_optional(text, given, "trigger", field),
        stored_as=_optional(text, given, "stored_as", field),
    )


def _prompt(given: dict[str, Any], index: int, field: str, vocab_size: int | None) -> tuple[int | None, np.ndarray]:
    if "extends" in given:
        if "prompt_ids" in given:
            raise RecordError(f"{field}.extends", "given together with prompt_ids; give one of the two")
        extends = _earlier(given["extends"], index, f"{field}.extends")
        appended = _required(given, "append_ids", field, "; extends needs it ([] when nothing was appended)")
        return extends, token_ids(appended, f"{field}.append_ids", vocab_size)
    if "append_ids" in given:
        raise RecordError(f"{field}.append_ids", "given without extends; say which turn these ids were appended to")
    whole = _required(given, "prompt_ids", field, " (or extends + append_ids)")
    head = token_ids(whole, f"{field}.prompt_ids", vocab_size)
    if not head.size:
        raise RecordError(f"{field}.prompt_ids", "is empty: the first sampled token would have no context")
    return None, head


def _earlier(value: Any, index: int, field: str) -> int:
    """The index of a turn before turn ``index``."""
    turn = integer(value, field)
    if turn == index:
        raise RecordError(field, f"is {turn}, this turn itself; must be an earlier turn")
    if not 0 <= turn < index:
        rule = f"must be an earlier turn (0 to {index - 1})" if index else "but no turn comes before the first"
        raise RecordError(field, f"is {turn}, {rule}")
    return turn


def _sampled_from(
    value: Any, field: str, before: int, completions: Sequence[np.ndarray], replacement: np.ndarray
) -> tuple[int, int, int]:
    if not isinstance(value, (list, tuple)) or len(value) != 3:
        raise RecordError(field, "must be [turn, lo, hi]")
    turn, lo, hi = (integer(entry, f"{field}[{k}]") for k, entry in enumerate(value))
    if not 0 <= turn < before:
        raise RecordError(field, f"names turn {turn}, must be earlier than before_turn ({before})")
    if not 0 <= lo < hi <= len(completions[turn]):
        raise RecordError(
            field, f"[{lo}, {hi}) is not a range of turn {turn}'s completion, which has {len(completions[turn])} ids"
        )
    if not np.array_equal(completions[turn][lo:hi], replacement):
        raise RecordError(field, f"turn {turn}'s completion_ids[{lo}:{hi}] are not replacement_ids")
    return turn, lo, hi


def _optional(check: Callable[[Any, str], Checked], given: dict[str, Any], key: str, field: str) -> Checked | None:
    return check(given[key], f"{field}.{key}" if field else key) if key in given else None


def _required(given: dict[str, Any], key: str, field: str, advice: str = "") -> Any:
    if key not in given:
        raise RecordError(f"{field}.{key}" if field else key, f"missing{advice}")
    return given[key]


def _list(value: Any, field: str) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise RecordError(field, f"is {described(value)}, must be a list")
    return value


def _frozen(array: np.ndarray, given: Any) -> np.ndarray:
    """The array made read-only, copied first if it is still the caller's own."""
    array = array.copy() if hasattr(given, "__array__") else array
    array.setflags(write=False)
    return array
