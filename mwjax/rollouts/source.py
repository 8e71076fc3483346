"""Random access to the rollouts of one file, as data pipelines with worker processes need it."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import numpy as np
from etils import epath

from mwjax.rollouts.errors import RecordError, Refusal, RolloutFileError, file_error
from mwjax.rollouts.lines import DamagedFile, Line, is_compressed, is_pipe, lines, open_binary
from mwjax.rollouts.packed import PackedRollouts, is_packed
from mwjax.rollouts.read import entries, parse_line, summary
from mwjax.rollouts.record import Rollout


def open_rollouts(path: epath.PathLike, *, vocab_size: int | None = None) -> RolloutFile | PackedRollouts:
    """A rollout file or a packed set, as a sequence of rollouts. Raises RolloutFileError if it cannot be read."""
    kind = PackedRollouts if is_packed(path) else RolloutFile
    return kind(path, vocab_size=vocab_size)


class RolloutFile:
    """A sequence of the good rollouts of a file; ``refused`` holds the rest.

    Opening it reads and validates every line once. Of a plain file only byte offsets stay in memory and an item is one
    seek and one read; a compressed file keeps its decompressed lines. A pickled copy carries the index alone, and
    each access opens the file anew, so threads, forks and spawned workers do not share a file position.
    """

    def __init__(self, path: epath.PathLike, *, vocab_size: int | None = None) -> None:
        """Raises RolloutFileError if the file cannot be read, or is a pipe."""
        self.path = str(path)
        self.vocab_size = vocab_size
        self.refused: list[Refusal] = []
        self.ids: list[str] = []
        if is_pipe(path):
            raise RolloutFileError(f"cannot read {path} more than once: it is a pipe; save what it gives to a file")
        self._compressed = is_compressed(path)
        self._text: list[bytes] | None = [] if self._compressed else None
        where = []
        for line, item in entries(path, vocab_size=vocab_size):
            if isinstance(item, Refusal):
                self.refused.append(item)
                continue
            self.ids.append(item.id)
            where.append((line.number, line.offset, len(line.data)))
            if self._text is not None:
                self._text.append(line.data)
        self._where = np.array(where, dtype=np.int64).reshape(-1, 3)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Rollout:
        """Raises IndexError out of range and RolloutFileError if the file was changed since it was opened."""
        index = operator.index(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"rollout {index} of {len(self)} in {self.path}")
        index %= len(self)
        number, offset, _ = self._where[index].tolist()
        try:
            rollout = parse_line(Line(number, offset, self._data(index)), vocab_size=self.vocab_size)
        except RecordError as error:
            raise self._changed(number, str(error)) from None
        if rollout.id != self.ids[index]:
            raise self._changed(number, f"it held rollout {self.ids[index]!r}, now {rollout.id!r}")
        return rollout

    def line(self, index: int) -> int:
        """Line number, from 1, of a rollout in the file."""
        return int(self._where[index, 0])

    def refusal(self, index: int, field: str, reason: str) -> Refusal:
        """That a rollout is not taken, and why."""
        return Refusal(self.path, self.line(index), field, reason)

    def __iter__(self) -> Iterator[Rollout]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"RolloutFile({self.path!r}, {len(self)} rollouts)"

    def summary(self, shown: int = 20) -> str:
        """Counts of read and refused, by field, and the first ``shown`` refusals in full."""
        return summary(len(self), self.refused, shown)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_text": None}

    def _data(self, index: int) -> bytes:
        if self._compressed:
            text = self._text
            if text is None:
                text = self._text = self._decompress()
            return text[index]
        _, offset, length = self._where[index].tolist()
        try:
            with open_binary(self.path) as handle:
                handle.seek(offset)
                return handle.read(length)
        except OSError as error:
            raise file_error("read", self.path, error) from error

    def _decompress(self) -> list[bytes]:
        wanted = set(self._where[:, 0].tolist())
        text = []
        try:
            for line in lines(self.path):
                if line.number in wanted:
                    text.append(line.data)
        except DamagedFile:
            pass  # the lines before the damage are all that the index holds
        if len(text) != len(self):
            raise self._changed(len(text) + 1, "lines are missing")
        return text

    def _changed(self, line: int, what: str) -> RolloutFileError:
        return RolloutFileError(f"{self.path}, line {line} changed since the file was opened ({what}); start again")
