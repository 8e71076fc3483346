"""Leaving a run at the same step on every process, whichever of them was asked to."""

from __future__ import annotations

from jax.sharding import Mesh

from mwjax.train import agreement
from mwjax.train.mesh import AnyProcess
from mwjax.train.stop import StopOnSignal


class Stopping:
    """Whether to stop on a signal: all processes learn it at the same place, whichever of them it came to."""

    def __init__(self, signal: StopOnSignal, mesh: Mesh) -> None:
        self._signal, self._any = signal, AnyProcess(mesh)

    def now(self) -> bool:
        """Whether any process has had a signal; waits until all have asked."""
        return any(agreement.gathered(self._signal.requested))

    def soon(self) -> bool:
        """The same as of the call before, where there are several processes, without waiting."""
        return self._any(self._signal.requested)
