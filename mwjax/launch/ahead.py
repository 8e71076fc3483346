"""The train step's own functions, compiled for a slice that is not there, from a configuration and shapes alone."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from mwjax import model
from mwjax.launch import flops, hlo, memory, traffic
from mwjax.launch.topologies import Slice
from mwjax.losses import Balance
from mwjax.model import sharding
from mwjax.train import setup, state, trainable
from mwjax.train.config import RunConfig
from mwjax.train.mesh import batch_shardings
from mwjax.train.optimizer import optimizer
from mwjax.train.step import Total, build, parameter_shardings
from mwjax.tree import Batch, collate
from mwjax.tree.context import split_context

_NEEDED = re.compile(r"(?:temporaries|Used) \(?([\d.]+)([KMGT]?)\)?")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Program:
    """A compiled function. seconds: its compilation took; peak: bytes of main memory on a device, with its arguments;
    arguments: their bytes, without padding; code: bytes; traffic: of one run."""

    name: str
    seconds: float
    peak: int
    arguments: int
    code: int
    traffic: traffic.Traffic


@dataclass(frozen=True)
class Failure:
    """A function that could not be compiled. cause: the compiler's or our own reason; needed: the bytes of main memory
    it would take, where that is the reason and the compiler says how many."""

    function: str
    cause: str
    out_of_memory: bool = False
    needed: float | None = None


@dataclass(frozen=True)
class Lowering:
    """What there is to compile on a mesh, and what a device holds meanwhile. functions: each compiles when called;
    runs: of each in a step; arguments: bytes of theirs on a device; computed: by one run of them, over all devices
    (``apply`` is limited by memory)."""

    functions: Mapping[str, Callable[[], Any]]
    runs: Mapping[str, int]
    arguments: Mapping[str, int]
    resident: memory.Resident
    computed: Mapping[str, flops.Flops]


def devices(slice_: Slice, slices: int = 1) -> list[Any]:
    """The devices of so many slices, for the compiler only. Raises RuntimeError where libtpu is missing or refuses."""
    from jax.experimental.topologies import get_topology_desc

    described = get_topology_desc(
        slice_.topology, platform="tpu", chips_per_host_bounds=slice_.host_bounds, num_slices=slices
    )
    return list(described.devices)


def lower(config: RunConfig, shape: model.ModelConfig, mesh: Mesh, microbatches: int, density: float) -> Lowering:
    """The functions that a step of ``config``, a `setup.resolved` one, runs on a mesh; nothing is compiled yet.

    microbatches: of a step, which are all on the devices at once. density: see `flops.work`.
    Raises ValueError where the mesh does not fit decoder or rows.
    """
    whole = model.abstract_params(shape)
    trained, frozen = trainable.split(config.model, shape, whole)
    transform = optimizer(config.optimizer, 10**6)
    averaged = setup.averages_teacher(config)
    placed = parameter_shardings(shape, mesh, trained)
    current = state.abstract(trained, transform, placed, averaged=averaged)
    kept = _placed(frozen, parameter_shardings(shape, mesh, frozen) if frozen else {}, config.model.frozen_dtype)
    batch = _batch(config, mesh)
    step_config = setup.step_config(config, shape)
    step = build(step_config, transform, mesh, current.params, _example(config), kept)
    everywhere = NamedSharding(mesh, jax.sharding.PartitionSpec())
    shapes = step.zero.eval_shape()  # type: ignore[attr-defined]
    total = Total(
        _placed(shapes.gradients, placed), _placed(shapes.numerator, everywhere), _placed(shapes.metrics, everywhere)
    )
    number: Any = jax.ShapeDtypeStruct((), np.float32)
    edges: Any = batch.rows.edges.parent
    ratios = None
    if step_config.loss.task == "policy_gradient" and step_config.loss.policy_gradient.algorithm == "gspo":
        ratios = jax.ShapeDtypeStruct(edges.shape, np.float32, sharding=edges.sharding)
    reads = (current.params, batch.rows)
    balance = None
    if step_config.loss.router_auxiliary:
        sums: Any = step.routing
        alone = microbatches == 1
        balance = Balance(number, None if alone else _placed(sums.func.eval_shape(kept, *reads), everywhere))
    called: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "accumulate": (step.accumulate, (current.params, total, batch, ratios, number, current.teacher, balance)),
        "apply": (step.apply, (current, total, number)),
    }
    work = flops.work(setup.layout(config).shape, config.data.rows_per_microbatch, density)
    computed = {"accumulate": flops.accumulate(step_config, trained, whole, work)}
    runs = {"accumulate": microbatches, "apply": 1}
    # The weights the run began with score a step's rows once for both; GSPO's ratios are of the present ones.
    scored = (setup.scores_own_rows(config) or setup.has_reference(config)) + (ratios is not None)
    if scored:
        called["score"] = (step.score, reads)
        computed["score"] = flops.score(step_config, whole, work)
        runs["score"] = scored * microbatches
    if balance is not None and balance.routing is not None:
        called["routing"] = (step.routing, reads)
        computed["routing"] = flops.routing(step_config, whole, work)
        runs["routing"] = microbatches
    return Lowering(
        {name: _lowered(function, given) for name, (function, given) in called.items()},
        runs,
        {name: memory.shard_bytes((_bound(function), given)) for name, (function, given) in called.items()},
        memory.Resident(
            parameters=memory.shard_bytes(current.params),
            frozen=memory.shard_bytes(kept),
            optimiser=memory.shard_bytes(current.opt_state),
            teacher=memory.shard_bytes(current.teacher),
            reference=memory.shard_bytes(current.params) if setup.compares_with_initial(config) else 0,
            gradients=memory.shard_bytes(total),
            batch=microbatches * memory.shard_bytes(batch),
        ),
        computed,
    )


def compile_one(lowering: Lowering, name: str, devices: int, slices: int = 1) -> Program | Failure:
    """Compile a function for the ``devices`` devices of its mesh, which are spread over so many slices. A refusal of
    the compiler is a result, not an error. Takes up to minutes."""
    begun = time.perf_counter()
    try:
        compiled = lowering.functions[name]()
    except (ValueError, NotImplementedError, RuntimeError) as error:  # jax.errors.JaxRuntimeError is a RuntimeError
        return _failure(name, error)
    stats = compiled.memory_analysis()
    return Program(
        name,
        time.perf_counter() - begun,
        stats.peak_memory_in_bytes,
        lowering.arguments[name],
        stats.generated_code_size_in_bytes,
        traffic.count(hlo.parse(compiled.as_text()), devices, slices),
    )


def _failure(name: str, error: Exception) -> Failure:
    text = str(error).strip()
    exhausted = "RESOURCE_EXHAUSTED" in text or "Ran out of memory" in text
    # A kernel that wants more of the core's own memory is no question of how much main memory there is.
    exhausted = exhausted and not re.search(r"vmem|smem", text.splitlines()[0].lower())
    found = _NEEDED.search(text) if exhausted else None
    needed = float(found[1]) * _UNITS[found[2]] if found else None
    return Failure(name, " ".join(text.split())[:600], exhausted, needed)


def _bound(function: Any) -> tuple[Any, ...]:
    """What `mwjax.train.step.build` has bound to a function: the frozen parameters."""
    return getattr(function, "args", ())


def _lowered(function: Any, given: tuple[Any, ...]) -> Callable[[], Any]:
    jitted = getattr(function, "func", function)
    return lambda: jitted.lower(*_bound(function), *given).compile()


def _placed(tree: Any, where: Any, dtype: Any = None) -> Any:
    """Shapes with shardings: one for all leaves, or nested as the tree."""
    if isinstance(where, jax.sharding.Sharding):
        where = jax.tree.map(lambda _: where, tree)
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, dtype or leaf.dtype, sharding=place), tree, where
    )


def _example(config: RunConfig) -> Batch:
    """The shapes of a micro-batch."""
    one = collate([], [], setup.layout(config).shape, 1)
    return _rows(one, config.data.rows_per_microbatch)


def _rows(batch: Batch, count: int) -> Batch:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape[1:]), leaf.dtype), batch)


def _batch(config: RunConfig, mesh: Mesh) -> Batch:
    """A micro-batch as the step gets it: spread, and dealt out over ``context``."""
    one = split_context(collate([], [], setup.layout(config).shape, 1), mesh.shape[sharding.CONTEXT])
    batch = _rows(one, config.data.rows_per_microbatch)
    return _placed(batch, batch_shardings(batch, mesh))
