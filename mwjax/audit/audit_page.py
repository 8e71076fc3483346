"""An audit as one HTML page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mwjax.audit import report
from mwjax.audit.comparison import compare_models
from mwjax.audit.comparison_page import models_section
from mwjax.audit.model_page import model_sections
from mwjax.audit.report import Section
from mwjax.audit.result import AuditResult, MethodAudit, RowsAudit
from mwjax.audit.tables import (
    METHOD_HEADERS,
    METHOD_LEGEND,
    context_facts,
    method_rows,
    mismatch_facts,
    notes,
    rows_facts,
    token_facts,
)
from mwjax.audit.verdict import percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def audit_html(result: AuditResult) -> str:
    """The whole page: verdict, figures and tables; a user's rows first where they were checked."""
    sections = [Section("", report.verdict(result.verdict, result.advice, result.consistent))]
    if result.rows is not None:
        sections = [*_rows_sections(result.rows), Section("The rollouts", sections[0].body)]
    methods = report.figure(
        wrong_share_figure(result), "Loss tokens whose training prefix is not the one they were sampled under."
    )
    methods += report.table(METHOD_HEADERS, method_rows(result))
    methods += report.paragraph(METHOD_LEGEND.format(common=result.common_survivors), "note")
    methods += "".join(report.paragraph(note, "note") for note in notes(result))
    sections.append(Section("What each method would train", methods))
    wrong = [found for name in ("naive_compressed", "naive_full") if (found := result.method(name)).wrong]
    if wrong:
        caption = "Loss tokens with a wrong prefix, by how many tokens it lacks (missing) and has too many (extra)."
        sections.append(Section("How wrong the prefixes are", report.figure(sizes_figure(wrong), caption)))
    contexts = report.facts(context_facts(result))
    if result.junctions:
        caption = "Where the main chain's prompt stops continuing what was there, by what happened."
        contexts = report.figure(_junctions_figure(result.junctions), caption) + contexts
    sections.append(Section("What happened to the contexts", contexts))
    if len(result.models) > 1:
        sections.append(models_section(compare_models(result.models), result.models))
    sections += [section for model in result.models for section in model_sections(model)]
    sections.append(Section("What was recorded", report.facts(token_facts(result))))
    if result.most_affected:
        rows = [
            (one.id, f"{one.wrong:,}", f"{one.loss_tokens:,}", f"{one.junctions:,}") for one in result.most_affected
        ]
        headers = ("rollout", "wrong prefix", "loss tokens", "forks")
        sections.append(Section("Most affected rollouts, naive_compressed", report.table(headers, rows)))
    if result.warnings:
        sections.append(Section("Warnings", report.bullet_list(result.warnings)))
    if result.refused:
        sections.append(Section("Refused input", report.bullet_list(str(refusal) for refusal in result.refused[:100])))
    title = "Is this data conditioning-consistent?"
    return report.html_page(
        title, sections, subtitle="mwjax audit of " + (", ".join(result.files) or "rollouts in memory")
    )


def _rows_sections(rows: RowsAudit) -> list[Section]:
    body = report.verdict(rows.verdict, rows.advice, rows.consistent) + report.facts(rows_facts(rows))
    sections = [Section(f"The training rows in {rows.file}", body)]
    if rows.mismatches:
        shown = ""
        for found in rows.mismatches:
            headline, details = mismatch_facts(found)
            shown += report.paragraph(headline) + report.facts(details, "ids")
        sections.append(Section("First mismatches", shown))
    if rows.refused:
        sections.append(Section("Refused rows", report.bullet_list(str(refusal) for refusal in rows.refused[:100])))
    return sections


def wrong_share_figure(result: AuditResult) -> Figure:
    """Share of loss tokens with a wrong prefix, by method."""
    fig, (axes,) = report.new_figure(height=2.4)
    methods = result.methods[::-1]
    place = np.arange(len(methods))
    shares = [100 * (found.wrong_share or 0) for found in methods]
    common = [100 * (found.common_wrong_share or 0) for found in methods]
    axes.barh(place + 0.18, shares, 0.34, color=report.BLUE, label="of its own loss tokens")
    axes.barh(place - 0.18, common, 0.34, color="#a9c1dd", label="of the tokens every method trains")
    for at, found in zip(place, methods):
        axes.annotate(
            percent(found.wrong_share),
            (100 * (found.wrong_share or 0), at + 0.18),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set_yticks(place, [found.method for found in methods])
    axes.tick_params(length=0)
    axes.set_xlim(0, max(*shares, *common, 1) * 1.15)
    axes.set_xlabel("wrong prefix, %")
    axes.grid(axis="x")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, fontsize=8, frameon=False)
    return fig


def _junctions_figure(junctions: dict[str, int]) -> Figure:
    fig, (axes,) = report.new_figure(height=0.6 + 0.32 * len(junctions))
    names = list(junctions)[::-1]
    bars = axes.barh(names, [junctions[name] for name in names], 0.6, color=report.BLUE)
    axes.bar_label(bars, padding=4, fontsize=8)
    axes.tick_params(length=0)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)
    axes.margins(x=0.1)
    return fig


def sizes_figure(methods: list[MethodAudit]) -> Figure:
    """How many tokens the wrong prefixes lack and have too many, one panel a method."""
    fig, panels = report.new_figure(height=2.4, panels=len(methods))
    for axes, found in zip(panels, methods):
        bins = max(len(found.missing_histogram), len(found.extra_histogram))
        for shift, counts, colour, label in (
            (-0.2, found.missing_histogram, report.RED, "missing"),
            (0.2, found.extra_histogram, report.ORANGE, "extra"),
        ):
            axes.bar(np.arange(len(counts)) + shift, counts, 0.38, color=colour, label=label)
        step = max(1, -(-bins // 7))
        ticks = np.arange(0, bins, step)
        axes.set_xticks(ticks, [_bin_name(int(tick)) for tick in ticks], fontsize=8)
        axes.set_title(found.method, loc="left", fontsize=9)
        axes.set_xlabel("tokens")
        axes.grid(axis="y")
        axes.tick_params(length=0)
    panels[0].set_ylabel("loss tokens")
    panels[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1), fontsize=8, frameon=False)
    return fig


def _bin_name(bits: int) -> str:
    return str(bits) if bits < 2 else f"{2 ** (bits - 1):,}+"
