"""What a model says of rollouts, as sections of the HTML page, with figures in the kind of MemoryWalker's 1b and 7."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mwjax.audit import report
from mwjax.audit.model_result import ModelAudit
from mwjax.audit.model_tables import (
    DELTA_HEADERS,
    KL_HEADERS,
    LOGDIFF_HEADERS,
    delta_rows,
    kl_rows,
    logdiff_rows,
    model_notes,
    scored_of,
)
from mwjax.audit.report import Section

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMALLEST = 1e-6


def model_sections(model: ModelAudit) -> list[Section]:
    """The sections of one model."""
    body = report.paragraph(scored_of(model)) + report.table(LOGDIFF_HEADERS, logdiff_rows(model))
    sections = [Section(f"What {model.model} says: logdiff", body)]
    deltas = report.table(DELTA_HEADERS, delta_rows(model))
    if model.leaves.kl or model.delta_full:
        caption = (
            "How the log-prob of a token changes under the wrong prefix. Left: diverging leaves in the last context. "
            "Right: tokens sampled while something was evicted, after all that was ever live. Shaded: expected sign."
        )
        deltas = report.figure(deltas_figure(model), caption) + deltas
    sections.append(Section(f"{model.model}: log-probs under the wrong prefix", deltas))
    kl = report.table(KL_HEADERS, kl_rows(model))
    if model.leaves.kl:
        caption = (
            "Every dot is a diverging leaf; the line is the mean, in steps of a factor of two. 0 is the first token "
            "behind the place where its two prefixes last differ."
        )
        kl = report.figure(distance_figure(model), caption) + kl
    kl += "".join(report.paragraph(note, "note") for note in model_notes(model))
    return [*sections, Section(f"{model.model}: conditioning KL", kl)]


def distance_figure(model: ModelAudit) -> Figure:
    """KL and |delta_comp| of the diverging leaves against their distance from the cut (the kind of Figure 1b)."""
    fig, panels = report.new_figure(8.6, 3.0, panels=2)
    distance = np.array(model.leaves.distance)
    for axes, values, colour, name in (
        (panels[0], np.array(model.leaves.kl), report.BLUE, "conditioning KL, nats"),
        (panels[1], np.abs(model.leaves.delta_comp), report.RED, "|delta_comp|, nats"),
    ):
        axes.scatter(distance + 1, np.maximum(values, SMALLEST), s=9, color=colour, alpha=0.3, lw=0)
        # Bin b holds the distances d with 2^b <= d + 1 < 2^(b + 1).
        of = np.floor(np.log2(distance + 1)).astype(int)
        bins = np.unique(of)
        means = [max(float(values[of == b].mean()), SMALLEST) for b in bins]
        axes.plot([float((distance[of == b] + 1).mean()) for b in bins], means, "o-", color=report.INK, lw=1.6, ms=4)
        axes.set_xscale("log")
        axes.set_yscale("log")
        ticks = 2 ** np.arange(0, int(of.max()) + 2, 2 if of.max() > 6 else 1)
        axes.set_xticks(ticks, [f"{tick - 1:,}" for tick in ticks])
        axes.minorticks_off()
        axes.set_title(name, loc="left", fontsize=9)
        axes.set_xlabel("tokens behind the cut")
        axes.grid(axis="y")
    return fig


def deltas_figure(model: ModelAudit) -> Figure:
    """Distributions of delta_comp and delta_full over tokens (the kind of Figure 7)."""
    fig, panels = report.new_figure(8.6, 2.8, panels=2)
    _distribution(panels[0], np.array(model.leaves.delta_comp), "delta_comp", report.RED, -1)
    _distribution(panels[1], np.array(model.delta_full), "delta_full", report.ORANGE, 1)
    panels[0].set_ylabel("tokens")
    return fig


def _distribution(axes: Any, values: np.ndarray, name: str, colour: str, expected: int) -> None:
    limit = max(float(np.quantile(np.abs(values), 0.98)), 0.1) if len(values) else 1.0
    edges = np.linspace(-limit, limit, 42)
    axes.axvspan(0, expected * limit, color="#f1f3f5", lw=0)
    counts, _, _ = axes.hist(np.clip(values, -limit, limit), edges, color=colour)
    axes.axvline(0, color=report.INK, lw=0.8)
    said = f"{name}, no such tokens"
    if len(values):
        axes.axvline(values.mean(), color=report.INK, lw=1.4, ls=(0, (3, 2)))
        said = f"{name}: mean {values.mean():+.2f} (dashed), {100 * (values * expected > 0).mean():.0f} % expected sign"
    # Most tokens change by next to nothing: linear up to 10 tokens, logarithmic above, so that the tails show.
    axes.set_yscale("symlog", linthresh=10)
    most = max(float(counts.max()), 10.0)
    ticks = [tick for tick in (0, 5, 10, 30, 100, 300, 1_000, 10_000, 100_000, 1_000_000) if tick <= most]
    axes.set_ylim(0, 1.3 * most)
    axes.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(-limit, limit)
    axes.set_title(said, loc="left", fontsize=9)
    axes.set_xlabel("nats; the outer bars hold what is beyond")
