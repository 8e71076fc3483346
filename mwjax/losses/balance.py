"""The auxiliary loss that spreads tokens evenly over the experts of a mixture."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from mwjax.model.experts import Routing


class Balance(NamedTuple):
    """What the term of one micro-batch needs of its whole step. denominator: what the step's numerator is divided by.
    routing: the sums of all its micro-batches; None, or all zeros, where it has only this one."""

    denominator: ArrayLike
    routing: Routing | None = None


def load_balance(routing: Routing, whole: Routing | None = None) -> jax.Array:
    """``E x sum over E experts of f P``: f an expert's share of the tokens, times the experts per token; P its mean
    probability; both over all tokens and layers. Even loads give the number of experts per token, the least there is
    where probabilities follow loads (Fedus et al., arXiv:2101.03961, eq. 4 to 6, as transformers computes it for
    Qwen3-MoE).

    routing: sums [layers, E], weighted so that a token of a trie counts once (`mwjax.tree.Rows.token_weight`).
    whole: those of the whole mini-batch, where ``routing`` is of a part of it: f and the number of tokens are taken
    from there, so that the terms of the parts add up to the loss over all tokens, however they are cut (global balance:
    arXiv:2501.11873). None, or all zeros: ``routing`` is of all. The gradient is that through P.
    """
    if whole is None:
        whole = routing
    else:
        given = whole.probability.sum() > 0
        whole = jax.tree.map(lambda there, here: jnp.where(given, there, here), whole, routing)
    whole = jax.lax.stop_gradient(whole)
    tokens = jnp.maximum(whole.probability.sum(), jnp.finfo(whole.probability.dtype).tiny)  # times the layers
    share, probability = whole.load.sum(0) / tokens, routing.probability.sum(0) / tokens
    return share.size * (share * probability).sum()
