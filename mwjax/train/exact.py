"""Log-probs of sampled tokens under their exact generation prefixes, whatever rows a method trains on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from mwjax.data import Index
from mwjax.tree import Batch, Edges, Rows, RowShape, collate, fragments, pack

ROUND_TO = 256


def row_shape(index: Index, at_least: int) -> RowShape:
    """Rows that hold the longest generation prefix of the data, ``at_least`` tokens or more. Reads every rollout."""
    longest = 1
    for number in range(len(index.ids)):
        (tree,) = index.trees([number])
        sampled = tree.sampled
        longest = max(longest, int(sampled.prefix[sampled.trainable].max(initial=1)))
    length = max(at_least, -(-longest // ROUND_TO) * ROUND_TO)
    return RowShape(length, length)


def batches(index: Index, numbers: Iterable[int], shape: RowShape, rows_per_batch: int) -> Iterator[Batch]:
    """The prefix tries of some rollouts in batches of ``rows_per_batch`` rows; edges carry the index's numbers."""
    made = []
    for number in numbers:
        made += fragments(index.trees([number]), "packed", shape, numbers=[number])
    rows = pack([fragment.needs for fragment in made], shape)
    for start in range(0, len(rows), rows_per_batch):
        yield collate(made, rows[start : start + rows_per_batch], shape, rows_per_batch)


def fill_old_logprobs(
    microbatches: Iterable[Batch],
    index: Index,
    shape: RowShape,
    rows_per_batch: int,
    score: Callable[[Rows], np.ndarray],
    numbers: Sequence[int] | None = None,
) -> None:
    """Writes ``old_logprob`` of every edge of ``microbatches``, in place: ``score`` of the same sampled token (same
    rollout, turn and index) under its exact prefix. ``score`` gives the log-probs [B, E] of some rows' edges.

    numbers: the rollouts to score; None: those of ``microbatches``. Where several processes share the work, each has
    other micro-batches, but all must score the same rows.
    """
    wanted = [batch.rows.edges for batch in microbatches]
    if numbers is None:
        numbers = sorted({int(n) for edges in wanted for n in np.unique(edges.rollout[edges.weight != 0])})
    keys, values = [], []
    for batch in batches(index, numbers, shape, rows_per_batch):
        active = batch.rows.edges.weight != 0
        keys.append(_key(batch.rows.edges, active))
        values.append(np.asarray(score(batch.rows))[active])
    key, value = np.concatenate(keys or [np.zeros(0)]), np.concatenate(values or [np.zeros(0)])
    order = np.argsort(key)
    for edges in wanted:
        active = edges.weight != 0
        edges.old_logprob[active] = value[order[np.searchsorted(key, _key(edges, active), sorter=order)]]


def _key(edges: Edges, active: np.ndarray) -> np.ndarray:
    """int64 [N]: a sampled token as one number (16 M tokens a turn, 64 k turns a rollout)."""
    rollout, turn, index = (
        np.asarray(part)[active].astype(np.int64) for part in (edges.rollout, edges.turn, edges.index)
    )
    return (rollout << 40) | (turn << 24) | index
