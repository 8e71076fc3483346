"""Which meshes and options are worth compiling, and in which order: by rough sizes, since a compilation takes minutes.

Nothing here decides whether something fits; the compiler does. These are guesses of its memory and of the step's time
that put the candidates in order and leave out the hopeless.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mwjax import model
from mwjax.launch import flops, memory, roofline
from mwjax.launch.topologies import Slice
from mwjax.model import sharding
from mwjax.model.attention import TPU_ONLY, splash
from mwjax.model.attention.block_pairs import BLOCKS, block_sizes
from mwjax.model.decoder import REMAT
from mwjax.train import setup, trainable
from mwjax.train.config import MeshConfig, RunConfig
from mwjax.tree import RowShape

SHORTEST = 1024  # tokens; rows are not cut below this
PAIR_PASSES = 64  # a layer's reads and writes of [pairs of token and expert, width], and of what grows with them


class Candidate(NamedTuple):
    """A way to run the configuration on a slice. score: guessed seconds of a step, for each token of a row; bytes:
    guessed, on one device."""

    config: RunConfig
    score: float
    bytes: float


def candidates(
    config: RunConfig, shape: model.ModelConfig, slice_: Slice, devices: Sequence[Any], rows_a_step: int
) -> list[Candidate]:
    """All ways on all devices of the slice, the nearest to ``config`` first: its row length before shorter ones, then
    by the guessed time of a step of ``rows_a_step`` rows. Remat is as configured or stronger, and micro-batches hold as
    many rows or fewer (more only where every device needs one)."""
    made = []
    for mesh, remat, length in itertools.product(
        meshes(shape, devices), REMAT[REMAT.index(config.model.remat) :], _lengths(config)
    ):
        for rows in _rows(config.data.rows_per_microbatch, mesh.data * mesh.fsdp):
            changed = with_options(config, mesh, remat, rows, length)
            if _divides(changed) and _attends(changed):
                made.append(Candidate(changed, *_guess(changed, shape, slice_, rows_a_step)))
    full = config.data.row_length
    return sorted(made, key=lambda one: (full / one.config.data.row_length, one.score, one.bytes))


def with_options(config: RunConfig, mesh: MeshConfig, remat: str, rows: int, length: int) -> RunConfig:
    """``config`` with other choices; the other capacities of a row shrink as its length does, and rows that are
    evaluated at once are as many on every device."""
    data, groups = config.data, mesh.data * mesh.fsdp
    evaluated = config.evaluation.rows_per_batch

    def scaled(capacity: int | None) -> int | None:
        return None if capacity is None else max(capacity * length // data.row_length, 1)

    return config.model_copy(
        update={
            "mesh": mesh,
            "model": config.model.model_copy(update={"remat": remat}),
            "evaluation": config.evaluation.model_copy(
                update={"rows_per_batch": None if evaluated is None else -(-evaluated // groups) * groups}
            ),
            "data": data.model_copy(
                update={
                    "rows_per_microbatch": rows,
                    "row_length": length,
                    "edges_per_row": scaled(data.edges_per_row),
                    "teacher_row_length": scaled(data.teacher_row_length),
                    "pairs_per_row": scaled(data.pairs_per_row),
                }
            ),
        }
    )


def meshes(shape: model.ModelConfig, devices: Sequence[Any]) -> Iterator[MeshConfig]:
    """Every mesh over all devices that divides the decoder and that the slice's wiring can be cut into."""
    for data, fsdp, tensor in itertools.product(_divisors(len(devices)), repeat=3):
        if len(devices) % (data * fsdp * tensor):
            continue
        context = len(devices) // (data * fsdp * tensor)
        sizes = dict(zip(sharding.AXES, (data, fsdp, tensor, context)))
        split = ((size, sharding.RULES[axis]) for axis, size in shape.axis_sizes().items())
        if any(axis is not None and size % sizes[axis] for size, axis in split):
            continue
        try:
            sharding.make_mesh(**sizes, devices=devices)
        except (NotImplementedError, ValueError):
            continue
        yield MeshConfig(**sizes)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _lengths(config: RunConfig) -> list[int]:
    lengths = [config.data.row_length]
    while lengths[-1] % 2 == 0 and lengths[-1] // 2 >= SHORTEST:
        lengths.append(lengths[-1] // 2)
    return lengths


def _rows(wanted: int, groups: int) -> list[int]:
    """Rows of a micro-batch: as many as wanted, rounded up to the same number on each group of devices, and fewer."""
    each = -(-wanted // groups)
    return [groups * n for n in range(each, 0, -1) if n == each or each % n == 0]


def _divides(config: RunConfig) -> bool:
    """Whether ``context`` divides all capacities of a row."""
    return not any(size % config.mesh.context for size in _capacities(setup.layout(config).shape))


def _attends(config: RunConfig) -> bool:
    """Whether the TPU kernels take rows of that length, spread over ``context``."""
    attention, shape = setup.resolved(config, "tpu").model.attention, setup.layout(config).shape
    if attention not in TPU_ONLY:
        return True
    try:
        for length in filter(None, (shape.length, shape.teacher_length)):
            block_sizes(length // config.mesh.context, length, splash.BLOCKS if attention == "splash" else BLOCKS)
    except ValueError:
        return False
    return True


def _capacities(shape: RowShape) -> tuple[int, int, int, int]:
    return shape.length, shape.edges, shape.teacher_length, shape.pairs


@dataclass(frozen=True)
class _Shares:
    """Sizes on one device. layer: elements of a layer's matrices, gathered; tokens, edges: of its rows."""

    parameters: float
    trained: float
    layer: float
    tokens: float
    edges: float
    teacher_tokens: float
    rows: float
    itemsize: int


def _guess(config: RunConfig, shape: model.ModelConfig, slice_: Slice, rows_a_step: int) -> tuple[float, float]:
    """`Candidate`'s score and bytes."""
    config = setup.resolved(config, "tpu")
    whole = model.abstract_params(shape)
    trained, _ = trainable.split(config.model, shape, whole)
    mesh, layout = config.mesh, setup.layout(config)
    rows = layout.rows_per_microbatch / (mesh.data * mesh.fsdp)
    shares = _Shares(
        _elements(whole) / (mesh.fsdp * mesh.tensor),
        _elements(trained) / (mesh.fsdp * mesh.tensor),
        _elements(whole["layers"]) / shape.layers / mesh.tensor,
        rows * layout.shape.length / mesh.context,
        rows * layout.shape.edges / mesh.context,
        rows * layout.shape.teacher_length / mesh.context,
        rows,
        jnp.dtype(config.model.dtype).itemsize,
    )
    work = flops.work(layout.shape, layout.rows_per_microbatch, 1.0)
    computed = flops.accumulate(setup.step_config(config, shape), trained, whole, work).total
    limits = roofline.limits(
        slice_.generation,
        mesh.devices,
        computed,
        _moved(config, shape, shares),
        _sent(config, shape, shares),
        2 * 4 * shares.trained * (1 - slice_.devices / mesh.devices),  # gradients, summed over the slices
    )
    # Transfers are never wholly hidden behind the work.
    seconds = limits.seconds + 0.3 * min(limits.compute, limits.links + limits.network)
    microbatches = -(-rows_a_step // layout.rows_per_microbatch)
    return microbatches * seconds / layout.shape.length, _bytes(config, shape, shares)


def _elements(params: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def _moved(config: RunConfig, shape: model.ModelConfig, shares: _Shares) -> float:
    """Bytes a device moves in main memory for a micro-batch's pairs of token and chosen expert, which limit a mixture
    of experts; little else limits a step so. Every device of ``tensor`` lays out the pairs of the others' experts too.
    """
    if shape.experts is None:
        return 0.0
    pairs = shape.experts.per_token * (shares.tokens + shares.teacher_tokens / 3)
    passes = PAIR_PASSES if config.model.remat != "none" else PAIR_PASSES * 3 / 4
    return shape.layers * pairs * shape.width * shares.itemsize * passes


def _sent(config: RunConfig, shape: model.ModelConfig, shares: _Shares) -> float:
    """Bytes a device sends for a micro-batch: weights gathered and gradients scattered over ``fsdp``, gradients summed
    over ``data`` and ``context``, activations over ``tensor``, keys and values over ``context``."""
    mesh, again = config.mesh, config.model.remat != "none"
    gathered = shares.parameters * mesh.fsdp * shares.itemsize
    tokens = shares.tokens + shares.teacher_tokens / 3
    copies = mesh.data * mesh.context

    def ring(size: int) -> float:
        return (size - 1) / size

    weights = gathered * (3 + again) * ring(mesh.fsdp)
    gradients = 2 * 4 * shares.trained * ring(copies)
    activations = 2 * (4 + 2 * again) * shape.layers * tokens * shape.width * shares.itemsize * ring(mesh.tensor)
    pairs = 2 * shape.key_value_heads * shape.head_dim / mesh.tensor * shares.itemsize
    keys = 3 * shape.layers * tokens * mesh.context * pairs * ring(mesh.context)
    return weights + gradients + activations + keys


def _bytes(config: RunConfig, shape: model.ModelConfig, shares: _Shares) -> float:
    """Bytes on a device: what the step holds, and about what the program takes beside it."""
    mesh, size = config.mesh, shares.itemsize
    moments = 2 * jnp.dtype(config.optimizer.moments_dtype).itemsize
    copies = 1 + setup.compares_with_initial(config) + setup.averages_teacher(config)
    frozen = (shares.parameters - shares.trained) * jnp.dtype(config.model.frozen_dtype).itemsize
    held = shares.trained * (4 * copies + moments + 4) + frozen
    heads = shape.heads * shape.head_dim / mesh.tensor
    keys = 2 * shape.key_value_heads * shape.head_dim / mesh.tensor
    inner = _inner(shape) / mesh.tensor
    a_layer = 6 * shape.width + 4 * inner + 4 * (heads + keys)
    kept = {
        "full": shape.width,
        "attention": shape.width + heads + 4 * shape.heads / mesh.tensor / size,
        "none": 4 * shape.width + 3 * inner + 3 * (heads + keys),
    }[config.model.remat]
    tokens = max(shares.tokens, shares.teacher_tokens)
    working = tokens * (a_layer * size + 3 * shape.width * 4) + 2 * shares.layer * size
    weights = shares.parameters * size + shares.trained * 4
    loss = 3 * shares.edges * shape.width * 4 + 2 * min(shares.edges * 9_500 * 4, 2**29)
    whole_rows = (mesh.context > 1) * tokens * mesh.context * (shape.width + 3 * keys) * size
    mask = tokens * splash.MASK_BYTES if config.model.attention == "splash" else 0.0
    return held + weights + shape.layers * shares.tokens * kept * size + max(working, loss) + whole_rows + mask


def _inner(shape: model.ModelConfig) -> int:
    """Width between the matrices of a feed-forward block, over the experts a token goes through."""
    experts = shape.experts
    return shape.feed_forward_width if experts is None else experts.per_token * experts.width


def hopeful(found: Sequence[Candidate], slice_: Slice, scale: float = 1.0) -> list[Candidate]:
    """Those whose guess, times ``scale``, fits a device or misses by little; the guesses are rough."""
    room = 1.1 * memory.usable(slice_.generation)
    return [one for one in found if one.bytes * scale <= room]
