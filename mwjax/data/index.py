"""One pass over the rollouts before training: what planning needs to know, and nothing else stays in memory."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mwjax.rollouts import Refusal, Rollout, RolloutFile
from mwjax.tree import Fragment, RowShape, RowTooShort, Tree, TreeError, build, build_trie, fragments


@dataclass(frozen=True)
class Layout:
    """How rollouts become rows. merge: join equal edges (SFT). group_tries: one trie for a group's rollouts (packed).

    rollouts_per_step: whole rollouts of one optimiser step; rows_per_microbatch: rows of one pass over all processes.
    """

    method: str
    shape: RowShape
    rollouts_per_step: int = 8
    rows_per_microbatch: int = 1
    group_tries: bool = True
    merge: bool = False


@dataclass(frozen=True, eq=False)
class Index:
    """What a scan found. Rollouts are numbered 0..R-1 in file order; refused ones are left out.

    lines: (file number, place in that file) of every rollout. rewards: float64 [R], NaN where unknown. groups: int64
    [R], equal numbers for rollouts of one group. units: the rollouts that are laid out together. needs: for every unit
    int64 [F, 4], the capacities its fragments take. edges: int64 [R], loss tokens under the method. sampled: int64 [R],
    all loss tokens. contents: int64 [R], CRC-32 of turns and edits. view_tokens, trie_tokens: int64 [U], per unit,
    over all its views.
    """

    sources: tuple[RolloutFile, ...]
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
    refused: tuple[Refusal, ...]

    def trees(self, numbers: Iterable[int]) -> list[Tree]:
        """Read some rollouts again and build their trees."""
        return [build(self.sources[file][place]) for file, place in (self.lines[number] for number in numbers)]

    def unit_fragments(self, unit: int) -> list[Fragment]:
        """The row fragments of one unit."""
        numbers = self.units[unit].tolist()
        layout = self.layout
        return fragments(self.trees(numbers), layout.method, layout.shape, numbers=numbers, merge=layout.merge)


def scan(
    paths: Sequence[str],
    layout: Layout,
    *,
    vocab_size: int | None = None,
    progress: Callable[[Iterable[int], int], Iterable[int]] | None = None,
) -> Index:
    """Read every rollout once, build its tree and measure its fragments.

    A rollout that cannot be read, whose edits contradict its turns, or that does not fit a row is refused and listed;
    the others are kept. ``progress`` wraps an iterable of known length to show how far the scan is.

    Raises:
        ValueError: no usable rollout.
    """
    sources = tuple(RolloutFile(path, vocab_size=vocab_size) for path in paths)
    refused: list[Refusal] = []
    found: list[_Measured] = []
    names: dict[str, str] = {}
    places = [(file, place) for file, source in enumerate(sources) for place in range(len(source))]
    numbers: Iterable[int] = range(len(places))
    for number in progress(numbers, len(places)) if progress else numbers:
        file, place = places[number]
        source = sources[file]
        try:
            measured = _measure(source[place], places[number], layout)
        except (TreeError, RowTooShort) as error:
            field = error.field if isinstance(error, TreeError) else "turns"
            refused.append(Refusal(paths[file], source.line(place), field, str(error)))
            continue
        here = f"{paths[file]}, line {source.line(place)}"
        first = names.setdefault(measured.id, here)
        if first != here:
            refused.append(Refusal(paths[file], source.line(place), "id", f"{measured.id!r} stands in {first} already"))
            continue
        found.append(measured)
    refused += [refusal for source in sources for refusal in source.refused]
    if not found:
        first = f"; the first reason: {refused[0]}" if refused else ""
        raise ValueError(f"no usable rollout in {', '.join(paths)}: {len(refused)} refused{first}")
    return _index(sources, layout, found, refused)


@dataclass(frozen=True, eq=False)
class _Measured:
    id: str
    line: tuple[int, int]
    group: str | None
    reward: float
    needs: np.ndarray
    edges: int
    sampled: int
    content: int
    view_tokens: int
    trie_tokens: int


def _measure(rollout: Rollout, line: tuple[int, int], layout: Layout) -> _Measured:
    tree = build(rollout)
    made = fragments([tree], layout.method, layout.shape)
    merged = fragments([tree], layout.method, layout.shape, merge=True) if layout.merge else made
    return _Measured(
        id=rollout.id,
        line=line,
        group=rollout.group,
        reward=np.nan if rollout.reward is None else rollout.reward,
        needs=_needs(merged),
        edges=sum(fragment.needs[1] for fragment in made),
        sampled=int(tree.sampled.trainable.sum()),
        content=_content(rollout),
        view_tokens=sum(len(view.ids) for view in tree.views),
        trie_tokens=len(build_trie([view.ids for view in tree.views]).tokens),
    )


def _content(rollout: Rollout) -> int:
    """CRC-32 of everything in turns and edits that a number of a run can depend on."""
    edits = [(e.before_turn, e.evicted, e.inserted_at, e.replacement_from, e.restored) for e in rollout.edits]
    crc = zlib.crc32(repr(edits).encode())
    for turn in rollout.turns:
        crc = zlib.crc32(repr((turn.chain, turn.trainable, turn.sampling, turn.logprobs is None)).encode(), crc)
        for part in (turn.prompt_ids, turn.completion_ids, turn.logprobs):
            if part is not None:
                crc = zlib.crc32(np.ascontiguousarray(part).tobytes(), crc)
    return crc


def _needs(made: Sequence[Fragment]) -> np.ndarray:
    return np.array([fragment.needs for fragment in made], np.int64).reshape(len(made), 4)


def _index(sources: tuple[RolloutFile, ...], layout: Layout, found: list[_Measured], refused: list[Refusal]) -> Index:
    codes: dict[str, int] = {}
    groups = np.array(
        [codes.setdefault(f"group {m.group}" if m.group is not None else f"rollout {m.id}", len(codes)) for m in found]
    )
    shared = layout.group_tries and layout.method == "packed"
    units = [np.array([number]) for number in range(len(found))]
    if shared:
        units = [
            members[start : start + layout.rollouts_per_step]
            for members in (np.flatnonzero(groups == code) for code in range(len(codes)))
            for start in range(0, len(members), layout.rollouts_per_step)
        ]
    index = Index(
        sources=sources,
        layout=layout,
        lines=tuple(m.line for m in found),
        ids=tuple(m.id for m in found),
        rewards=np.array([m.reward for m in found]),
        groups=groups,
        units=tuple(units),
        needs=(),
        edges=np.array([m.edges for m in found]),
        sampled=np.array([m.sampled for m in found]),
        contents=np.array([m.content for m in found], np.int64),
        view_tokens=np.array([sum(found[n].view_tokens for n in unit) for unit in units]),
        trie_tokens=np.zeros(len(units), np.int64),
        refused=tuple(refused),
    )
    needs, trie_tokens = [], []
    for number, unit in enumerate(units):
        if len(unit) == 1:
            needs.append(found[unit[0]].needs)
            trie_tokens.append(found[unit[0]].trie_tokens)
        else:
            needs.append(_needs(index.unit_fragments(number)))
            views = [view.ids for tree in index.trees(unit) for view in tree.views]
            trie_tokens.append(len(build_trie(views).tokens))
    fields = {name: getattr(index, name) for name in Index.__dataclass_fields__}
    return Index(**{**fields, "needs": tuple(needs), "trie_tokens": np.array(trie_tokens)})
