"""For every loss token of built rows: how the context it is trained under differs from the one it was sampled under.

Exact and without a loop per token. The rows are taken as they are, tokens, mask and edges; nothing is assumed of the
method that made them. ``prefixes.py`` reads the same prefixes back one by one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mwjax.rollouts.record import MAIN_CHAIN
from mwjax.tree import Fragment, Tree
from mwjax.tree.alignment import common_prefix


class Differences(NamedTuple):
    """One entry per edge of a fragment, arrays [E].

    sampled: int64, the token's place in ``tree.sampled``. wrong: the ids it sees are not the generation prefix.
    indirect: the ids are right, but they were computed while other text was in view, or their position ids have gaps.
    missing, extra: int64, tokens only in the generation prefix, and only in what the row shows; a token is the same
    where it is the same place of ``H_T``.
    """

    sampled: np.ndarray
    wrong: np.ndarray
    indirect: np.ndarray
    missing: np.ndarray
    extra: np.ndarray


def fragment_differences(tree: Tree, fragment: Fragment, identity: np.ndarray | None) -> Differences:
    """Compare what every edge of ``fragment`` sees with the token's generation prefix.

    identity: int64 [>= N], the position in the main chain's ``H_T`` of each row token; None where a row shows branch
    views, whose tokens are told apart by their ids alone: there, all that follows the first difference counts.
    """
    edges, sampled = fragment.edges, tree.sampled
    count = len(edges.parent)
    offset = np.concatenate([[0], np.cumsum([len(turn.completion_ids) for turn in tree.rollout.turns])])
    which = offset[edges.turn] + edges.index
    found = Differences(
        which, np.zeros(count, bool), np.zeros(count, bool), np.zeros(count, np.int64), np.zeros(count, np.int64)
    )
    if not count:
        return found
    parents, prefix, view = edges.parent.astype(np.int64), sampled.prefix[which], sampled.view[which]
    visible = visible_counts(fragment.visible_until)
    leaked = leaking_rows(fragment.visible_until)
    order = np.lexsort((prefix, parents, view))
    for mine in np.split(order, np.flatnonzero(np.diff(view[order])) + 1):
        todo = mine
        ids, union = tree.views[view[mine[0]]].ids, None
        if identity is not None and tree.views[view[mine[0]]].chain == MAIN_CHAIN:
            union = tree.views[view[mine[0]]].union
        while len(todo):
            top = parents[todo[-1]]
            seen = np.flatnonzero(fragment.visible_until[: top + 1] > top)
            shown = np.searchsorted(seen, parents[todo], side="right")
            # Where the counts agree, a row shows a prefix of what the last one shows: compared with it in one go.
            nested = np.flatnonzero(shown == visible[parents[todo]])
            generated = prefix[todo[nested]]
            taken = nested[generated == np.maximum.accumulate(generated)]
            here, shown, generated = todo[taken], shown[taken], prefix[todo[taken]]
            todo = np.delete(todo, taken)
            agree = common_prefix(fragment.tokens[seen], ids)
            gaps = fragment.positions[seen] != np.arange(len(seen))
            first_gap = int(gaps.argmax()) if gaps.any() else len(seen)
            wrong = (shown != generated) | (shown > agree)
            if identity is None:
                common = np.minimum(np.minimum(shown, generated), agree)
            elif union is None:
                common = np.zeros(len(here), np.int64)
            else:
                common = _common_tokens(identity[seen], union, shown, generated)
            found.wrong[here] = wrong
            found.indirect[here] = ~wrong & (leaked[parents[here]] | (shown > first_gap))
            found.missing[here], found.extra[here] = generated - common, shown - common
    return found


def _common_tokens(identity: np.ndarray, union: np.ndarray, shown: np.ndarray, generated: np.ndarray) -> np.ndarray:
    """|identity[:shown[k]] & union[:generated[k]]| for every k; shown and generated never fall: int64 [K]."""
    size = int(max(identity.max(initial=-1), union.max(initial=-1))) + 1
    place = np.full(size, len(union), np.int64)
    place[union] = np.arange(len(union))
    from_shown = np.searchsorted(shown, np.arange(len(identity)), side="right")
    from_generated = np.searchsorted(generated, place[identity], side="right")
    from_both = np.maximum(from_shown, from_generated)
    return np.cumsum(np.bincount(from_both, minlength=len(shown) + 1))[: len(shown)]


def visible_counts(visible_until: np.ndarray) -> np.ndarray:
    """How many keys each row sees: int64 [T]."""
    length = len(visible_until)
    return np.arange(1, length + 1) - np.cumsum(np.bincount(visible_until, minlength=length + 1))[:length]


def leaking_rows(visible_until: np.ndarray) -> np.ndarray:
    """Rows that see a key which itself saw a key they do not see: bool [T]. Never in a trie, often in a union row."""
    length = len(visible_until)
    starts_or_ends = np.zeros(length + 1, np.int64)
    ends, firsts = np.unique(visible_until, return_index=True)
    for end, first in zip(ends.tolist(), firsts.tolist()):
        if end >= length:
            break
        last = int(visible_until[first:end].max())
        starts_or_ends[end] += 1
        starts_or_ends[max(last, end)] -= 1
    return np.cumsum(starts_or_ends)[:length] > 0
