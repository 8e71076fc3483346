"""Which sampled token does each loss token of a user's row train, and is its context the one it was sampled under?

A loss token is exact when its prefix and itself are a prefix of a branch view that ends in a sampled token. Otherwise
it is looked for, in this order: where the row runs along a view or ``H_T`` from the start, by the origin of that place;
by aligning the row with them (the rule of :mod:`mwjax.tree.alignment`); where a run of loss tokens is a piece of a
completion, by the one whose context ends most alike, which is then only the likely one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mwjax.audit.result import Mismatch
from mwjax.audit.text import Decode, head
from mwjax.audit.training_rows import TrainingRow
from mwjax.tree import Tree, build_trie
from mwjax.tree.alignment import align, common_prefix

# How far back contexts are compared to choose between equal pieces of completions.
SUFFIX_STEPS = 256

EXACT, UNTRAINABLE, WRONG_PREFIX, NOT_SAMPLED, WITHOUT_CONTEXT = range(5)
KINDS = ("exact", "untrainable", "wrong_prefix", "not_sampled", "without_context")


class Reference(NamedTuple):
    """A walk of the rollout, a view or an ``H_T``: ids [N], and which sampled token each place holds, or -1 [N]."""

    ids: np.ndarray
    owner: np.ndarray


@dataclass(frozen=True, eq=False)
class Index:
    """What rows of one rollout are looked up in.

    views, unions: references. node: for every view, the trie node of each place. trainable_at, untrainable_at: how many
    sampled tokens a node holds, all of one prefix and id. node_of: the node of every sampled token. last_of_turn:
    whether a sampled token ends its completion.
    """

    views: list[Reference]
    unions: list[Reference]
    node: list[np.ndarray]
    node_of: np.ndarray
    trainable_at: np.ndarray
    untrainable_at: np.ndarray
    last_of_turn: np.ndarray


@dataclass(frozen=True, eq=False)
class RowsFacts:
    """One rollout's rows; see :class:`mwjax.audit.result.RowsAudit`. kinds: loss tokens by kind, int64 [5]."""

    rows: int
    segments: int
    tokens: int
    kinds: np.ndarray
    position_gaps: int
    double: int
    surplus: int
    never: int
    mismatches: tuple[Mismatch, ...]


class Targets(NamedTuple):
    """The loss tokens of one segment, arrays [L]: place in the segment, kind, node if exact, sampled token if known,
    and whether that one is certain."""

    place: np.ndarray
    kind: np.ndarray
    node: np.ndarray
    owner: np.ndarray
    certain: np.ndarray


def check_rows(tree: Tree, rows: Sequence[TrainingRow], file: str, decode: Decode, shown: int) -> RowsFacts:
    """Check all rows of one rollout."""
    index = build_index(tree)
    kinds = np.zeros(len(KINDS), np.int64)
    hits = np.zeros(len(index.trainable_at), np.int64)
    times = np.zeros(len(tree.sampled.turn), np.int64)
    gaps = segments = tokens = 0
    mismatches: list[Mismatch] = []
    for row in rows:
        tokens += len(row.ids)
        segments += len(row.starts)
        for number, (start, end) in enumerate(zip(row.starts, np.append(row.starts[1:], len(row.ids)))):
            ids = row.ids[start:end]
            found = match(tree, index, ids, np.flatnonzero(row.loss[start:end]))
            kinds += np.bincount(found.kind, minlength=len(KINDS))
            hits += np.bincount(found.node[found.kind == EXACT], minlength=len(hits))
            times += np.bincount(found.owner[found.kind == WRONG_PREFIX], minlength=len(times))
            gaps += int((found.place > row.first_gap[number]).sum())
            for first, count in _mismatch_runs(tree, found):
                if len(mismatches) == shown:
                    break
                mismatches.append(_mismatch(tree, index, file, row, number, ids, found, first, count, decode))
    times += _spread(tree, index, hits)
    trainable = tree.sampled.trainable
    return RowsFacts(
        rows=len(rows),
        segments=segments,
        tokens=tokens,
        kinds=kinds,
        position_gaps=gaps,
        double=int((times > 1).sum()),
        surplus=int(np.maximum(times - 1, 0).sum()),
        never=int((trainable & (times == 0)).sum()),
        mismatches=tuple(mismatches),
    )


