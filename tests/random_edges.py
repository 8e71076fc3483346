"""Random edge lists and dense, independent scores to compare the losses with."""

from __future__ import annotations

import numpy as np

from mwjax.tree.rows import Edges


def random_edges(seed: int, rows: int = 2, edges: int = 12, tokens: int = 9, vocabulary: int = 37) -> Edges:
    """Every field filled; about a quarter of the edges is masked, and those hold NaN wherever a NaN can be held."""
    rng = np.random.default_rng(seed)
    shape = (rows, edges)
    masked = rng.random(shape) < 0.25
    masked[:, 0] = False

    def real(low: float, high: float) -> np.ndarray:
        return np.where(masked, np.nan, rng.uniform(low, high, shape))

    return Edges(
        parent=rng.integers(0, tokens, shape).astype(np.int32),
        target=rng.integers(0, vocabulary, shape).astype(np.int32),
        weight=np.where(masked, 0.0, rng.uniform(0.5, 2.0, shape)),
        advantage=real(-2, 2),
        rollout_logprob=real(-6, -1),
        old_logprob=np.where(rng.random(shape) < 0.5, np.nan, real(-6, -1)),
        ref_logprob=real(-6, -1),
        temperature=np.where(masked, np.nan, rng.uniform(0.5, 1.5, shape)),
        rollout=rng.integers(0, 3, shape).astype(np.int32),
        turn=rng.integers(0, 2, shape).astype(np.int32),
        index=np.broadcast_to(np.arange(edges, dtype=np.int32), shape),
        view=rng.integers(0, 2, shape).astype(np.int32),
    )


def random_states(
    seed: int, rows: int = 2, tokens: int = 9, vocabulary: int = 37, width: int = 5
) -> tuple[np.ndarray, np.ndarray]:
    """Float64 hidden states [rows, tokens, width] and unembedding [vocabulary, width]."""
    rng = np.random.default_rng(seed + 1000)
    return rng.normal(size=(rows, tokens, width)), rng.normal(size=(vocabulary, width))


def dense_scores(hidden: np.ndarray, unembedding: np.ndarray, edges: Edges) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs and entropies by the definition, edge by edge, in numpy float64."""
    logprob, entropy = np.zeros(edges.parent.shape), np.zeros(edges.parent.shape)
    for b, e in np.ndindex(edges.parent.shape):
        logits = unembedding @ hidden[b, edges.parent[b, e]] / np.nan_to_num(edges.temperature[b, e], nan=1.0)
        p = np.exp(logits - logits.max())
        p /= p.sum()
        logprob[b, e] = np.log(p[edges.target[b, e]])
        entropy[b, e] = -(p * np.log(p)).sum()
    return logprob, entropy
