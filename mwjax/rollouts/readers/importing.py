"""``mwjax import``: outside logs in, one file of rollouts out, every record accounted for."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from etils import epath

from mwjax.rollouts.errors import RecordError, Refusal, RolloutFileError, file_error
from mwjax.rollouts.fields import known_keys, name, number
from mwjax.rollouts.readers.detect import by_name, detect
from mwjax.rollouts.readers.reader import Found, Options, Reader, Remark
from mwjax.rollouts.readers.records import json_records
from mwjax.rollouts.record import Rollout
from mwjax.rollouts.validate import from_json
from mwjax.rollouts.write import as_line, as_object, write


@dataclass
class Imported:
    """What came of it. ``used``: records that are in the rollouts. ``rewarded``, ``grouped``: rollouts with a reward, a
    group. ``supplied``, ``normalised``: rollouts that got what their log lacks, and those whose system prompts were
    made one. ``formats``: of every file."""

    out: str
    formats: dict[str, str] = field(default_factory=dict)
    rollouts: int = 0
    turns: int = 0
    sampled: int = 0
    used: int = 0
    rewarded: int = 0
    grouped: int = 0
    supplied: int = 0
    normalised: int = 0
    refused: list[Refusal] = field(default_factory=list)
    remarks: list[Remark] = field(default_factory=list)

    @property
    def merged(self) -> int:
        return sum(remark.kind == "merged" for remark in self.remarks)

    @property
    def empty(self) -> int:
        return sum(remark.kind == "empty" for remark in self.remarks)

    @property
    def records(self) -> int:
        """Records read: every one is used, merged, empty or refused."""
        return self.used + self.merged + self.empty + len(self.refused)

    def summary(self) -> str:
        """One line on what was written."""
        if not self.rollouts:
            return f"no rollout could be imported; {self.out} is not written"
        counts = f"{_count(self.rollouts, 'rollout')}, {_count(self.turns, 'turn')}, {self.sampled:,} sampled ids"
        return f"{counts}: {self.out}"

    def account(self, shown: int = 20) -> str:
        """What became of the records, and why, as lines of text; the first ``shown`` refusals in full."""
        parts = [f"{file}: {form}" for file, form in self.formats.items()]
        parts.append(
            f"{_count(self.records, 'record')} read: {self.used} in rollouts, {self.merged} merged, {self.empty} with "
            f"nothing sampled, {len(self.refused)} refused"
        )
        for kind, title in (("merged", "merged"), ("empty", "nothing sampled"), ("warning", "warning")):
            found: dict[str, list[Remark]] = {}
            for remark in self.remarks:
                if remark.kind == kind:
                    found.setdefault(remark.reason, []).append(remark)
            for reason, group in found.items():
                first = f"{group[0].file}{f', line {group[0].line}' if group[0].line else ''}"
                parts.append(f"  {title}{f' ({len(group)} times)' if len(group) > 1 else ''}: {reason}; {first}")
        parts += [f"  refused: {refusal}" for refusal in self.refused[:shown]]
        if len(self.refused) > shown:
            reasons = Counter(refusal.reason for refusal in self.refused[shown:])
            parts += [f"  refused, {count} more: {reason}" for reason, count in reasons.most_common(shown)]
        return "\n".join(parts)


def import_files(
    files: Sequence[str],
    out: epath.PathLike,
    *,
    format: str | None = None,
    options: Options = Options(),  # noqa: B008
    rewards: str | None = None,
    overwrite: bool = False,
) -> Imported:
    """Reads logs of outside formats and writes their rollouts to ``out``, all or nothing.

    format: of all files, else each one's is detected. rewards: JSON Lines of ``{"id", "reward", "group"}`` for logs
    that hold none. Without a usable rollout nothing is written. Raises RolloutFileError for a file that cannot be read
    or is of no known format, or where ``out`` exists and ``overwrite`` is false.
    """
    given = {} if rewards is None else _rewards(rewards)
    chosen = [by_name(format) if format is not None else detect(file) for file in files]
    if len(set(files)) < len(files):
        raise ValueError(f"{Counter(files).most_common(1)[0][0]} is given twice")
    target = epath.Path(out).expanduser()
    if any(epath.Path(file).expanduser() == target for file in files):
        raise RolloutFileError(f"{out} is also a file to import; give another --out")
    if target.exists() and not overwrite:
        raise RolloutFileError(f"{out} exists already; give --overwrite to replace it, or another --out")
    result = Imported(str(out), {file: reader.NAME for file, reader in zip(files, chosen)})
    seen: dict[str, bytes] = {}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise file_error("write", out, error) from error
    try:
        write(out, _rollouts(files, chosen, options, given, result, seen))
    except _Nothing:
        return result
    result.remarks += _without_effect(options, result)
    unused = sorted(given.keys() - seen.keys())
    for missing in unused:
        result.remarks.append(Remark("warning", str(rewards), 0, f"no rollout has the id {missing!r}"))
    return result


def _without_effect(options: Options, result: Imported) -> Iterator[Remark]:
    """Options that found nothing to do."""
    if options.reward is not None and not result.rewarded:
        yield Remark("warning", result.out, 0, f"--reward {options.reward} had no effect: no rollout got a reward")
    if options.group_by is not None and not result.grouped:
        yield Remark("warning", result.out, 0, f"--group-by {options.group_by} had no effect: no rollout got a group")
    if (options.opening or options.tools is not None) and not result.supplied:
        reason = "--system and --tools had no effect: no main conversation here lacks what they give"
        yield Remark("warning", result.out, 0, reason)
    if options.normalise_system and not result.normalised:
        reason = "--normalise-system had no effect: no system prompt that is rendered changed in a few lines"
        yield Remark("warning", result.out, 0, f"{reason}; recorded ids stay as they are")


class _Nothing(Exception):
    """No rollout was found: an existing file stays."""


def _rollouts(
    files: Sequence[str],
    readers: Sequence[Reader],
    options: Options,
    rewards: Mapping[str, Mapping[str, Any]],
    result: Imported,
    seen: dict[str, bytes],
) -> Iterator[Rollout]:
    """The rollouts of all files; everything else goes into ``result``. ``seen``: ids, and digests of what they name."""
    answered: dict[bytes, str] = {}
    repeats: Counter[str] = Counter()
    for file, reader in zip(files, readers):
        for item in reader.read(file, options):
            if isinstance(item, Refusal):
                result.refused.append(item)
                continue
            if isinstance(item, Remark):
                result.remarks.append(item)
                continue
            try:
                rollout = _checked(item, file, reader, options, rewards)
            except RecordError as error:
                # Each of its records is lost with it.
                reason = f"{error.reason} (rollout {item.rollout.id!r})"
                result.refused += [Refusal(file, item.line, error.field, reason)] * item.records
                continue
            copies = _copies(rollout, item.responses, file, answered)
            if copies and len(copies) == len(rollout.turns):
                again = Remark(
                    "merged", file, item.line, "all its responses are in another file, as of a resumed session"
                )
                result.remarks += [again] * item.records
                continue
            if copies:
                reason = "responses that another file has too, as of a resumed session, are context only here"
                result.remarks.append(Remark("warning", file, item.line, reason))
                turns = enumerate(rollout.turns)
                kept = (dataclasses.replace(turn, trainable=turn.trainable and k not in copies) for k, turn in turns)
                rollout = dataclasses.replace(rollout, turns=tuple(kept))
            digest = hashlib.sha256(as_line(as_object(dataclasses.replace(rollout, meta={})))).digest()
            if seen.get(rollout.id) == digest:
                again = Remark("merged", file, item.line, "the same rollout again")
                result.remarks += [again] * item.records
                continue
            unique = rollout.id
            while unique in seen:
                repeats[rollout.id] += 1
                unique = f"{rollout.id}~{repeats[rollout.id] + 1}"
            if unique != rollout.id:
                result.remarks.append(
                    Remark("warning", file, item.line, "another rollout has the same id; ~2, ~3, ... is appended")
                )
                rollout = dataclasses.replace(rollout, id=unique)
            seen[unique] = digest
            result.rollouts += 1
            result.turns += len(rollout.turns)
            result.sampled += sum(len(turn.completion_ids) for turn in rollout.turns)
            result.used += item.records
            result.rewarded += rollout.reward is not None
            result.grouped += rollout.group is not None
            result.supplied += "supplied" in rollout.meta
            result.normalised += "system_normalised" in rollout.meta
            yield rollout
    if not result.rollouts:
        raise _Nothing


def _copies(rollout: Rollout, responses: Sequence[Hashable], file: str, answered: dict[bytes, str]) -> frozenset[int]:
    """Turns with the response, and the ids, of one in another file. ``answered``: the file of every response."""
    found = set()
    for k, (turn, response) in enumerate(zip(rollout.turns, responses)):
        if response is not None:
            digest = hashlib.sha256(repr(response).encode("utf-8", "backslashreplace"))
            digest.update(turn.prompt_ids.tobytes() + b"|" + turn.completion_ids.tobytes())
            if answered.setdefault(digest.digest(), file) != file:
                found.add(k)
    return frozenset(found)


def _checked(
    found: Found, file: str, reader: Reader, options: Options, rewards: Mapping[str, Mapping[str, Any]]
) -> Rollout:
    rollout = found.rollout
    said = rewards.get(rollout.id, {})
    rollout = dataclasses.replace(
        rollout,
        group=said.get("group", rollout.group),
        reward=said.get("reward", rollout.reward),
        meta={**rollout.meta, "imported": {"format": reader.NAME, "file": file, "line": found.line}},
    )
    return from_json(as_object(rollout), vocab_size=options.vocab_size)


def _rewards(path: str) -> dict[str, dict[str, Any]]:
    """By rollout id: reward and group. Raises ValueError for a bad line, since a wrong reward is worse than none."""
    result: dict[str, dict[str, Any]] = {}
    for record in json_records(path):
        if isinstance(record, Refusal):
            raise ValueError(str(record))
        try:
            value = known_keys(record.value, ("id", "reward", "group"), "")
            key = name(value.get("id"), "id")
            if key in result:
                raise RecordError("id", f"{key!r} is given twice")
            result[key] = {
                **({"reward": number(value["reward"], "reward")} if "reward" in value else {}),
                **({"group": name(value["group"], "group")} if "group" in value else {}),
            }
        except RecordError as error:
            raise ValueError(str(record.refusal(path, error.field, error.reason))) from None
    return result


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
