"""The command line: the verbs of ``commands/`` under one program, and what becomes of their errors.

A user's mistake, raised as ``ValueError`` or ``OSError``, becomes a message and status 2; any other exception is a
defect of mwjax, shown with its traceback, status 70.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from mwjax.commands import (
    audit,
    export,
    import_logs,
    inspect,
    launch,
    pack_data,
    plan,
    quickstart,
    record,
    train,
)
from mwjax.commands.statuses import DEFECT, DONE, UNUSABLE

EXAMPLES = """\b
Examples:
  mwjax quickstart                              all of it on shipped rollouts, in three minutes
  mwjax audit rollouts.jsonl                    is this data consistent, and what to do
  mwjax audit rollouts.jsonl --rows train.jsonl are these training rows right?
  mwjax audit rollouts.jsonl --model MODEL_DIR  how far off are the log-probs?
  mwjax audit a.jsonl b.jsonl --compare         two sets of rollouts side by side
  mwjax inspect rollouts.jsonl --limit 3        draw the trees of the first rollouts
  mwjax train configs/sft.yaml                  train as the file says
  mwjax train configs/grpo.yaml run_dir=runs/b  change options on the way
  mwjax train --keys                            every option and its default
  mwjax export runs/b --out models/b            the trained weights as transformers loads them
  mwjax record http://127.0.0.1:8000            log what a harness and an engine say: mwjax record --help
  mwjax import calls.jsonl --out rollouts.jsonl logs of other tools as rollouts: mwjax import --help
  mwjax plan configs/sft.yaml --topology v5p-32 does it fit on these TPUs, and how fast could it be?
  mwjax launch NAME --tpu v5p-32 ...            train on TPU machines in the cloud: mwjax launch --help
  mwjax pack-data rollouts.jsonl --out packed   a large training set that train opens at once

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


app.command(epilog=quickstart.EXAMPLES)(quickstart.quickstart)
app.command(epilog=train.EXAMPLES)(train.train)
app.command(epilog=export.EXAMPLES)(export.export)
app.command("pack-data", epilog=pack_data.EXAMPLES)(pack_data.pack_data)
app.command(epilog=inspect.EXAMPLES)(inspect.inspect)
app.command(epilog=audit.EXAMPLES)(audit.audit)
app.command(epilog=record.EXAMPLES)(record.record)
app.command("import", epilog=import_logs.EXAMPLES)(import_logs.import_logs)
app.command(epilog=plan.EXAMPLES)(plan.plan)
app.command(epilog=launch.EXAMPLES)(launch.launch)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit status."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="mwjax")
    except SystemExit as leaving:
        if isinstance(leaving.__context__, BrokenPipeError):  # click met it first and left with status 1
            _reader_left()
        raise
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            _reader_left()
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


def _reader_left() -> NoReturn:
    """Whoever read our output has seen enough, as `head` does."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(DONE)


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
