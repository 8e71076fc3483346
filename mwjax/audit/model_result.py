"""What a model says of rollouts, plain enough for JSON. Needs neither jax nor the model."""

from __future__ import annotations

import csv
import dataclasses
from importlib import resources


@dataclasses.dataclass(frozen=True)
class MethodScore:
    """logdiff of one method, in nats: |log p in its training rows - log p recorded|, of ``tokens`` loss tokens.

    max_token: the largest of a token (the paper's maximum is of step means). signed_mean: of the difference itself.
    All None where no token can be compared: ``reason`` says why.
    """

    method: str
    tokens: int
    mean: float | None
    max_token: float | None
    signed_mean: float | None
    reason: str


@dataclasses.dataclass(frozen=True)
class Delta:
    """Mean change of the log-prob under a wrong prefix, in nats, and the share of tokens with the expected sign.

    name: ``delta_comp`` (diverging leaves; expected negative), ``delta_full`` (tokens sampled while something was
    evicted; expected positive), ``delta_full_walk`` (the same tokens, where they survive, against their log-prob in
    ``H_comp`` instead of that under the generation prefix, as in the paper's section 6.3; expected positive).
    of: ``all``, or the value of ``meta.harness`` it was measured for.
    """

    name: str
    of: str
    expected: str
    tokens: int
    mean: float | None
    share_expected: float | None


@dataclasses.dataclass(frozen=True)
class PublishedSigns:
    """A row of MemoryWalker's Table 7: the paper's figures, on the paper's models and harnesses."""

    harness: str
    n_comp: int
    mean_delta_comp: float
    frac_negative: float
    n_full: int
    mean_delta_full: float
    frac_positive: float


@dataclasses.dataclass(frozen=True)
class KLGroup:
    """Conditioning KL of some of the diverging leaves, in nats; delta_comp of the same leaves beside it."""

    label: str
    leaves: int
    mean_kl: float | None
    max_kl: float | None
    mean_abs_delta: float | None


@dataclasses.dataclass(frozen=True)
class LeafColumns:
    """Every diverging leaf that was scored, as columns of one length.

    rollout: its id; turn, index: which sampled token; kl, delta_comp: nats; distance: tokens between it and the place
    where its two prefixes last differ; missing, extra: tokens only in its generation prefix, only in the prefix it has
    in ``H_comp``; cause: the first junction that put it under another context.
    """

    rollout: tuple[str, ...]
    turn: tuple[int, ...]
    index: tuple[int, ...]
    kl: tuple[float, ...]
    delta_comp: tuple[float, ...]
    distance: tuple[int, ...]
    missing: tuple[int, ...]
    extra: tuple[int, ...]
    cause: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ModelAudit:
    """What one model says of some of the rollouts.

    scored: ids of the rollouts looked at, of the ``rollouts`` that were read. without_logprobs, unmatched: their loss
    tokens without a recorded log-prob, and with one that no training row can reproduce (processed by top-p, top-k or
    temperature 0). exact: whether ``packed`` reproduces the recorded log-probs up to the rounding of float32, None
    where there are none. kl: over all leaves; kl_by_*: groups of them, see :class:`LeafColumns`. delta_full: one value
    a token. seconds: wall-clock.
    """

    model: str
    parameters: int
    rollouts: int
    scored: tuple[str, ...]
    without_logprobs: int
    unmatched: int
    exact: bool | None
    methods: tuple[MethodScore, ...]
    deltas: tuple[Delta, ...]
    kl: KLGroup
    kl_by_distance: tuple[KLGroup, ...]
    kl_by_junction: tuple[KLGroup, ...]
    kl_by_missing: tuple[KLGroup, ...]
    leaves: LeafColumns
    delta_full: tuple[float, ...]
    published: tuple[PublishedSigns, ...]
    seconds: float

    def method(self, name: str) -> MethodScore:
        """The logdiff of one method by its name."""
        return next(found for found in self.methods if found.method == name)

    def delta(self, name: str, of: str = "all") -> Delta:
        """``delta_comp`` or ``delta_full``, of all rollouts or of one harness."""
        return next(found for found in self.deltas if (found.name, found.of) == (name, of))


def published_signs() -> tuple[PublishedSigns, ...]:
    """MemoryWalker's Table 7."""
    text = resources.files("mwjax.published").joinpath("table7_signs.csv").read_text()
    return tuple(
        PublishedSigns(
            harness=row["harness"],
            n_comp=int(row["n_comp"]),
            mean_delta_comp=float(row["mean_delta_comp"]),
            frac_negative=float(row["frac_negative"]),
            n_full=int(row["n_full"]),
            mean_delta_full=float(row["mean_delta_full"]),
            frac_positive=float(row["frac_positive"]),
        )
        for row in csv.DictReader(text.splitlines())
    )
