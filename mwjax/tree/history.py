"""``H_T``: every token that was ever live in a chain, once, in order of first appearance, and which of them are live.

MemoryWalker section 2 calls it the physical union. Positions in it identify tokens across edits, so it is what edits
are written in and what says whether a sampled token survived.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mwjax.rollouts.record import Edit

NO_ORIGIN = -1


class TreeError(ValueError):
    """A rollout that reads well but contradicts itself. ``field`` names where, ``reason`` why."""

    def __init__(self, rollout_id: str, field: str, reason: str):
        super().__init__(f"rollout {rollout_id!r}: {field}: {reason}")
        self.rollout_id, self.field, self.reason = rollout_id, field, reason


@dataclass
class History:
    """The growing ``H_T`` of one chain while its turns are replayed. Positions are int64, -1 marks "none".

    ids: ``H_T`` itself, as pieces. origin_turn, origin_index: the sampled token a position holds, as pieces.
    document: all positions in the order of the text (a replacement stands where it was put, not where it appeared).
    live: whether a position is in the live view.
    entry_position, entry_until: the union row (MemoryWalker eq. 7). Entry e holds ``H_T`` position
    ``entry_position[e]`` and is visible to rows ``e <= i < entry_until[e]``; a restored position gets a second entry.
    entry_depth: where each entry stood in the live view when it entered, its RoPE position ever after.
    """

    length: int = 0
    ids: list[np.ndarray] = field(default_factory=list)
    origin_turn: list[np.ndarray] = field(default_factory=list)
    origin_index: list[np.ndarray] = field(default_factory=list)
    document: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    live: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    entry_position: list[np.ndarray] = field(default_factory=list)
    entry_depth: list[np.ndarray] = field(default_factory=list)
    settled: int = 0
    entries: int = 0
    entry_of: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    entry_ends: list[tuple[np.ndarray, int]] = field(default_factory=list)

    def append(self, ids: np.ndarray, turn: int = NO_ORIGIN, first_index: int = 0) -> np.ndarray:
        """Make ``ids`` new live tokens (sampled in ``turn`` from ``first_index`` on, if given); return their positions.

        Where they stand in the text is left to :meth:`place` or :meth:`place_last`.
        """
        count = len(ids)
        positions = np.arange(self.length, self.length + count)
        self.length += count
        self.ids.append(ids)
        self.origin_turn.append(np.full(count, turn, np.int64))
        index = np.arange(first_index, first_index + count) if turn != NO_ORIGIN else np.full(count, NO_ORIGIN)
        self.origin_index.append(index.astype(np.int64))
        self.live = np.concatenate([self.live, np.ones(count, bool)])
        self.entry_of = np.concatenate([self.entry_of, np.zeros(count, np.int64)])
        self._enter(positions)
        return positions

    def _enter(self, positions: np.ndarray) -> None:
        self.entry_of[positions] = np.arange(self.entries, self.entries + len(positions))
        self.entry_position.append(positions)
        self.entries += len(positions)

    def evict(self, positions: np.ndarray) -> None:
        """Take live positions out. Row J, the last before the edit, predicts the first token after it, so it already
        must not see them: keys end at J."""
        self.live[positions] = False
        self.entry_ends.append((self.entry_of[positions], self.entries - 1))

    def restore(self, positions: np.ndarray) -> None:
        """Put evicted positions back at their old place in the text."""
        self.live[positions] = True
        self._enter(positions)

    def live_view(self) -> np.ndarray:
        """Live positions in the order of the text: int64 [N]."""
        return self.document[self.live[self.document]]

    def place(self, positions: np.ndarray, live_index: int) -> None:
        """Put new positions into the text so that they stand at ``live_index`` of the live view: right after the live
        token before it, hence before any evicted text of that gap."""
        at = 0 if live_index == 0 else int(np.flatnonzero(self.live[self.document])[live_index - 1]) + 1
        self.document = np.insert(self.document, at, positions)

    def place_last(self, positions: np.ndarray) -> None:
        self.document = np.concatenate([self.document, positions])

    def settle(self, view: np.ndarray) -> None:
        """Note where the pieces that entered since the last call stand in the live view (one call a turn)."""
        depth = np.zeros(self.length, np.int64)
        depth[view] = np.arange(len(view))
        self.entry_depth += [depth[piece] for piece in self.entry_position[self.settled :]]
        self.settled = len(self.entry_position)

    def last_live_entry(self) -> int:
        """The union row that predicts the next token: the latest entry that is still live."""
        return int(self.entry_of[self.live].max(initial=NO_ORIGIN))


def _positions(ranges: tuple[tuple[int, int], ...]) -> np.ndarray:
    return np.concatenate([np.arange(lo, hi) for lo, hi in ranges] or [np.zeros(0, np.int64)])


def apply_edit(history: History, edit: Edit, rollout_id: str, name: str) -> None:
    """Apply one recorded edit to the live view.

    Raises:
        TreeError: a range lies outside ``H_T``, evicts what is not live or restores what is, or ``inserted_at`` lies
            outside the live view.
    """
    for field_name, ranges, want_live in (("evicted", edit.evicted, True), ("restored", edit.restored, False)):
        for lo, hi in ranges:
            where = f"{name}.{field_name}"
            if not 0 <= lo <= hi <= history.length:
                raise TreeError(
                    rollout_id, where, f"[{lo}, {hi}] is outside H_T, which has {history.length} tokens here"
                )
            wrong = np.flatnonzero(history.live[lo:hi] != want_live)
            if not want_live and not np.isin(np.arange(lo, hi), history.document).all():
                reason = f"[{lo}, {hi}] left at a junction that no edit explains, so its old place is unknown"
                raise TreeError(rollout_id, where, reason)
            if len(wrong):
                state = "is not in the live view" if want_live else "is in the live view already"
                raise TreeError(rollout_id, where, f"[{lo}, {hi}]: H_T position {lo + int(wrong[0])} {state}")
    if edit.evicted:
        history.evict(_positions(edit.evicted))
    if len(edit.replacement_ids):
        live_count = int(history.live.sum())
        at = edit.inserted_at
        if at is None or not 0 <= at <= live_count:
            reason = f"{at} is not an index into the live view, which has {live_count} tokens after the eviction"
            raise TreeError(rollout_id, f"{name}.inserted_at", reason)
        source = edit.replacement_from
        turn, lo = (source[0], source[1]) if source else (NO_ORIGIN, 0)
        history.place(history.append(np.asarray(edit.replacement_ids, np.int32), turn, lo), at)
    if edit.restored:
        history.restore(_positions(edit.restored))
