"""The ``extends`` form: a prompt as an earlier turn's prompt + completion + new ids, so that logs grow linearly."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

_MULTIPLIER = 0x9E3779B97F4A7C15


class Piece(NamedTuple):
    """One turn without repetition. ``head`` is the whole prompt where ``extends`` is None, otherwise what follows
    turn ``extends``'s prompt + completion. int32 arrays."""

    extends: int | None
    head: np.ndarray
    completion: np.ndarray


def join(pieces: Sequence[Piece]) -> list[tuple[np.ndarray, np.ndarray]]:
    """(prompt, completion) per turn, int32, read-only.

    Turns that extend one another are views into one buffer, so memory stays linear in the tokens of the pieces except
    where several turns extend the same one.
    """
    heir: dict[int, int] = {piece.extends: turn for turn, piece in enumerate(pieces) if piece.extends is not None}
    joined: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for start, first in enumerate(pieces):
        if first.extends is not None and heir[first.extends] == start:
            continue
        parts = [] if first.extends is None else list(joined[first.extends])
        end, spans = sum(map(len, parts)), []
        turn: int | None = start
        while turn is not None:
            piece = pieces[turn]
            parts += [piece.head, piece.completion]
            prompt_end = end + len(piece.head)
            end = prompt_end + len(piece.completion)
            spans.append((turn, prompt_end, end))
            turn = heir.get(turn)
        buffer = np.concatenate(parts).astype(np.int32, copy=False)
        buffer.setflags(write=False)
        for turn, prompt_end, end in spans:
            joined[turn] = (buffer[:prompt_end], buffer[prompt_end:end])
    return [joined[turn] for turn in range(len(pieces))]


class Shortener:
    """Turns full prompts into pieces, turn by turn: each extends the earlier turn whose prompt + completion is its
    longest exact prefix (the latest of equals).

    Candidates come from 64-bit prefix hashes in O(prompt length + distinct lengths so far), then one is compared id by
    id against the stored pieces, so the whole is linear in the ids handed in and keeps only the pieces.
    """

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self._lengths: list[int] = []
        self._ends = np.zeros(0, np.int64)  # the distinct lengths, less one
        self._turns: dict[int, list[int]] = {}  # by hash

    def add(self, prompt: np.ndarray, completion: np.ndarray) -> Piece:
        """The piece of the next turn; prompt and completion are int32 and must not change afterwards."""
        powers = _powers(len(prompt) + len(completion))
        # + 1 so that id 0 counts; wrap-around modulo 2^64 is meant.
        prefix = np.cumsum((prompt.astype(np.uint64) + np.uint64(1)) * powers[: len(prompt)])
        piece = Piece(None, prompt, completion)
        for turn in self._candidates(prefix):
            if self._is_prefix(turn, prompt):
                piece = Piece(turn, prompt[self._lengths[turn] :].copy(), completion)
                break
        tail = np.sum((completion.astype(np.uint64) + np.uint64(1)) * powers[len(prompt) :])
        length = len(prompt) + len(completion)
        if length and not np.any(self._ends == length - 1):
            self._ends = np.append(self._ends, length - 1)
        whole = (int(tail) + (int(prefix[-1]) if len(prefix) else 0)) % 2**64
        self._turns.setdefault(whole, []).append(len(self.pieces))
        self.pieces.append(piece)
        self._lengths.append(length)
        return piece

    def _candidates(self, prefix: np.ndarray) -> list[int]:
        """Turns whose ids may be a prefix, the longest first, the latest of equals first."""
        ends = self._ends[self._ends < len(prefix)]
        found = self._turns.keys() & prefix[ends].tolist()
        turns = [turn for each in found for turn in self._turns[each] if 0 < self._lengths[turn] <= len(prefix)]
        return sorted(turns, key=lambda turn: (self._lengths[turn], turn), reverse=True)

    def _is_prefix(self, turn: int | None, prompt: np.ndarray) -> bool:
        end = self._lengths[turn] if turn is not None else 0
        while turn is not None:
            piece = self.pieces[turn]
            for part in (piece.completion, piece.head):
                if not np.array_equal(part, prompt[end - len(part) : end]):
                    return False
                end -= len(part)
            turn = piece.extends
        return True


def _powers(count: int) -> np.ndarray:
    return _power_table(1 << max(10, count.bit_length()))[:count]


@lru_cache(maxsize=4)
def _power_table(count: int) -> np.ndarray:
    table = np.full(count, _MULTIPLIER, dtype=np.uint64)
    np.cumprod(table, out=table)
    table.setflags(write=False)
    return table
