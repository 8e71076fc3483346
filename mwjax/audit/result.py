"""What an audit says. Frozen, and plain enough for JSON: ``to_json`` gives the object that ``--json`` writes."""

from __future__ import annotations

import dataclasses
from typing import Any

from mwjax.audit.comparison import compare_models
from mwjax.audit.model_result import ModelAudit
from mwjax.rollouts.read import Refusal


@dataclasses.dataclass(frozen=True)
class MethodAudit:
    """What a method would train on this data. Shares are None where there is nothing to take a share of.

    loss_tokens: sampled tokens it trains. lost: trainable sampled tokens it does not. wrong: loss tokens whose prefix
    ids are not the generation prefix. indirect: right ids, but their keys were computed while text was in view that the
    policy no longer saw, or their position ids have gaps. common_wrong: as ``wrong``, of the tokens that every method
    trains. missing, extra: tokens only in the generation prefix, only in the training prefix; means and largest over
    the wrong ones. row_tokens, teacher_tokens: tokens of its rows before padding. Bin b of a histogram counts the wrong
    tokens whose number of missing (extra) tokens has b bits: 0, 1, 2-3, 4-7, ...
    """

    method: str
    loss_tokens: int
    lost: int
    wrong: int
    wrong_share: float | None
    indirect: int
    indirect_share: float | None
    common_wrong: int
    common_wrong_share: float | None
    missing_mean: float | None
    missing_max: int
    extra_mean: float | None
    extra_max: int
    row_tokens: int
    teacher_tokens: int
    missing_histogram: tuple[int, ...]
    extra_histogram: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class AffectedRollout:
    """A rollout and how much of it ``naive_compressed`` would train under a wrong prefix."""

    id: str
    junctions: int
    wrong: int
    loss_tokens: int


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """Neighbouring loss tokens of a user's row that are not trained under the context they were sampled under.

    kind: ``wrong_prefix`` or ``not_sampled``. file, line: the row. tokens: how many there are; the rest tells of the
    first. position: in ``input_ids``; segment: which packed segment. turn, index: the sampled token it trains, only the
    likely one where ``certain`` is False, None if there is none. agree: how many leading tokens the two prefixes share;
    expected, found: what follows there, as text (without a sampled token: the last of the row's prefix). Lengths are of
    the generation prefix and of the row's prefix.
    """

    kind: str
    rollout: str
    file: str
    line: int
    segment: int
    position: int
    tokens: int
    token: int
    token_text: str
    turn: int | None
    index: int | None
    certain: bool
    agree: int
    expected_length: int | None
    found_length: int
    expected: str
    found: str


@dataclasses.dataclass(frozen=True)
class RowsAudit:
    """A user's own training rows against the rollouts they were made from.

    loss_tokens = exact + wrong_prefix + untrainable + not_sampled + without_context. untrainable: right context, but
    its turn is marked not trainable. not_sampled: prompt, tool or other text that the policy did not write.
    without_context: first token of a segment. position_gaps: loss tokens whose visible prefix has position ids other
    than 0, 1, 2, ... double: sampled tokens trained more than once (``surplus``: how many times too many). never:
    trainable sampled tokens that no row trains, of which ``unnamed_tokens`` are in the ``unnamed_rollouts`` that no row
    names.
    """

    file: str
    rows: int
    segments: int
    tokens: int
    refused: tuple[Refusal, ...]
    loss_tokens: int
    exact: int
    wrong_prefix: int
    untrainable: int
    not_sampled: int
    without_context: int
    position_gaps: int
    double: int
    surplus: int
    never: int
    unnamed_rollouts: int
    unnamed_tokens: int
    ignored_keys: tuple[str, ...]
    mismatches: tuple[Mismatch, ...]
    verdict: str
    advice: str

    @property
    def consistent(self) -> bool:
        """Every loss token is trained under exactly the context it was sampled under."""
        return self.exact == self.loss_tokens and not self.position_gaps


@dataclasses.dataclass(frozen=True)
class AuditResult:
    """Whether rollouts are conditioning-consistent under each training method.

    junctions, details: of ``main``, by reason and, where edits tell, by what the harness did; side_junctions: of the
    other chains. forks_per_rollout: junctions of ``main`` (our K); evictions: those that evicted something (the
    paper's K). diverging_leaves: the sum of the paper's D. evicted_span_mean: tokens per eviction. depth, frequency:
    the paper's E[c | c > 0] and Pr[c > 0], c = share of a rollout's rendered context that was evicted; depth is None
    (N/A) when nothing fires. trie_ratio: view tokens / trie tokens, how many times the trie saves (>= 1); with
    ``group`` tries span a group's rollouts, None when not asked for. common_survivors: tokens that every method trains.
    truncated_turns: completions that ended by length. models: what each model
    that was asked for says of some rollouts. consistent: no method would train a loss token under a context it
    was not sampled under, or lose one.
    """

    files: tuple[str, ...]
    rollouts: int
    refused: tuple[Refusal, ...]
    turns: int
    chains: int
    views: int
    view_tokens: int
    trie_tokens: int
    trie_ratio: float | None
    groups: int | None
    group_trie_tokens: int | None
    group_trie_ratio: float | None
    sampled_tokens: int
    loss_tokens: int
    untrainable_tokens: int
    untrainable_share: float | None
    tokens_with_logprobs: int
    tokens_without_logprobs: int
    truncated_turns: int
    junctions: dict[str, int]
    details: dict[str, int]
    side_junctions: dict[str, int]
    forks_per_rollout: float | None
    evictions: int
    evictions_per_rollout: float | None
    diverging_leaves: int
    diverging_per_rollout: float | None
    evicted_span_mean: float | None
    depth: float | None
    frequency: float | None
    common_survivors: int
    methods: tuple[MethodAudit, ...]
    most_affected: tuple[AffectedRollout, ...]
    warnings: tuple[str, ...]
    consistent: bool
    verdict: str
    advice: str
    rows: RowsAudit | None = None
    models: tuple[ModelAudit, ...] = ()

    def method(self, name: str) -> MethodAudit:
        """The audit of one method by its name."""
        return next(found for found in self.methods if found.method == name)

    @property
    def usable(self) -> bool:
        """Something was audited: at least one rollout, and at least one of the user's rows if there are any."""
        return self.rollouts > 0 and (self.rows is None or self.rows.rows > 0)

    @property
    def any_refused(self) -> bool:
        """Some input was refused."""
        return bool(self.refused) or (self.rows is not None and bool(self.rows.refused))

    @property
    def strictly_consistent(self) -> bool:
        """What ``--strict`` asks: the user's rows if given, otherwise plain training on the last context."""
        return self.method("naive_compressed").wrong == 0 if self.rows is None else self.rows.consistent


def to_json(result: AuditResult) -> dict[str, Any]:
    """The result as plain JSON values; with several models also their figures side by side."""
    value = dataclasses.asdict(result)
    if len(result.models) > 1:
        value["model_comparison"] = dataclasses.asdict(compare_models(result.models))
    return value
