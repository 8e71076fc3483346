"""Log-probs and entropies of sampled tokens, read at their parents: an online log-sum-exp over vocabulary chunks."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mwjax.losses.vocabulary import (
    MASKED,
    chunk_logits,
    chunk_rows,
    compute_dtype,
    gather_rows,
    loop_chunks,
    matmul,
    put_chunk,
    take_chunk,
)


class EdgeScores(NamedTuple):
    """logprob: natural log of the target's probability; entropy: of the whole distribution, in nats. Both [B, E]."""

    logprob: jax.Array
    entropy: jax.Array


def edge_logprobs(
    hidden: jax.Array,
    unembedding: jax.Array,
    parent: jax.Array,
    target: jax.Array,
    temperature: jax.Array,
    *,
    vocab_chunk: int | None = None,
) -> EdgeScores:
    """Every edge's log-prob and the entropy at its parent, of ``softmax(hidden @ unembedding.T / temperature)``.

    hidden [B, T, D] after the final norm; unembedding [V, D]; parent, target int32 [B, E]; temperature [B, E] > 0.
    Returns [B, E] float32, or float64 for float64 hidden states.

    Only parents are unembedded, ``vocab_chunk`` vocabulary rows at a time (default: see `vocabulary.chunk_rows`); the
    backward pass recomputes a chunk's logits, so nothing of size edges x vocabulary exists in either direction.
    Gradients reach hidden states and unembedding through both results; the temperature gets none. An edge whose two
    cotangents are zero contributes exactly 0 to every gradient, even where its hidden state is not finite.
    On accelerators the matrix products follow ``jax.default_matmul_precision``. Inside ``jax.shard_map`` pass
    ``check_vma=False``.
    """
    parents = gather_rows(hidden, parent)
    chunk = chunk_rows(unembedding.shape[0], parent.size, vocab_chunk)
    inverse_temperature = 1.0 / jax.lax.stop_gradient(temperature).astype(compute_dtype(hidden))
    logprob, entropy = _scores(chunk, parents, unembedding, target.reshape(-1), inverse_temperature.reshape(-1))
    return EdgeScores(logprob.reshape(parent.shape), entropy.reshape(parent.shape))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scores(
    chunk: int, parents: jax.Array, unembedding: jax.Array, target: jax.Array, inverse_temperature: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _forward(chunk, parents, unembedding, target, inverse_temperature)[0]


def _forward(
    chunk: int, parents: jax.Array, unembedding: jax.Array, target: jax.Array, inverse_temperature: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, ...]]:
    """Carried along the chunks, each [N]: the maximum m, l = sum exp(z - m), s = sum exp(z - m) (z - m), and the
    target's logit. The entropy is then log l - s / l."""

    def body(start: jax.Array, fresh: jax.Array | None, carry: tuple[jax.Array, ...]) -> Any:
        m, l, s, at_target = carry
        logits = _logits(parents, take_chunk(unembedding, start, chunk), inverse_temperature, fresh)
        column, inside = _column(target, start, chunk, fresh)
        at_target = at_target + jnp.where(inside, jnp.take_along_axis(logits, column[:, None], axis=1)[:, 0], 0.0)
        higher = jnp.maximum(m, logits.max(-1))
        shrink, shifted = jnp.exp(m - higher), logits - higher[:, None]
        weight = jnp.exp(shifted)
        s = shrink * (s + l * (m - higher)) + (weight * shifted).sum(-1)
        return higher, shrink * l + weight.sum(-1), s, at_target

    zero = jnp.zeros_like(inverse_temperature)
    m, l, s, at_target = loop_chunks(unembedding.shape[0], chunk, body, (zero + MASKED, zero, zero, zero))
    log_normaliser, entropy = m + jnp.log(l), jnp.log(l) - s / l
    saved = (parents, unembedding, target, inverse_temperature, log_normaliser, entropy)
    return (at_target - log_normaliser, entropy), saved


def _logits(parents: jax.Array, rows: jax.Array, inverse_temperature: jax.Array, fresh: jax.Array | None) -> jax.Array:
    return chunk_logits(parents, rows, fresh, inverse_temperature.dtype) * inverse_temperature[:, None]


def _column(target: jax.Array, start: jax.Array, chunk: int, fresh: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Each target's column in this chunk (clipped) and whether it is to be read here."""
    column = jnp.clip(target - start, 0, chunk - 1)
    inside = target - start == column
    return column, inside if fresh is None else inside & fresh[column]


def _backward(chunk: int, saved: tuple[Any, ...], cotangents: tuple[jax.Array, jax.Array]) -> tuple[Any, ...]:
    """d logprob / d z_j = [j = target] - p_j and d entropy / d z_j = -p_j (log p_j + entropy)."""
    parents, unembedding, target, inverse_temperature, log_normaliser, entropy = saved
    g_logprob, g_entropy = (g[:, None] for g in cotangents)
    # 0 * NaN is NaN: an edge nobody asked about must not bring its hidden state into the sums over edges.
    asked = (g_logprob != 0) | (g_entropy != 0)
    x = jnp.where(asked, parents, 0)

    def body(start: jax.Array, fresh: jax.Array | None, carry: tuple[jax.Array, jax.Array]) -> Any:
        dx, dw = carry
        rows = take_chunk(unembedding, start, chunk)
        log_p = _logits(x, rows, inverse_temperature, fresh) - log_normaliser[:, None]
        column, inside = _column(target, start, chunk, fresh)
        # A comparison, not a scatter: it fuses, and it shards over edges.
        hit = (column[:, None] == jnp.arange(chunk)) & inside[:, None]
        dz = jnp.where(hit, g_logprob, 0.0) - jnp.exp(log_p) * (g_logprob + g_entropy * (log_p + entropy[:, None]))
        dz = jnp.where(asked, dz * inverse_temperature[:, None], 0.0)
        return dx + matmul("nv,vd->nd", dz, rows), put_chunk(dw, matmul("nv,nd->vd", dz, x), start, fresh)

    start = jnp.zeros(x.shape, inverse_temperature.dtype), jnp.zeros_like(unembedding)
    dx, dw = loop_chunks(unembedding.shape[0], chunk, body, start)
    return dx.astype(parents.dtype), dw, None, None


_scores.defvjp(_forward, _backward)
