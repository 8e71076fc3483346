"""How fast a step could be at best: each compiled function is as slow as the slowest of its limits.

An estimate, and an optimistic one: it takes the chip's published peaks as reached and all of them as wholly overlapped.
"""

from __future__ import annotations

from typing import NamedTuple

from mwjax.launch.topologies import Generation


class Limits(NamedTuple):
    """Seconds that a function takes at least on one device, by what limits it."""

    compute: float
    memory: float
    links: float
    network: float = 0.0

    @property
    def seconds(self) -> float:
        """The slowest."""
        return max(self)

    @property
    def by(self) -> str:
        """Which one that is."""
        return self._fields[self.index(self.seconds)]


class Estimate(NamedTuple):
    """Of one step: seconds; tokens a second, over all devices; mfu: what the model's mathematics asks for, as a share
    of what the chips could compute in that time (model FLOPs utilisation, arXiv:2204.02311, appendix B)."""

    seconds: float
    tokens_per_second: float
    mfu: float


def limits(
    generation: Generation, devices: int, flops: float, hbm_bytes: float, sent: float, to_slices: float = 0.0
) -> Limits:
    """Of a function on ``devices`` devices. flops: over all devices; hbm_bytes, sent (within a slice), to_slices (sent
    to others): of one. Half of the published bandwidth of the links is for sending."""
    share = generation.devices_per_chip
    return Limits(
        flops / devices / (generation.flops / share),
        hbm_bytes / (generation.hbm_bandwidth / share),
        sent / (generation.ici_bandwidth / 2 / share),
        to_slices / (generation.dcn_bandwidth / share),
    )


def estimate(generation: Generation, devices: int, seconds: float, tokens: float, model_flops: float) -> Estimate:
    """Of a step of ``seconds``. tokens, model_flops: over all devices."""
    peak = generation.flops / generation.devices_per_chip * devices
    return Estimate(seconds, tokens / seconds, model_flops / (seconds * peak))
