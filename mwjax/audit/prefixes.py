"""What a packed row really conditions each loss token on, read back from the row's own mask and edges."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mwjax.tree.rows import Rows


@dataclass(frozen=True, order=True)
class Prefix:
    """The visible prefix of one edge: its length and the CRC-32 of its ids as little-endian int32."""

    rollout: int
    turn: int
    index: int
    length: int
    crc32: int


def crc32_of(ids: np.ndarray) -> int:
    """CRC-32 of token ids as little-endian int32."""
    return zlib.crc32(np.ascontiguousarray(ids, "<i4"))


def edge_prefixes(rows: Rows) -> Iterator[Prefix]:
    """For every edge of weight > 0: the ids its parent position attends to, in row order."""
    for row in range(len(rows.tokens)):
        edges = np.flatnonzero(rows.edges.weight[row] > 0)
        parents = rows.edges.parent[row, edges]
        visible = visible_prefixes(rows.tokens[row], rows.visible_until[row], np.unique(parents))
        for edge, parent in zip(edges, parents):
            length, crc32 = visible[int(parent)]
            rollout, turn, index = (
                int(column[row, edge]) for column in (rows.edges.rollout, rows.edges.turn, rows.edges.index)
            )
            yield Prefix(rollout, turn, index, length, crc32)


def visible_prefixes(tokens: np.ndarray, visible_until: np.ndarray, parents: np.ndarray) -> dict[int, tuple[int, int]]:
    """``{parent: (length, crc32)}`` of the keys each parent sees: ``j <= parent < visible_until[j]``.

    tokens, visible_until: int32 [T]; parents: ascending. Going from one parent to the next only adds keys unless one
    of the visible keys has ended, so the checksum is carried on and begun anew only there.
    """
    keys = np.arange(len(tokens))
    found: dict[int, tuple[int, int]] = {}
    length, crc32, at, first_end = 0, 0, 0, 0
    for parent in parents.tolist():
        if parent >= first_end:
            seen = keys[: parent + 1][visible_until[: parent + 1] > parent]
            length, crc32 = len(seen), crc32_of(tokens[seen])
            first_end = int(visible_until[seen].min())
        else:
            new = keys[at + 1 : parent + 1][visible_until[at + 1 : parent + 1] > parent]
            length, crc32 = length + len(new), zlib.crc32(np.ascontiguousarray(tokens[new], "<i4"), crc32)
            first_end = min(first_end, int(visible_until[new].min(initial=first_end)))
        at = parent
        found[parent] = (length, crc32)
    return found
