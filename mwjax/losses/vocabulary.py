"""Walk over the rows of an unembedding in chunks, so that nothing of size positions x vocabulary is ever held.

On a mesh every device walks over its own share of the vocabulary for its own positions (inside ``jax.shard_map``);
``split`` says so. A chunk of a table that is also cut along D is put together when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from mwjax.model.sharding import CONTEXT, DATA, FSDP, HIDDEN, ROWS, TABLE, TENSOR, TOKENS, constrain

Carry = TypeVar("Carry")

# Vocabulary rows; 151,936 (Qwen3) falls into 16 equal chunks of 9,496. On CPU twice the width is 6 to 12 % slower and
# takes twice the memory, half the width is no faster (tests/benchmarks/edge_loss.py --chunk 4748 18992).
WIDEST_CHUNK = 9_500
NARROWEST_CHUNK = 2_048  # below this the matrix products get too thin to be worth it
CHUNK_ELEMENTS = 2**27  # logits held at once by default: 512 MiB in float32

# Stands for minus infinity where a column is masked; finite, so that 0 * (masked - maximum) is 0 and not NaN.
MASKED = -1e30


def chunk_rows(vocabulary: int, positions: int, vocab_chunk: int | None) -> int:
    """Vocabulary rows per chunk: ``vocab_chunk`` where given, else the whole of a small vocabulary or near-equal chunks
    of at most 9,500 rows, narrower (down to 2,048) where ``positions`` are so many that one chunk's logits would pass
    512 MiB in float32."""
    if vocab_chunk is not None:
        if vocab_chunk < 1:
            raise ValueError(f"vocab_chunk must be at least 1, or None for the default; got {vocab_chunk}")
        return min(vocab_chunk, vocabulary)
    widest = max(NARROWEST_CHUNK, min(WIDEST_CHUNK, CHUNK_ELEMENTS // max(positions, 1)))
    return -(-vocabulary // -(-vocabulary // widest))


def compute_dtype(hidden: jax.Array) -> jnp.dtype:
    """The dtype of logits and losses: float64 for float64 hidden states, else float32."""
    return jnp.dtype(jnp.float64 if hidden.dtype == jnp.float64 else jnp.float32)


def gather_rows(hidden: jax.Array, index: jax.Array, mesh: Mesh | None = None) -> jax.Array:
    """hidden [B, T, D], index int [B, N] -> [B, N, D]; an index outside its row is clipped (padding only)."""
    # A position may lie on any device of the row's context group.
    hidden = constrain(hidden, PartitionSpec(ROWS, None, None), mesh)
    return constrain(jnp.take_along_axis(hidden, index[..., None], axis=1, mode="clip"), HIDDEN, mesh)


def flat(x: jax.Array) -> jax.Array:
    """hidden states [B, N, D] -> [B * N, D]: products with one leading axis are up to ten times faster than with two
    (XLA on CPU, measured)."""
    return x.reshape(-1, x.shape[-1])


def matmul(subscripts: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """Einsum that accumulates in float32 (float64 for float64 operands) whatever the operands are."""
    accumulate = jnp.promote_types(jnp.promote_types(left.dtype, right.dtype), jnp.float32)
    return jnp.einsum(subscripts, left, right, preferred_element_type=accumulate)


def loop_chunks(
    vocabulary: int, chunk: int, body: Callable[[jax.Array, jax.Array | None, Carry], Carry], carry: Carry
) -> Carry:
    """Fold ``body(start, fresh, carry)`` over the chunks ``start .. start + chunk`` of a vocabulary.

    Where the chunk does not divide the vocabulary, the last one is moved left to end with it (no copy, no padding) and
    ``fresh`` bool [chunk] is False for the rows an earlier chunk has covered; it is None where chunks never overlap.
    """
    if vocabulary % chunk == 0:
        return jax.lax.fori_loop(0, vocabulary // chunk, lambda i, c: body(i * chunk, None, c), carry)

    def step(i: jax.Array, c: Carry) -> Carry:
        start = jnp.minimum(i * chunk, vocabulary - chunk)
        return body(start, start + jnp.arange(chunk) >= i * chunk, c)

    return jax.lax.fori_loop(0, -(-vocabulary // chunk), step, carry)


def take_chunk(unembedding: jax.Array, start: jax.Array, chunk: int, split: bool = False) -> jax.Array:
    """Rows ``start .. start + chunk`` of the unembedding [V, D] -> [chunk, D]."""
    rows = jax.lax.dynamic_slice_in_dim(unembedding, start, chunk, axis=0)
    return jax.lax.all_gather(rows, FSDP, axis=1, tiled=True) if split and jax.lax.axis_size(FSDP) > 1 else rows


def put_chunk(
    gradient: jax.Array, rows: jax.Array, start: jax.Array, fresh: jax.Array | None, split: bool = False
) -> jax.Array:
    """Write the fresh ones of ``rows`` [chunk, D] into ``gradient`` [V, D] at ``start``, in place inside a loop.
    split: sums over the devices that hold other columns first, and keeps this device's."""
    if split and jax.lax.axis_size(FSDP) > 1:
        rows = jax.lax.psum_scatter(rows, FSDP, scatter_dimension=1, tiled=True)
    rows = rows.astype(gradient.dtype)
    if fresh is not None:
        rows = jnp.where(fresh[:, None], rows, take_chunk(gradient, start, rows.shape[0]))
    return jax.lax.dynamic_update_slice_in_dim(gradient, rows, start, axis=0)


def first_row(unembedding: jax.Array, split: bool) -> jax.Array | int:
    """The number, in the whole vocabulary, of the first row this device holds."""
    return jax.lax.axis_index(TENSOR) * unembedding.shape[0] if split else 0


def over_vocabulary(x: Any, split: bool) -> Any:
    """Sums over the devices that hold other rows of the vocabulary."""
    return jax.lax.psum(x, TENSOR) if split else x


def largest_over_vocabulary(x: jax.Array) -> jax.Array:
    """The maximum over the devices that hold other rows of the vocabulary, which is split."""
    return jax.lax.pmax(x, TENSOR)


def over_positions(gradient: jax.Array, split: bool) -> jax.Array:
    """Sums a table's gradient over the devices that hold other positions, beyond what `put_chunk` sums."""
    return jax.lax.psum(gradient, (DATA, CONTEXT)) if split else gradient


def on_mesh(local: Callable[..., Any], mesh: Mesh | None, inputs: str, outputs: str) -> Callable[..., Any]:
    """``local`` under ``jax.shard_map``; itself without a mesh.

    inputs, outputs: a letter per array: h hidden states [B, N, D], t a table [V, D], e values [B, N].
    """
    if mesh is None:
        return local
    kinds = {"h": HIDDEN, "t": TABLE, "e": TOKENS}
    # Both directions are written out, so that nothing is left to the check of what is equal on all devices.
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=tuple(kinds[kind] for kind in inputs),
        out_specs=tuple(kinds[kind] for kind in outputs),
        check_vma=False,
    )


def chunk_logits(positions: jax.Array, rows: jax.Array, fresh: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """Logits [N, chunk] of ``positions`` [N, D] over vocabulary ``rows`` [chunk, D]; those not fresh are masked."""
    logits = matmul("nd,vd->nv", positions, rows).astype(dtype)
    return logits if fresh is None else jnp.where(fresh, logits, MASKED)
