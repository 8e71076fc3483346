"""What every engine looks like from outside: token ids in, sampled token ids and their log-probs out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from mwjax.rollouts.record import Sampling


class EngineError(ValueError):
    """A request that the engine cannot serve as it stands."""


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one completion.

    temperature: 0 is greedy. top_p, top_k: truncation after the temperature, top_k first; 1.0 and 0 switch them off.
    logprobs: record ``raw`` (of the model's own distribution, temperature 1) or ``processed`` log-probs (of the
    distribution sampled from; 0 where greedy). max_tokens: completions never get longer. stop_ids: sampling ends after
    any of these, which stays the completion's last id. seed: the same seed and prompt give the same completion.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    logprobs: Literal["raw", "processed"] = "raw"
    max_tokens: int = 64
    stop_ids: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        checks = (
            ("temperature", self.temperature >= 0, "at least 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("logprobs", self.logprobs in ("raw", "processed"), "'raw' or 'processed'"),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
        )
        for name, good, wanted in checks:
            if not good:
                raise EngineError(f"sampling: {name} is {getattr(self, name)!r}, it must be {wanted}")

    def recorded(self) -> Sampling:
        """The part that a record keeps with each turn."""
        return Sampling(self.temperature, self.top_p, self.top_k, self.logprobs)


@dataclass(frozen=True, eq=False)
class Completion:
    """What an engine sampled for one prompt.

    ids: int32 [C], the stop id included. logprobs: float64 [C], natural log. finish_reason: ``stop`` (the last id is a
    stop id) or ``length``. policy_version: which weights sampled it, None where unknown.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: str
    policy_version: int | None = None


class Engine(Protocol):
    """Anything that samples: one completion per prompt, in order. ``sampling`` is for all prompts, or one for each."""

    def generate(
        self, batch: Sequence[Sequence[int] | np.ndarray], sampling: SamplingParams | Sequence[SamplingParams]
    ) -> list[Completion]: ...
