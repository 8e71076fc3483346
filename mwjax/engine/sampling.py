"""One sampling step: logits to a token and its log-probs. Pure functions of [B, V] logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def process_logits(
    logits: jax.Array, temperature: jax.Array, top_p: jax.Array, top_k: jax.Array, *, truncate: bool
) -> jax.Array:
    """Logits of the distribution to sample from: temperature, then top-k, then top-p (nucleus) truncation.

    logits: float [B, V]. temperature, top_p: float [B]; top_k: int32 [B], 0 keeps all. Rows of temperature 0 become a
    point mass on their largest logit (the first of equals). ``truncate`` False skips both truncations, and their sort.
    Ties with the last kept token are kept by top-k; top-p keeps the smallest set whose probability reaches it.
    Returns float [B, V], -inf where excluded, not normalised.
    """
    vocabulary = logits.shape[-1]
    greedy = (temperature <= 0)[:, None]
    scaled = logits / jnp.where(greedy, 1.0, temperature[:, None])
    point = jnp.where(jnp.arange(vocabulary) == logits.argmax(-1)[:, None], 0.0, -jnp.inf)
    if not truncate:
        return jnp.where(greedy, point, scaled)
    order = jnp.argsort(-scaled, axis=-1)
    ranked = jnp.take_along_axis(scaled, order, axis=-1)
    kept = jnp.where(top_k > 0, jnp.minimum(top_k, vocabulary), vocabulary)
    smallest = jnp.take_along_axis(ranked, kept[:, None] - 1, axis=-1)
    ranked = jnp.where(ranked >= smallest, ranked, -jnp.inf)
    probability = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    # The rounding of the sum must not exclude anything where top_p is off.
    inside = (before < top_p[:, None]) | (top_p >= 1)[:, None]
    ranked = jnp.where(inside, ranked, -jnp.inf)
    rank = jnp.argsort(order, axis=-1)
    return jnp.where(greedy, point, jnp.take_along_axis(ranked, rank, axis=-1))


def sample_tokens(
    logits: jax.Array,
    keys: jax.Array,
    temperature: jax.Array,
    top_p: jax.Array,
    top_k: jax.Array,
    processed: jax.Array,
    *,
    truncate: bool,
) -> tuple[jax.Array, jax.Array]:
    """Sample one token per row from ``process_logits`` with that row's key.

    logits: float [B, V]; keys: PRNG keys [B]; processed: bool [B], which log-prob to return: of the distribution
    sampled from, or the raw one (``log_softmax(logits)``). Returns (tokens int32 [B], logprobs float [B]).
    """
    chosen_from = process_logits(logits, temperature, top_p, top_k, truncate=truncate)
    tokens = jax.vmap(jax.random.categorical)(keys, chosen_from).astype(jnp.int32)
    of_token = tokens[:, None]
    raw = jnp.take_along_axis(logits, of_token, axis=-1) - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    own = jnp.take_along_axis(chosen_from, of_token, axis=-1) - jax.nn.logsumexp(chosen_from, axis=-1, keepdims=True)
    # A log-prob is at most 0; the subtraction may round to just above it.
    return tokens, jnp.minimum(jnp.where(processed[:, None], own, raw)[:, 0], 0.0)
