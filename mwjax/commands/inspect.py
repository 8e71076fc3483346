"""``mwjax inspect``."""

from __future__ import annotations

from typing import Annotated

import typer

from mwjax.commands.statuses import DONE, SOME_REFUSED, UNUSABLE

EXAMPLES = """\b
Examples:
  mwjax inspect rollouts.jsonl --limit 3                         draw the first three trees
  mwjax inspect rollouts.jsonl --id r1 --tokenizer tokenizer.json one, with texts
  mwjax inspect rollouts.jsonl --json | jq .                     every figure of every rollout
  mwjax inspect rollouts.jsonl --json --tokens > tokens.jsonl    and the prefix of every sampled token
"""


def inspect(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Rollouts, JSON Lines; .gz and .zst too.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per rollout instead of a drawing.")] = False,
    tokens: Annotated[
        bool,
        typer.Option(
            "--tokens", help="With --json: also one line per sampled token with its prefix under every method."
        ),
    ] = False,
    ids: Annotated[list[str] | None, typer.Option("--id", metavar="ID", help="Only this rollout; repeatable.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Stop after this many rollouts.")] = None,
    tokenizer: Annotated[str | None, typer.Option(metavar="FILE", help="tokenizer.json: show texts too.")] = None,
) -> None:
    """Show the tree of every rollout: views, where and why they fork, what survives."""
    import json

    from mwjax.audit import inspect as inspection
    from mwjax.audit.drawing import draw, legend
    from mwjax.audit.output import terminal
    from mwjax.audit.text import decoder
    from mwjax.rollouts.read import Refusal, summary

    if tokens and not as_json:
        raise typer.BadParameter("goes with --json", param_hint="--tokens")
    console, decode = terminal(), None if tokenizer is None else decoder(tokenizer)
    refused: list[Refusal] = []
    shown: list[str] = []
    for item in inspection.trees(file, ids=ids or (), limit=limit):
        if isinstance(item, Refusal):
            refused.append(item)
        elif as_json:
            for line in inspection.lines(item, tokens=tokens):
                print(json.dumps(line))
        else:
            console.print("" if shown else legend(console))
            draw(item, console, decode)
        if not isinstance(item, Refusal):
            shown.append(item.rollout.id)
    absent = [wanted for wanted in ids or () if wanted not in shown]
    typer.echo(
        "\n".join([summary(len(shown), refused), *(f"{file} has no usable rollout {name!r}" for name in absent)]),
        err=True,
    )
    raise typer.Exit(UNUSABLE if not shown else SOME_REFUSED if refused or absent else DONE)
