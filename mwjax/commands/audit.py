"""``mwjax audit``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mwjax.commands.models import model_folder
from mwjax.commands.statuses import DONE, SOME_REFUSED, UNUSABLE

EXAMPLES = """\b
Examples:
  mwjax audit rollouts.jsonl                        what each training method would do to these rollouts
  mwjax audit part-*.jsonl.zst                      several files as one set
  mwjax audit a.jsonl b.jsonl --compare             two harnesses or two versions of one, side by side
  mwjax audit rollouts.jsonl --rows train.jsonl     are these training rows the rollouts they came from?
  mwjax audit rollouts.jsonl --model MODEL_DIR      how far off are the log-probs, and where?
  mwjax audit rollouts.jsonl --model A --model B    two models side by side, on the same rollouts
  mwjax audit a.jsonl b.jsonl --compare --model A --html report.html
"""


def audit(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...", help="Rollouts, JSON Lines (.gz and .zst too) or packed sets; several are one set."
        ),
    ],
    compare: Annotated[
        bool, typer.Option("--compare", help="Audit every FILE on its own and put the figures side by side.")
    ] = False,
    rows: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Your own training rows: JSON Lines with input_ids, loss_mask, rollout_id, optionally position_ids, "
            "where a value that does not rise, such as 0, starts a new packed segment.",
        ),
    ] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write all figures; - is stdout.")
    ] = None,
    html_file: Annotated[str | None, typer.Option("--html", metavar="FILE", help="Write a report as one page.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="FILE", help="With --rows: tokenizer.json, to show texts, not ids.")
    ] = None,
    shown: Annotated[int, typer.Option(min=0, help="How many mismatches and affected rollouts to list.")] = 5,
    group_tries: Annotated[bool, typer.Option(help="Also measure tries over groups; holds all ids in memory.")] = True,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Exit 1 unless every loss token of the rows, or of naive_compressed without --rows, is trained under "
            "exactly the context it was sampled under.",
        ),
    ] = False,
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="DIR",
            help="Score rollouts with this model: folder, hub id, or smollm2 for the one that sampled the shipped "
            "rollouts. Repeatable: several models are put side by side.",
        ),
    ] = None,
    scored: Annotated[
        int | None,
        typer.Option(
            "--rollouts",
            min=1,
            help="With --model: how many rollouts to score, spread over the groups; by default, what takes a minute or "
            "two on a CPU.",
        ),
    ] = None,
) -> None:
    """Is this data conditioning-consistent? What each method would train wrong, and what to do. Needs no model; with
    one, also how far off the log-probs are."""
    from mwjax import audit as auditing
    from mwjax.audit.output import deliver, deliver_compared
    from mwjax.audit.progress import watching

    if scored is not None and not models:
        raise typer.BadParameter("goes with --model", param_hint="--rollouts")
    if compare and len(files) < 2:
        raise typer.BadParameter("takes two or more files", param_hint="--compare")
    if compare and rows is not None:
        raise typer.BadParameter("goes with one set of rollouts, not with --compare", param_hint="--rows")
    if tokenizer is not None and rows is None:
        raise typer.BadParameter("goes with --rows: only their mismatches show texts", param_hint="--tokenizer")
    folders = [model_folder(name) for name in models or ()]
    result: auditing.AuditResult | auditing.ComparedFiles
    with watching(files) as (progress, moved):
        common: dict[str, Any] = {
            "tokenizer": tokenizer,
            "shown": shown,
            "group_tries": group_tries,
            "progress": progress,
            "models": folders,
            "rollouts_scored": scored,
            "scoring": moved,
        }
        result = auditing.compare(files, **common) if compare else auditing.run(files, rows=rows, **common)
    if isinstance(result, auditing.ComparedFiles):
        deliver_compared(result, json_file=json_file, html_file=html_file)
    else:
        deliver(result, json_file=json_file, html_file=html_file)
    if not result.usable:
        raise typer.Exit(UNUSABLE)
    failed = strict and not result.strictly_consistent
    if failed:
        typer.echo("mwjax: not consistent, and --strict was given", err=True)
    raise typer.Exit(SOME_REFUSED if failed or result.any_refused else DONE)
