"""Training rows of other trainers as rollouts: a rollout may be several rows, a row several turns.

Every run of sampled ids in a row is a turn, and what stands before it its prompt. Rows with the same rollout name are
one rollout, in the order of the file. Where a row repeats what an earlier one of its rollout has, ids, prompt and
log-probs, it was sampled once and is there once.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from mwjax.rollouts.errors import RecordError, Refusal
from mwjax.rollouts.fields import described, log_probabilities, number, token_ids
from mwjax.rollouts.readers.engine_call import Call
from mwjax.rollouts.readers.masked import sampled_runs
from mwjax.rollouts.readers.reader import DEFAULT_SAMPLING, Item, Options, Remark
from mwjax.rollouts.readers.records import Record
from mwjax.rollouts.readers.sessions import Session, at, refused, rollouts_of
from mwjax.rollouts.record import Sampling

# A rollout's name, by whatever name the trainers and their users give it.
ROLLOUT = ("rollout_id", "trajectory_id", "traj_id", "session_id", "request_id", "episode_id")


@dataclass(frozen=True)
class Row:
    """One row, unpadded: ids; mask, 1 for every sampled one; logprobs of all ids or None (those of ids that were not
    sampled do not matter). ``versions``: of the policy, one for each id. ``names``: fields of ids, mask and
    logprobs."""

    ids: Any
    mask: Any
    logprobs: Any = None
    rollout: str | None = None
    group: str | None = None
    reward: Any = None
    versions: Any = None
    sampling: Sampling = DEFAULT_SAMPLING
    finish_reason: str | None = None
    trainable: bool = True
    names: tuple[str, str, str] = ("input_ids", "loss_mask", "logprobs")


def read_rows(
    path: str, records: Iterable[Record | Refusal], rows_of: Callable[[Record], Iterable[Row]], options: Options
) -> Iterator[Item]:
    """The rollouts of a file of rows, each of which is counted. rows_of: the rows of one record, a batch or one; raises
    RecordError."""
    sessions: dict[str, Session] = {}
    sampled: dict[str, set[bytes]] = {}  # by session, what is there already
    stem = os.path.basename(path).partition(".")[0]
    count = 0
    for record in records:
        if isinstance(record, Refusal):
            yield record
            continue
        unnamed = Session(f"{stem}:{record.line}{record.place}", one=True)
        try:
            numbered = enumerate(rows_of(record), start=count)
            made = [(row, _calls(row, number_, record.line, options), _reward(row)) for number_, row in numbered]
            unnamed.note(record, options)
        except RecordError as error:
            yield refused(path, unnamed, record, error)
            continue
        count += len(made)
        said = at(record.value, options.session_by) if options.session_by is not None else None
        for place, (row, calls, reward) in enumerate(made):
            if not calls:
                yield Remark("empty", path, record.line, "the row has no sampled id")
                continue
            name = row.rollout if said is None else str(said)
            name = name or (unnamed.name if len(made) == 1 else f"{unnamed.name}.{place}")
            session = sessions.setdefault(name, Session(name, one=True))
            known = sampled.setdefault(name, set())
            contents = [_contents(call) for call in calls]
            fresh = [call for call, content in zip(calls, contents) if content not in known]
            session.calls += fresh
            known.update(contents)
            if not fresh:
                yield Remark("merged", path, record.line, "the row repeats what another row of its rollout has")
            session.group = unnamed.group or row.group or session.group
            reward = reward if unnamed.reward is None else unnamed.reward
            if session.reward is not None and reward is not None and session.reward != reward:
                reason = "the rows of one rollout have different rewards; the last one is taken"
                yield Remark("warning", path, record.line, reason)
            session.reward = session.reward if reward is None else reward
    yield from rollouts_of(path, sessions, options)


def flat(value: Any, field: str) -> list[list[Any]]:
    """A list, or a batch of lists, as a batch."""
    if not isinstance(value, list):
        raise RecordError(field, f"is {described(value)}, must be a list, as a tensor's .tolist() gives it")
    if value and all(isinstance(each, list) for each in value):
        return value
    return [value]


def entries(value: Any, field: str, ids: list[Any]) -> list[Any] | None:
    """One entry for each id, or None where there are none. Raises RecordError."""
    if value is not None and not isinstance(value, list):
        raise RecordError(field, f"is {described(value)}, must be a list")
    if value is not None and len(value) != len(ids):
        raise RecordError(field, f"has {len(value)} entries for {len(ids)} ids")
    return value


def first(record: Any, names: Iterable[str]) -> Any:
    """The first of these fields that is there and not null."""
    return next((record[name] for name in names if record.get(name) is not None), None)


def _reward(row: Row) -> float | None:
    return None if row.reward is None else number(row.reward, "reward")


def _calls(row: Row, number_: int, line: int, options: Options) -> list[Call]:
    ids_field, mask_field, logprobs_field = row.names
    ids = token_ids(row.ids, ids_field, options.vocab_size)
    calls = []
    runs = sampled_runs(row.mask, len(ids), mask_field)
    if row.logprobs is not None and len(row.logprobs) != len(ids):
        raise RecordError(logprobs_field, f"has {len(row.logprobs)} entries for {len(ids)} ids")
    for lo, hi in runs:
        logprobs = None
        if row.logprobs is not None:
            try:
                logprobs = log_probabilities(row.logprobs[lo:hi], logprobs_field, hi - lo)
            except RecordError as error:
                reason = f"{error.reason} (of the ids from {lo} on)"
                raise RecordError(logprobs_field, reason) from None
        version = None
        if row.versions is not None:
            # The oldest policy that had a part in it.
            known = [each for each in row.versions[lo:hi] if type(each) is int and each >= 0]
            version = min(known, default=None)
        if not lo:
            raise RecordError(mask_field, "begins with a sampled id: the first one would have no context")
        calls.append(
            Call(
                record=number_,
                line=line,
                prompt_ids=ids[:lo],
                completion_ids=ids[lo:hi],
                logprobs=logprobs,
                sampling=row.sampling,
                finish_reason=row.finish_reason if (lo, hi) == runs[-1] else None,
                policy_version=version,
                trainable=row.trainable,
            )
        )
    return calls


def _contents(call: Call) -> bytes:
    """Equal for calls with the same ids and log-probs."""
    found = hashlib.sha256()
    for part in (call.prompt_ids, call.completion_ids, call.logprobs):
        data = b"" if part is None else part.tobytes()
        found.update(len(data).to_bytes(8, "little") + data)
    return found.digest()
