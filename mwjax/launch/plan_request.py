"""What `mwjax plan` was asked, carried out: one slice after another, with progress on stderr."""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from mwjax.launch import topologies
from mwjax.train import load

# For libtpu, which compiles without a TPU: beside other processes that use it, and leaving real TPUs alone.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}

INTERRUPTED = 130  # exit status
FILE_WIDTH = 120  # columns of tables that do not go to a terminal


T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """The command line. topology: names, separated by commas; slices: how many of each; auto: choose the mesh; the
    others as `plan.make`."""

    config: str | None
    overrides: tuple[str, ...]
    topology: str
    slices: int
    auto: bool
    density: float
    microbatches: int | None
    tries: int
    as_json: bool


def carry_out(asked: Request) -> int:
    """Plan and print; 0 where everything fits as asked or as chosen, 1 where something does not fit.

    Raises ValueError for what the user can put right.
    """
    kinds = [topologies.find(name) for name in asked.topology.split(",")]
    config = load.load(asked.config, asked.overrides, defaults=("run_dir=planned", "data.paths=planned"))
    os.environ.update(ENVIRONMENT)  # before jax is imported

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from mwjax.launch import plan, plan_report

    plan.check_installed()
    console = Console(stderr=True, highlight=False)
    results = Console(highlight=False, width=None if sys.stdout.isatty() else FILE_WIDTH)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    made: list[plan.Planned] = []
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            for slice_ in kinds:
                task = bar.add_task(slice_.name, total=None)

                def say(what: str, done: int, most: int, task: int = task) -> None:
                    bar.update(task, description=what, completed=done, total=most)  # type: ignore[arg-type]
                    if not console.is_terminal:
                        print(f"mwjax: {what}", file=sys.stderr, flush=True)

                making = functools.partial(
                    plan.make,
                    config,
                    slice_,
                    slices=asked.slices,
                    auto=asked.auto,
                    density=asked.density,
                    microbatches=asked.microbatches,
                    tries=asked.tries,
                    say=say,
                )
                made.append(_interruptibly(making, bar.stop))
                bar.remove_task(task)
                if not asked.as_json:
                    plan_report.show(made[-1], results)
    finally:  # also where a later slice is refused: these took minutes
        if asked.as_json and made:
            print(json.dumps(plan_report.to_json(made), indent=1))
    return 0 if all(one.fitting is not None for one in made) else 1


def _interruptibly(work: Callable[[], T], leaving: Callable[[], None]) -> T:
    """What ``work`` returns, or raises. It runs beside the main thread: the compiler, once at work, hears of no Ctrl-C
    and cannot be stopped, so then the process ends at once, after ``leaving``."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    try:
        threading.Thread(target=run, daemon=True).start()
        return outcome.result()
    except KeyboardInterrupt:
        leaving()
        sys.stdout.flush()
        os._exit(INTERRUPTED)
