"""``mwjax quickstart``."""

from __future__ import annotations

from typing import Annotated

import typer

from mwjax.commands.statuses import DONE, SOME_REFUSED

EXAMPLES = """\b
Examples:
  mwjax quickstart                              into runs/quickstart; the same command again goes on there
  mwjax quickstart --fresh --run-dir runs/q2    anew, somewhere else
  mwjax quickstart --no-model --steps 8         without the pretrained model, and shorter
"""


def quickstart(
    run_dir: Annotated[str, typer.Option(metavar="DIR", help="Where everything is written.")] = "runs/quickstart",
    steps: Annotated[int, typer.Option(min=1, help="Steps of each of the two training runs.")] = 24,
    no_model: Annotated[
        bool, typer.Option("--no-model", help="Leave out what needs the pretrained model: logdiff is then N/A.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Remove what an earlier quickstart left in DIR first.")
    ] = False,
) -> None:
    """Audit real rollouts, score them with the model that sampled them, train on them with two methods, and report."""
    from rich.console import Console

    from mwjax.quickstart import run, summary

    found = run.run(run_dir, steps=steps, with_model=not no_model, fresh=fresh)
    if found.stopped:
        typer.echo("stopped; the same command continues", err=True)
    else:
        summary.show(found, Console(highlight=False))
    raise typer.Exit(SOME_REFUSED if found.refused else DONE)
