"""``mwjax launch``."""

from __future__ import annotations

from typing import Annotated

import typer

EXAMPLES = """\b
Examples:
  mwjax launch a --tpu v5p-32 --zone us-east5-a --spot --bucket gs://mine/runs configs/grpo.yaml mesh.fsdp=16 \\
    data.paths=gs://mine/r.jsonl data.rows_per_microbatch=16 model.path=Qwen/Qwen3-4B
                                                rent, install, train, follow; again after every preemption
  mwjax launch a ... --dry-run                  print the commands instead
  mwjax launch a --tpu v6e-8 --zone us-east5-b --file eval.py -- python eval.py --model gs://mine/m
                                                any command, on every host
  mwjax launch a --zone us-east5-a --status     how the machines and the job on them stand
  mwjax launch a --zone us-east5-a --logs       follow a job that runs, without restarts
  mwjax launch a --zone us-east5-a --stop       let it save its state and stop
  mwjax launch a --zone us-east5-a --delete     give the machines back
  mwjax launch a --tpu v6e-16 --zone us-east5-b --bucket gs://mine/runs --xpk CLUSTER --dry-run my.yaml
                                                the same on a GKE cluster made with xpk

\b
The same command again uses the machines that are there, and follows the job where it runs already. Ctrl-C leaves the
job running. Restarts need this command to go on: run it under tmux, or on a small machine in the cloud. The machines
are paid for until they are deleted: see --rm. Machines that somebody deletes meanwhile are not rented again.

\b
Before: install the Google Cloud CLI, gcloud auth login, enable the TPU API; ssh-add the key if it has a passphrase.
The machines' service account must be able to write to the bucket. Copy data and models into the bucket: the hosts do
not see this machine's files. Secrets: --env HF_TOKEN --env WANDB_API_KEY take their values from here. They, and what
is called a token, key, secret or password, are shown nowhere and are in no command line of ours.

\b
Exit status: the job's; 2 where it could not be launched, 130 after Ctrl-C. Not tried on real TPU machines yet.
"""


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
        list[str] | None,
        typer.Option(
            "--env", metavar="NAME[=VALUE]", help="Set for the job; repeatable. NAME alone: a secret, as set here."
        ),
    ] = None,
    max_restarts: Annotated[int, typer.Option(min=0, help="How often to begin again after a preemption.")] = 20,
    remove: Annotated[
        bool, typer.Option("--rm", help="Delete the machines once the job has ended or cannot go on.")
    ] = False,
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
