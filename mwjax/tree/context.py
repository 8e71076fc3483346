"""Cutting rows over the devices of a context-parallel group, so that each gets the same share of the attention's work.

A tree costs unequally along a row: where the rows of a long trunk are cheap, those of deep branches see all of it. So
the positions of a row are dealt out in blocks, and ``Rows.index`` says which position of the row stands where.
"""

from __future__ import annotations

import math

import numpy as np

from mwjax.tree.rows import Batch, Pairs, Rows

BLOCK = 512  # positions that stay together: what the TPU kernels work on at once, and a multiple of the other blocks
MOST_BLOCKS = 4096  # the cost of a row's blocks is worked out from a table of all pairs


def split_context(batch: Batch, shards: int) -> Batch:
    """The batch with the positions of every row reordered for ``shards`` devices: shard k takes positions
    ``k * T / shards`` up to ``(k + 1) * T / shards`` of the new order. ``visible_until`` stays in the row's own order;
    ``index``, the weights of the tokens, the parents of the edges and the pairs follow. The same batch for one shard.

    Raises:
        ValueError: the length of the rows, or their number of edges or pairs, is no multiple of ``shards``.
    """
    if shards == 1:
        return batch
    rows, place = _split(batch.rows, shards, "data.row_length")
    _check_multiple(rows.edges.parent.shape[1], shards, "data.edges_per_row")
    rows = rows._replace(edges=rows.edges._replace(parent=_move(place, rows.edges.parent)))
    if batch.teacher is None or batch.pairs is None:
        return batch._replace(rows=rows)
    teacher, teacher_place = _split(batch.teacher, shards, "data.teacher_row_length")
    pairs = batch.pairs
    _check_multiple(pairs.student.shape[1], shards, "data.pairs_per_row")
    moved = Pairs(_move(place, pairs.student), _move(teacher_place, pairs.teacher), pairs.weight)
    return Batch(rows, teacher, moved)


def deal(visible_until: np.ndarray, shards: int, block: int) -> np.ndarray:
    """An order of one row's positions, int32 [T], in which each of ``shards`` equal parts costs about the same.

    Blocks of ``block`` positions are dealt out, the most expensive first, each to the part that has the least work of
    those that still have room. A block costs one unit for every block of keys in which it sees something.
    """
    blocks = len(visible_until) // block
    last_end = visible_until.reshape(blocks, block).max(axis=1)
    first = np.arange(blocks) * block
    cost = ((first <= first[:, None]) & (first[:, None] < last_end)).sum(axis=1)
    parts: list[list[int]] = [[] for _ in range(shards)]
    work, room = np.zeros(shards, np.int64), blocks // shards
    for number in np.argsort(-cost, kind="stable").tolist():
        part = min((p for p in range(shards) if len(parts[p]) < room), key=lambda p: (work[p], p))
        parts[part].append(number)
        work[part] += cost[number]
    order = np.concatenate([np.sort(part) for part in parts])
    return (order[:, None] * block + np.arange(block)).reshape(-1).astype(np.int32)


def order(visible_until: np.ndarray, shards: int) -> np.ndarray:
    """The order of the positions of some rows, int32 [B, T], in which `split_context` cuts them.

    Raises ValueError for rows that could only be cut into many small blocks.
    """
    length = visible_until.shape[1]
    if shards == 1:
        return np.broadcast_to(np.arange(length, dtype=np.int32), visible_until.shape)
    block = math.gcd(length // shards, BLOCK)
    if length // block > MOST_BLOCKS:
        unit = shards * BLOCK
        raise ValueError(
            f"rows of {length} tokens over mesh.context ({shards}) are {length // block} blocks of {block}, too many: "
            f"take a length that is a multiple of {unit}, such as {-(-length // unit) * unit}"
        )
    return np.stack([deal(row, shards, block) for row in visible_until])


def _split(rows: Rows, shards: int, what: str) -> tuple[Rows, np.ndarray]:
    """The reordered rows, and int32 [B, T] where every position of a row went. Edges keep their parents."""
    _check_multiple(rows.tokens.shape[1], shards, what)
    index = order(rows.visible_until, shards)
    place = np.argsort(index, axis=1).astype(np.int32)
    tokens, positions = (np.take_along_axis(x, index, axis=1) for x in (rows.tokens, rows.positions))
    weight = None if rows.token_weight is None else np.take_along_axis(rows.token_weight, index, axis=1)
    return rows._replace(tokens=tokens, positions=positions, index=index, token_weight=weight), place


def _move(place: np.ndarray, positions: np.ndarray) -> np.ndarray:
    return np.take_along_axis(place, positions, axis=1)


def _check_multiple(size: int, shards: int, what: str) -> None:
    if size % shards:
        raise ValueError(f"{what} ({size}) must be a multiple of mesh.context ({shards})")
