"""``mwjax plan``."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

EXAMPLES = """\b
Examples:
  mwjax plan configs/grpo.yaml --topology v5p-32 model.path=Qwen/Qwen3-4B
                                                does it fit, and how fast could it be?
  mwjax plan configs/grpo.yaml --topology v5litepod-16,v6e-16,v5p-32 model.path=Qwen/Qwen3-4B
                                                three kinds of slices, one after the other
  mwjax plan configs/grpo.yaml --topology v5p-32 --slices 2 model.path=Qwen/Qwen3-4B
                                                two of them, joined by the data centre's network
  mwjax plan configs/sdcc.yaml --topology v5p-64 --mesh auto data.row_length=32768 data.rows_per_microbatch=32
                                                the mesh chosen here, whatever the file says
  mwjax plan configs/grpo.yaml --topology v5p-32 --json > plan.json

\b
The step's own functions are compiled for the slice by XLA's TPU compiler: memory, and whether it fits, are the
compiler's word; seconds are estimates from below, tokens/s from above. No TPU, no data and no weights are needed:
of a model only config.json is read, and of published Qwen3 and Qwen2.5 models not even that. What does not fit is
tried again on other meshes, with stronger remat, smaller micro-batches and shorter rows. A compilation of a large model
takes minutes.

\b
Needs libtpu: pip install 'mwjax[tpu]'.
Exit status: 0 it fits, as asked or as found, 1 something does not fit, 2 wrong usage
"""


def plan(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="YAML file, as for train.")],
    topology: Annotated[
        str, typer.Option(metavar="SLICE,...", help="As rented: v5p-N counts cores, v5litepod-N and v6e-N chips.")
    ],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="Options to change.")] = None,
    slices: Annotated[int, typer.Option(min=1, help="How many such slices; mesh.data goes over them.")] = 1,
    mesh: Annotated[
        Literal["config", "auto"],
        typer.Option(help="auto chooses the mesh; config takes the file's, or chooses if that leaves chips out."),
    ] = "config",
    density: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, help="Visible pairs of a row, as a share of those of one long sequence: trees have fewer."
        ),
    ] = 1.0,
    microbatches: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Micro-batches of a step, full ones of data.rows_per_microbatch as given (a chosen mesh may cut these "
            "rows otherwise); by default, its rollouts fill a row each.",
        ),
    ] = None,
    tries: Annotated[int, typer.Option(min=0, help="How many other ways are compiled where it does not fit.")] = 6,
    as_json: Annotated[bool, typer.Option("--json", help="Print every figure as JSON instead of tables.")] = False,
) -> None:
    """What a training run would take on a TPU slice, before you rent it: memory, traffic, speed, and what would fit."""
    from mwjax.launch import plan_request

    asked = plan_request.Request(
        config=config,
        overrides=tuple(overrides or ()),
        topology=topology,
        slices=slices,
        auto=mesh == "auto",
        density=density,
        microbatches=microbatches,
        tries=tries,
        as_json=as_json,
    )
    raise typer.Exit(plan_request.carry_out(asked))
