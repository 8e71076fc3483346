"""``mwjax train``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mwjax.commands.statuses import DONE, SOME_REFUSED

if TYPE_CHECKING:
    from mwjax.train.config import RunConfig
    from mwjax.train.loop import TrainResult

EXAMPLES = """\b
Examples:
  mwjax train configs/sft.yaml                                    as the file says
  mwjax train configs/grpo.yaml run_dir=runs/b data.paths=mine.jsonl model.path=Qwen/Qwen3-0.6B
  mwjax train configs/grpo.yaml run_dir=runs/b data.steps=400     the same run_dir: goes on where it stopped
  mwjax train configs/sft.yaml evaluation.paths=held_out.jsonl evaluation.every=20
  mwjax train configs/sft.yaml tracking.tensorboard=true          then: tensorboard --logdir runs
  mwjax train configs/sft.yaml --debug run_dir=runs/look data.steps=1
                                                                  what is trained, token by token; NaNs are named
  mwjax train --keys | grep -A1 evaluation                        what the options of a section do

\b
A run directory holds config.yaml, card.md, metrics.jsonl, evaluation.jsonl, plots/training.png and checkpoints/.
Ctrl-C or SIGTERM saves a checkpoint and stops; the same command continues.
"""


def train(
    config: Annotated[str | None, typer.Argument(metavar="CONFIG", help="YAML file; configs/ has examples.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="Options to change.")] = None,
    keys: Annotated[bool, typer.Option("--keys", help="List every option with its default, and stop.")] = False,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug",
            help="As debug=true: no jit, no scan, NaN checks, and the first rollout printed token by token.",
        ),
    ] = False,
) -> None:
    """Train on recorded rollouts. The same command again continues a run that was stopped."""
    from mwjax.train import load, stop

    if keys:
        for key, default, description in load.options():
            typer.echo(f"{key} = {default}\n    {description}")
        raise typer.Exit(DONE)
    if config is None:
        raise typer.BadParameter("give a YAML configuration, as in: mwjax train configs/sft.yaml", param_hint="CONFIG")
    settings = load.load(config, [*(overrides or ()), *(["debug=true"] if debug else [])])
    try:
        result = _run(settings)
    except stop.StoppedEarly as stopped:
        typer.echo(f"mwjax: {stopped}", err=True)
        raise typer.Exit(stopped.status) from None
    typer.echo(result.summary())
    raise typer.Exit(SOME_REFUSED if result.refused else DONE)


def _run(settings: RunConfig) -> TrainResult:
    from mwjax.train import distributed, stop

    stop.stop_early()
    with distributed.joined():  # before anything else calls jax
        from mwjax.train import loop

        return loop.run(settings)
