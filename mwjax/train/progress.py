"""What a running job shows on stderr: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn, track
from rich.text import Text


class Reporter:
    """Shows the metric rows of a run of ``total`` steps, ``done`` of which an earlier start of it made: as a live
    display on a terminal, else as a plain line every ``every`` steps. ``quiet``: nothing at all."""

    def __init__(self, total: int, done: int, every: int, quiet: bool = False) -> None:
        self.total, self.every, self.quiet = total, every, quiet
        self.console = console = Console(stderr=True, highlight=False, quiet=quiet)
        self.bar = Progress(
            TextColumn("{task.description}"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(), console=console
        )
        self.task = self.bar.add_task("step", total=total, completed=done)
        self.scoring = self.bar.add_task("evaluating", visible=False)
        self.live = (
            Live(Group(self.bar, Text("compiling")), console=console) if console.is_terminal and not quiet else None
        )

    def __enter__(self) -> Reporter:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.live is not None:
            self.live.stop()

    def say(self, message: str) -> None:
        """A line that stays."""
        if self.live is not None:
            self.live.console.print(message, markup=False, soft_wrap=True)
        elif not self.quiet:
            print(message, file=sys.stderr, flush=True)

    def show(self, text: Text) -> None:
        """Styled text that stays, a line of at most ``console.width`` columns."""
        self.console.print(text, soft_wrap=True)

    def evaluating(self, done: int, total: int) -> None:
        """How far an evaluation is."""
        self.bar.update(self.scoring, completed=done, total=total, visible=done < total)

    def evaluated(self, row: Mapping[str, Any]) -> None:
        """Shows a row of ``evaluation.jsonl``."""
        logdiff = "" if row["logdiff_mean"] is None else f"  logdiff {_number(row['logdiff_mean'])}"
        refused = f"  refused {row['refused']}" if row["refused"] else ""
        self.say(
            f"evaluation at step {row['step']}  loss {_number(row['loss'])}  perplexity {_number(row['perplexity'])}  "
            f"tokens {row['tokens']:,}{logdiff}{refused}  {row['seconds']:.1f} s"
        )

    def step(self, row: Mapping[str, Any]) -> None:
        """Shows a row of ``metrics.jsonl``."""
        if self.live is not None:
            self.bar.update(self.task, completed=row["step"])
            self.live.update(Group(self.bar, Text(line(row))))
        elif row["step"] % self.every == 0 or row["step"] == self.total:
            self.say(f"step {row['step']}/{self.total}  {line(row)}")


def measuring(numbers: Iterable[int], total: int) -> Iterable[int]:
    """``numbers``, with a bar while they are gone through; as `data.scan` takes it."""
    console = Console(stderr=True)
    return track(numbers, "measuring rollouts", total, console=console, transient=True, disable=not console.is_terminal)


def line(row: Mapping[str, Any]) -> str:
    """The figures to watch while a run goes."""
    logdiff = row.get("logdiff_mean")
    return "  ".join(
        [
            f"loss {_number(row['loss'])}",
            f"logdiff {_number(logdiff)}",
            f"tokens/s {row['tokens_per_second']:,.0f}",
            f"loss tokens {row['loss_tokens']:,.0f}",
            f"trie ratio {_number(row.get('trie_ratio'))}",
            f"recompiles {row['recompiles']}",
        ]
    )


def _number(value: float | None) -> str:
    return "N/A" if value is None else f"{value:.4g}"
