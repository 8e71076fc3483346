"""``mwjax import``."""

from __future__ import annotations

import contextlib
import os
from typing import Annotated, Literal

import typer

from mwjax.commands.models import model_folder
from mwjax.commands.statuses import DONE, SOME_REFUSED, UNUSABLE

EXAMPLES = """\b
Examples:
  mwjax import runs/record/calls.jsonl --out rollouts.jsonl      what mwjax record wrote
  mwjax import traces.jsonl part-*.jsonl.zst --out rollouts.jsonl.zst
  mwjax import calls.jsonl --rewards rewards.jsonl               one {"id": ..., "reward": ..., "group": ...} a line
  mwjax import calls.jsonl --session-by request.metadata.task    calls of one rollout have this in common
  mwjax import log.jsonl --format engine --logprobs processed    where vLLM ran with processed_logprobs
  mwjax import session.jsonl --tokenizer Qwen/Qwen3-0.6B         messages only: rendered for that model
  mwjax import session.jsonl --tokenizer MODEL --system system.txt --tools tools.json
                                                                 with what session files lack, so that they train
  mwjax import calls.jsonl --tokenizer MODEL --check-rendering   are rendered messages the ids that were recorded?
  mwjax import --formats                                         the formats, one a line
Then:
  mwjax inspect rollouts.jsonl; mwjax audit rollouts.jsonl; mwjax train configs/sft.yaml data.paths=rollouts.jsonl

\b
Exit status: 0 every record was used or says the same as another, 1 some were refused, 2 nothing was written
"""


def import_logs(
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
    system: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="System prompt of session files, which do not hold it: its text, or a JSON list of the messages that "
            "come before the first of the session.",
        ),
    ] = None,
    tools: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Tools of session files: a JSON list in OpenAI's form or Anthropic's."),
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
    if tokenizer is None:
        rendering_only = {
            "--check-rendering": check_rendering,
            "--template": template is not None,
            "--template-option": bool(template_options),
        }
        for name in (name for name, given in rendering_only.items() if given):
            raise typer.BadParameter("needs --tokenizer, the model's", param_hint=name)

    from mwjax.audit.progress import watching

    with contextlib.ExitStack() as stack:
        if tokenizer is not None and not os.path.exists(os.path.expanduser(tokenizer)):
            from mwjax.model.hub import local_folder

            tokenizer = os.fspath(stack.enter_context(local_folder(model_folder(tokenizer), weights=False)))
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
            opening=() if system is None else readers.opening_in(system),
            tools=None if tools is None else readers.tools_in(tools),
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
