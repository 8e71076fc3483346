"""A plan as tables for people and as values for programs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from mwjax.launch import plan
from mwjax.launch.topologies import GIB
from mwjax.train import setup

NOT_RUN = (
    "compiled by XLA for this slice, not run on a TPU: memory is the compiler's, times are estimates (upper bounds of "
    "speed: published peaks, compute, memory and links overlapped)"
)
KINDS = {
    "frozen": "parameters that are not trained",
    "optimiser": "optimiser state",
    "teacher": "averaged teacher",
    "reference": "initial weights, compared with",
    "gradients": "gradient sums",
    "batch": "batch (all micro-batches)",
    "temporaries": "temporaries (activations, gathered weights, padding)",
    "code": "code",
}


def show(planned: plan.Planned, console: Console) -> None:
    """Print the plan, the way that fits if it is another one, and what else was tried."""
    _show_plan(planned.asked, console)
    for other in planned.tried:
        if not other.fits:
            _say(console, f"  tried: {plan.describe(other.config)}: {_verdict(other)}")
    found = planned.fitting
    if found is not None and found is not planned.asked:
        _say(console, f"\nThe nearest that fits: {' '.join(found.chosen) or 'as configured'}")
        _show_plan(found, console)
    elif found is None:
        left = f"; {planned.untried} more could be tried: --tries" if planned.untried else ""
        failure = planned.asked.failure
        if failure is None or failure.out_of_memory:
            tried = f"none of {len(planned.tried)} others does" if planned.tried else "nothing else is likely to"
            _say(console, f"\nDoes not fit, and {tried}{left or ': take a larger slice'}", "bold red")


def _show_plan(made: plan.Plan, console: Console) -> None:
    config, slice_ = made.compiled, made.slice
    several = "" if made.slices == 1 else f"{made.slices} x "
    _say(console, f"\n{several}{slice_.describe()}", "bold")
    name = config.model.path or "small random model"
    plural = "" if made.microbatches == 1 else "es"
    _say(
        console,
        f"  {name}, {setup.method(config)}, {config.loss.task}; {plan.describe(config)}; "
        f"{made.rows_a_step} rows a step in {made.microbatches} micro-batch{plural}; "
        f"attention {config.model.attention}, {config.model.dtype}",
    )
    if made.chosen:
        _say(console, f"  chosen here: {' '.join(made.chosen)}")
    _say(console, f"  {_verdict(made)}", "bold green" if made.fits else "bold red")
    if made.peak is not None:
        console.print(_memory_table(made))
    if made.programs:
        console.print(_programs_table(made))
    if any(program.traffic.collectives for program in made.programs):
        console.print(_collectives_table(made))
    _show_estimate(made, console)
    for note in notes(made):
        _say(console, f"  note: {note}", "dim")


def _say(console: Console, text: str, style: str = "") -> None:
    """A line as it is: no markup is looked for in names, and what may be copied is not broken."""
    console.print(text, style=style, markup=False, soft_wrap=True)


def _table(title: str, *columns: str, words: int = 1) -> Table:
    """A table of at most 80 columns. words: how many of its columns are text; the others are numbers."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number < words else "right", no_wrap=True)
    return table


def _verdict(made: plan.Plan) -> str:
    if made.failure is not None:
        what = "does not fit" if made.failure.out_of_memory else "does not compile"
        return f"{what}: {made.failure.function}: {made.failure.cause}"
    assert made.peak is not None
    room = made.usable - made.peak.total
    used = f"{_size(made.peak.total)} of {_size(made.usable)}"
    if room < 0:
        return f"does not fit: {used} a device, {_size(-room)} too much (in {made.peak.function})"
    return f"fits: {used} a device, {_size(room)} left ({room / made.usable:.0%})"


def _memory_table(made: plan.Plan) -> Table:
    assert made.peak is not None
    table = _table(f"\nMemory of one device at its fullest, in {made.peak.function}", "kind", "bytes")
    for kind, size in made.peak.kinds.items():
        table.add_row(KINDS.get(kind, kind), _size(size))
    table.add_row("together", _size(made.peak.total), style="bold")
    table.add_row("headroom", _size(made.usable - made.peak.total))
    return table


def _programs_table(made: plan.Plan) -> Table:
    title = "\nOne run of each function, on one device (times: estimates)"
    limited, moved = ["compute s", "memory s", "links s", "network s"], ["memory", "links"]
    # No network within one slice; of several, the next table has the bytes of both.
    (limited if made.slices == 1 else moved).pop()
    table = _table(title, "function", "a step", *limited, "limit", *moved)
    for program in made.programs:
        limits = made.limits[program.name]
        table.add_row(
            program.name,
            str(made.runs[program.name]),
            *(f"{value:.3g}" for value in limits[: len(limited)]),
            limits.by,
            *map(_size, (program.traffic.hbm_bytes, program.traffic.over_links)[: len(moved)]),
        )
    return table


