"""Log-probs and entropies of sampled tokens, read at their parents: an online log-sum-exp over vocabulary chunks."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mwjax.losses.vocabulary import (
    MASKED,
    chunk_logits,
    chunk_rows,
    compute_dtype,
    first_row,
    flat,
    gather_rows,
    largest_over_vocabulary,
    loop_chunks,
    matmul,
    on_mesh,
    over_positions,
    over_vocabulary,
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
    mesh: Mesh | None = None,
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

    With a ``mesh`` (all axes of `mwjax.model.sharding`) edges are split over rows and ``context``, the vocabulary over
    ``tensor`` and D over ``fsdp``; every device scores its edges against its share of the vocabulary, and a log-sum-exp
    over ``tensor`` joins them. Sizes must divide: B by data x fsdp, E by context, V by tensor, D by fsdp.
    """
    inverse_temperature = 1.0 / jax.lax.stop_gradient(temperature).astype(compute_dtype(hidden))
    static = vocab_chunk, mesh
    return EdgeScores(*_scores(static, gather_rows(hidden, parent, mesh), unembedding, target, inverse_temperature))


Static = tuple[int | None, Mesh | None]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scores(
    static: Static, parents: jax.Array, unembedding: jax.Array, target: jax.Array, inverse_temperature: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _forward(static, parents, unembedding, target, inverse_temperature)[0]


def _forward(
    static: Static, parents: jax.Array, unembedding: jax.Array, target: jax.Array, inverse_temperature: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, ...]]:
    vocab_chunk, mesh = static
    local = on_mesh(partial(_forward_local, vocab_chunk, mesh is not None), mesh, "htee", "eee")
    logprob, entropy, log_normaliser = local(parents, unembedding, target, inverse_temperature)
    saved = (parents, unembedding, target, inverse_temperature, log_normaliser, entropy)
    return (logprob, entropy), saved


def _forward_local(
    vocab_chunk: int | None,
    split: bool,
    parents: jax.Array,
    unembedding: jax.Array,
    target: jax.Array,
    inverse_temperature: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(log-prob, entropy, log-sum-exp). Carried along the chunks, each [N]: the maximum m, l = sum exp(z - m),
    s = sum exp(z - m) (z - m), and the target's logit. The entropy is then log l - s / l."""
    chunk = chunk_rows(unembedding.shape[0], target.size, vocab_chunk)
    shape, x, scale = target.shape, flat(parents), inverse_temperature.reshape(-1)
    column_of = target.reshape(-1) - first_row(unembedding, split)

    def body(start: jax.Array, fresh: jax.Array | None, carry: tuple[jax.Array, ...]) -> Any:
        m, l, s, at_target = carry
        logits = _logits(x, take_chunk(unembedding, start, chunk, split), scale, fresh)
        column, inside = _column(column_of, start, chunk, fresh)
        at_target = at_target + jnp.where(inside, jnp.take_along_axis(logits, column[:, None], axis=1)[:, 0], 0.0)
        higher = jnp.maximum(m, logits.max(-1))
        shrink, shifted = jnp.exp(m - higher), logits - higher[:, None]
        weight = jnp.exp(shifted)
        s = shrink * (s + l * (m - higher)) + (weight * shifted).sum(-1)
        return higher, shrink * l + weight.sum(-1), s, at_target

    zero = jnp.zeros_like(scale)
    m, l, s, at_target = loop_chunks(unembedding.shape[0], chunk, body, (zero + MASKED, zero, zero, zero))
    if split:
        higher = largest_over_vocabulary(m)
        shrink = jnp.exp(m - higher)
        l, s, at_target = over_vocabulary((shrink * l, shrink * (s + l * (m - higher)), at_target), split)
        m = higher
    log_normaliser, entropy = m + jnp.log(l), jnp.log(l) - s / l
    return (at_target - log_normaliser).reshape(shape), entropy.reshape(shape), log_normaliser.reshape(shape)


def _logits(parents: jax.Array, rows: jax.Array, inverse_temperature: jax.Array, fresh: jax.Array | None) -> jax.Array:
    return chunk_logits(parents, rows, fresh, inverse_temperature.dtype) * inverse_temperature[:, None]


def _column(target: jax.Array, start: jax.Array, chunk: int, fresh: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Each target's column in this chunk (clipped) and whether it is to be read here."""
    column = jnp.clip(target - start, 0, chunk - 1)
    inside = target - start == column
    return column, inside if fresh is None else inside & fresh[column]


def _backward(static: Static, saved: tuple[Any, ...], cotangents: tuple[jax.Array, jax.Array]) -> tuple[Any, ...]:
    vocab_chunk, mesh = static
    local = on_mesh(partial(_backward_local, vocab_chunk, mesh is not None), mesh, "hteeeeee", "ht")
    return *local(*saved, *cotangents), None, None


def _backward_local(
    vocab_chunk: int | None,
    split: bool,
    parents: jax.Array,
    unembedding: jax.Array,
    target: jax.Array,
    inverse_temperature: jax.Array,
    log_normaliser: jax.Array,
    entropy: jax.Array,
    g_logprob: jax.Array,
    g_entropy: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """d logprob / d z_j = [j = target] - p_j and d entropy / d z_j = -p_j (log p_j + entropy)."""
    chunk = chunk_rows(unembedding.shape[0], target.size, vocab_chunk)
    scale, column_of = inverse_temperature.reshape(-1), target.reshape(-1) - first_row(unembedding, split)
    log_normaliser, entropy, g_logprob, g_entropy = (
        part.reshape(-1, 1) for part in (log_normaliser, entropy, g_logprob, g_entropy)
    )
    # 0 * NaN is NaN: an edge nobody asked about must not bring its hidden state into the sums over edges.
    asked = (g_logprob != 0) | (g_entropy != 0)
    x = jnp.where(asked, flat(parents), 0)

    def body(start: jax.Array, fresh: jax.Array | None, carry: tuple[jax.Array, jax.Array]) -> Any:
        dx, dw = carry
        rows = take_chunk(unembedding, start, chunk, split)
        log_p = _logits(x, rows, scale, fresh) - log_normaliser
        column, inside = _column(column_of, start, chunk, fresh)
        # A comparison, not a scatter: it fuses, and it shards over edges.
        hit = (column[:, None] == jnp.arange(chunk)) & inside[:, None]
        dz = jnp.where(hit, g_logprob, 0.0) - jnp.exp(log_p) * (g_logprob + g_entropy * (log_p + entropy))
        dz = jnp.where(asked, dz * scale[:, None], 0.0)
        return dx + matmul("nv,vd->nd", dz, rows), put_chunk(dw, matmul("nv,nd->vd", dz, x), start, fresh, split)

    start = jnp.zeros(x.shape, scale.dtype), jnp.zeros_like(unembedding)
    dx, dw = loop_chunks(unembedding.shape[0], chunk, body, start)
    dx = over_vocabulary(dx, split)
    return dx.astype(parents.dtype).reshape(parents.shape), over_positions(dw, split)


_scores.defvjp(_forward, _backward)
