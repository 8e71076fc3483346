"""``mwjax record``."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from mwjax.commands.statuses import DONE, SOME_REFUSED

EXAMPLES = """\b
Examples:
  mwjax record http://127.0.0.1:8000                   vLLM or SGLang: token ids and log-probs are recorded too
  mwjax record https://HOST/v1 --run-dir runs/agent    any engine with one of the three APIs
  mwjax record http://127.0.0.1:8000 --redact user --redact "messages.*.name"

\b
Then start the harness with the base URL that is printed, for instance:
  OPENAI_BASE_URL=http://127.0.0.1:8787/v1 my-agent
  OPENAI_BASE_URL=http://127.0.0.1:8787/session/task-7/v1 my-agent      a session of its own name
"""


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
            "name at any depth; repeatable. Token ids go with the text that they spell, and the raw events of streams "
            "and the texts of errors, which may repeat it, are left out.",
        ),
    ] = None,
    max_body_mb: Annotated[
        float, typer.Option(metavar="MB", min=0.001, max=1e6, help="Of a larger body only the beginning is written.")
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
