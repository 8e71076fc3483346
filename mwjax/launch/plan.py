"""What a training run would take on a TPU slice, before it is rented: the train step compiled for it by XLA itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from mwjax import model
from mwjax.launch import ahead, flops, memory, presets, roofline, search
from mwjax.launch.topologies import Slice
from mwjax.model import sharding
from mwjax.train import setup
from mwjax.train.config import RunConfig

Say = Callable[[str, int, int], None]  # (what is done now, compilations done, the most there can be)


class PlanError(ValueError):
    """A plan that cannot be made; the message says what to do."""


@dataclass(frozen=True)
class Plan:
    """A configuration on so many slices. config: as `compiled` but for what is auto; chosen: what was chosen in place
    of what the configuration says, as KEY=VALUE; rows_a_step: full ones, the rest of the micro-batches is padding;
    programs: the functions that were compiled; runs: of each in a step; failure: the one that was not compiled; peak:
    the fullest moment of a step on one device, None where nothing was compiled; flops, limits: of one run of each
    function; estimate: of a step, None where not all was compiled. seconds: compiling took."""

    slice: Slice
    slices: int
    config: RunConfig
    shape: model.ModelConfig
    microbatches: int
    rows_a_step: int
    density: float
    chosen: tuple[str, ...]
    programs: tuple[ahead.Program, ...]
    runs: dict[str, int]
    failure: ahead.Failure | None
    resident: memory.Resident | None
    peak: memory.Peak | None
    flops: dict[str, flops.Flops]
    limits: dict[str, roofline.Limits]
    estimate: roofline.Estimate | None
    seconds: float

    @property
    def compiled(self) -> RunConfig:
        """``config`` with what auto is on TPUs."""
        return setup.resolved(self.config, "tpu")

    @property
    def usable(self) -> float:
        """Bytes a program may have on one device."""
        return memory.usable(self.slice.generation)

    @property
    def needed(self) -> float | None:
        """Bytes on one device at the fullest moment, as far as known."""
        if self.peak is not None:
            return self.peak.total
        return None if self.failure is None else self.failure.needed

    @property
    def fits(self) -> bool:
        """Whether everything compiled, and is on a device at once."""
        return self.failure is None and self.peak is not None and self.peak.total <= self.usable


@dataclass(frozen=True)
class Planned:
    """A slice's plans. asked: the configuration as it is; tried: the others that were compiled because it does not fit,
    the last of which fits if any does."""

    asked: Plan
    tried: tuple[Plan, ...]
    untried: int

    @property
    def fitting(self) -> Plan | None:
        """The nearest plan that fits."""
        return next((plan for plan in (self.asked, *self.tried) if plan.fits), None)


def check_installed() -> None:
    """Raises PlanError without libtpu."""
    if find_spec("libtpu") is None:
        raise PlanError("plan compiles with XLA's TPU compiler, libtpu: pip install 'mwjax[tpu]' (no TPU is needed)")


def make(
    config: RunConfig,
    slice_: Slice,
    *,
    slices: int = 1,
    auto: bool = False,
    density: float = 1.0,
    microbatches: int | None = None,
    tries: int = 6,
    say: Say = lambda what, done, most: None,
) -> Planned:
    """Plan ``config`` on so many slices: compile its step, and where that does not fit, up to ``tries`` other ways.

    auto: choose the mesh, also where the configuration has one. density: visible pairs of a row as a share of a causal
    one's. microbatches: of a step, full ones; None: its rollouts fill a row each. say: is told what goes on.

    Raises PlanError, and ModelFilesError where the decoder's config.json cannot be had.
    """
    check_installed()
    shape = setup.decoder_shape(config.model, presets.DECODERS)
    name = slice_.name if slices == 1 else f"{slices} x {slice_.name}"
    try:
        devices = ahead.devices(slice_, slices)
    except RuntimeError as error:
        raise PlanError(f"{name}: XLA's TPU compiler does not take {slice_.topology}: {error}") from error
    rows_a_step = config.data.rollouts_per_step
    if microbatches is not None:
        rows_a_step = microbatches * config.data.rows_per_microbatch
    listed: list[search.Candidate] | None = None
    compiled: list[Plan] = []

    def ways() -> list[search.Candidate]:
        nonlocal listed
        if listed is None:
            say(f"{name}: listing meshes", len(compiled), 1 + tries)
            listed = search.candidates(config, shape, slice_, devices, rows_a_step)
        return listed

    def assess(made: RunConfig) -> Plan:
        compiled.append(
            _assess(
                made,
                config,
                shape,
                slice_,
                slices,
                devices,
                rows_a_step,
                density,
                lambda what: say(f"{name}: {what}", len(compiled), 1 + tries),
            )
        )
        return compiled[-1]

    first = config
    if auto or config.mesh.devices != len(devices):
        possible = [one for one in ways() if one.config.data.row_length == config.data.row_length]
        if not possible:
            raise PlanError(f"{name}: no mesh over its {len(devices)} devices divides the decoder and its rows")
        likely = search.hopeful(possible, slice_)
        first = (likely[0] if likely else min(possible, key=lambda one: one.bytes)).config
    asked = assess(first)
    if asked.fits or (asked.failure is not None and not _depends_on_the_way(asked.failure, first, ways)):
        return Planned(asked, (), 0)
    tried: list[Plan] = []
    left = _left(compiled, ways(), slice_)
    while left and len(tried) < tries and not compiled[-1].fits:
        tried.append(assess(left[0].config))
        left = _left(compiled, ways(), slice_)
    return Planned(asked, tuple(tried), len(left))


def _depends_on_the_way(
    failure: ahead.Failure, config: RunConfig, ways: Callable[[], Sequence[search.Candidate]]
) -> bool:
    """Whether another mesh, or less at a time, may compile where this did not: it is none of the ways there are."""
    return failure.out_of_memory or all(one.config != config for one in ways())


def _left(failed: Sequence[Plan], ways: Sequence[search.Candidate], slice_: Slice) -> list[search.Candidate]:
    """What is worth a try after some did not fit, in order: what should take less than any of them, and fit by guesses
    corrected by the last one's true size; if none should, the smallest."""
    compiled = [made.config for made in failed]
    guesses = [one.bytes for one in ways if one.config in compiled]
    smaller = [one for one in ways if one.config not in compiled and one.bytes < min(guesses, default=float("inf"))]
    last = next((one.bytes for one in ways if one.config == compiled[-1]), None)
    needed = failed[-1].needed
    scale = min(max(needed / last, 0.8), 1.5) if needed and last else 1.0
    return search.hopeful(smaller, slice_, scale) or sorted(smaller, key=lambda one: one.bytes)[:1]


