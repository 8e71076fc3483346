"""Which edges count, and arithmetic in which the others cannot be heard, whatever their fields hold."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from mwjax.tree.rows import Edges


def active(edges: Edges) -> jax.Array:
    """Bool [B, E]: the loss-carrying edges. Masked and padding edges have weight 0; their other fields may be NaN."""
    return jnp.asarray(edges.weight) != 0


def only(mask: jax.Array, value: ArrayLike, otherwise: ArrayLike = 0.0) -> jax.Array:
    """``value`` where ``mask``, else ``otherwise``: applied to the operands, not to the result, so that a NaN outside
    the mask reaches neither the value nor, as 0 x NaN, the gradient."""
    return jnp.where(mask, value, otherwise)


def weighted_sum(mask: jax.Array, weight: ArrayLike, value: jax.Array) -> jax.Array:
    """Sum of ``weight * value`` over ``mask``; both [B, E]. Returns a scalar of ``value``'s dtype."""
    return (only(mask, weight) * only(mask, value)).sum().astype(value.dtype)


def behaviour_logprob(edges: Edges) -> jax.Array:
    """The log-probs an importance ratio divides by, [B, E]: ``old_logprob`` where known, else ``rollout_logprob``; NaN
    where neither is. Both are of the generation prefix and of the kind (raw, processed) that ``temperature`` scores."""
    old = jnp.asarray(edges.old_logprob)
    return jnp.where(jnp.isnan(old), edges.rollout_logprob, old)
