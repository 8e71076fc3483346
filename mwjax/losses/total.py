"""The one loss the train step calls: task loss and, where asked for, the SDCC term, as a numerator and metric sums."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mwjax.losses.balance import Balance, load_balance
from mwjax.losses.logprobs import edge_logprobs
from mwjax.losses.masking import active, only
from mwjax.losses.metrics import Metrics, join, router_metrics, score_metrics, sdcc_metrics
from mwjax.losses.policy_gradient import PolicyGradientConfig, policy_gradient_loss
from mwjax.losses.sdcc import sdcc_kl
from mwjax.losses.sft import sft_loss
from mwjax.model.experts import Routing
from mwjax.tree.rows import Edges, Pairs


@dataclass(frozen=True)
class LossConfig:
    """Static choices of a loss; hashable, so it can be a static argument of ``jax.jit``.

    vocab_chunk: vocabulary rows unembedded at once; None for the default (`vocabulary.chunk_rows`).
    router_auxiliary: weight of `load_balance`, for mixtures of experts; 0 leaves it out.
    """

    task: Literal["sft", "policy_gradient"] = "policy_gradient"
    policy_gradient: PolicyGradientConfig = field(default_factory=PolicyGradientConfig)
    vocab_chunk: int | None = None
    router_auxiliary: float = 0.0

    def __post_init__(self) -> None:
        if self.task not in ("sft", "policy_gradient"):
            raise ValueError(f"task must be sft or policy_gradient; got {self.task!r}")


class Teacher(NamedTuple):
    """SDCC's teacher side: hidden states of the teacher rows [B, Tt, D] after the final norm, the unembedding [V, D],
    and the pairs [B, P]. A stop-gradient is put on both arrays."""

    hidden: jax.Array
    unembedding: jax.Array
    pairs: Pairs


def batch_loss(
    hidden: jax.Array,
    unembedding: jax.Array,
    edges: Edges,
    config: LossConfig,
    *,
    teacher: Teacher | None = None,
    sdcc_lambda: float | jax.Array = 0.0,
    unit_log_ratio: jax.Array | None = None,
    routing: Routing | None = None,
    balance: Balance | None = None,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, Metrics]:
    """Sums of one micro-batch: the numerator of the loss (a scalar, float32 or float64) and the metrics.

    hidden [B, T, D] after the final norm; unembedding [V, D]; edges [B, E]. Add numerators and metrics
    (`metrics.combine`) over micro-batches and devices, then divide once by the mini-batch's denominator
    (`advantages.edge_weights`). With ``teacher``, ``sdcc_lambda x sum of weight x KL`` over the pairs is added.
    ``sdcc_lambda`` as a Python number 0 is a static branch: the term is absent from the computation, which is then the
    plain task loss. As an array (so that the ramp does not recompile) a value of 0 gives a term and a gradient of
    exactly 0. ``unit_log_ratio``: see `policy_gradient_loss`. ``mesh``: see `edge_logprobs`.

    ``routing`` is what the routers did with the tokens [layers, experts]; with ``config.router_auxiliary`` the
    `load_balance` of the whole step is added to the loss (not divided by the denominator), for which ``balance`` is
    needed.
    """
    mask = active(edges)
    scores = edge_logprobs(
        hidden, unembedding, jnp.asarray(edges.parent), jnp.asarray(edges.target), only(mask, edges.temperature, 1.0),
        vocab_chunk=config.vocab_chunk, mesh=mesh,
    )  # fmt: skip
    metrics = score_metrics(scores, edges)
    if config.task == "sft":
        numerator = sft_loss(scores, edges)
    else:
        numerator, more = policy_gradient_loss(scores, edges, config.policy_gradient, unit_log_ratio=unit_log_ratio)
        metrics = join(metrics, more)
    if routing is not None:
        metrics = join(metrics, router_metrics(routing))
    if config.router_auxiliary:
        if routing is None or balance is None:
            raise ValueError("router_auxiliary needs what the routers did (rows with token_weight) and balance")
        term = config.router_auxiliary * balance.denominator * load_balance(routing, balance.routing)
        numerator = numerator + term.astype(numerator.dtype)

    if teacher is None or (isinstance(sdcc_lambda, int | float) and sdcc_lambda == 0):
        return numerator, metrics
    kl = sdcc_kl(
        hidden,
        teacher.hidden,
        unembedding,
        teacher.unembedding,
        teacher.pairs,
        vocab_chunk=config.vocab_chunk,
        mesh=mesh,
    )
    total = (only(jnp.asarray(teacher.pairs.weight) != 0, teacher.pairs.weight) * kl).sum()
    # where, not a product alone: 0 x NaN is NaN.
    term = jnp.where(jnp.asarray(sdcc_lambda) > 0, sdcc_lambda * total, 0.0)
    return numerator + term.astype(numerator.dtype), join(metrics, sdcc_metrics(kl, teacher.pairs))
