"""What a running job shows on stderr: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Reporter:
    """Shows the metric rows of a run of ``total`` steps, ``done`` of which an earlier start of it made."""

    def __init__(self, total: int, done: int, every: int) -> None:
        self.total, self.every = total, every
        console = Console(stderr=True)
        self.live = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[metrics]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.live.add_task("train", total=total, completed=done, metrics="compiling")

    def __enter__(self) -> Reporter:
        self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.live.stop()

    def say(self, message: str) -> None:
        """A line that stays."""
        if self.live.disable:
            print(message, file=sys.stderr, flush=True)
        else:
            self.live.console.print(message, highlight=False)

    def step(self, row: Mapping[str, Any]) -> None:
        """Shows a row of ``metrics.jsonl``."""
        if not self.live.disable:
            self.live.update(self.task, completed=row["step"], metrics=line(row))
        elif row["step"] % self.every == 0 or row["step"] == self.total:
            self.say(f"step {row['step']}/{self.total}  {line(row)}")


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