def build_index(tree: Tree) -> Index:
    """Prepare a rollout for look-ups."""
    sampled = tree.sampled
    lengths = np.array([len(turn.completion_ids) for turn in tree.rollout.turns], np.int64)
    offset = np.concatenate([[0], np.cumsum(lengths)])
    owner_of = {
        chain: np.where(union.origin_turn >= 0, offset[union.origin_turn] + union.origin_index, -1)
        for chain, union in tree.unions.items()
    }
    trie = build_trie([view.ids for view in tree.views])
    node = [trie.rows_of(number, np.arange(len(view.ids))) for number, view in enumerate(tree.views)]
    node_of = np.zeros(len(sampled.turn), np.int64)
    for number in range(len(tree.views)):
        here = sampled.view == number
        node_of[here] = node[number][sampled.prefix[here]]
    size = len(trie.tokens)
    return Index(
        views=[Reference(view.ids, owner_of[view.chain][view.union]) for view in tree.views],
        unions=[Reference(union.ids, owner_of[chain]) for chain, union in tree.unions.items()],
        node=node,
        node_of=node_of,
        trainable_at=np.bincount(node_of[sampled.trainable], minlength=size),
        untrainable_at=np.bincount(node_of[~sampled.trainable], minlength=size),
        last_of_turn=sampled.index == lengths[sampled.turn] - 1,
    )


def match(tree: Tree, index: Index, ids: np.ndarray, place: np.ndarray) -> Targets:
    """Find the sampled tokens that the loss tokens at ``place`` of a segment train."""
    count = len(place)
    found = Targets(
        place=place,
        kind=np.full(count, NOT_SAMPLED, np.int64),
        node=np.full(count, -1, np.int64),
        owner=np.full(count, -1, np.int64),
        certain=np.ones(count, bool),
    )
    agree = np.array([common_prefix(view.ids, ids) for view in index.views])
    best = int(agree.argmax())
    along = np.flatnonzero(place < agree[best])
    node = index.node[best][place[along]]
    found.node[along] = node
    found.kind[along[index.untrainable_at[node] > 0]] = UNTRAINABLE
    found.kind[along[index.trainable_at[node] > 0]] = EXACT
    found.kind[place == 0] = WITHOUT_CONTEXT
    todo = np.flatnonzero(found.kind == NOT_SAMPLED)
    if len(todo):
        _identify(tree, index, ids, found, todo, best)
        found.kind[todo[found.owner[todo] >= 0]] = WRONG_PREFIX
    return found


def _identify(tree: Tree, index: Index, ids: np.ndarray, found: Targets, todo: np.ndarray, best: int) -> None:
    """Write ``owner`` and ``certain`` of the targets ``todo``, whose prefix is nobody's generation prefix."""
    known = np.zeros(len(found.place), bool)  # also where it is known that no sampled token stands
    for reference in (index.views[best], *index.unions, *index.views):
        mine = todo[(found.place[todo] < common_prefix(reference.ids, ids)) & (found.owner[todo] < 0)]
        found.owner[mine] = reference.owner[found.place[mine]]
        known[mine] = True
    if known[todo].all():
        return
    aligned = [(reference, _origin(index, reference, ids)) for reference in (index.views[best], *index.unions)]
    # The walk that the row is most alike says what a text is: a summary is sampled here and only context there.
    for reference, origins in sorted(aligned, key=lambda pair: -int((pair[1] >= 0).sum())):
        open_ = todo[~known[todo]]
        origin = origins[found.place[open_]]
        mine = open_[origin >= 0]
        found.owner[mine] = reference.owner[origin[origin >= 0]]
        known[mine] = True
    open_ = todo[~known[todo]]
    for run in np.split(open_, np.flatnonzero(np.diff(found.place[open_]) != 1) + 1):
        likely = _likely(tree, ids, found.place[run]) if len(run) else None
        if likely is not None:
            found.owner[run] = np.arange(likely, likely + len(run))
            found.certain[run] = False


