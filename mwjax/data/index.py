"""What planning needs to know of the rollouts, and how to read some of them again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from mwjax.rollouts import PackedRollouts, Refusal, RolloutFile
from mwjax.tree import Fragment, RowShape, Tree, build, fragments

Source = RolloutFile | PackedRollouts
LeftOut = tuple[int, int, str, str]


@dataclass(frozen=True)
class Layout:
    """How rollouts become rows. merge: join equal edges (SFT). group_tries: one trie for a group's rollouts (packed).

    rollouts_per_step: whole rollouts of one optimiser step; rows_per_microbatch: rows of one pass over all processes.
    ratios: the loss is a policy gradient, which needs the ids that were really sampled; recorded: and the log-probs of
    the engine that sampled them.
    """

    method: str
    shape: RowShape
    rollouts_per_step: int = 8
    rows_per_microbatch: int = 1
    group_tries: bool = True
    merge: bool = False
    ratios: bool = False
    recorded: bool = False


@dataclass(frozen=True, eq=False)
class Index:
    """What a scan found. Rollouts are numbered 0..R-1 in file order; refused ones are left out.

    lines: (file number, place in that file) of every rollout. rewards: float64 [R], NaN where unknown. groups: int64
    [R], equal numbers for rollouts of one group. units: the rollouts that are laid out together. needs: for every unit
    int64 [F, 4], the capacities its fragments take. edges: int64 [R], loss tokens under the method. sampled: int64 [R],
    all loss tokens. contents: int64 [R], CRC-32 of turns and edits. view_tokens, trie_tokens: int64 [U], per unit,
    over all its views. left_out: (file number, place in that file, field, reason) of readable rollouts that cannot be
    used.
    """

    sources: tuple[Source, ...]
    layout: Layout
    lines: tuple[tuple[int, int], ...]
    ids: tuple[str, ...]
    rewards: np.ndarray
    groups: np.ndarray
    units: tuple[np.ndarray, ...]
    needs: tuple[np.ndarray, ...]
    edges: np.ndarray
    sampled: np.ndarray
    contents: np.ndarray
    view_tokens: np.ndarray
    trie_tokens: np.ndarray
    left_out: tuple[LeftOut, ...]

    @property
    def refused(self) -> tuple[Refusal, ...]:
        """Every rollout that is not in the index."""
        unusable = [self.sources[file].refusal(place, field, why) for file, place, field, why in self.left_out]
        return tuple(unusable + [refusal for source in self.sources for refusal in source.refused])

    def trees(self, numbers: Iterable[int]) -> list[Tree]:
        """Read some rollouts again and build their trees."""
        return [build(self.sources[file][place]) for file, place in (self.lines[number] for number in numbers)]

    def unit_fragments(self, unit: int) -> list[Fragment]:
        """The row fragments of one unit."""
        numbers = self.units[unit].tolist()
        layout = self.layout
        return fragments(self.trees(numbers), layout.method, layout.shape, numbers=numbers, merge=layout.merge)
