"""Self-contained HTML pages with figures: nothing is fetched, so they open offline and travel as one file."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, MUTED, LINE = "#1f2933", "#66727f", "#dde2e7"
BLUE, RED, GREEN, ORANGE = "#3b6ea8", "#b8473d", "#3d8361", "#c98a2b"

STYLE = f"""
:root {{ color-scheme: light; }}
body {{ margin: 0 auto; max-width: 62rem; padding: 2.5rem 1.25rem 4rem; background: #fff; color: {INK};
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }}
h1 {{ font-size: 1.6rem; line-height: 1.25; margin: 0 0 .25rem; }}
h2 {{ font-size: 1.15rem; margin: 2.25rem 0 .5rem; padding-top: 1rem; border-top: 1px solid {LINE}; }}
p {{ margin: .5rem 0; max-width: 48rem; }}
.note {{ color: {MUTED}; font-size: .9rem; }}
.verdict {{ border-left: 4px solid {BLUE}; padding: .25rem 0 .25rem 1rem; margin: 1.25rem 0; }}
.verdict.good {{ border-color: {GREEN}; }} .verdict.bad {{ border-color: {RED}; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; margin: .75rem 0; font-variant-numeric: tabular-nums; font-size: .94rem; }}
th, td {{ padding: .3rem .9rem .3rem 0; text-align: right; vertical-align: top; border-bottom: 1px solid {LINE}; }}
th {{ font-weight: 600; color: {MUTED}; }} th:first-child, td:first-child {{ text-align: left; }}
tr.heading th {{ padding-top: 1rem; color: {INK}; }}
table.facts td {{ text-align: left; border: 0; padding: .15rem 1.5rem .15rem 0; }}
table.facts td:first-child {{ color: {MUTED}; white-space: pre; }}
code, .ids {{ font: .88em/1.45 ui-monospace, "SF Mono", Menlo, Consolas, monospace; overflow-wrap: anywhere; }}
figure {{ margin: 1rem 0; }} figure svg {{ max-width: 100%; height: auto; }}
figcaption {{ color: {MUTED}; font-size: .9rem; max-width: 48rem; }}
"""


class Section(NamedTuple):
    """A part of a page: its heading (none if empty) and its HTML."""

    heading: str
    body: str


def html_page(title: str, sections: Iterable[Section], *, subtitle: str = "") -> str:
    """A whole page. ``title``, ``subtitle`` and headings are plain text, bodies are HTML."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{html.escape(title)}</h1>",
    ]
    if subtitle:
        parts.append(f'<p class="note">{html.escape(subtitle)}</p>')
    for section in sections:
        heading = f"<h2>{html.escape(section.heading)}</h2>" if section.heading else ""
        parts.append(f"<section>{heading}{section.body}</section>")
    return "\n".join([*parts, "</body></html>\n"])


def paragraph(text: str, kind: str = "") -> str:
    """Plain text as a paragraph; kind: ``note`` or nothing."""
    return f"<p{_class(kind)}>{html.escape(text)}</p>"


def verdict(text: str, advice: str, good: bool) -> str:
    """The answer, marked in colour, and what to do."""
    return (
        f'<div class="verdict {"good" if good else "bad"}"><p>{html.escape(text)}</p><p>{html.escape(advice)}</p></div>'
    )


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Plain text cells; the first column is left-aligned, the others are right-aligned. A row of one cell is the
    heading of those that follow."""
    head = "".join(f"<th>{html.escape(header)}</th>" for header in headers)
    body = "".join(_row(row, len(headers)) for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _row(cells: Sequence[str], columns: int) -> str:
    if len(cells) == 1:
        return f'<tr class="heading"><th colspan="{columns}">{html.escape(cells[0])}</th></tr>'
    return "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"


def facts(rows: Iterable[tuple[str, str]], value_kind: str = "") -> str:
    """Names and values, without lines; value_kind ``ids`` sets the values in a fixed width."""
    cells = (
        f"<tr><td>{html.escape(name)}</td><td{_class(value_kind)}>{html.escape(value)}</td></tr>"
        for name, value in rows
    )
    return f'<table class="facts"><tbody>{"".join(cells)}</tbody></table>'


def bullet_list(items: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{html.escape(item)}</li>" for item in items) + "</ul>"


def figure(fig: Figure, caption: str) -> str:
    """A matplotlib figure in the page, with what it shows in words."""
    return f"<figure>{figure_svg(fig)}<figcaption>{html.escape(caption)}</figcaption></figure>"


def figure_svg(fig: Figure) -> str:
    """A matplotlib figure as an inline ``<svg>`` element, its text kept as text."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "mwjax"}):
        fig.savefig(buffer, format="svg", metadata={"Date": None}, bbox_inches="tight")
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    return re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)


def new_figure(width: float = 7.0, height: float = 2.6, panels: int = 1) -> tuple[Figure, list[Any]]:
    """A figure of ``panels`` axes side by side in the page's style, without any global state; sizes in inches."""
    import matplotlib
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "font.family": "sans-serif",
        "font.sans-serif": ["system-ui", "Segoe UI", "Helvetica", "Arial", "DejaVu Sans"],
        "font.size": 9,
        "text.color": INK,
        "axes.labelcolor": MUTED,
        "axes.edgecolor": LINE,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "xtick.color": MUTED,
        "ytick.color": INK,
        "grid.color": LINE,
    }
    with matplotlib.rc_context(style):
        fig = Figure(figsize=(width, height), layout="constrained")
        axes = fig.subplots(1, panels, squeeze=False)
    return fig, list(axes[0])


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""