def _origin(index: Index, reference: Reference, ids: np.ndarray) -> np.ndarray:
    """The place in ``reference`` that each id of a segment comes from, or -1: int32 [N]."""
    held = reference.owner >= 0
    ends = np.flatnonzero(held)[index.last_of_turn[reference.owner[held]]] + 1
    return align(reference.ids, ids, ends).origin


def _likely(tree: Tree, ids: np.ndarray, place: np.ndarray) -> int | None:
    """The first sampled token of the piece of a completion that ``ids[place]`` (a contiguous run) most likely is."""
    sampled = tree.sampled
    starts = max(len(sampled.token) - len(place) + 1, 0)
    candidates = np.flatnonzero(sampled.token[:starts] == ids[place[0]])
    for step in range(1, len(place)):
        if not len(candidates):
            return None
        there = candidates + step
        same_turn = sampled.turn[there] == sampled.turn[candidates]
        candidates = candidates[same_turn & (sampled.token[there] == ids[place[step]])]
    if not len(candidates):
        return None
    for step in range(1, min(int(place[0]), SUFFIX_STEPS) + 1):
        if len(candidates) == 1:
            break
        before = sampled.prefix[candidates] - step
        context = np.array([tree.views[v].ids[p] if p >= 0 else -1 for v, p in zip(sampled.view[candidates], before)])
        closer = candidates[context == ids[place[0] - step]]
        if not len(closer):
            break
        candidates = closer
    return int(candidates[0])


def _spread(tree: Tree, index: Index, hits: np.ndarray) -> np.ndarray:
    """How often each sampled token is trained exactly, int64 [S]: hits go round a node's sampled tokens."""
    times = np.zeros(len(index.node_of), np.int64)
    trainable = np.flatnonzero(tree.sampled.trainable)
    order = trainable[np.argsort(index.node_of[trainable], kind="stable")]
    nodes = index.node_of[order]
    first = np.searchsorted(nodes, nodes)
    rank, held = np.arange(len(nodes)) - first, index.trainable_at[nodes]
    times[order] = hits[nodes] // np.maximum(held, 1) + (rank < hits[nodes] % np.maximum(held, 1))
    return times


def _mismatch_runs(tree: Tree, found: Targets) -> Iterator[tuple[int, int]]:
    """(first target, how many) of every run of neighbouring mismatches of one kind and, if known, one turn."""
    bad = np.flatnonzero((found.kind == WRONG_PREFIX) | (found.kind == NOT_SAMPLED))
    if not len(bad):
        return
    owner = found.owner[bad]
    turn = np.append(tree.sampled.turn, -1)[owner]
    new = (np.diff(found.place[bad]) != 1) | (np.diff(found.kind[bad]) != 0) | (np.diff(turn) != 0)
    for run in np.split(bad, np.flatnonzero(new) + 1):
        yield int(run[0]), len(run)


def _mismatch(
    tree: Tree,
    index: Index,
    file: str,
    row: TrainingRow,
    segment: int,
    ids: np.ndarray,
    found: Targets,
    target: int,
    count: int,
    decode: Decode,
) -> Mismatch:
    place, owner = int(found.place[target]), int(found.owner[target])
    sampled = tree.sampled
    expected = None if owner < 0 else index.views[sampled.view[owner]].ids[: sampled.prefix[owner]]
    context = ids[:place]
    agree = 0 if expected is None else common_prefix(expected, context)
    at = int(row.starts[segment]) + place
    return Mismatch(
        kind=KINDS[found.kind[target]],
        rollout=tree.rollout.id,
        file=file,
        line=row.line,
        segment=segment,
        position=int(row.index[at]),
        tokens=count,
        token=int(ids[place]),
        token_text=decode(ids[place : place + 1]),
        turn=None if owner < 0 else int(sampled.turn[owner]),
        index=None if owner < 0 else int(sampled.index[owner]),
        certain=bool(found.certain[target]),
        agree=agree,
        expected_length=None if expected is None else len(expected),
        found_length=place,
        expected="" if expected is None else head(decode, expected[agree:]),
        found=head(decode, context[agree:]) if expected is not None else head(decode, context[max(place - 12, 0) :]),
    )