def _assess(
    config: RunConfig,
    asked: RunConfig,
    shape: model.ModelConfig,
    slice_: Slice,
    slices: int,
    devices: Sequence[Any],
    rows_a_step: int,
    density: float,
    say: Callable[[str], None],
) -> Plan:
    """Compile the functions of a step, the largest first, as long as they fit."""
    begun = time.perf_counter()
    microbatches = -(-rows_a_step // config.data.rows_per_microbatch)
    programs: list[ahead.Program] = []
    failure, lowering, peak = None, None, None
    try:
        mesh = sharding.make_mesh(**config.mesh.model_dump(), devices=devices)
        lowering = ahead.lower(setup.resolved(config, "tpu"), shape, mesh, microbatches, density)
    except (ValueError, NotImplementedError) as error:
        failure = ahead.Failure("mesh", " ".join(str(error).split()))
    for name in lowering.functions if lowering is not None else ():
        say(f"compiling {name} ({describe(config)})")
        assert lowering is not None
        made = ahead.compile_one(lowering, name, len(devices), slices)
        if isinstance(made, ahead.Failure):
            failure = made
            break
        programs.append(made)
        peak = memory.peaks(
            lowering.resident,
            {program.name: (program.peak, program.arguments) for program in programs},
            sum(program.code for program in programs),
        )[0]
        if peak.total > memory.usable(slice_.generation):
            break
    limits = {} if lowering is None else _limits(slice_, lowering, programs, len(devices))
    complete = lowering is not None and len(programs) == len(lowering.functions)
    return Plan(
        slice=slice_,
        slices=slices,
        config=config,
        shape=shape,
        microbatches=microbatches,
        rows_a_step=rows_a_step,
        density=density,
        chosen=tuple(_changes(asked, config)),
        programs=tuple(programs),
        runs={} if lowering is None else dict(lowering.runs),
        failure=failure,
        resident=None if lowering is None else lowering.resident,
        peak=peak,
        flops={} if lowering is None else dict(lowering.computed),
        limits=limits,
        estimate=_estimate(slice_, lowering, limits, config, rows_a_step) if complete and lowering else None,
        seconds=time.perf_counter() - begun,
    )


def _limits(
    slice_: Slice, lowering: ahead.Lowering, programs: Sequence[ahead.Program], devices: int
) -> dict[str, roofline.Limits]:
    computed = {name: counted.total for name, counted in lowering.computed.items()}
    return {
        program.name: roofline.limits(
            slice_.generation,
            devices,
            computed.get(program.name, 0.0),
            program.traffic.hbm_bytes,
            program.traffic.over_links,
            program.traffic.over_network,
        )
        for program in programs
    }


def _estimate(
    slice_: Slice, lowering: ahead.Lowering, limits: dict[str, roofline.Limits], config: RunConfig, rows: int
) -> roofline.Estimate:
    """Of a step of ``rows`` full rows; what else its micro-batches hold is padding, and counts for nothing."""
    runs = lowering.runs
    counted = sum(runs[name] * sum(function.model.values()) for name, function in lowering.computed.items())
    return roofline.estimate(
        slice_.generation,
        config.mesh.devices,
        sum(runs[name] * one.seconds for name, one in limits.items()),
        rows * config.data.row_length,
        counted * rows / (runs["accumulate"] * config.data.rows_per_microbatch),
    )


def describe(config: RunConfig) -> str:
    """The options that a search changes, in a few words."""
    mesh = " ".join(f"{axis} {size}" for axis, size in config.mesh.model_dump().items() if size > 1) or "one device"
    rows, length = config.data.rows_per_microbatch, config.data.row_length
    return f"{mesh}; {rows} rows of {length:,}; remat {config.model.remat}"


def _changes(before: RunConfig, after: RunConfig) -> list[str]:
    """What to add to the command line to get ``after``."""
    sections: tuple[tuple[str, Any, Any], ...] = (
        ("mesh", before.mesh, after.mesh),
        ("data", before.data, after.data),
        ("model", before.model, after.model),
        ("evaluation", before.evaluation, after.evaluation),
    )
    return [
        f"{section}.{key}={value}"
        for section, old, new in sections
        for key, value in new.model_dump().items()
        if value != old.model_dump()[key]
    ]
