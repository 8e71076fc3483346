"""Counts recompilations of the training step: every one costs minutes on a pod, and fixed shapes should need none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from types import TracebackType

import jax

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts backend compilations of the jitted functions named ``names``, while used as a context manager.

    ``recompiles`` is the number of compilations of a function beyond its first one, summed over the functions;
    ``seconds`` the time all of them took, the first ones included.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)
        self.counts: Counter[str] = Counter()
        self.seconds = 0.0

    @property
    def recompiles(self) -> int:
        return sum(count - 1 for count in self.counts.values())

    def __enter__(self) -> CompileCounter:
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event != COMPILE_EVENT:
            return
        # jax reports "jit(name)".
        name = str(kwargs.get("fun_name", "")).removeprefix("jit(").removesuffix(")")
        if name in self.names:
            self.counts[name] += 1
            self.seconds += duration_secs
