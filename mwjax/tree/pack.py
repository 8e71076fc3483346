"""Fragments -> rows of fixed shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mwjax.tree.methods import EDGE_DTYPES, Fragment, RowShape, Teacher
from mwjax.tree.rows import Batch, Edges, Pairs, Rows


def pack(needs: Sequence[tuple[int, ...]], shape: RowShape) -> list[list[int]]:
    """First-fit decreasing over all of a row's capacities at once.

    Args:
        needs: for every fragment what it takes, in the order of :class:`RowShape` (``Fragment.needs``).
        shape: the capacities of a row.

    Returns:
        for every row, the fragments in it, in the order they are laid out.
    """
    wanted = np.array(needs, np.int64).reshape(len(needs), 4)
    capacity = np.array([shape.length, shape.edges, shape.teacher_length, shape.pairs], np.int64)
    share = (wanted / np.maximum(capacity, 1)).max(axis=1) if len(wanted) else np.zeros(0)
    free = np.zeros((0, 4), np.int64)
    rows: list[list[int]] = []
    for fragment in np.argsort(-share, kind="stable").tolist():
        fits = (free >= wanted[fragment]).all(axis=1)
        row = int(fits.argmax()) if fits.any() else len(rows)
        if row == len(rows):
            rows.append([])
            free = np.concatenate([free, capacity[None]])
        rows[row].append(fragment)
        free[row] -= wanted[fragment]
    return rows


def collate(fragments: Sequence[Fragment], rows: Sequence[Sequence[int]], shape: RowShape, count: int) -> Batch:
    """Lay fragments out as a batch of ``count`` rows (empty rows are padding).

    Raises:
        ValueError: more rows than ``count``.
    """
    if len(rows) > count:
        raise ValueError(f"{len(rows)} rows do not fit a batch of {count}")
    student = _empty(count, shape.length, shape.edges)
    paired = shape.teacher_length > 0
    teacher = _empty(count, shape.teacher_length, 0) if paired else None
    pairs = (
        Pairs(
            np.zeros((count, shape.pairs), np.int32),
            np.zeros((count, shape.pairs), np.int32),
            np.zeros((count, shape.pairs), np.float32),
        )
        if paired
        else None
    )
    for row, members in enumerate(rows):
        at = edge = teacher_at = pair = 0
        for member in members:
            fragment = fragments[member]
            _write(student, row, at, fragment)
            _write_edges(student.edges, row, edge, at, fragment.edges)
            if fragment.teacher is not None and teacher is not None and pairs is not None:
                _write(teacher, row, teacher_at, fragment.teacher)
                span = slice(pair, pair + fragment.needs[3])
                pairs.student[row, span] = fragment.teacher.student_pairs + np.int32(at)
                pairs.teacher[row, span] = fragment.teacher.teacher_pairs + np.int32(teacher_at)
                pairs.weight[row, span] = 1
            taken = fragment.needs
            at, edge, teacher_at, pair = at + taken[0], edge + taken[1], teacher_at + taken[2], pair + taken[3]
    return Batch(student, teacher, pairs)


def _empty(count: int, length: int, edges: int) -> Rows:
    columns = [np.zeros((count, edges), dtype) for dtype in EDGE_DTYPES]
    padding = Edges(*columns)
    padding.temperature[:] = 1
    sees_itself = np.broadcast_to(np.arange(1, length + 1, dtype=np.int32), (count, length)).copy()
    tokens, positions = np.zeros((2, count, length), np.int32)
    return Rows(tokens, positions, sees_itself, padding, token_weight=np.zeros((count, length), np.float32))


def _write(rows: Rows, row: int, at: int, piece: Fragment | Teacher) -> None:
    span = slice(at, at + len(piece.tokens))
    rows.tokens[row, span] = piece.tokens
    rows.positions[row, span] = piece.positions
    rows.visible_until[row, span] = piece.visible_until + np.int32(at)
    if isinstance(piece, Fragment) and rows.token_weight is not None:
        rows.token_weight[row, span] = 1 if piece.copies is None else 1 / piece.copies


def _write_edges(edges: Edges, row: int, first: int, at: int, values: Edges) -> None:
    span = slice(first, first + len(values.parent))
    for column, new in zip(edges, values):
        column[row, span] = new
    edges.parent[row, span] += np.int32(at)


@dataclass(frozen=True)
class Fill:
    """How full packed rows are. rows, tokens, edges: counts; rate: tokens / (rows x row length)."""

    rows: int
    tokens: int
    edges: int
    rate: float


def fill(needs: Sequence[tuple[int, ...]], rows: Sequence[Sequence[int]], shape: RowShape) -> Fill:
    """Fill rate of packed rows."""
    tokens = sum(need[0] for need in needs)
    return Fill(len(rows), tokens, sum(need[1] for need in needs), tokens / max(len(rows) * shape.length, 1))
