"""Audits side by side: the figures of two or more files, or of two or more models, as one table of numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from etils import epath

from mwjax.audit.model_result import ModelAudit

if TYPE_CHECKING:
    from mwjax.audit.result import AuditResult

Number = int | float
# mean: a count per something, or a ratio of counts; share: 0 to 1; size: nats, not negative; signed: nats.
Kind = Literal["count", "mean", "share", "size", "signed"]


@dataclasses.dataclass(frozen=True)
class Figure:
    """One figure of every column.

    section, name: what it is of; sections are ``RECORDED`` and the others below. values: None where a column has no
    such figure. difference: the second value less the first, where there are two columns and both have one.
    """

    section: str
    name: str
    kind: Kind
    values: tuple[Number | None, ...]
    difference: Number | None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Figures side by side, one column per file or model."""

    columns: tuple[str, ...]
    figures: tuple[Figure, ...]

    def value(self, section: str, name: str) -> tuple[Number | None, ...]:
        """The values of one figure."""
        return next(found.values for found in self.figures if (found.section, found.name) == (section, name))

    def section(self, section: str) -> tuple[Figure, ...]:
        """The figures of one section."""
        return tuple(found for found in self.figures if found.section == section)


# Sections of the figures. wrong_prefix: share of a method's loss tokens; lost: share of the trainable sampled tokens.
RECORDED, CONTEXTS, WRONG, LOST, ROW_TOKENS = "recorded", "contexts", "wrong_prefix", "lost", "row_tokens"
SCORED, LOGDIFF, LOGDIFF_MAX = "scored", "logdiff_mean", "logdiff_max"
DELTA, EXPECTED, KL = "delta_mean", "delta_expected_sign", "kl_mean"
DISTANCE, MISSING = "distance ", "missing "

Entry = tuple[str, str, Kind, Number | None]


def compare_audits(results: Sequence[AuditResult], names: Sequence[str] | None = None) -> Comparison:
    """The verdict figures of several audits, without their models. names: of the columns, by default the files."""
    files = [", ".join(result.files) or f"rollouts {k + 1}" for k, result in enumerate(results)]
    return _side_by_side(files if names is None else names, [_audit_figures(result) for result in results])


def compare_models(models: Sequence[ModelAudit], names: Sequence[str] | None = None) -> Comparison:
    """What several models say. names: of the columns, by default the models'."""
    called = [model.model for model in models] if names is None else names
    return _side_by_side(called, [_model_figures(model) for model in models])


def short_names(paths: Sequence[epath.PathLike]) -> list[str]:
    """The ends of some paths, as many parts of each as it takes to tell them apart; equal paths are numbered."""
    parts = [str(path).rstrip("/").split("/") for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{part[-1]} ({k})" for k, part in enumerate(parts, start=1)]


def _side_by_side(names: Iterable[str], columns: Sequence[Iterable[Entry]]) -> Comparison:
    """One figure for every (section, name) that any column has, in the order of the first that has it."""
    values: list[dict[tuple[str, str], Number | None]] = [{} for _ in columns]
    kinds: dict[tuple[str, str], Kind] = {}
    for own, column in zip(values, columns):
        for section, name, kind, value in column:
            own[section, name] = value
            kinds.setdefault((section, name), kind)
    sections = list(dict.fromkeys(section for section, _ in kinds))
    figures = []
    for section, name in sorted(kinds, key=lambda figure: sections.index(figure[0])):
        row = tuple(own.get((section, name)) for own in values)
        figures.append(Figure(section, name, kinds[section, name], row, _difference(row)))
    return Comparison(tuple(names), tuple(figures))


def _difference(row: tuple[Number | None, ...]) -> Number | None:
    if len(row) != 2 or row[0] is None or row[1] is None:
        return None
    return row[1] - row[0]


def _audit_figures(result: AuditResult) -> Iterator[Entry]:
    for name, count in (
        ("rollouts", result.rollouts),
        ("refused", len(result.refused)),
        ("turns", result.turns),
        ("views", result.views),
        ("view tokens", result.view_tokens),
        ("sampled tokens", result.sampled_tokens),
        ("not trainable", result.untrainable_tokens),
        ("without a log-prob", result.tokens_without_logprobs),
    ):
        yield RECORDED, name, "count", count
    contexts: tuple[tuple[str, Kind, Number | None], ...] = (
        ("forks of main (K) per rollout", "mean", result.forks_per_rollout),
        ("evictions (paper's K) per rollout", "mean", result.evictions_per_rollout),
        ("tokens per eviction", "mean", result.evicted_span_mean),
        ("compression depth", "share", result.depth),
        ("rollouts with compression", "share", result.frequency),
        ("diverging leaves (D)", "count", result.diverging_leaves),
        ("diverging leaves per rollout", "mean", result.diverging_per_rollout),
        ("trie ratio", "mean", result.trie_ratio),
        ("trie ratio over groups", "mean", result.group_trie_ratio),
    )
    for name, kind, value in contexts:
        yield CONTEXTS, name, kind, value
    for found in result.methods:
        yield WRONG, found.method, "share", found.wrong_share
        yield LOST, found.method, "share", found.lost / result.loss_tokens if result.loss_tokens else None
        yield ROW_TOKENS, found.method, "count", found.row_tokens + found.teacher_tokens


def _model_figures(model: ModelAudit) -> Iterator[Entry]:
    yield SCORED, "parameters", "count", model.parameters
    yield SCORED, "rollouts", "count", len(model.scored)
    yield SCORED, "diverging leaves", "count", model.kl.leaves
    for found in model.methods:
        yield LOGDIFF, found.method, "size", found.mean
        yield LOGDIFF_MAX, found.method, "size", found.max_token
    for delta in model.deltas:
        name = delta.name if delta.of == "all" else f"{delta.name}, {delta.of}"
        yield DELTA, name, "signed", delta.mean
        yield EXPECTED, f"{name} ({'-' if delta.expected == 'negative' else '+'})", "share", delta.share_expected
    yield KL, "all diverging leaves", "size", model.kl.mean_kl
    for prefix, groups in (
        (DISTANCE, model.kl_by_distance),
        ("", model.kl_by_junction),
        (MISSING, model.kl_by_missing),
    ):
        for group in groups:
            yield KL, prefix + group.label, "size", group.mean_kl
