"""The command line: one small function per verb. Imports of what a verb needs stay inside it, so that help is instant.

A verb returns by ``raise typer.Exit(status)``: 0 done, 1 done but some input was refused, 2 wrong usage or nothing
usable. Results go to stdout, messages to stderr. A user's mistake, raised as ``ValueError`` or ``OSError``, becomes a
message and status 2; any other exception is a defect of mwjax, shown with its traceback, status 70.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NoReturn

import typer

DONE, SOME_REFUSED, UNUSABLE, DEFECT = 0, 1, 2, 70

EXAMPLES = """\b
Examples:
  mwjax quickstart                              all of it on shipped rollouts, in two minutes
  mwjax audit rollouts.jsonl                    is this data consistent, and what to do
  mwjax audit rollouts.jsonl --rows train.jsonl are these training rows?
  mwjax audit rollouts.jsonl --model MODEL_DIR  how far off are the log-probs?
  mwjax audit a.jsonl b.jsonl --compare         two sets of rollouts side by side
  mwjax inspect rollouts.jsonl --limit 3        draw the trees of the first rollouts
  mwjax train configs/sft.yaml                  train as the file says
  mwjax train configs/grpo.yaml run_dir=runs/b  change options on the way
  mwjax train --keys                            every option and its default
  mwjax export runs/b --out models/b            the trained weights as transformers loads them
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


QUICKSTART_EXAMPLES = """\b
Examples:
  mwjax quickstart                              into runs/quickstart; the same command again goes on there
  mwjax quickstart --fresh --run-dir runs/q2    anew, somewhere else
  mwjax quickstart --no-model --steps 8         without the pretrained model, and shorter
"""


@app.command(epilog=QUICKSTART_EXAMPLES)
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


TRAIN_EXAMPLES = """\b
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


@app.command(epilog=TRAIN_EXAMPLES)
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
    from mwjax.train import load

    if keys:
        for key, default, description in load.options():
            typer.echo(f"{key} = {default}\n    {description}")
        raise typer.Exit(DONE)
    if config is None:
        raise typer.BadParameter("give a YAML configuration, as in: mwjax train configs/sft.yaml", param_hint="CONFIG")
    settings = load.load(config, [*(overrides or ()), *(["debug=true"] if debug else [])])

    from mwjax.train import distributed

    joined = distributed.join()  # before anything else calls jax

    from mwjax.train import loop

    with distributed.ending_together(joined):
        result = loop.run(settings)
    typer.echo(result.summary())
    raise typer.Exit(SOME_REFUSED if result.refused else DONE)


EXPORT_EXAMPLES = """\b
Examples:
  mwjax export runs/b --out models/b                    the newest checkpoint of a run, weights as trained (float32)
  mwjax export runs/b/checkpoints/50 --out models/b50   one step
  mwjax export runs/b --best --out models/best          the one of lowest loss on held-out rollouts
  mwjax export runs/b --out models/b --dtype bfloat16   half the size, rounded
  mwjax export runs/b --out models/b --tokenizer Qwen/Qwen3-0.6B
"""


@app.command(epilog=EXPORT_EXAMPLES)
def export(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="A run directory, or one step in its checkpoints folder.")
    ],
    out: Annotated[str, typer.Option(metavar="FOLDER", help="Where to write the model; may be gs://.")],
    to: Annotated[
        Literal["hf"], typer.Option(help="The format; hf: config.json and safetensors, as Hugging Face has them.")
    ] = "hf",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Type of the written weights; as trained by default, so that nothing is rounded."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="FROM",
            help="Folder, hub id or tokenizer.json for the tokenizer; by default, of the model the run began from.",
        ),
    ] = None,
    max_shard_gb: Annotated[
        float, typer.Option(metavar="GB", min=0.001, help="Weights larger than this are split into several files.")
    ] = 5.0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a FOLDER that is not empty.")] = False,
    best: Annotated[
        bool, typer.Option("--best", help="Of a run directory, the best checkpoint by the run's checkpoint.best_by.")
    ] = False,
) -> None:
    """Write a trained model as a folder that transformers and mwjax load."""
    from mwjax.train import export as exporting

    written = exporting.export(
        checkpoint,
        out,
        dtype=dtype,
        tokenizer=tokenizer,
        overwrite=overwrite,
        best=best,
        max_shard_bytes=int(max_shard_gb * 1e9),
    )
    if not written.tokenizer:
        typer.echo(
            "mwjax: no tokenizer files were found where the run took its model from; give --tokenizer to add them",
            err=True,
        )
    typer.echo(written.summary())
    raise typer.Exit(DONE)


PACK_EXAMPLES = """\b
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


