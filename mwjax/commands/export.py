"""``mwjax export``."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from mwjax.commands.statuses import DONE

EXAMPLES = """\b
Examples:
  mwjax export runs/b --out models/b                    the newest checkpoint of a run, weights as trained (float32)
  mwjax export runs/b/checkpoints/50 --out models/b50   one step
  mwjax export runs/b --best --out models/best          the one of lowest loss on held-out rollouts
  mwjax export runs/b --out models/b --dtype bfloat16   half the size, rounded
  mwjax export runs/b --out models/b --tokenizer Qwen/Qwen3-0.6B
"""


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
