"""Conditioning KL: how far a wrong prefix moves the policy's whole next-token distribution at the diverging leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mwjax.audit.leaves import Leaves
from mwjax.losses import sdcc_kl
from mwjax.model import ModelConfig, forward, unembedding
from mwjax.tree import Batch, Rows, RowShape, Tree, collate, fragments, pack


def conditioning_kl(
    config: ModelConfig,
    params: Any,
    trees: Sequence[Tree],
    leaves: Sequence[Leaves],
    shape: RowShape,
    progress: Callable[[int, int], None] | None = None,
) -> list[np.ndarray]:
    """KL(pi(. | generation prefix) || pi(. | prefix in ``H_comp``)) over the whole vocabulary at every diverging leaf.

    The distributions of MemoryWalker's SDCC term, forward only, in nats and at temperature 1.

    Args:
        leaves: of every tree, see :func:`mwjax.audit.leaves.leaves_of`.
        shape: a row that holds every branch view and every compressed walk, as
            :func:`mwjax.audit.logdiff.row_shape` gives; teacher rows are as large.
        progress: called with (rows done, rows in all) after every row.

    Returns:
        per tree float64 [D], in the order of its leaves.
    """
    shape = RowShape(shape.length, shape.edges, shape.length, shape.edges)
    made = [(n, f) for n, tree in enumerate(trees) for f in fragments([tree], "sdcc", shape, numbers=[n])]
    made = [(number, fragment) for number, fragment in made if fragment.teacher is not None]
    rows = pack([fragment.needs for _, fragment in made], shape)
    found = [np.full(len(one.sampled), np.nan) for one in leaves]
    # A position of the compressed walk holds at most one sampled token, so it tells which leaf a pair is of.
    at = [
        dict(zip(tree.sampled.compressed[one.sampled].tolist(), range(len(one.sampled))))
        for tree, one in zip(trees, leaves)
    ]
    for done, row in enumerate(rows, start=1):
        batch = collate([made[k][1] for k in row], [range(len(row))], shape, 1)
        values = np.asarray(_kl(params, config, batch), np.float64)[0]
        first = 0
        for number, fragment in (made[k] for k in row):
            assert fragment.teacher is not None
            places = (fragment.teacher.student_pairs + 1).tolist()
            found[number][[at[number][place] for place in places]] = values[first : first + len(places)]
            first += len(places)
        if progress is not None:
            progress(done, len(rows))
    return found


@partial(jax.jit, static_argnums=1)
def _kl(params: Any, config: ModelConfig, batch: Batch) -> jax.Array:
    """KL of a batch's pairs: float32 [B, P]."""
    assert batch.teacher is not None and batch.pairs is not None
    output = unembedding(params, config)
    student, teacher = (_hidden(params, config, rows) for rows in (batch.rows, batch.teacher))
    return sdcc_kl(student, teacher, output, output, batch.pairs)


def _hidden(params: Any, config: ModelConfig, rows: Rows) -> jax.Array:
    return forward(params, config, *(jnp.asarray(a) for a in (rows.tokens, rows.positions, rows.visible_until)))
