"""Random packed rows for tests, with the ancestors of every position known by construction."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Trie(NamedTuple):
    """One row in depth-first order. parent, position, visible_until: int32 [T]; a root's or padding's parent is -1."""

    parent: np.ndarray
    position: np.ndarray
    visible_until: np.ndarray

    def ancestors(self, node: int) -> list[int]:
        """The path from the root to ``node``, itself included: what ``node`` may see, in order."""
        path: list[int] = []
        while node >= 0:
            path.append(node)
            node = int(self.parent[node])
        return path[::-1]

    def visible(self) -> np.ndarray:
        """bool [T, T], True where row i sees key j."""
        mask = np.zeros((len(self.parent), len(self.parent)), bool)
        for node in range(len(self.parent)):
            mask[node, self.ancestors(node)] = True
        return mask


def random_trie(
    rng: np.random.Generator, length: int, *, fork: float = 0.1, root: float = 0.02, padding: float = 0.15
) -> Trie:
    """``fork``: chance that a token continues a random ancestor of the one before; ``root``: that it starts a new tree;
    ``padding``: share of the row at its end that sees only itself."""
    used = length - int(padding * length)
    parent = np.full(length, -1, np.int32)
    position = np.zeros(length, np.int32)
    for node in range(1, used):
        draw = rng.random()
        if draw < root:
            continue
        parent[node] = node - 1
        if draw < root + fork:
            for _ in range(int(rng.integers(1, 40))):
                parent[node] = parent[node] if parent[parent[node]] < 0 else parent[parent[node]]
        position[node] = position[parent[node]] + 1
    size = np.ones(length, np.int32)
    for node in range(length - 1, 0, -1):
        if parent[node] >= 0:
            size[parent[node]] += size[node]
    return Trie(parent, position, np.arange(length, dtype=np.int32) + size)
