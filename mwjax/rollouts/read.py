"""Rollouts in, from JSON Lines or a packed set; a bad line is refused with its reason and the rest is kept."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from etils import epath

from mwjax.rollouts.errors import RecordError, Refusal
from mwjax.rollouts.lines import DamagedFile, Line, lines
from mwjax.rollouts.packed import PackedRollouts, is_packed
from mwjax.rollouts.record import Rollout
from mwjax.rollouts.validate import from_json


@dataclass(frozen=True)
class ReadResult:
    """What a file held: the rollouts in file order, and a refusal for every line that is not among them."""

    rollouts: list[Rollout]
    refused: list[Refusal]

    def summary(self, shown: int = 20) -> str:
        """Counts of read and refused, by field, and the first ``shown`` refusals in full."""
        return summary(len(self.rollouts), self.refused, shown)


class Entry(NamedTuple):
    """One line of a file and what it turned out to be."""

    line: Line
    item: Rollout | Refusal


def read(path: epath.PathLike, *, vocab_size: int | None = None) -> ReadResult:
    """Reads a whole rollout file (``.jsonl``, also gzip or Zstandard compressed; local or ``gs://``), or a packed set.

    With ``vocab_size`` ids at or beyond it are refused. Raises RolloutFileError if the file cannot be read at all.
    """
    result = ReadResult([], [])
    for _, item in iterate(path, vocab_size=vocab_size):
        if isinstance(item, Refusal):
            result.refused.append(item)
        else:
            result.rollouts.append(item)
    return result


def iterate(path: epath.PathLike, *, vocab_size: int | None = None) -> Iterator[tuple[int, Rollout | Refusal]]:
    """(line number, rollout or refusal) for each line in turn, holding one line in memory. Blank lines are skipped."""
    for entry in entries(path, vocab_size=vocab_size):
        yield entry.line.number, entry.item


def entries(path: epath.PathLike, *, vocab_size: int | None = None) -> Iterator[Entry]:
    """Like ``iterate``, with the line itself; of a packed set, its number only, and refusals come last."""
    if is_packed(path):
        yield from _packed(PackedRollouts(path, vocab_size=vocab_size))
        return
    file = str(path)
    line_of_id: dict[str, int] = {}
    try:
        for line in lines(path):
            if not line.data.strip():
                continue
            try:
                rollout = parse_line(line, vocab_size=vocab_size)
                if rollout.id in line_of_id:
                    raise RecordError("id", f"{rollout.id!r} was already used in line {line_of_id[rollout.id]}")
            except RecordError as error:
                yield Entry(line, Refusal(file, line.number, error.field, error.reason))
                continue
            line_of_id[rollout.id] = line.number
            yield Entry(line, rollout)
    except DamagedFile as error:
        line = Line(error.last + 1, -1, b"")
        reason = f"{error.reason}; whatever followed line {error.last} is lost"
        yield Entry(line, Refusal(file, line.number, "", reason))


def _packed(rollouts: PackedRollouts) -> Iterator[Entry]:
    for place, rollout in enumerate(rollouts):
        yield Entry(Line(rollouts.line(place), -1, b""), rollout)
    for refusal in rollouts.refused:
        yield Entry(Line(refusal.line, -1, b""), refusal)


def parse_line(line: Line, *, vocab_size: int | None = None) -> Rollout:
    """The rollout of one line. Raises RecordError."""
    return from_json(json_value(line), vocab_size=vocab_size)


def json_value(line: Line) -> Any:
    """The JSON value of one line. Raises RecordError."""
    try:
        text = line.data.decode("utf-8-sig" if line.number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        advice = "; it is UTF-16: save it as UTF-8" if line.data.startswith((b"\xff\xfe", b"\xfe\xff")) else ""
        raise RecordError("", f"is not UTF-8 text (byte {error.start + 1}){advice}") from None
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise RecordError("", _syntax(error, text)) from None
    except RecursionError:
        raise RecordError("", "is nested too deeply") from None
    except RecordError:
        raise
    except ValueError as error:  # a number of thousands of digits
        raise RecordError("", f"is not readable JSON: {error}") from None


def summary(kept: int, refused: list[Refusal], shown: int = 20) -> str:
    """Counts of read and refused lines and the reasons, as lines of text."""
    parts = [f"{kept} rollout{'' if kept == 1 else 's'} read, {len(refused)} refused"]
    parts += [f"  {refusal}" for refusal in refused[:shown]]
    if len(refused) > shown:
        fields = Counter(re.sub(r"\[\d+\]", "[]", refusal.field) or "whole line" for refusal in refused[shown:])
        rest = ", ".join(f"{count} at {field}" for field, count in fields.most_common())
        parts.append(f"  and {len(refused) - shown} more: {rest}")
    return "\n".join(parts)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        key = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise RecordError("", f"the key {key!r} is given twice in one object")
    return result


def _syntax(error: json.JSONDecodeError, text: str) -> str:
    rest = text[error.pos :].strip()
    if error.msg == "Extra data":
        return f"goes on after the end of the object (column {error.colno}); write one rollout a line"
    inside_last_value = error.pos > 0 and not re.search(r"[][{},:]", rest)
    if not rest or inside_last_value or error.msg.startswith("Unterminated string"):
        return (
            f"the line ends early (after {len(text.rstrip())} characters): it was cut off, "
            "or one rollout is spread over several lines"
        )
    return f"is not JSON: {error.msg} at column {error.colno}"
