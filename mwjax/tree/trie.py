"""Prefix trie of branch views, laid out depth first, so that one int per token is the whole attention mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, eq=False)
class Trie:
    """A laid-out prefix trie of several paths.

    tokens, positions, visible_until: int32 [N]; position = depth; row i sees key j exactly when
    ``j <= i < visible_until[j]``. order: the paths in depth-first order, a path before those that go on from its end.
    shared: int64 [P], for each path of ``order``, the length of the prefix it shares with the one before it.
    """

    tokens: np.ndarray
    positions: np.ndarray
    visible_until: np.ndarray
    order: np.ndarray
    shared: np.ndarray
    _depths: tuple[np.ndarray, ...]
    _starts: tuple[np.ndarray, ...]

    def rows_of(self, path: int, depths: np.ndarray) -> np.ndarray:
        """Row positions of the tokens at ``depths`` of a path (numbered as given to :func:`build_trie`): int64."""
        segment = np.searchsorted(self._depths[path], depths, side="right") - 1
        return self._starts[path][segment] + depths - self._depths[path][segment]


@dataclass
class _Node:
    """A run of tokens without a fork: ``ids`` from depth ``depth`` on."""

    ids: np.ndarray
    depth: int
    children: dict[int, _Node] = field(default_factory=dict)
    ending: list[int] = field(default_factory=list)
    start: int = 0


def build_trie(paths: Sequence[np.ndarray]) -> Trie:
    """Merge token paths (each int32 [n], n >= 1) that begin alike. Children keep the order of first appearance."""
    root = _Node(np.zeros(0, np.int32), 0)
    for number, path in enumerate(paths):
        _insert(root, path, number)
    # Depth first, without recursion: trees as deep as a rollout has junctions must not hit the stack limit.
    nodes: list[_Node] = []
    walk: list[tuple[_Node, tuple[_Node, ...]]] = [(root, ())]
    order, shared, trails = [], [], {}
    previous: tuple[_Node, ...] = ()
    length = 0
    while walk:
        node, above = walk.pop()
        node.start, length = length, length + len(node.ids)
        nodes.append(node)
        trail = (*above, node)
        for number in node.ending:
            common = 0
            for left, right in zip(previous, trail):
                if left is not right:
                    break
                common = left.depth + len(left.ids)
            order.append(number)
            shared.append(common)
            trails[number] = previous = trail
        walk.extend((child, trail) for child in reversed(node.children.values()))
    tokens = np.concatenate([node.ids for node in nodes])
    sizes = np.array([len(node.ids) for node in nodes])
    depths = np.array([node.depth for node in nodes])
    starts = np.array([node.start for node in nodes])
    # A node's subtree ends where the next node that is not deeper starts.
    ends = np.full(len(nodes), length)
    open_nodes: list[int] = []
    for number in range(len(nodes)):
        while open_nodes and depths[open_nodes[-1]] + sizes[open_nodes[-1]] > depths[number]:
            ends[open_nodes.pop()] = starts[number]
        open_nodes.append(number)
    trail_of = [trails[number] for number in range(len(paths))]
    return Trie(
        tokens=tokens.astype(np.int32, copy=False),
        positions=(np.arange(length) + np.repeat(depths - starts, sizes)).astype(np.int32),
        visible_until=np.repeat(ends, sizes).astype(np.int32),
        order=np.array(order, np.int64),
        shared=np.array(shared, np.int64),
        _depths=tuple(np.array([node.depth for node in trail[1:]]) for trail in trail_of),
        _starts=tuple(np.array([node.start for node in trail[1:]]) for trail in trail_of),
    )


def _insert(root: _Node, path: np.ndarray, number: int) -> None:
    node, depth = root, 0
    while depth < len(path):
        child = node.children.get(int(path[depth]))
        if child is None:
            child = node.children[int(path[depth])] = _Node(path[depth:], depth)
            node, depth = child, len(path)
            break
        count = min(len(child.ids), len(path) - depth)
        unequal = child.ids[:count] != path[depth : depth + count]
        first = int(unequal.argmax())
        agree = first if unequal[first] else count
        if agree < len(child.ids):
            below = _Node(child.ids[agree:], child.depth + agree, child.children, child.ending)
            child.ids, child.children, child.ending = child.ids[:agree], {int(below.ids[0]): below}, []
        node, depth = child, depth + agree
    node.ending.append(number)


def split_paths(
    lengths: np.ndarray, shared: np.ndarray, counts: np.ndarray, row_length: int, max_edges: int
) -> list[slice]:
    """Cut depth-first ordered paths into runs whose tries fit a row, repeating as little trunk as possible.

    lengths, shared, counts: int64 [P], each path's length, the prefix it shares with the path before it, and its edges.
    The trie of a run has ``lengths[first]`` tokens and ``lengths - shared`` more for each further path, so a dynamic
    program over the cuts finds the least total.
    """
    total = len(lengths)
    best = np.zeros(total + 1, np.int64)
    cut = np.zeros(total + 1, np.int64)
    size = np.concatenate([[0], np.cumsum(lengths - shared)])
    edges = np.concatenate([[0], np.cumsum(counts)])
    for end in range(1, total + 1):
        first = np.arange(end)
        tokens = size[end] - size[first] + shared[first]
        fits = (tokens <= row_length) & (edges[end] - edges[first] <= max_edges)
        cost = np.where(fits, best[first] + tokens, np.iinfo(np.int64).max)
        cut[end] = int(cost.argmin())
        best[end] = cost[cut[end]]
    cuts, end = [], total
    while end:
        cuts.append(slice(int(cut[end]), end))
        end = int(cut[end])
    return cuts[::-1]
