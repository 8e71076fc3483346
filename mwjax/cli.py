"""The command line: one small function per verb. Imports of what a verb needs stay inside it, so that help is instant.

A verb returns by ``raise typer.Exit(status)``: 0 done, 1 done but some input was refused, 2 wrong usage or nothing
usable. Results go to stdout, messages to stderr. A user's mistake, raised as ``ValueError`` or ``OSError``, becomes a
message and status 2; any other exception is a defect of mwjax, shown with its traceback, status 70.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

DONE, SOME_REFUSED, UNUSABLE, DEFECT = 0, 1, 2, 70

EXAMPLES = """\b
Examples:
  mwjax train configs/sft.yaml                  train as the file says
  mwjax train configs/grpo.yaml run_dir=runs/b  change options on the way
  mwjax train --keys                            every option and its default

\b
Exit status:
  0 done, 1 done but some input was refused, 2 wrong usage or nothing usable
"""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from mwjax import __version__

        typer.echo(__version__)
        raise typer.Exit(DONE)


@app.callback(help="mwjax: train agents on the contexts they actually saw.", epilog=EXAMPLES)
def common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", is_eager=True, callback=_print_version)
    ] = False,
    show_traceback: Annotated[bool, typer.Option("--traceback", hidden=True)] = False,
) -> None:
    if show_traceback:
        os.environ["MWJAX_TRACEBACK"] = "1"


@app.command()
def train(
    config: Annotated[str | None, typer.Argument(metavar="CONFIG", help="YAML file; configs/ has examples.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="Options to change.")] = None,
    keys: Annotated[bool, typer.Option("--keys", help="List every option with its default, and stop.")] = False,
) -> None:
    """Train on recorded rollouts. The same command again continues a run that was stopped."""
    from mwjax.train import load

    if keys:
        for key, default, description in load.options():
            typer.echo(f"{key} = {default}\n    {description}")
        raise typer.Exit(DONE)
    if config is None:
        raise typer.BadParameter("give a YAML configuration, as in: mwjax train configs/sft.yaml", param_hint="CONFIG")
    settings = load.load(config, overrides or ())

    from mwjax.train import loop

    result = loop.run(settings)
    typer.echo(result.summary())
    raise typer.Exit(SOME_REFUSED if result.refused else DONE)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit status."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="mwjax")
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # the reader of our output left, as `head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(DONE)
        if not _by_the_user(error):
            traceback.print_exception(error)
            sys.exit(DEFECT)
        if os.environ.get("MWJAX_TRACEBACK"):
            traceback.print_exception(error)
        print(f"mwjax: {_message(error)}", file=sys.stderr)
        sys.exit(UNUSABLE)
    except Exception as error:
        traceback.print_exception(error)
        sys.exit(DEFECT)


def _by_the_user(error: Exception) -> bool:
    """Whether the input, not mwjax, is at fault: the system refused a file, or our own check raised."""
    if isinstance(error, OSError):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return os.path.dirname(os.path.abspath(__file__)) in os.path.abspath(frames[-1].filename)


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    return str(error)
