"""Floating-point operations of a training step, counted from the sizes: XLA counts a loop's body once, and a kernel not
at all.

A matrix product of [m, k] and [k, n] is 2 m k n. Attention is counted over the pairs that are visible: 2 head_dim each
for a score and for its share of the output. The backward pass of a product is two products, for its input and for its
weights (none for weights that are not trained). What a pass computes again that an earlier one had is counted apart: it
takes time but is no part of the model (as in PaLM, arXiv:2204.02311, appendix B). Norms, rotations, softmax and
the optimiser are left out: they are limited by memory.
"""

from __future__ import annotations

import fnmatch
from typing import Any, NamedTuple

from flax.traverse_util import flatten_dict

from mwjax import model
from mwjax.train.optimizer import decayed
from mwjax.train.step import StepConfig
from mwjax.tree import RowShape

# Products that a backward pass of attention computes again: the scores, and in separate kernels for the gradient of
# the query and for those of key and value also the scores and their gradient once more.
_ATTENTION_AGAIN = {"blockwise": 1, "pallas": 3, "splash": 3, "oracle": 0}


class Work(NamedTuple):
    """What a micro-batch holds, all rows together. pairs: visible ones, (query, key); edges: scored tokens; the rest
    only with a teacher: its tokens and visible pairs, and compared pairs of positions."""

    tokens: float
    pairs: float
    edges: float
    teacher_tokens: float = 0.0
    teacher_pairs: float = 0.0
    compared: float = 0.0


class Flops(NamedTuple):
    """Operations by part. model: what the mathematics asks for; again: what is computed once more to save memory."""

    model: dict[str, float]
    again: dict[str, float]

    @property
    def total(self) -> float:
        """All that the chips compute."""
        return sum(self.model.values()) + sum(self.again.values())


def work(shape: RowShape, rows: int, density: float) -> Work:
    """A micro-batch of full rows. density: visible pairs as a share of those of a causal row of the same length."""

    def pairs(length: int) -> float:
        return density * rows * length * (length + 1) / 2

    length, edges, teacher_length, compared = shape.length, shape.edges, shape.teacher_length, shape.pairs
    return Work(
        rows * length, pairs(length), rows * edges, rows * teacher_length, pairs(teacher_length), rows * compared
    )


def matrices(shape: model.ModelConfig, params: Any, name: str = "*") -> float:
    """Elements of the matrices in some of a decoder's layers that a token meets: of experts, those it goes through.
    name: of the last part of their dotted names, with * and ?."""
    axes = flatten_dict(model.logical_axes(shape), sep=".")
    layers = {"layers": params.get("layers", {})}
    is_matrix = flatten_dict(decayed(layers), sep=".")
    experts = shape.experts
    met = 1.0 if experts is None else experts.per_token / experts.count
    return sum(
        leaf.size * (met if "expert_mlp" in axes[path] else 1.0)
        for path, leaf in flatten_dict(layers, sep=".").items()
        if is_matrix[path] and fnmatch.fnmatchcase(path.rpartition(".")[2], name)
    )


def accumulate(config: StepConfig, trained: Any, whole: Any, work: Work) -> Flops:
    """Of the gradients of one micro-batch. trained, whole: the decoder's parameters, arrays or their shapes."""
    shape = config.model
    everything, changed = matrices(shape, whole), matrices(shape, trained)
    table = shape.vocab_size * shape.width
    changed_table = table if ("embedding" if shape.tied else "unembedding") in trained else 0
    per_pair = 2 * shape.layers * shape.heads * shape.head_dim
    # The result of a layer's last product has no part in a gradient, but for experts: in that of their weight.
    last = matrices(shape, whole, "down") if shape.experts is None else 0.0
    attention = config.attention if isinstance(config.attention, str) else ""
    again = _ATTENTION_AGAIN.get(attention, 0) + (2 if config.remat == "full" else 0)
    counted = {
        "layers": work.tokens * (4 * everything + 2 * changed),
        "attention": work.pairs * per_pair * (2 + 4),
        "unembedding": work.edges * (4 * table + 2 * changed_table),
    }
    repeated = {
        "layers": work.tokens * 2 * (everything - last) if config.remat != "none" else 0.0,
        "attention": work.pairs * per_pair * again,
        "unembedding": work.edges * 2 * table,
    }
    if config.sdcc:
        counted["teacher"] = work.teacher_tokens * 2 * everything + work.teacher_pairs * per_pair * 2
        counted["comparison"] = work.compared * (6 * table + 2 * changed_table)
        repeated["comparison"] = work.compared * 4 * table
    return Flops(counted, repeated)


def score(config: StepConfig, whole: Any, work: Work) -> Flops:
    """Of the log-probs of one micro-batch, without gradient."""
    shape = config.model
    counted = {
        "layers": work.tokens * 2 * matrices(shape, whole),
        "attention": work.pairs * 2 * shape.layers * shape.heads * shape.head_dim * 2,
        "unembedding": work.edges * 2 * shape.vocab_size * shape.width,
    }
    return Flops(counted, {})


def routing(config: StepConfig, whole: Any, work: Work) -> Flops:
    """Of what routers do with one micro-batch, before its gradients: a forward pass that is computed again."""
    forward = score(config, whole, work).model
    return Flops({}, {name: forward[name] for name in ("layers", "attention")})
