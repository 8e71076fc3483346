"""The one record: what a harness left behind, in token ids, exactly as the engine saw and sampled them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

MAIN_CHAIN = "main"


@dataclass(frozen=True)
class Sampling:
    """How a completion was sampled.

    ``logprobs`` says of which distribution the recorded log-probs are: ``raw`` (the model's own, temperature 1) or
    ``processed`` (the one really sampled from, after temperature and truncation).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    logprobs: Literal["raw", "processed"] = "raw"


@dataclass(frozen=True, eq=False)
class Turn:
    """One call of the engine: the prompt it saw and the completion it sampled.

    prompt_ids: int32 [P]; completion_ids: int32 [C]; logprobs: float64 [C], natural log, or None where the engine gave
    none. ``chain`` names the conversation this call belongs to; ``cause_turn`` the side call whose text it carries.
    """

    prompt_ids: np.ndarray
    completion_ids: np.ndarray
    logprobs: np.ndarray | None = None
    chain: str = MAIN_CHAIN
    purpose: str = "act"
    trainable: bool = True
    finish_reason: str | None = None
    sampling: Sampling = Sampling()
    policy_version: int | None = None
    cause_turn: int | None = None


@dataclass(frozen=True, eq=False)
class Edit:
    """One edit of the live context by a white-box harness; it fires before turn ``before_turn``.

    evicted, restored: half-open ranges of positions in ``H_T`` (all tokens that were ever live in the chain, in order
    of first appearance) as it stood before the edit. inserted_at: index into the live view after the eviction.
    replacement_ids: int32 [R]. replacement_from: ``(turn, lo, hi)`` when that text was sampled in that turn.
    """

    before_turn: int
    evicted: tuple[tuple[int, int], ...] = ()
    inserted_at: int | None = None
    replacement_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    replacement_from: tuple[int, int, int] | None = None
    restored: tuple[tuple[int, int], ...] = ()
    author: str | None = None
    trigger: str | None = None
    stored_as: str | None = None


@dataclass(frozen=True, eq=False)
class Rollout:
    """One episode: its turns in the order the engine served them, the harness's edits if known, and the reward.

    ``meta`` is the user's own, but for what ``mwjax import`` writes: ``junction_details`` (turn -> what was done to the
    context before it), ``rendered`` (the ids are a template's, not an engine's), ``context_incomplete`` (what of the
    context the log did not hold) and ``supplied`` (what of it the user gave).
    """

    id: str
    turns: tuple[Turn, ...]
    edits: tuple[Edit, ...] = ()
    group: str | None = None
    reward: float | None = None
    meta: dict[str, Any] = field(default_factory=dict)