@app.command("pack-data", epilog=PACK_EXAMPLES)
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


@app.command()
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


AUDIT_EXAMPLES = """\b
Examples:
  mwjax audit rollouts.jsonl                        what each training method would do to these rollouts
  mwjax audit part-*.jsonl.zst                      several files as one set
  mwjax audit a.jsonl b.jsonl --compare             two harnesses or two versions of one, side by side
  mwjax audit rollouts.jsonl --rows train.jsonl     are these training rows the rollouts they came from?
  mwjax audit rollouts.jsonl --model MODEL_DIR      how far off are the log-probs, and where?
  mwjax audit rollouts.jsonl --model A --model B    two models side by side, on the same rollouts
  mwjax audit a.jsonl b.jsonl --compare --model A --html report.html
"""


@app.command(epilog=AUDIT_EXAMPLES)
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
    tokenizer: Annotated[str | None, typer.Option(metavar="FILE", help="tokenizer.json: show texts, not ids.")] = None,
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
    folders = [_model_folder(name) for name in models or ()]
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


RECORD_EXAMPLES = """\b
Examples:
  mwjax record http://127.0.0.1:8000                   vLLM or SGLang: token ids and log-probs are recorded too
  mwjax record https://HOST/v1 --run-dir runs/agent    any engine with one of the three APIs
  mwjax record http://127.0.0.1:8000 --redact user --redact "messages.*.name"

\b
Then start the harness with the base URL that is printed, for instance:
  OPENAI_BASE_URL=http://127.0.0.1:8787/v1 my-agent
  OPENAI_BASE_URL=http://127.0.0.1:8787/session/task-7/v1 my-agent      a session of its own name
"""


@app.command(epilog=RECORD_EXAMPLES)
def record(
    upstream: Annotated[str, typer.Argument(metavar="URL", help="Address of the engine, http or https.")],
    run_dir: Annotated[
        str, typer.Option(metavar="DIR", help="Where calls.jsonl is written; one that is there is continued.")
    ] = "runs/record",
    host: Annotated[str, typer.Option(help="Where to listen; by default only this machine can connect.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8787,
    engine: Annotated[
        Literal["auto", "vllm", "sglang", "none"],
        typer.Option(
            help="Whom to ask for token ids and log-probs, which the harness does not get to see; auto looks at "
            "/v1/models, none asks nobody."
        ),
    ] = "auto",
    session_headers: Annotated[
        list[str] | None,
        typer.Option(
            "--session-header",
            metavar="NAME",
            help="Request header that names the session; repeatable. Without one the session is /session/NAME/ in the "
            "path, else what the harness calls it in a usual header, else a hash of the API key.",
        ),
    ] = None,
    redact: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD",
            help="Field of requests and responses that is not written: metadata.user_id, messages.*.content, or a bare "
            "name at any depth; repeatable. Token ids go with the text that they spell.",
        ),
    ] = None,
    max_body_mb: Annotated[
        float, typer.Option(metavar="MB", min=0.001, help="Of a larger body only the beginning is written.")
    ] = 64.0,
    connect_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.0, help="For reaching the engine; 0 for no limit.")
    ] = 30.0,
    idle_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.0, help="For silence of the engine; 0 for no limit.")
    ] = 3600.0,
    grace: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.0, help="For open calls after Ctrl-C or SIGTERM.")
    ] = 30.0,
) -> None:
    """Stand between a harness and an engine and write down every call: OpenAI chat completions and responses, Anthropic
    messages, streams too. The harness sees what it would have seen; keys are never written."""
    from mwjax.recorder import run as recorder

    recorder.require_http()

    from mwjax.recorder.upstream import Settings

    settings = Settings(
        upstream,
        engine=engine,
        session_headers=tuple(session_headers or ()),
        max_body_bytes=int(max_body_mb * (1 << 20)),
        connect_timeout=connect_timeout,
        idle_timeout=idle_timeout,
    )
    result = recorder.run(settings, run_dir, host=host, port=port, redact=redact or (), grace=grace, say=typer.echo)
    typer.echo(result.summary())
    raise typer.Exit(SOME_REFUSED if result.lost else DONE)


