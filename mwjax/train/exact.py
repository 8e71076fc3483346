"""Log-probs of sampled tokens under their exact generation prefixes, whatever rows a method trains on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from mwjax import data
from mwjax.train.mesh import WHOLE, Share
from mwjax.tree import Batch, Edges, Rows, RowShape, fragments

ROUND_TO = 256
UNBOUNDED = RowShape(1 << 40, 1 << 40)  # longer than anything, and not allocated

# Some rows of this process -> edges and their log-probs, [B, E] in numpy, over the rows of all processes.
Score = Callable[[Rows], tuple[Edges, np.ndarray]]


def plan(index: data.Index, at_least: int, share: Share = WHOLE) -> data.StepSource:
    """The prefix tries of the rollouts of ``index``, each its own unit, in rows of ``at_least`` tokens or as many as
    the longest generation prefix needs; of them the share of one process. Reads every rollout."""
    longest, needs = 1, []
    for number in range(len(index.ids)):
        (tree,) = index.trees([number])
        sampled = tree.sampled
        longest = max(longest, int(sampled.prefix[sampled.trainable].max(initial=1)))
        needs.append(_needs(index, number, UNBOUNDED))
    length = max(at_least, -(-longest // ROUND_TO) * ROUND_TO)
    shape = RowShape(length, length)
    # What is larger than a row is split.
    needs = [_needs(index, n, shape) if need[:, :2].max(initial=0) > length else need for n, need in enumerate(needs)]
    exact = dataclasses.replace(
        index,
        layout=dataclasses.replace(index.layout, method="packed", shape=shape, group_tries=False, merge=False),
        units=tuple(np.array([number]) for number in range(len(index.ids))),
        needs=tuple(needs),
        view_tokens=np.zeros(len(index.ids), np.int64),
        trie_tokens=np.zeros(len(index.ids), np.int64),
    )
    return data.StepSource(exact, process=share.part, processes=share.parts)


def _needs(index: data.Index, number: int, shape: RowShape) -> np.ndarray:
    made = fragments(index.trees([number]), "packed", shape)
    return np.array([fragment.needs for fragment in made], np.int64).reshape(len(made), 4)


def fill_old_logprobs(
    microbatches: Iterable[Batch], source: data.StepSource, score: Score, numbers: Sequence[int] | None = None
) -> None:
    """Writes ``old_logprob`` of every edge of ``microbatches``, in place: the log-prob of the same sampled token (same
    rollout, turn and index) under its exact prefix, on the rows of ``source`` (see `plan`).

    numbers: the rollouts to score; None: those of ``microbatches``. Where several processes share the work, each has
    other micro-batches and other rows, but all must name the same rollouts.
    """
    wanted = [batch.rows.edges for batch in microbatches]
    if numbers is None:
        numbers = sorted({int(n) for edges in wanted for n in np.unique(edges.rollout[edges.weight != 0])})
    keys, values = [np.zeros(0, np.int64)], [np.zeros(0)]
    if len(numbers):
        for batch in source.batches(np.asarray(numbers)).microbatches:
            edges, scored = score(batch.rows)
            active = edges.weight != 0
            keys.append(_key(edges, active))
            values.append(np.asarray(scored)[active])
    key, value = np.concatenate(keys), np.concatenate(values)
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
