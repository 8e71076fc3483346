"""SDCC: KL(teacher on a leaf's live prefix || student on the compressed walk), the MemoryWalker regulariser."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mwjax.losses.vocabulary import (
    MASKED,
    chunk_logits,
    chunk_rows,
    compute_dtype,
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
from mwjax.tree.rows import Pairs


def lambda_at(step: int, total_steps: int, peak: float = 0.1, ramp: float = 0.2) -> float:
    """The weight of the SDCC term at update ``step`` (from 0): linear from 0 to ``peak`` over the first ``ramp`` share
    of ``total_steps``, then constant (MemoryWalker, SDCC)."""
    if not 0.0 <= ramp <= 1.0:
        raise ValueError(f"the ramp is a share of the update steps, between 0 and 1; got {ramp}")
    if peak < 0.0:
        raise ValueError(f"the SDCC weight must not be negative; got {peak}")
    ramp_steps = ramp * total_steps
    return peak if step >= ramp_steps else peak * step / ramp_steps


def sdcc_kl(
    student_hidden: jax.Array,
    teacher_hidden: jax.Array,
    student_unembedding: jax.Array,
    teacher_unembedding: jax.Array,
    pairs: Pairs,
    *,
    vocab_chunk: int | None = None,
    mesh: Mesh | None = None,
) -> jax.Array:
    """KL(teacher || student) over the full vocabulary for every pair, in nats, at temperature 1.

    student_hidden [B, T, D], teacher_hidden [B, Tt, Dt], unembeddings [V, D] and [V, Dt], pairs [B, P]. Returns [B, P]
    float32 (float64 for float64 students), unweighted, exactly 0 where the pair's weight is 0. Rounding may leave a
    value a few 1e-7 below 0.

    Teacher states and unembedding are taken under a stop-gradient. One pass over vocabulary chunks carries both
    log-sum-exps and sum p_t (z_t - z_s): KL is that sum minus the difference of the two, so nothing of size
    pairs x vocabulary exists. A pair of weight 0 contributes exactly 0 to every gradient, whatever its hidden states.

    ``mesh``: as in `mwjax.losses.logprobs.edge_logprobs`, pairs in place of edges.
    """
    if student_unembedding.shape[0] != teacher_unembedding.shape[0]:
        raise ValueError(
            f"teacher and student must share one vocabulary; got {teacher_unembedding.shape[0]} and "
            f"{student_unembedding.shape[0]} unembedding rows"
        )
    dtype = compute_dtype(student_hidden)
    real = jnp.asarray(pairs.weight) != 0
    if real.size == 0:
        return jnp.zeros(real.shape, dtype)
    student = gather_rows(student_hidden, jnp.asarray(pairs.student), mesh)
    teacher, teacher_unembedding = jax.lax.stop_gradient(
        (gather_rows(teacher_hidden, jnp.asarray(pairs.teacher), mesh), teacher_unembedding)
    )
    kl = _kl((vocab_chunk, dtype, mesh), student, student_unembedding, teacher, teacher_unembedding)
    return jnp.where(real, kl, 0.0)


Static = tuple[int | None, Any, Mesh | None]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kl(static: Static, student: jax.Array, ws: jax.Array, teacher: jax.Array, wt: jax.Array) -> jax.Array:
    return _forward(static, student, ws, teacher, wt)[0]


def _forward(
    static: Static, student: jax.Array, ws: jax.Array, teacher: jax.Array, wt: jax.Array
) -> tuple[jax.Array, tuple[Any, ...]]:
    kl, *normalisers = on_mesh(partial(_forward_local, static), static[2], "htht", "eee")(student, ws, teacher, wt)
    return kl, (student, ws, teacher, wt, *normalisers)


def _forward_local(
    static: Static, student: jax.Array, ws: jax.Array, teacher: jax.Array, wt: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(KL, the student's log-sum-exp, the teacher's)."""
    chunk, dtype, split = _local(static, student, ws)
    shape, xs, xt = student.shape[:-1], flat(student), flat(teacher)

    def body(start: jax.Array, fresh: jax.Array | None, carry: tuple[jax.Array, ...]) -> Any:
        ms, ls, mt, lt, gap = carry
        zs = chunk_logits(xs, take_chunk(ws, start, chunk, split), fresh, dtype)
        zt = chunk_logits(xt, take_chunk(wt, start, chunk, split), fresh, dtype)
        ms_new, mt_new = jnp.maximum(ms, zs.max(-1)), jnp.maximum(mt, zt.max(-1))
        ls = ls * jnp.exp(ms - ms_new) + jnp.exp(zs - ms_new[:, None]).sum(-1)
        shrink, weight = jnp.exp(mt - mt_new), jnp.exp(zt - mt_new[:, None])
        return ms_new, ls, mt_new, lt * shrink + weight.sum(-1), gap * shrink + (weight * (zt - zs)).sum(-1)

    zero = jnp.zeros(xs.shape[0], dtype)
    ms, ls, mt, lt, gap = loop_chunks(ws.shape[0], chunk, body, (zero + MASKED, zero, zero + MASKED, zero, zero))
    if split:
        ms_all, mt_all = largest_over_vocabulary(ms), largest_over_vocabulary(mt)
        ls, lt, gap = over_vocabulary(
            (ls * jnp.exp(ms - ms_all), lt * jnp.exp(mt - mt_all), gap * jnp.exp(mt - mt_all)), split
        )
        ms, mt = ms_all, mt_all
    student_normaliser, teacher_normaliser = ms + jnp.log(ls), mt + jnp.log(lt)
    kl = gap / lt - (teacher_normaliser - student_normaliser)
    return kl.reshape(shape), student_normaliser.reshape(shape), teacher_normaliser.reshape(shape)


