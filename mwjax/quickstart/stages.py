"""What the quickstart says on stderr while it works, and how long every stage took."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.progress import Progress
from rich.text import Text


class Stages:
    """Announces and times a fixed number of stages. ``seconds``: (name, wall-clock seconds) of those that ended."""

    def __init__(self, total: int, console: Console | None = None) -> None:
        self.total = total
        self.console = Console(stderr=True, highlight=False) if console is None else console
        self.seconds: list[tuple[str, float]] = []

    @contextlib.contextmanager
    def stage(self, name: str, what: str) -> Iterator[None]:
        """One stage, called ``name`` in the summary, introduced by the sentence ``what``."""
        number = f"[{len(self.seconds) + 1}/{self.total}]"
        self.console.print()
        self.console.print(Text.assemble((f"{number} {name}  ", "bold"), what))
        started = time.perf_counter()
        yield
        taken = time.perf_counter() - started
        self.seconds.append((name, taken))
        self.console.print(Text(f"{number} took {taken:.1f} s", "dim"))

    @contextlib.contextmanager
    def bar(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """A bar to be moved by (done, total) while it lasts; nothing where stderr is no terminal."""
        with Progress(console=self.console, transient=True, disable=not self.console.is_terminal) as progress:
            task = progress.add_task(what, total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)

    def say(self, message: str) -> None:
        self.console.print(Text(message))


def times(seconds: Sequence[tuple[str, float]]) -> str:
    """``audit 1.2 s, logdiff 30.0 s, 31.2 s in all``."""
    parts = [f"{name} {taken:.1f} s" for name, taken in seconds]
    return ", ".join([*parts, f"{sum(taken for _, taken in seconds):.1f} s in all"])
