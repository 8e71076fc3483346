"""Which tokens of an old view survive in the next prompt, when no edit says so.

The rule: the common prefix; then the common suffix; then, in the rectangle that remains, the longest common run of
consecutive ids (ties to the leftmost in old, then in new), kept if it has at least ``MIN_RUN`` ids or ends where a
completion ends; left and right of a kept run the same again. A rectangle whose longest run is not kept stays unmatched.
A free longest common subsequence would instead match the words of a summary to the text it folded, and so give
sampled tokens a wrong owner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

MIN_RUN = 8
# Gram keys are packed into int64 as long as they stay below this; above, they are renumbered first.
_KEY_LIMIT = 2**62
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class Alignment:
    """origin: int32 [M], the position in the old view that each position of the new prompt came from, or -1; matched
    positions rise strictly. ``prefix``: length of the common prefix. ``evicted``: unmatched positions of the old view.
    ``inserted``: unmatched positions of the new prompt."""

    origin: np.ndarray
    prefix: int
    evicted: int
    inserted: int


class _Rectangles(NamedTuple):
    """Disjoint rectangles old[a0:a1] x new[b0:b1], none empty, sorted by a0 and thereby by b0. int64 [R] each.

    ``known``: a common run of this length is known to exist (0: none is). ``step``: how far below the upper bound the
    next length is tried while none is known."""

    a0: np.ndarray
    a1: np.ndarray
    b0: np.ndarray
    b1: np.ndarray
    known: np.ndarray
    step: np.ndarray


def align(old: np.ndarray, new: np.ndarray, completion_ends: np.ndarray) -> Alignment:
    """Align a new prompt with the old view of its chain.

    old: int [N]; new: int [M]; completion_ends: int [C], the half-open end positions in ``old`` of its sampled
    completions (empty completions left out). A hundred thousand ids against as many take well under a second, whatever
    the content.
    """
    old, new = np.asarray(old), np.asarray(new)
    prefix = common_prefix(old, new)
    suffix = common_prefix(old[prefix:][::-1], new[prefix:][::-1])
    old_stop, new_stop = old.size - suffix, new.size - suffix
    origin = np.full(new.size, -1, np.int32)
    origin[:prefix] = np.arange(prefix)
    origin[new_stop:] = np.arange(old_stop, old.size)
    matched = prefix + suffix
    if prefix < old_stop and prefix < new_stop:
        is_end = np.zeros(old_stop - prefix + 1, bool)
        ends = np.asarray(completion_ends, np.int64) - prefix
        is_end[ends[(ends > 0) & (ends < is_end.size)]] = True
        middle = (old[prefix:old_stop], new[prefix:new_stop], is_end)
        kept = _runs_of_unique_grams(*middle)
        runs = np.array(_kept_runs(*middle) if kept is None else kept, np.int64).reshape(-1, 3)
        lengths = runs[:, 2]
        total = int(lengths.sum())
        offset = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        origin[prefix + np.repeat(runs[:, 1], lengths) + offset] = prefix + np.repeat(runs[:, 0], lengths) + offset
        matched += total
    return Alignment(origin, prefix, old.size - matched, new.size - matched)


def common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """Number of leading ids that are equal, of two 1-D arrays."""
    length = min(left.size, right.size)
    different = left[:length] != right[:length]
    return int(different.argmax()) if different.any() else length


def _runs_of_unique_grams(old: np.ndarray, new: np.ndarray, is_end: np.ndarray) -> list[tuple[int, int, int]] | None:
    """What :func:`_kept_runs` finds, faster, for the usual text: few runs, and no common gram of ``MIN_RUN`` ids twice
    on one side. None for any other text."""
    found = _unique_gram_runs(old, new)
    if found is None:
        return None
    kept: list[tuple[int, int, int]] = []
    boxes = [(0, old.size, 0, new.size, found)]
    while boxes:
        a0, a1, b0, b1, runs = boxes.pop()
        if a0 == a1 or b0 == b1:
            continue
        inside = []
        for i, j, length in runs:
            skip = max(a0 - i, b0 - j, 0)
            stop = min(length, a1 - i, b1 - j)
            if stop - skip >= MIN_RUN:
                inside.append((i + skip, j + skip, stop - skip))
        if inside:
            i, j, length = run = max(inside, key=lambda run: (run[2], -run[0], -run[1]))
            kept.append(run)
            boxes += [(a0, i, b0, j, inside), (i + length, a1, j + length, b1, inside)]
        elif is_end[a0 + 1 : a1 + 1].any():  # a completion's whole tail may be shorter
            ends = is_end[a0 : a1 + 1].copy()
            ends[0] = False
            kept += [(a0 + i, b0 + j, length) for i, j, length in _kept_runs(old[a0:a1], new[b0:b1], ends)]
    return kept


_MOST_RUNS = 64


def _unique_gram_runs(old: np.ndarray, new: np.ndarray) -> list[tuple[int, int, int]] | None:
    """Maximal common runs of at least ``MIN_RUN`` ids, or None where a gram repeats or there are many runs."""
    if min(old.size, new.size) < MIN_RUN:
        return []
    left, right = _hashed_grams(old), _hashed_grams(new)
    order = np.argsort(right)
    ordered = right[order]
    place = np.searchsorted(ordered, left)
    place[place == right.size] = 0
    starts = np.flatnonzero(ordered[place] == left)
    if not starts.size:
        return []
    hit = place[starts]
    repeats_new = ordered[np.minimum(hit + 1, right.size - 1)] == ordered[hit]
    if (repeats_new & (hit + 1 < right.size)).any() or np.unique(hit).size < hit.size:
        return None
    others = order[hit]
    begins = np.flatnonzero((np.diff(starts, prepend=-2) != 1) | (np.diff(others, prepend=-2) != 1))
    lengths = np.diff(begins, append=starts.size) + MIN_RUN - 1
    if begins.size > _MOST_RUNS:
        return None
    runs = list(zip(starts[begins].tolist(), others[begins].tolist(), lengths.tolist()))
    alike = all(np.array_equal(old[i : i + length], new[j : j + length]) for i, j, length in runs)
    return runs if alike else None


def _hashed_grams(ids: np.ndarray) -> np.ndarray:
    """uint64, one per gram of ``MIN_RUN`` = 2^3 ids; equal grams have equal hashes."""
    hashed = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for span, factor in ((1, 0xBF58476D1CE4E5B9), (2, 0x94D049BB133111EB), (4, 0xD6E8FEB86659FD93)):
        hashed = (hashed[:-span] ^ (hashed[:-span] >> np.uint64(29))) * np.uint64(factor) + hashed[span:]
    return hashed


def _kept_runs(old: np.ndarray, new: np.ndarray, is_end: np.ndarray) -> list[tuple[int, int, int]]:
    """All kept runs (old start, new start, length) of the recursion, in no particular order.

    Both sides are laid out as one text, old + barrier + new + barrier. ``reach`` [T] bounds from above how long a
    common run can start at each position, within its rectangle. All open rectangles advance together: each tries one
    length, positions whose run is too short learn it, and a rectangle whose longest run is known exactly is split at
    all its runs of that length at once. Runs split off one inside the other have distinct lengths, so even the worst
    content needs only about sqrt(2 N) sweeps (real text some ten), and a sweep sorts only the positions that can still
    start a run of the length tried.
    """
    n, size = old.size, old.size + new.size + 2
    ranks = _gram_ranks(old, new)
    if len(ranks) == 1:
        return []
    reach = _longest_runs(ranks, n)
    ends_before = np.cumsum(is_end)
    place = np.arange(size)
    runs: list[tuple[int, int, int]] = []
    todo = _rectangles([(0, n, 0, new.size)])
    while todo.a0.size:
        count = todo.a0.size
        bounds = np.concatenate(
            [np.stack([todo.a0, todo.a1], 1).ravel(), np.stack([todo.b0, todo.b1], 1).ravel() + n + 1]
        )
        widths = np.diff(bounds, prepend=0, append=size)
        stops = np.zeros(widths.size, np.int64)
        stops[1::2] = bounds[1::2]
        np.minimum(reach, np.repeat(stops, widths) - place, out=reach)
        peaks = np.maximum.reduceat(reach, bounds)[::2]
        upper = np.minimum(peaks[:count], peaks[count:])
        lower = np.where(ends_before[todo.a1] > ends_before[todo.a0], 1, MIN_RUN)
        tried = np.where(todo.known > 0, (todo.known + upper + 1) // 2, np.maximum(lower, upper - todo.step))
        alive = upper >= lower
        tried[~alive] = _NEVER

        owner = np.full(widths.size, count)
        owner[1::2] = np.tile(np.arange(count), 2)
        owner = np.repeat(owner, widths)
        active = np.flatnonzero(reach >= np.append(tried, _NEVER)[owner])
        owner = owner[active]
        length = tried[owner]
        key = _gram_keys(ranks, active, length, owner, count)
        split = int(np.searchsorted(active, n))
        shared = _shared(key[:split], key[split:])
        starts, old_starts = active[split:][shared.order] - n - 1, active[:split][shared.found]

        reach[active[:split][~shared.found]] = length[:split][~shared.found] - 1
        lost = shared.order[~shared.used] + split
        reach[active[lost]] = length[lost] - 1
        hit_owner = owner[:split][shared.found]
        hit = np.zeros(count, bool)
        hit[hit_owner] = True
        exact = hit & (tried == upper)

        pieces: list[tuple[int, int, int, int]] = []
        chosen = np.flatnonzero(exact)
        lows, highs = np.searchsorted(hit_owner, chosen), np.searchsorted(hit_owner, chosen, "right")
        for which, low, high in zip(chosen.tolist(), lows.tolist(), highs.tolist()):
            box = (int(todo.a0[which]), int(todo.a1[which]), int(todo.b0[which]), int(todo.b1[which]))
            here = slice(low, high)
            candidates = _Candidates(old_starts[here], shared.low[here], shared.high[here], starts)
            _split(box, int(tried[which]), candidates, is_end, runs, pieces)
        known = np.where(hit, tried, todo.known)
        step = np.where(hit, todo.step, 2 * todo.step + 1)
        stay = alive & ~exact
        rest = _Rectangles(*(column[stay] for column in todo._replace(known=known, step=step)))
        todo = _merged(rest, _rectangles(pieces))
    return runs


def _rectangles(boxes: list[tuple[int, int, int, int]]) -> _Rectangles:
    columns = np.array(boxes, np.int64).reshape(-1, 4).T
    nothing = np.zeros(len(boxes), np.int64)
    return _Rectangles(columns[0], columns[1], columns[2], columns[3], known=nothing, step=nothing)


def _merged(left: _Rectangles, right: _Rectangles) -> _Rectangles:
    order = np.argsort(np.concatenate([left.a0, right.a0]))
    return _Rectangles(*(np.concatenate(pair)[order] for pair in zip(left, right)))


class _Candidates(NamedTuple):
    """The starts in old, ascending, of one rectangle's runs of one length; the starts in new of the run at
    ``old_starts[c]`` are ``new_starts[low[c]:high[c]]``, ascending."""

    old_starts: np.ndarray
    low: np.ndarray
    high: np.ndarray
    new_starts: np.ndarray


def _split(
    box: tuple[int, int, int, int],
    length: int,
    candidates: _Candidates,
    is_end: np.ndarray,
    runs: list[tuple[int, int, int]],
    pieces: list[tuple[int, int, int, int]],
) -> None:
    """Split a rectangle at its kept runs of ``length``, the longest it has; append those and the rectangles between.

    Left of the leftmost such run there is none, so they are met from left to right.
    """
    a0, a1, b0, b1 = box
    old_starts, low, high, new_starts = candidates
    last = new_starts[high - 1]
    at = 0
    while at < old_starts.size:
        i = int(old_starts[at])
        choices = new_starts[low[at] : high[at]]
        j = int(choices[choices.searchsorted(b0)])
        if length < MIN_RUN and not is_end[i + length]:
            return
        runs.append((i, j, length))
        if a0 < i and b0 < j:
            pieces.append((a0, i, b0, j))
        a0, b0 = i + length, j + length
        # The next start past this run whose ids still occur past it in new; b0 only grows, so nothing is met twice.
        at += int(old_starts[at:].searchsorted(a0))
        window = 16
        while at < old_starts.size:
            fits = last[at : at + window] >= b0
            step = int(fits.argmax())
            if fits[step]:
                at += step
                break
            at += window
            window *= 2
    if a0 < a1 and b0 < b1:
        pieces.append((a0, a1, b0, b1))


def _gram_ranks(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """int32 [K + 1, T]: ``ranks[k, p]`` identifies the 2^k ids from position p of old + barrier + new + barrier.

    A position of old and one of new have equal ranks exactly when these ids are equal; ranks rise in the order of the
    ids. K is the least for which no 2^K ids are common to both sides, so the last ranks order all positions. Prefix
    doubling (Manber and Myers 1993; ranks are first places of groups in sorted order, as in Larsson and Sadakane 2007);
    a group of one side only is not refined any further, for it can match nothing.
    """
    n, size = old.size, old.size + new.size + 2
    ids = np.unique(np.concatenate([old, new]), return_inverse=True)[1]
    text = np.concatenate([ids[:n], [size - 2], ids[n:], [size - 1]])
    counts = np.bincount(text, minlength=size)
    rank = (np.cumsum(counts) - counts)[text].astype(np.int32)
    levels = []
    while True:
        in_old, in_new = np.zeros(size, bool), np.zeros(size, bool)
        in_old[rank[:n]] = True
        in_new[rank[n + 1 : -1]] = True
        common = np.flatnonzero((in_old & in_new)[rank])
        levels.append(rank)
        if not common.size:
            return np.stack(levels)
        # Common grams lie within their side, so the place right after them exists.
        key = rank[common] * np.int64(size) + rank[common + (1 << (len(levels) - 1))]
        order = np.argsort(key)
        key, before = key[order], rank[common[order]]
        refined = before + _group_starts(key) - _group_starts(before)
        rank = rank.copy()
        rank[common[order]] = refined


def _group_starts(values: np.ndarray) -> np.ndarray:
    """For sorted values: the index at which the group of equal values begins, for each."""
    if not values.size:
        return np.zeros(0, np.int64)
    begins = np.concatenate([[True], values[1:] != values[:-1]])
    return np.maximum.accumulate(np.where(begins, np.arange(values.size), 0))


def _longest_runs(ranks: np.ndarray, n: int) -> np.ndarray:
    """int64 [T]: the longest run starting at each position that also occurs on the other side; 0 at the barriers."""
    size = ranks.shape[1]
    order = np.argsort(ranks[-1])
    index = np.arange(size)
    is_new = order > n
    last_new = np.maximum.accumulate(np.where(is_new, index, -1))
    last_old = np.maximum.accumulate(np.where(is_new, -1, index))
    next_new = np.minimum.accumulate(np.where(is_new, index, size)[::-1])[::-1]
    next_old = np.minimum.accumulate(np.where(is_new, size, index)[::-1])[::-1]
    # A suffix shares most with its neighbours in sorted order; the barrier at n stands in for a missing neighbour.
    barrier = np.concatenate([order, [n]])
    before, behind = np.where(is_new, last_old, last_new), np.where(is_new, next_old, next_new)
    reach = np.zeros(size, np.int64)
    reach[order] = np.maximum(_common(ranks, order, barrier[before]), _common(ranks, order, barrier[behind]))
    reach[[n, size - 1]] = 0
    return reach


def _common(ranks: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Length of the common run at each pair of positions of opposite sides."""
    length = np.zeros(left.size, np.int64)
    for level in range(len(ranks) - 1, -1, -1):
        length += (ranks[level][left + length] == ranks[level][right + length]).astype(np.int64) << level
    return length


