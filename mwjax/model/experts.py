"""A mixture of experts in place of the feed-forward block (Shazeer et al., arXiv:1701.06538; Qwen3, arXiv:2505.09388).

Dropless: every token goes through all the experts it chose, however many others chose the same ones. Shapes are fixed
nevertheless: the pairs of token and expert are sorted by expert and multiplied group by group (as in MegaBlocks,
arXiv:2211.15841).

An engine rounds otherwise than the trainer, and where two experts score alike, another one is chosen: then the two
differ by a whole expert and not by rounding. With mixtures, expect the drift between training and rollout (``logdiff``)
to have a longer tail than with dense models (arXiv:2507.18071, section 5.3; arXiv:2510.11370).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from mwjax.model.config import ModelConfig
from mwjax.model.grouped import grouped_matmul
from mwjax.model.parameters import parameter
from mwjax.model.sharding import (
    CONTEXT,
    DATA,
    EXPERTS_IN,
    EXPERTS_OUT,
    FSDP,
    HIDDEN,
    ROUTER,
    ROWS,
    TENSOR,
    TOKENS,
    constrain,
)


class Routing(NamedTuple):
    """Sums over tokens, each times its weight, [experts] or [layers, experts]: how often every expert was chosen
    (``load``, without gradient), and its probability among all experts."""

    load: jax.Array
    probability: jax.Array


class MixtureOfExperts(nnx.Module):
    """SwiGLU experts behind a router: the softmax over all experts, of which the ``per_token`` largest are kept and,
    where the model is so, scaled to add up to one. Logits and softmax are float32 or wider."""

    def __init__(self, config: ModelConfig):
        assert config.experts is not None
        self.router = parameter(config, "embed experts", "mlp.gate.weight", "experts embed", "embed")
        into, out = "experts embed expert_mlp", "experts expert_mlp embed"
        self.gate = parameter(config, into, "mlp.experts.{}.gate_proj.weight", "expert_mlp embed", "embed")
        self.up = parameter(config, into, "mlp.experts.{}.up_proj.weight", "expert_mlp embed", "embed")
        self.down = parameter(config, out, "mlp.experts.{}.down_proj.weight", "embed expert_mlp", "expert_mlp")
        self.per_token, self.normalised = config.experts.per_token, config.experts.normalised

    def __call__(
        self, x: jax.Array, weight: jax.Array | None = None, mesh: Mesh | None = None
    ) -> tuple[jax.Array, Routing | None]:
        """x [B, T, D] -> (the block's output [B, T, D], sums for which a token counts as ``weight`` [B, T] says; None
        without it).

        On a mesh experts are split over ``tensor``: every device has all tokens of its rows and positions and computes
        its own experts' part of them, and a sum over ``tensor`` joins the parts. Room is made for all pairs of token
        and expert, since all may fall to one device: the fewer devices share tokens, the less each moves in its memory.
        By `mwjax plan`, Qwen3-30B-A3B on v6e-64 takes less than half the time with fsdp 64 than with fsdp 16, tensor
        4, though it gathers four times the weights.
        """
        local = partial(_mixture, per_token=self.per_token, normalised=self.normalised, split=mesh is not None)
        matrices = self.router[...], self.gate[...], self.up[...], self.down[...]
        if mesh is None:
            part, routing = local(x, weight, *matrices)
            return part[0], routing
        # The sum over tensor stands outside: so its gradient is a copy, where inside it would be a sum again.
        mapped = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(HIDDEN, None if weight is None else TOKENS, ROUTER, EXPERTS_IN, EXPERTS_IN, EXPERTS_OUT),
            out_specs=(PartitionSpec(TENSOR, ROWS, CONTEXT, None), PartitionSpec()),
            check_vma=False,
        )
        parts, routing = mapped(x, weight, *matrices)
        return constrain(jax.lax.reduce_sum(parts, axes=[0]), HIDDEN, mesh), routing


def route(
    tokens: jax.Array, router: jax.Array, per_token: int, normalised: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """tokens [N, D], router [D, experts] -> weights [N, per_token] and numbers of the chosen experts, largest first,
    and all probabilities [N, experts]."""
    wide = jnp.promote_types(tokens.dtype, jnp.float32)
    logits = jnp.matmul(tokens, router.astype(tokens.dtype), preferred_element_type=wide)
    probability = jax.nn.softmax(logits, axis=-1)
    weights, chosen = jax.lax.top_k(probability, per_token)
    if normalised:
        weights = weights / weights.sum(-1, keepdims=True)
    return weights, chosen, probability


def _mixture(
    x: jax.Array,
    weight: jax.Array | None,
    router: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    per_token: int,
    normalised: bool,
    split: bool,
) -> tuple[jax.Array, Routing | None]:
    """What the experts of this device add to x [B, T, D]: [1, B, T, D]; and the sums of all devices."""
    tokens = x.reshape(-1, x.shape[-1])
    first: jax.Array | int = 0
    gate, up, down = (matrices.astype(x.dtype) for matrices in (gate, up, down))
    if split:
        first = jax.lax.axis_index(TENSOR) * len(gate)
        router = jax.lax.all_gather(router, TENSOR, axis=1, tiled=True)
        router = jax.lax.all_gather(router, FSDP, axis=0, tiled=True)
        gate, up = (jax.lax.all_gather(matrices, FSDP, axis=1, tiled=True) for matrices in (gate, up))
        down = jax.lax.all_gather(down, FSDP, axis=2, tiled=True)
    weights, chosen, probability = route(tokens, router, per_token, normalised)

    # Pairs of token and chosen expert, this device's experts first and in order; a token has at most so many of them.
    count = len(gate)
    place, sizes = _places(chosen - first, count)
    pair = _order(chosen - first, count)[: len(tokens) * min(per_token, count)]
    # Past this device's pairs, rows mean nothing all the way; nothing reads them, in either direction.
    rows = _to_pairs(tokens, pair, place)
    inner = jax.nn.silu(grouped_matmul(rows, gate, sizes)) * grouped_matmul(rows, up, sizes)
    output = _to_tokens(grouped_matmul(inner, down, sizes), weights, pair, place).reshape(1, *x.shape)
    return output, None if weight is None else _sums(weight.reshape(-1), chosen, probability, split)


def _sums(weight: jax.Array, chosen: jax.Array, probability: jax.Array, split: bool) -> Routing:
    weight = weight.astype(probability.dtype)
    times_chosen = jax.nn.one_hot(chosen, probability.shape[1], dtype=weight.dtype).sum(axis=1)
    sums = Routing(weight @ times_chosen, weight @ probability)
    return jax.lax.psum(sums, (DATA, FSDP, CONTEXT)) if split else sums


def _places(expert: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """expert: int32 [N, per_token], every token's distinct experts. Sorted by expert, then by token, the pairs of
    experts 0 to ``count`` - 1 stand at these places [N, per_token] (the others at one past all), so many of each
    expert [count]."""
    is_of = expert[..., None] == jnp.arange(count, dtype=expert.dtype)
    so_far = jnp.cumsum(is_of.any(axis=1), axis=0, dtype=jnp.int32)
    sizes = so_far[-1]
    at = so_far - 1 + jnp.cumsum(sizes) - sizes
    here = (expert >= 0) & (expert < count)
    return jnp.where(here, jnp.where(is_of, at[:, None], 0).sum(axis=-1), expert.size), sizes


def _order(expert: jax.Array, count: int) -> jax.Array:
    """The pairs' numbers [N * per_token], sorted as in `_places`, the other experts' behind them.

    One array of distinct keys is sorted, unstably: XLA's TPU compiler takes a third of the time for it that it takes
    for `jnp.argsort` (3.5 and 12 CPU seconds for 65,536 pairs), and sorting is most of what a mixture takes to compile.
    """
    pairs = expert.size
    assert (count + 1) * pairs < 2**31, "too many pairs of token and expert on one device to number them"
    group = jnp.where((expert >= 0) & (expert < count), expert, count).reshape(-1).astype(jnp.int32)
    return jax.lax.sort(group * pairs + jnp.arange(pairs, dtype=jnp.int32), is_stable=False) % pairs


# Either move goes back as a gather too: no scatter is needed.
@jax.custom_vjp
def _to_pairs(tokens: jax.Array, pair: jax.Array, place: jax.Array) -> jax.Array:
    """tokens [N, D] -> [M, D]: the tokens of the first M pairs in order. pair: int [M], the numbers of those pairs;
    place: int [N, per_token], where in the order every pair stands, or some place from M on."""
    return tokens[pair // place.shape[1]]


@jax.custom_vjp
def _to_tokens(rows: jax.Array, weights: jax.Array, pair: jax.Array, place: jax.Array) -> jax.Array:
    """rows [M, D] of the first M pairs in order, weights [N, per_token] -> [N, D] of the rows' dtype: for every token
    the weighted sum over its pairs."""
    return (_of_tokens(rows, place) * weights[..., None]).sum(axis=1).astype(rows.dtype)


def _of_tokens(rows: jax.Array, place: jax.Array) -> jax.Array:
    """rows [M, ...] -> [N, per_token, ...], zeros for pairs that stand at no row."""
    return rows.at[place].get(mode="fill", fill_value=0)


def _to_tokens_backward(saved: tuple[jax.Array, ...], gradient: jax.Array) -> tuple[jax.Array | None, ...]:
    rows, weights, pair, place = saved
    moved = _to_pairs(gradient, pair, place)
    to_rows = moved * weights.reshape(-1)[pair][:, None]
    to_weights = (moved.astype(weights.dtype) * rows).sum(axis=1)
    return to_rows.astype(rows.dtype), _of_tokens(to_weights, place), None, None


_to_pairs.defvjp(
    lambda tokens, pair, place: (_to_pairs(tokens, pair, place), place),
    lambda place, gradient: (_of_tokens(gradient, place).sum(axis=1), None, None),
)
_to_tokens.defvjp(lambda *given: (_to_tokens(*given), given), _to_tokens_backward)
