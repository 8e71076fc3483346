"""Diverging leaves one by one: how far behind the cut they stand, and which junction moved them. Numpy only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mwjax.audit.junctions import junction_label
from mwjax.rollouts.record import MAIN_CHAIN
from mwjax.tree import Tree
from mwjax.tree.alignment import common_prefix

OTHER_CHAIN, UNKNOWN = "sampled in another chain", "unknown"


@dataclass(frozen=True, eq=False)
class Leaves:
    """The diverging leaves of a rollout that have a prefix in ``H_comp``, in order of turn and index. Arrays [D].

    sampled: index into ``tree.sampled``. distance: how many tokens directly before the leaf its generation prefix and
    its prefix in ``H_comp`` have in common, counted backwards from it: 0 is the first token behind the place where the
    two last differ. cause: the first junction after which the leaf stood under another context, as
    :func:`mwjax.audit.junctions.junction_label` names it.
    """

    sampled: np.ndarray
    distance: np.ndarray
    cause: tuple[str, ...]


def leaves_of(tree: Tree) -> Leaves:
    """Where the diverging leaves of ``tree`` stand."""
    sampled, walk = tree.sampled, tree.compressed
    chosen = np.flatnonzero(sampled.diverging & (sampled.compressed > 0))
    if walk is None:
        return Leaves(chosen[:0], np.zeros(0, np.int64), ())
    distance = [
        common_prefix(
            tree.views[sampled.view[k]].ids[: sampled.prefix[k]][::-1], walk.ids[: sampled.compressed[k]][::-1]
        )
        for k in chosen
    ]
    return Leaves(chosen, np.array(distance, np.int64), _causes(tree, chosen))


def _causes(tree: Tree, chosen: np.ndarray) -> tuple[str, ...]:
    sampled = tree.sampled
    lengths = np.array([len(turn.completion_ids) for turn in tree.rollout.turns], np.int64)
    offset = np.concatenate([[0], np.cumsum(lengths)])
    union = tree.unions[MAIN_CHAIN]
    opened = {j.turn: junction_label(tree, j) for j in tree.junctions if j.chain == MAIN_CHAIN}
    cause = np.full(len(chosen), UNKNOWN, object)
    own = [tree.views[view].chain for view in sampled.view[chosen]]
    cause[np.array([chain != MAIN_CHAIN for chain in own], bool)] = OTHER_CHAIN
    for number, view in enumerate(tree.views):
        if view.chain != MAIN_CHAIN or view.turns[0] not in opened:
            continue
        turn, index = union.origin_turn[view.union], union.origin_index[view.union]
        held = np.flatnonzero(turn >= 0)[::-1]
        place = np.full(len(sampled.turn), -1, np.int64)
        place[offset[turn[held]] + index[held]] = held
        for before in range(number):
            here = (sampled.view[chosen] == before) & (cause == UNKNOWN) & (place[chosen] >= 0)
            if not here.any():
                continue
            agree = common_prefix(tree.views[before].ids, view.ids)
            moved = (place[chosen] != sampled.prefix[chosen]) | (place[chosen] > agree)
            cause[here & moved] = opened[view.turns[0]]
    return tuple(cause.tolist())
