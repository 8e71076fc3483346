"""Supervised fine-tuning: weighted negative log-likelihood."""

from __future__ import annotations

import jax

from mwjax.losses.logprobs import EdgeScores
from mwjax.losses.masking import active, weighted_sum
from mwjax.tree.rows import Edges


def sft_loss(scores: EdgeScores, edges: Edges) -> jax.Array:
    """The scalar ``sum of weight x -logprob`` over active edges; the caller divides once by the global denominator."""
    return weighted_sum(active(edges), edges.weight, -scores.logprob)
