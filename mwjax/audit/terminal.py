"""An audit in the terminal. Lines fit 80 columns and read the same in a pipe."""

from __future__ import annotations

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

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
    for model in result.models:
        _show_model(model, console)
    for warning in result.warnings:
        console.print(Text.assemble(("Warning: ", "yellow"), warning))


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