def _gram_keys(
    ranks: np.ndarray, position: np.ndarray, length: np.ndarray, owner: np.ndarray, owners: int
) -> np.ndarray:
    """int64, equal for two positions of opposite sides exactly when owner and the next ``length`` ids are equal.

    A gram is identified by two overlapping grams of a power of two.
    """
    size = ranks.shape[1]
    level = np.frexp(length)[1] - 1
    flat = ranks.reshape(-1)
    at = level * np.int64(size) + position
    key = flat[at] * np.int64(size) + flat[at + length - (1 << level.astype(np.int64))]
    if size * size * owners >= _KEY_LIMIT:
        key = np.unique(key, return_inverse=True)[1]
    return key * owners + owner


class _Shared(NamedTuple):
    """Keys common to two lists: ``order`` sorts the right one, ties by index; ``found`` marks the left ones that occur
    in it, at ``order[low:high]`` (one entry per found); ``used`` marks, in sorted order, the right ones that occur in
    the left."""

    order: np.ndarray
    found: np.ndarray
    low: np.ndarray
    high: np.ndarray
    used: np.ndarray


def _shared(left: np.ndarray, right: np.ndarray) -> _Shared:
    order = np.argsort(right, kind="stable")
    right = right[order]
    low = np.searchsorted(right, left)
    found = np.zeros(left.size, bool)
    inside = low < right.size
    found[inside] = right[low[inside]] == left[inside]
    low = low[found]
    begins = np.flatnonzero(np.diff(right, prepend=right[:1] - 1))
    group = np.searchsorted(begins, low)
    high = np.append(begins, right.size)[group + 1]
    marked = np.zeros(right.size, bool)
    marked[low] = True
    return _Shared(order, found, low, high, marked[_group_starts(right)])
