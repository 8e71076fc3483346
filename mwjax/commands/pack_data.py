"""``mwjax pack-data``."""

from __future__ import annotations

from typing import Annotated

import typer

from mwjax.commands.statuses import DONE, SOME_REFUSED

EXAMPLES = """\b
Examples:
  mwjax pack-data rollouts.jsonl --out packed           one file, one set
  mwjax pack-data part-*.jsonl.zst --out packed         many files, in this order
  mwjax pack-data rollouts.jsonl --out packed --shard-mb 64 --overwrite
  mwjax train configs/sft.yaml data.paths=packed        the same run, to the bit, as from the JSON Lines

\b
DIR is a local folder: ArrayRecord neither writes nor reads gs://. The first run with a set measures every rollout
once and keeps that in DIR; later runs with the same rows start at once. audit and inspect take DIR too.

\b
Exit status: 0 all packed, 1 some rollouts were refused, 2 nothing was written
"""


def pack_data(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="Rollouts, JSON Lines; .gz and .zst too; or packed sets.")
    ],
    out: Annotated[str, typer.Option(metavar="DIR", help="Folder to write; it appears when it is complete.")],
    shard_mb: Annotated[
        float, typer.Option(metavar="MB", min=0.001, help="Begin another file after this much, before compression.")
    ] = 256.0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a packed set in DIR.")] = False,
) -> None:
    """Pack rollouts into ArrayRecord files: a training set that is checked once and opened at once."""
    from mwjax import data
    from mwjax.audit.progress import watching
    from mwjax.rollouts.read import summary

    with watching(files, doing="packing") as (progress, _):
        made = data.pack_rollouts(files, out, file_bytes=int(shard_mb * 1e6), overwrite=overwrite, progress=progress)
    typer.echo(summary(made.rollouts, list(made.refused)), err=True)
    typer.echo(made.summary())
    raise typer.Exit(SOME_REFUSED if made.refused else DONE)