IMPORT_EXAMPLES = """\b
Examples:
  mwjax import runs/record/calls.jsonl --out rollouts.jsonl      what mwjax record wrote
  mwjax import traces.jsonl part-*.jsonl.zst --out rollouts.jsonl.zst
  mwjax import calls.jsonl --rewards rewards.jsonl               one {"id": ..., "reward": ..., "group": ...} a line
  mwjax import calls.jsonl --session-by request.metadata.task    calls of one rollout have this in common
  mwjax import log.jsonl --format vllm --logprobs processed
  mwjax import session.jsonl --tokenizer Qwen/Qwen3-0.6B         messages only: rendered for that model
  mwjax import calls.jsonl --tokenizer MODEL --check-rendering   are rendered messages the ids that were recorded?
  mwjax import --formats                                         the formats, one a line
Then:
  mwjax inspect rollouts.jsonl; mwjax audit rollouts.jsonl; mwjax train configs/sft.yaml data.paths=rollouts.jsonl

\b
Exit status: 0 every record was used or says the same as another, 1 some were refused, 2 nothing was written
"""


@app.command("import", epilog=IMPORT_EXAMPLES)
def import_(
    files: Annotated[
        list[str] | None, typer.Argument(metavar="FILE...", help="Logs; the format of each is detected.")
    ] = None,
    out: Annotated[
        str, typer.Option(metavar="FILE", help="Rollouts, JSON Lines; .gz and .zst are compressed; may be gs://.")
    ] = "rollouts.jsonl",
    form: Annotated[
        str | None, typer.Option("--format", metavar="NAME", help="Of all files, instead of detecting it.")
    ] = None,
    formats: Annotated[bool, typer.Option("--formats", help="List the formats, and stop.")] = False,
    rewards: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="JSON Lines with id, reward and group of rollouts, for logs without them."),
    ] = None,
    reward: Annotated[
        str | None, typer.Option(metavar="FIELD", help="Field of a record that holds the reward, such as info.score.")
    ] = None,
    group_by: Annotated[
        str | None, typer.Option(metavar="FIELD", help="Field of a record that names the group, such as info.task_id.")
    ] = None,
    session_by: Annotated[
        str | None, typer.Option(metavar="FIELD", help="Field that names the rollout which a call belongs to.")
    ] = None,
    logprobs: Annotated[
        Literal["auto", "raw", "processed"],
        typer.Option(
            help="Of which distribution recorded log-probs are: raw is the model's own, processed the one sampled "
            "from; auto goes by the engine."
        ),
    ] = "auto",
    sampling: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="temperature, top_p or top_k where a record does not say; repeatable.",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="FROM", help="Model folder, hub id or tokenizer.json; formats without ids need it."),
    ] = None,
    template: Annotated[
        str | None, typer.Option(metavar="FILE", help="Chat template, where the tokenizer's folder has none.")
    ] = None,
    template_options: Annotated[
        list[str] | None,
        typer.Option(
            "--template-option",
            metavar="NAME=JSON",
            help="Variable of the chat template, such as enable_thinking=false; repeatable.",
        ),
    ] = None,
    normalise_system: Annotated[
        bool,
        typer.Option(
            "--normalise-system",
            help="Give all calls of a conversation the first one's system prompt where a few lines differ (a date).",
        ),
    ] = False,
    check_rendering: Annotated[
        bool,
        typer.Option(
            "--check-rendering",
            help="Of logs with messages and ids: does rendering the messages with --tokenizer give the recorded ids?",
        ),
    ] = False,
    vocab_size: Annotated[int | None, typer.Option(min=1, help="Refuse ids at or beyond it.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output file.")] = False,
) -> None:
    """Turn the logs of other tools into rollouts: recorded calls, other trainers' traces and dumps, session files."""
    from mwjax.rollouts import readers

    if formats:
        for name, reader in readers.READERS.items():
            typer.echo(f"{name:<20} {reader.DESCRIPTION}")
        raise typer.Exit(DONE)
    if not files:
        raise typer.BadParameter("give the logs to import, as in: mwjax import calls.jsonl", param_hint="FILE...")
    if check_rendering and tokenizer is None:
        raise typer.BadParameter("needs --tokenizer, the model's", param_hint="--check-rendering")

    from mwjax.audit.progress import watching

    with contextlib.ExitStack() as stack:
        if tokenizer is not None and not os.path.exists(os.path.expanduser(tokenizer)):
            from mwjax.model.hub import local_folder

            tokenizer = os.fspath(stack.enter_context(local_folder(_model_folder(tokenizer), weights=False)))
        progress, _ = stack.enter_context(watching(files, doing="importing"))
        options = readers.Options(
            group_by=group_by,
            reward=reward,
            session_by=session_by,
            logprobs=logprobs,
            sampling=readers.sampling_of(sampling or ()),
            tokenizer=tokenizer,
            template=template,
            template_options=readers.template_options(template_options or ()),
            normalise_system=normalise_system,
            vocab_size=vocab_size,
            progress=progress,
        )
        rendering = readers.rendering_for("these", options) if check_rendering else None
        made = readers.import_files(files, out, format=form, options=options, rewards=rewards, overwrite=overwrite)
    typer.echo(made.account(), err=True)
    typer.echo(made.summary())
    if rendering is not None:
        for file in files:
            typer.echo(f"{file}: {readers.check_rendering(file, rendering).report()}")
    raise typer.Exit(UNUSABLE if not made.rollouts else SOME_REFUSED if made.refused else DONE)


