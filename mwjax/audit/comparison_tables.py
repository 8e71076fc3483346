"""A comparison as rows of text, for the terminal and the HTML page alike."""

from __future__ import annotations

from collections.abc import Iterable

from mwjax.audit.comparison import (
    CONTEXTS,
    DELTA,
    EXPECTED,
    KL,
    LOGDIFF,
    LOGDIFF_MAX,
    LOST,
    RECORDED,
    ROW_TOKENS,
    SCORED,
    WRONG,
    Comparison,
    Kind,
    Number,
)
from mwjax.audit.model_result import ModelAudit
from mwjax.audit.model_tables import PAPER, model_notes, size
from mwjax.audit.verdict import percent

TITLES = {
    RECORDED: "Recorded",
    CONTEXTS: "Contexts",
    WRONG: "Wrong prefix, of loss tokens",
    LOST: "Lost, of trainable tokens",
    ROW_TOKENS: "Row tokens",
    SCORED: "Scored",
    LOGDIFF: "logdiff, mean, nats",
    LOGDIFF_MAX: "logdiff, largest, nats",
    DELTA: "Under the wrong prefix, nats",
    EXPECTED: "Share of the expected sign",
    KL: "Conditioning KL, mean, nats",
}


def comparison_headers(comparison: Comparison) -> tuple[str, ...]:
    """The columns of :func:`comparison_rows`."""
    return ("", *comparison.columns, *(("difference",) if len(comparison.columns) == 2 else ()))


def comparison_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """One row per figure; a row of one cell is the title of those that follow. Two columns have their difference."""
    rows: list[tuple[str, ...]] = []
    section = None
    for found in comparison.figures:
        if found.section != section:
            section = found.section
            rows.append((TITLES[section],))
        cells = tuple(value_text(found.kind, value) for value in found.values)
        if len(comparison.columns) == 2:
            cells += (_difference(found.kind, found.difference),)
        rows.append((found.name, *cells))
    return rows


def comparison_notes(models: Iterable[ModelAudit]) -> list[str]:
    """What the figures of some models mean, and what they cannot say."""
    said = dict.fromkeys(note for model in models for note in model_notes(model))
    return [note for note in said if not note.startswith(PAPER)]


def value_text(kind: Kind, value: Number | None) -> str:
    """A value of a figure in a few characters."""
    if value is None:
        return "N/A"
    if kind == "count":
        return f"{value:,}"
    if kind == "share":
        return percent(value)
    return size(value) if kind == "size" else f"{value:+.2f}" if kind == "signed" else f"{value:,.2f}"


def _difference(kind: Kind, value: Number | None) -> str:
    if value is None:
        return "N/A"
    if value == 0:
        return "0"
    if kind == "count":
        return f"{value:+,}"
    if kind == "share":
        return f"{100 * value:+.1f} pp"
    return size(value, "+") if kind == "size" else f"{value:+,.2f}"
