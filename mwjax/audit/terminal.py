"""An audit in the terminal. Lines fit 80 columns and read the same in a pipe."""

from __future__ import annotations

from collections.abc import Sequence

from rich.bar import Bar
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mwjax.audit.compared import ComparedFiles
from mwjax.audit.comparison import LOGDIFF, WRONG, Comparison, compare_models
from mwjax.audit.comparison_tables import TITLES, comparison_headers, comparison_notes, comparison_rows, value_text
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
from mwjax.audit.result import AuditResult, RowsAudit
from mwjax.audit.tables import (
    METHOD_HEADERS,
    METHOD_LEGEND,
    Facts,
    context_facts,
    method_rows,
    mismatch_facts,
    notes,
    plural,
    rows_facts,
    token_facts,
)
from mwjax.audit.text import harmless

BAR_COLOURS, BAR_WIDTH = ("blue", "yellow", "green", "red", "magenta", "cyan"), 28


def show(result: AuditResult, console: Console) -> None:
    """Print an audit: verdict first, then the figures it rests on; with rows, those come first."""
    if result.rows is not None:
        _show_rows(result.rows, console)
        console.print()
    _heading(console, "The rollouts", ", ".join(result.files))
    _verdict(console, result.consistent, result.verdict, result.advice)
    _methods(console, result)
    console.print()
    _facts(console, "Contexts", context_facts(result))
    _facts(console, "Recorded", token_facts(result))
    if result.most_affected:
        affected = [
            (one.id, f"{one.wrong:,} of {one.loss_tokens:,} loss tokens ({plural(one.junctions, 'fork')} of main)")
            for one in result.most_affected
        ]
        _facts(console, "Most affected rollouts, naive_compressed", affected)
    if len(result.models) == 1:
        _show_model(result.models[0], console)
    elif result.models:
        _heading(console, "What the models say", scored_of(result.models[0]))
        _comparison(compare_models(result.models), LOGDIFF, console, comparison_notes(result.models))
    for warning in result.warnings:
        console.print(Text.assemble(("Warning: ", "yellow"), warning))


def show_compared(compared: ComparedFiles, console: Console) -> None:
    """Print audits of several files side by side: their verdicts, then the figures, then what models say."""
    for name, result in zip(compared.names, compared.results):
        _heading(console, name, "")
        _verdict(console, result.consistent, result.verdict, result.advice)
    _comparison(compared.figures, WRONG, console)
    if compared.models is not None:
        _heading(console, "What the models say", "")
        models = [model for result in compared.results for model in result.models]
        _comparison(compared.models, LOGDIFF, console, comparison_notes(models))
    for name, result in zip(compared.names, compared.results):
        for warning in result.warnings:
            console.print(Text.assemble((f"Warning: {name}: ", "yellow"), warning))


def _comparison(comparison: Comparison, drawn: str, console: Console, said: Sequence[str] = ()) -> None:
    """The whole table, what is to be ``said`` about it, and the figures of section ``drawn`` as bars."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for number, header in enumerate(comparison_headers(comparison)):
        table.add_column(
            harmless(header),
            justify="right" if number else "left",
            no_wrap=not number,
            overflow="fold",
            vertical="bottom",
        )
    for row in comparison_rows(comparison):
        if len(row) == 1:
            table.add_row(Text(row[0], "bold"))
        else:
            table.add_row(*(Text(harmless(f"{'' if number else '  '}{cell}")) for number, cell in enumerate(row)))
    console.print(_indented(table))
    console.print()
    figures = comparison.section(drawn)
    longest = max((value for found in figures for value in found.values if value is not None), default=0)
    for note in said:
        console.print(_indented(Text(note, "dim"), 2))
    if said:
        console.print()
    if not longest:
        return
    console.print(Text(TITLES[drawn], "bold"))
    bars = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    for found in figures:
        for number, (name, value) in enumerate(zip(comparison.columns, found.values)):
            colour = BAR_COLOURS[number % len(BAR_COLOURS)]
            bar = Bar(longest, 0, value or 0, width=BAR_WIDTH, color=colour)
            bars.add_row("" if number else found.name, Text(harmless(name), colour), bar, value_text(found.kind, value))
    console.print(_indented(bars))
    console.print()


def _show_rows(rows: RowsAudit, console: Console) -> None:
    _heading(console, "The training rows", rows.file)
    _verdict(console, rows.consistent, rows.verdict, rows.advice)
    _facts(console, "What they train", rows_facts(rows))
    if rows.mismatches:
        console.print(Text("First mismatches", "bold"))
    for found in rows.mismatches:
        headline, details = mismatch_facts(found)
        console.print(Text(f"  {headline}"))
        console.print(_indented(_two_columns(details), 4))


def _show_model(model: ModelAudit, console: Console) -> None:
    _heading(console, f"What {model.model} says", scored_of(model))
    for title, headers, rows in (
        ("logdiff", LOGDIFF_HEADERS, logdiff_rows(model)),
        ("Change of a token's log-prob under the wrong prefix", DELTA_HEADERS, delta_rows(model)),
        ("Conditioning KL at the diverging leaves", KL_HEADERS, kl_rows(model)),
    ):
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
        for number, header in enumerate(headers):
            table.add_column(header, justify="right" if number else "left", no_wrap=not number, vertical="bottom")
        for row in rows:
            table.add_row(*(Text(harmless(cell)) for cell in row))
        console.print()
        console.print(Text(title, "bold"))
        console.print(_indented(table))
    console.print()
    for note in model_notes(model):
        console.print(_indented(Text(note, "dim"), 2))
    console.print()


def _heading(console: Console, title: str, files: str) -> None:
    console.print(Text.assemble((title, "bold"), f"  {files}" if files else ""))


def _verdict(console: Console, consistent: bool, verdict: str, advice: str) -> None:
    console.print()
    console.print(_indented(Text(verdict, "green" if consistent else "red")))
    console.print(_indented(Text(advice)))
    console.print()


def _methods(console: Console, result: AuditResult) -> None:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for number, header in enumerate(METHOD_HEADERS):
        table.add_column(
            header.replace(" ", "\n", 1), justify="right" if number else "left", no_wrap=True, vertical="bottom"
        )
    for found, row in zip(result.methods, method_rows(result)):
        wrong = "red" if found.wrong else "green" if found.loss_tokens else "dim"
        table.add_row(*(Text(cell, wrong if number in (3, 4) else "") for number, cell in enumerate(row)))
    console.print(_indented(table, 2))
    legend = [METHOD_LEGEND.format(common=result.common_survivors), *notes(result)]
    for note in legend:
        console.print(_indented(Text(note, "dim"), 2))


def _facts(console: Console, title: str, facts: Facts) -> None:
    console.print(Text(title, "bold"))
    console.print(_indented(_two_columns(facts)))
    console.print()


def _indented(what: RenderableType, by: int = 2) -> Padding:
    return Padding(what, (0, 0, 0, by), expand=False)


def _two_columns(facts: Facts) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in facts:
        table.add_row(Text(harmless(name)), Text(harmless(value)))
    return table