def _local(static: Static, student: jax.Array, ws: jax.Array) -> tuple[int, Any, bool]:
    vocab_chunk, dtype, mesh = static
    pairs = student.shape[0] * student.shape[1]
    return chunk_rows(ws.shape[0], 2 * pairs, vocab_chunk), dtype, mesh is not None


def _backward(static: Static, saved: tuple[Any, ...], cotangent: jax.Array) -> tuple[Any, ...]:
    local = on_mesh(partial(_backward_local, static), static[2], "hthteee", "ht")
    return *local(*saved, cotangent), None, None


def _backward_local(
    static: Static,
    student: jax.Array,
    ws: jax.Array,
    teacher: jax.Array,
    wt: jax.Array,
    student_normaliser: jax.Array,
    teacher_normaliser: jax.Array,
    cotangent: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """d KL / d z_s = p_s - p_t; the teacher's side gets nothing."""
    chunk, dtype, split = _local(static, student, ws)
    g, student_normaliser, teacher_normaliser = (
        part.reshape(-1, 1) for part in (cotangent, student_normaliser, teacher_normaliser)
    )
    # 0 * NaN is NaN: a padding pair must not bring its hidden state into the sums over pairs.
    x, xt = jnp.where(g != 0, flat(student), 0), flat(teacher)

    def body(start: jax.Array, fresh: jax.Array | None, carry: tuple[jax.Array, jax.Array]) -> Any:
        dx, dw = carry
        rows = take_chunk(ws, start, chunk, split)
        ps = jnp.exp(chunk_logits(x, rows, fresh, dtype) - student_normaliser)
        pt = jnp.exp(chunk_logits(xt, take_chunk(wt, start, chunk, split), fresh, dtype) - teacher_normaliser)
        dz = jnp.where(g != 0, g * (ps - pt), 0.0)
        return dx + matmul("nv,vd->nd", dz, rows), put_chunk(dw, matmul("nv,nd->vd", dz, x), start, fresh, split)

    dx, dw = loop_chunks(ws.shape[0], chunk, body, (jnp.zeros(x.shape, dtype), jnp.zeros_like(ws)))
    dx = over_vocabulary(dx, split)
    return dx.astype(student.dtype).reshape(student.shape), over_positions(dw, split)


_kl.defvjp(_forward, _backward)