def _model_folder(name: str) -> str:
    """``smollm2`` as the folder it is converted into; anything else as it is."""
    if name != "smollm2" or os.path.isdir(name):
        return name
    from mwjax.engine import load_smollm2

    return str(load_smollm2())


PLAN_EXAMPLES = """\b
Examples:
  mwjax plan configs/grpo.yaml --topology v5p-32 model.path=Qwen/Qwen3-4B model.attention=splash
                                                does it fit, and how fast could it be?
  mwjax plan configs/grpo.yaml --topology v5litepod-16,v6e-16,v5p-32 model.path=Qwen/Qwen3-4B
                                                several slices, one after the other
  mwjax plan configs/sdcc.yaml --topology v5p-64 --mesh auto data.row_length=32768 data.rows_per_microbatch=32
                                                the mesh chosen here, whatever the file says
  mwjax plan configs/grpo.yaml --topology v5p-32 --json > plan.json

\b
The step's own functions are compiled for the slice by XLA's TPU compiler: memory, and whether it fits, are the
compiler's word; seconds and tokens/s are estimates, and bounds from above. No TPU, no data and no weights are needed:
of a model only config.json is read, and of published Qwen3 and Qwen2.5 models not even that. What does not fit is
tried again on other meshes, with stronger remat, smaller micro-batches and shorter rows. A compilation of a large model
takes minutes.

\b
Needs libtpu: pip install 'mwjax[tpu]'.
Exit status: 0 it fits, as asked or as found, 1 something does not fit, 2 wrong usage
"""


@app.command(epilog=PLAN_EXAMPLES)
def plan(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="YAML file, as for train.")],
    topology: Annotated[
        str, typer.Option(metavar="SLICE,...", help="As rented: v5p-N counts cores, v5litepod-N and v6e-N chips.")
    ],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="Options to change.")] = None,
    mesh: Annotated[
        Literal["config", "auto"],
        typer.Option(help="auto chooses the mesh; config takes the file's, where that uses the whole slice."),
    ] = "config",
    density: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, help="Visible pairs of a row, as a share of those of one long sequence: trees have fewer."
        ),
    ] = 1.0,
    microbatches: Annotated[
        int | None,
        typer.Option(min=1, help="Micro-batches of a step, full ones; by default, its rollouts fill a row each."),
    ] = None,
    tries: Annotated[int, typer.Option(min=0, help="How many other ways are compiled where it does not fit.")] = 6,
    as_json: Annotated[bool, typer.Option("--json", help="Print every figure as JSON instead of tables.")] = False,
) -> None:
    """What a training run would take on a TPU slice, before you rent it: memory, traffic, speed, and what would fit."""
    from mwjax.launch import plan_request

    asked = plan_request.Request(
        config=config,
        overrides=tuple(overrides or ()),
        slices=topology,
        auto=mesh == "auto",
        density=density,
        microbatches=microbatches,
        tries=tries,
        as_json=as_json,
    )
    raise typer.Exit(plan_request.carry_out(asked))


LAUNCH_EXAMPLES = """\b
Examples:
  mwjax launch a --tpu v5p-32 --zone us-east5-a --spot --bucket gs://mine/runs configs/grpo.yaml data.paths=gs://mine/r.gz
                                                rent, install, train, follow; again after every preemption
  mwjax launch a ... --dry-run                  print the commands instead
  mwjax launch a --tpu v6e-8 --zone us-east5-b --file eval.py -- python eval.py --model gs://mine/m
                                                any command, on every host
  mwjax launch a --zone us-east5-a --status     how the machines and the job on them stand
  mwjax launch a --zone us-east5-a --logs       follow a job that runs, without restarts
  mwjax launch a --zone us-east5-a --stop       let it save its state and stop
  mwjax launch a --zone us-east5-a --delete     give the machines back
  mwjax launch a --tpu v6e-16 --zone us-east5-b --bucket gs://mine/runs --xpk CLUSTER --dry-run configs/grpo.yaml
                                                the same on a GKE cluster made with xpk

\b
The same command again uses the machines that are there, and follows the job where it runs already. Ctrl-C leaves the
job running. Restarts need this command to go on: run it under tmux, or on a small machine in the cloud. The machines
are paid for until they are deleted: see --rm.

\b
Before: install the Google Cloud CLI, gcloud auth login, enable the TPU API; ssh-add the key if it has a passphrase.
The machines' service account must be able to write to the bucket. Copy data and models into the bucket: the hosts do
not see this machine's files.

\b
Exit status: the job's; 2 where it could not be launched, 130 after Ctrl-C. Not tried on real TPU machines yet.
"""


