"""One packed pass over a prefix tree is the same computation as one pass per view: loss and every gradient leaf."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mwjax import model
from tests.random_tries import Trie, random_trie


class Edge(NamedTuple):
    parent: int  # position in the packed row at which the target is predicted
    target: int
    weight: float


def hand_made() -> tuple[Trie, list[Edge]]:
    """Three levels, laid out depth first, then a second tree and padding (row positions in brackets):

    [0 1 2 3] -+- [4 5 6] -+- [7 8]
               |           +- [9]
               +- [10 11]            [12 13 14]   [15] padding
    """
    parent = np.array([-1, 0, 1, 2, 3, 4, 5, 6, 7, 6, 3, 10, -1, 12, 13, -1], np.int32)
    position = np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 7, 4, 5, 0, 1, 2, 0], np.int32)
    visible_until = np.array([12, 12, 12, 12, 10, 10, 10, 9, 9, 10, 12, 12, 15, 15, 15, 16], np.int32)
    edges = [
        Edge(2, 5, 1.0),
        Edge(3, 17, 0.5),  # a fork: one position, three targets
        Edge(3, 8, -0.7),
        Edge(3, 8, 2.0),  # the same target sampled twice
        Edge(6, 11, 1.0),
        Edge(8, 2, 1.3),  # a leaf: its target has no position of its own
        Edge(9, 19, 1.0),
        Edge(11, 0, -1.0),
        Edge(13, 4, 1.0),
    ]
    return Trie(parent, position, visible_until), edges


def random_tree(seed: int) -> tuple[Trie, list[Edge]]:
    rng = np.random.default_rng(seed)
    trie = random_trie(rng, 30, fork=0.25, root=0.05)
    return trie, [
        Edge(int(p), int(t), float(w))
        for p, t, w in zip(rng.integers(0, 25, 20), rng.integers(0, 23, 20), rng.standard_normal(20))
    ]


@pytest.mark.parametrize(
    ("family", "made"), [("qwen3", hand_made()), ("qwen2", hand_made()), ("qwen3", random_tree(0))]
)
def test_packed_equals_separate_views_in_loss_and_every_gradient(family, made):
    trie, edges = made
    np.testing.assert_array_equal(
        trie.visible(),
        (np.arange(len(trie.parent))[:, None] < trie.visible_until) & np.tri(len(trie.parent), dtype=bool),
    )
    tokens = np.random.default_rng(7).integers(0, 23, len(trie.parent))
    with jax.enable_x64(True):
        config = model.small_config(23, 2, 16, family=family, tied=family == "qwen3")
        params = model.init(config, jax.random.key(0), jnp.float64)

        def loss_of(params, hidden):
            """hidden [E, width]: the state every edge's target is predicted from."""
            logprobs = jax.nn.log_softmax(hidden @ model.unembedding(params, config).T)
            targets = jnp.asarray([edge.target for edge in edges])
            return -jnp.vdot(logprobs[jnp.arange(len(edges)), targets], jnp.asarray([edge.weight for edge in edges]))

        def packed(params):
            row = (jnp.asarray(x, jnp.int32)[None] for x in (tokens, trie.position, trie.visible_until))
            hidden = model.forward(params, config, *row, dtype=jnp.float64, remat="attention")[0]
            return loss_of(params, hidden[jnp.asarray([edge.parent for edge in edges])])

        def separate(params):
            """Every edge from a row that holds its own prefix alone, under a plain causal mask."""
            paths = [trie.ancestors(edge.parent) for edge in edges]
            shape = (len(edges), max(map(len, paths)))
            own = np.zeros(shape, np.int32)
            for row, path in zip(own, paths):
                row[: len(path)] = tokens[path]
            hidden = model.forward(
                params,
                config,
                jnp.asarray(own),
                jnp.broadcast_to(jnp.arange(shape[1]), shape),
                jnp.full(shape, shape[1]),
                attention="oracle",
                dtype=jnp.float64,
            )
            return loss_of(params, hidden[jnp.arange(len(edges)), jnp.asarray([len(path) - 1 for path in paths])])

        expected, expected_gradients = jax.jit(jax.value_and_grad(separate))(params)
        loss, gradients = jax.jit(jax.value_and_grad(packed))(params)
        np.testing.assert_allclose(loss, expected, rtol=1e-12)
        for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
            other = expected_gradients
            for part in path:
                other = other[part.key]
            error = np.linalg.norm(gradient - other) / np.linalg.norm(other)
            assert error < 1e-10, (path, error)
