"""Positions dealt out over the devices of a context-parallel group."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mwjax.model.attention.block_pairs import block_sizes
from mwjax.model.attention.blockwise import visited_blocks
from mwjax.tree import Batch, Pairs, Rows
from mwjax.tree.context import deal, order, split_context
from tests.benchmarks.attention import chain_of_views
from tests.random_edges import random_edges
from tests.random_tries import random_trie


def visible(index: np.ndarray, visible_until: np.ndarray) -> np.ndarray:
    """bool [T, T] by definition: the queries of ``index`` against all keys."""
    keys = np.arange(len(visible_until))
    return (keys <= index[:, None]) & (index[:, None] < visible_until)


@given(st.integers(0, 1000), st.sampled_from([2, 3, 4, 6]), st.sampled_from([1, 2, 4]))
def test_every_part_has_its_share_of_the_work(seed: int, shards: int, block: int) -> None:
    length = shards * block * 4
    end = random_trie(np.random.default_rng(seed), length).visible_until
    order = deal(end, shards, block)
    assert sorted(order.tolist()) == list(range(length))
    blocks = visible(np.arange(length), end).reshape(length // block, block, length // block, block).any(axis=(1, 3))
    work = blocks.sum(axis=1)[order[::block] // block].reshape(shards, -1).sum(axis=1)
    # Dealing the largest first into parts of equal size: no part is off by more than the largest block.
    assert work.max() - work.min() <= blocks.sum(axis=1).max()
    parts = order.reshape(shards, -1)
    assert all((np.diff(part[::block]) > 0).all() for part in parts)


def test_a_plain_row_is_dealt_evenly() -> None:
    """Causal: early blocks are cheap and late ones dear, and contiguous shares would cost 1 : 7 on four devices."""
    order = deal(np.full(16, 16, np.int32), 4, 1)
    work = (order + 1).reshape(4, 4).sum(axis=1)
    assert work.max() - work.min() <= 2


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_parts_together_visit_the_pairs_of_blocks_that_the_whole_row_visits(shards: int) -> None:
    """With the blocks of the TPU kernels: a block of queries from two places would see what either of them sees."""
    sizes = block_sizes(8192 // shards, 8192)
    end = jnp.asarray(chain_of_views(8192 // 5, multiple=4096)[:8192])
    whole = visited_blocks(end, jnp.arange(8192), sizes).sum()
    parts = np.split(order(np.asarray(end)[None], shards)[0], shards)
    assert sum(visited_blocks(end, jnp.asarray(part), sizes).sum() for part in parts) == whole


def test_edges_pairs_and_tokens_follow() -> None:
    rng = np.random.default_rng(3)
    ends = np.stack([random_trie(rng, 24).visible_until for _ in range(2)])
    tokens, positions = rng.integers(0, 50, (2, 2, 24)).astype(np.int32)
    rows = Rows(tokens, positions, ends, random_edges(0, edges=12, tokens=24, vocabulary=50))
    pairs = Pairs(*rng.integers(0, 24, (2, 2, 8)).astype(np.int32), np.ones((2, 8), np.float32))
    teacher = rows._replace(tokens=tokens[::-1], visible_until=ends[::-1])
    batch = split_context(Batch(rows, teacher, pairs), 4)
    for made, given_rows in ((batch.rows, rows), (batch.teacher, teacher)):
        assert made is not None and made.index is not None
        np.testing.assert_array_equal(made.tokens, np.take_along_axis(given_rows.tokens, made.index, axis=1))
        np.testing.assert_array_equal(made.positions, np.take_along_axis(given_rows.positions, made.index, axis=1))
        np.testing.assert_array_equal(made.visible_until, given_rows.visible_until)
    assert batch.pairs is not None and batch.teacher is not None
    for before, after, made in (
        (rows.edges.parent, batch.rows.edges.parent, batch.rows),
        (pairs.student, batch.pairs.student, batch.rows),
        (pairs.teacher, batch.pairs.teacher, batch.teacher),
    ):
        np.testing.assert_array_equal(np.take_along_axis(made.index, after, axis=1), before)
    assert split_context(Batch(rows), 1) == Batch(rows)


def test_sizes_that_do_not_divide_are_named() -> None:
    rows = Rows(
        *np.zeros((2, 1, 24), np.int32), np.arange(1, 25, dtype=np.int32)[None], random_edges(0, rows=1, edges=12)
    )
    with pytest.raises(ValueError, match=r"data.row_length \(24\) must be a multiple of mesh.context \(5\)"):
        split_context(Batch(rows), 5)
    with pytest.raises(ValueError, match=r"data.edges_per_row \(12\) must be a multiple of mesh.context \(8\)"):
        split_context(Batch(rows), 8)
    odd = np.broadcast_to(np.arange(1, 131_001, dtype=np.int32), (1, 131_000))
    with pytest.raises(ValueError, match=r"131000 tokens .* 131000 blocks of 1, too many: .* such as 131072"):
        order(odd, 8)
