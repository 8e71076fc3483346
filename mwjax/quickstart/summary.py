"""What the quickstart found, method by method, as rows of text for the terminal and the page alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mwjax.audit import AuditResult
from mwjax.audit.logdiff import shift
from mwjax.audit.tables import notes
from mwjax.audit.verdict import percent
from mwjax.quickstart.pretrained import MODEL, Scores
from mwjax.quickstart.stages import times
from mwjax.quickstart.training import WARM_UP, TrainingRun
from mwjax.tree import METHODS

if TYPE_CHECKING:
    from mwjax.quickstart.run import Quickstart

HEADERS = (
    "method",
    "logdiff mean",
    "logdiff max",
    "wrong prefix",
    "tokens lost",
    "loss tokens",
    "row tokens",
    "step cost",
    "re- compiles",
)
NOT_TRAINED = "-"


def method_rows(audit: AuditResult, scores: Scores, runs: Sequence[TrainingRun]) -> list[tuple[str, ...]]:
    """One row per method, under :data:`HEADERS`."""
    trained = {run.method: run for run in runs}
    rows: list[tuple[str, ...]] = []
    for method in METHODS:
        measured, audited, run = scores.of(method), audit.method(method), trained.get(method)
        mean, most = (None, None) if measured is None else (measured.mean, measured.max_token)
        lost = audited.lost / audit.loss_tokens if audit.loss_tokens else None
        rows.append(
            (
                method,
                "N/A" if mean is None else f"{mean:.2g}",
                "N/A" if most is None else f"{most:.2g}",
                percent(audited.wrong_share),
                percent(lost),
                NOT_TRAINED if run is None else f"{run.total('loss_tokens'):,}",
                NOT_TRAINED if run is None else f"{run.total('tokens'):,}",
                NOT_TRAINED if run is None else _cost(run, trained.get("naive_compressed")),
                NOT_TRAINED if run is None or run.recompiles is None else str(run.recompiles),
            )
        )
    return rows


def _cost(run: TrainingRun, base: TrainingRun | None) -> str:
    if run.step_seconds is None or base is None or not base.step_seconds:
        return "N/A"
    return f"{run.step_seconds / base.step_seconds:.2f}"


def explanations(audit: AuditResult, scores: Scores, runs: Sequence[TrainingRun]) -> list[str]:
    """What the columns mean, and what they cannot say."""
    said = []
    if scores.results:
        said.append(
            f"logdiff: |log p in the training row - log p recorded by the engine| of {MODEL}, which sampled them, over "
            f"the loss tokens of {len(scores.trees)} rollouts; sdcc: of its student."
        )
        said += _signs(scores)
        if not scores.exact:
            said.append(
                "Warning: packed does not reproduce the recorded log-probs. The weights found are not those that "
                "sampled these rollouts; logdiff then measures the difference of the models, too."
            )
    else:
        said.append(f"logdiff {scores.reason}")
    said.append(
        "wrong prefix: share of a method's loss tokens trained under another context than they were sampled under; "
        f"tokens lost: share of the sampled tokens that get no loss; both over all {audit.rollouts} rollouts."
    )
    said += [note for note in notes(audit) if note.startswith("union")]
    packed, naive = (next((run for run in runs if run.method == name), None) for name in ("packed", "naive_compressed"))
    if packed is not None and naive is not None and packed.step_seconds and naive.step_seconds:
        said.append(
            f"loss tokens, row tokens: over all {len(packed.rows)} steps. step cost: median step time over that of "
            f"naive_compressed ({packed.step_seconds:.2f} s against {naive.step_seconds:.2f} s), the first {WARM_UP} "
            "steps left out."
        )
    return said


def _signs(scores: Scores) -> list[str]:
    exact, compressed, full = scores.of("packed"), scores.of("naive_compressed"), scores.of("naive_full")
    assert exact is not None and compressed is not None and full is not None  # results are of all methods
    parts = []
    for name, other, where, expected in (
        ("delta_comp", compressed, "diverging leaves", "negative"),
        ("delta_full", full, "tokens sampled after an eviction", "positive"),
    ):
        found = shift(exact, other, scores.trees)
        if found.mean is not None:
            parts.append(f"{name} {found.mean:+.2f} at {found.tokens} {where} (MemoryWalker expects it {expected})")
    if not parts:
        return []
    return [f"log p under the wrong prefix - log p under the generation prefix, mean in nats: {'; '.join(parts)}."]


def show(found: Quickstart, console: Console) -> None:
    """Print the table, what it means and where the report is; 80 columns are enough."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for number, header in enumerate(HEADERS):
        table.add_column(
            header.replace(" ", "\n", 1), justify="right" if number else "left", no_wrap=True, vertical="bottom"
        )
    for row in method_rows(found.audit, found.scores, found.runs):
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
    console.print()
    for line in explanations(found.audit, found.scores, found.runs):
        console.print(Text(line))
    console.print()
    console.print(Text(f"time: {times(found.seconds)}"))
    console.print(Text(f"report: {found.run_dir / 'report.html'}"), soft_wrap=True)
