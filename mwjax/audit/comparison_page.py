"""A comparison as an HTML page, or as sections of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mwjax.audit import report
from mwjax.audit.compared import ComparedFiles
from mwjax.audit.comparison import DISTANCE, KL, LOGDIFF, LOST, WRONG, Comparison, Figure
from mwjax.audit.comparison_tables import comparison_headers, comparison_notes, comparison_rows
from mwjax.audit.model_result import ModelAudit
from mwjax.audit.model_tables import size
from mwjax.audit.report import Section
from mwjax.audit.verdict import percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

COLOURS = (report.BLUE, report.ORANGE, report.GREEN, report.RED, "#7a66a8", "#4d98a3", "#8d9199")


def compared_html(compared: ComparedFiles) -> str:
    """The whole page of a comparison of files."""
    sections = [
        Section(
            name,
            report.verdict(result.verdict, result.advice, result.consistent)
            + (report.bullet_list(result.warnings) if result.warnings else ""),
        )
        for name, result in zip(compared.names, compared.results)
    ]
    caption = "Left: loss tokens whose training prefix is not the one they were sampled under. Right: sampled tokens "
    caption += "that a method does not train."
    body = report.figure(files_figure(compared.figures), caption) + _table(compared.figures)
    sections.append(Section("Side by side", body))
    if compared.models is not None:
        scored = [model for result in compared.results for model in result.models]
        sections.append(models_section(compared.models, scored))
    refused = [str(refusal) for result in compared.results for refusal in result.refused]
    if refused:
        sections.append(Section("Refused input", report.bullet_list(refused[:100])))
    subtitle = "mwjax audit of " + ", ".join(file for result in compared.results for file in result.files)
    return report.html_page("Are these data conditioning-consistent?", sections, subtitle=subtitle)


def models_section(comparison: Comparison, models: Sequence[ModelAudit]) -> Section:
    """What models say, side by side."""
    body = ""
    if drawn := models_figure(comparison):
        caption = "Left: how far off log-probs are under each method. Right: mean conditioning KL of the diverging "
        body = report.figure(drawn, caption + "leaves, by how many tokens directly before them both prefixes share.")
    notes = "".join(report.paragraph(note, "note") for note in comparison_notes(models))
    return Section("What the models say, side by side", body + _table(comparison) + notes)


def files_figure(comparison: Comparison) -> Drawing:
    """Shares of wrong and of lost tokens, by method, a bar per file."""
    methods = len(comparison.section(WRONG))
    height = 1.2 + methods * (0.12 + 0.16 * len(comparison.columns))
    fig, panels = report.new_figure(8.6, height, panels=2)
    for axes, section, label in zip(panels, (WRONG, LOST), ("wrong prefix, %", "lost, %")):
        _bars(axes, comparison.section(section), comparison.columns, lambda value: percent(value), 100)
        axes.set_xlabel(label)
    panels[1].set_yticklabels([])
    _legend(panels[0])
    return fig


def models_figure(comparison: Comparison) -> Drawing | None:
    """logdiff by method, a bar per model, and KL by distance, a line per model; None where no model has either."""
    logdiff = comparison.section(LOGDIFF)
    distances = [found for found in comparison.section(KL) if found.name.startswith(DISTANCE)]
    if not any(value is not None for found in (*logdiff, *distances) for value in found.values):
        return None
    height = max(2.8, 1.2 + len(logdiff) * (0.12 + 0.16 * len(comparison.columns)))
    fig, panels = report.new_figure(8.6, height, panels=2)
    _bars(panels[0], logdiff, comparison.columns, size, 1)
    panels[0].set_xlabel("mean logdiff, nats")
    for number, name in enumerate(comparison.columns):
        values = [np.nan if found.values[number] is None else found.values[number] for found in distances]
        panels[1].plot(values, "o-", color=_colour(number), lw=1.6, ms=4, label=name)
    panels[1].set_xticks(range(len(distances)), [found.name.removeprefix(DISTANCE) for found in distances])
    panels[1].set_xlabel("tokens behind the cut")
    panels[1].set_title("mean conditioning KL, nats", loc="left", fontsize=9)
    panels[1].set_yscale("log", nonpositive="clip")  # next to the cut and far from it are orders of magnitude apart
    panels[1].grid(axis="y")
    _legend(panels[0])
    return fig


def _bars(axes: Any, figures: Sequence[Figure], columns: Sequence[str], said: Any, scale: float) -> None:
    place, width = np.arange(len(figures))[::-1], 0.84 / len(columns)
    for number, name in enumerate(columns):
        known = [(at, found.values[number]) for at, found in zip(place, figures)]
        shift = (len(columns) - 1) / 2 - number
        lengths = [0 if value is None else scale * value for _, value in known]
        axes.barh(place + width * shift, lengths, 0.9 * width, color=_colour(number), label=name)
        for (at, value), length in zip(known, lengths):
            text = "N/A" if value is None else said(value)
            axes.annotate(
                text, (length, at + width * shift), (4, 0), textcoords="offset points", va="center", fontsize=7.5
            )
    axes.set_yticks(place, [found.name for found in figures])
    axes.tick_params(length=0)
    longest = max((value for found in figures for value in found.values if value is not None), default=0)
    axes.set_xlim(0, 1.2 * scale * (longest or 0.01))  # room for the numbers
    axes.grid(axis="x")


def _legend(axes: Any) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), fontsize=8, frameon=False)


def _table(comparison: Comparison) -> str:
    return report.table(comparison_headers(comparison), comparison_rows(comparison))


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]