def _collectives_table(made: plan.Plan) -> Table:
    table = _table("\nCollectives of one run, per device", "function", "kind", "number", "bytes", "sent", words=2)
    for program in made.programs:
        for one in program.traffic.collectives:
            table.add_row(program.name, one.kind, f"{one.number:,}", _size(one.bytes), _size(one.sent))
    return table


def _show_estimate(made: plan.Plan, console: Console) -> None:
    for name, counted in made.flops.items():
        model, again = sum(counted.model.values()), sum(counted.again.values())
        parts = ", ".join(f"{part} {value:.3g}" for part, value in counted.model.items())
        _say(
            console,
            f"  FLOPs of one {name}, all devices: {model:.4g} ({parts}) and {again:.3g} computed again; attention "
            f"over {100 * made.density:.3g}% of a causal row's pairs",
        )
    if made.estimate is not None:
        found = made.estimate
        _say(
            console,
            f"  estimate: {found.seconds:.3g} s a step at least, {found.tokens_per_second:,.0f} tokens/s and MFU "
            f"{found.mfu:.0%} at most",
            "bold",
        )


def notes(made: plan.Plan) -> list[str]:
    """What to know about a plan."""
    found = [NOT_RUN]
    unknown = sum(program.traffic.unknown_loops for program in made.programs)
    if unknown:
        found.append(f"{unknown} loops run as often as the data decides; their bytes count once")
    if made.compiled.model.attention == "blockwise":
        found.append("attention blockwise is for any device; on TPUs model.attention=auto takes a kernel")
    if made.config.loss.old_logprobs == "recompute" and setup.method(made.config) not in ("packed", "logittree"):
        found.append("loss.old_logprobs=recompute scores rows whose length the data decides: not planned")
    if made.config.evaluation.paths:
        found.append("scoring evaluation.paths is not planned")
    return found


def to_json(made: Iterable[plan.Planned]) -> list[dict[str, Any]]:
    """Every figure; sizes in bytes, times in seconds."""
    return [
        {
            **_values(one.asked),
            "tried": [_values(other) for other in one.tried],
            "fitting": None if one.fitting is None else list(one.fitting.chosen),
        }
        for one in made
    ]


def _values(made: plan.Plan) -> dict[str, Any]:
    slice_, config = made.slice, made.compiled
    estimate = made.estimate
    return {
        "slice": slice_.name,
        "slices": made.slices,
        "chips": made.slices * slice_.chips,
        "hosts": made.slices * slice_.hosts,
        "topology": slice_.topology,
        "mesh": config.mesh.model_dump(),
        "model": config.model.path,
        "method": setup.method(config),
        "attention": config.model.attention,
        "dtype": config.model.dtype,
        "remat": config.model.remat,
        "row_length": config.data.row_length,
        "rows_per_microbatch": config.data.rows_per_microbatch,
        "microbatches": made.microbatches,
        "rows_a_step": made.rows_a_step,
        "density": made.density,
        "chosen": list(made.chosen),
        "fits": made.fits,
        "failure": None if made.failure is None else vars(made.failure),
        "usable_bytes": made.usable,
        "memory": None
        if made.peak is None
        else {"function": made.peak.function, "total": made.peak.total, **made.peak.kinds},
        "flops": {name: counted._asdict() for name, counted in made.flops.items()},
        "functions": {
            program.name: {
                "compile_seconds": program.seconds,
                "runs_a_step": made.runs[program.name],
                "peak_bytes": program.peak,
                "hbm_bytes": program.traffic.hbm_bytes,
                "unknown_loops": program.traffic.unknown_loops,
                "collectives": [one._asdict() for one in program.traffic.collectives],
                "limits": made.limits[program.name]._asdict(),
            }
            for program in made.programs
        },
        "estimate": None if estimate is None else estimate._asdict(),
        "seconds": made.seconds,
        "ran_on_tpu": False,
    }


def _size(size: float) -> str:
    """1234567 -> "1.18 MiB"."""
    if abs(size) < 0.01 * 2**20:
        return f"{size:,.0f} B"
    return f"{size / GIB:,.2f} GiB" if abs(size) >= 0.05 * GIB else f"{size / 2**20:,.2f} MiB"