@app.command(epilog=LAUNCH_EXAMPLES)
def launch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the machines; also the run's folder.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="CONFIG KEY=VALUE... | -- COMMAND...", help="What to train, or any command."),
    ] = None,
    zone: Annotated[
        str | None, typer.Option(envvar="CLOUDSDK_COMPUTE_ZONE", help="Where, such as us-east5-a. Needed.")
    ] = None,
    tpu: Annotated[str | None, typer.Option(metavar="SLICE", help="v5litepod-16, v5p-32 (cores), v6e-8, ...")] = None,
    slices: Annotated[int, typer.Option(min=1, help="How many such slices.")] = 1,
    project: Annotated[str | None, typer.Option(help="Google Cloud project; by default gcloud's own.")] = None,
    spot: Annotated[bool, typer.Option("--spot", help="Cheaper, and taken away at any time.")] = False,
    reserved: Annotated[bool, typer.Option("--reserved", help="From your reservation.")] = False,
    bucket: Annotated[
        str | None, typer.Option(metavar="GS://...", help="For the run directory and the compilation cache.")
    ] = None,
    files: Annotated[
        list[str] | None,
        typer.Option("--file", metavar="FILE", help="Copy this file to every host as well; repeatable."),
    ] = None,
    environment: Annotated[
        list[str] | None, typer.Option("--env", metavar="NAME=VALUE", help="Set for the job; repeatable.")
    ] = None,
    max_restarts: Annotated[int, typer.Option(min=0, help="How often to begin again after a preemption.")] = 20,
    remove: Annotated[bool, typer.Option("--rm", help="Delete the machines once the job has ended.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands in their order; run none.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Say how machines and job stand.")] = False,
    logs: Annotated[bool, typer.Option("--logs", help="Follow the job that runs.")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="Stop the job; it saves its state.")] = False,
    delete: Annotated[bool, typer.Option("--delete", help="Delete the machines.")] = False,
    xpk: Annotated[
        str | None, typer.Option(metavar="CLUSTER", help="Submit to this GKE cluster with xpk instead.")
    ] = None,
    python: Annotated[str, typer.Option(help="Python version on the hosts.")] = "3.12",
    wheel: Annotated[str | None, typer.Option(metavar="FILE", help="Install this wheel of mwjax.")] = None,
    runtime: Annotated[str | None, typer.Option(metavar="IMAGE", help="Image of the hosts; by generation.")] = None,
    internal_ips: Annotated[
        bool, typer.Option("--internal-ips", help="Hosts without internet addresses; run this in their network.")
    ] = False,
    give_up_after: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Queue no longer than this, such as 6h.")
    ] = None,
    create_flags: Annotated[
        list[str] | None,
        typer.Option("--create-flag", metavar="FLAG", help="For gcloud's create, such as --network=N; repeatable."),
    ] = None,
    poll: Annotated[float, typer.Option(metavar="SECONDS", min=0.05, help="Between looks at the queue.")] = 15.0,
) -> None:
    """Run on TPU machines in Google Cloud: rent them, install mwjax, start one command on all, follow, restart."""
    from mwjax.launch import request

    chosen = (("status", status), ("logs", logs), ("stop", stop), ("delete", delete))
    asked = request.Request(
        name=name,
        words=tuple(words or ()),
        zone=zone,
        tpu=tpu,
        slices=slices,
        project=project,
        capacities=tuple(kind for kind, wanted in (("spot", spot), ("reserved", reserved)) if wanted),
        bucket=bucket,
        files=tuple(files or ()),
        environment=tuple(environment or ()),
        max_restarts=max_restarts,
        remove=remove,
        dry_run=dry_run,
        actions=tuple(action for action, wanted in chosen if wanted),
        xpk=xpk,
        python=python,
        wheel=wheel,
        runtime=runtime,
        internal_ips=internal_ips,
        give_up_after=give_up_after,
        create_flags=tuple(create_flags or ()),
        poll=poll,
    )
    raise typer.Exit(request.carry_out(asked))


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
