"""One call of a model as a log of messages tells it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mwjax.rollouts.readers.chat import Message
from mwjax.rollouts.readers.reader import DEFAULT_SAMPLING
from mwjax.rollouts.record import MAIN_CHAIN, Sampling


@dataclass(frozen=True, eq=False)
class Seen:
    """What a model saw and answered at one call, in the messages of :mod:`chat`.

    ``line``: of the record that holds the answer. ``chain``, ``purpose``, ``cause`` (the place of an earlier call in
    the same list) and ``detail`` (what was done to the context before this call) are what the log tells itself.
    ``hidden``: more was sampled than the log shows. ``cut_off`` as in ``Call``. ``options``: further variables of the
    chat template. ``time``: seconds since 1970.
    """

    messages: Sequence[Message]
    answer: Message
    tools: tuple[Mapping[str, Any], ...] = ()
    line: int = 0
    chain: str = MAIN_CHAIN
    purpose: str = "act"
    cause: int | None = None
    detail: str | None = None
    trainable: bool = True
    hidden: bool = False
    cut_off: bool = False
    finish_reason: str | None = None
    sampling: Sampling = DEFAULT_SAMPLING
    identity: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    time: float | None = None
