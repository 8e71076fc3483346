"""The same job on a GKE cluster, through xpk: https://github.com/AI-Hypercomputer/xpk (docs/usage/workloads.md).

The cluster, made by ``xpk cluster create``, decides on spot or reserved capacity. xpk puts a folder, ``--script-dir``,
into a container image and runs one command in every container; ours holds the wheel and the job's files.
Flags as in xpk's src/xpk/parser/workload.py at 367c838 (June 2026); xpk 1.16.0 takes the command under its own
``--dry-run``. Not run on GKE.

xpk restarts a workload whose command ends with 42, 127 to 255 or our status for a lost process, and one whose nodes
were taken away: the run goes on from its last checkpoint. SIGTERM ends the shell that xpk starts, unheard by the run.

Secrets go by name in ``--env-file``, which cannot stand beside ``--env``: xpk takes their values from its own
environment.
"""

from __future__ import annotations

import shlex

from mwjax.launch import wheel
from mwjax.launch.commands import Command
from mwjax.launch.job import Job
from mwjax.train import ending


def submit_commands(job: Job, cluster: str, built: str, max_restarts: int) -> list[Command]:
    """Copies the files beside the wheel ``built`` and submits the workload."""
    machines = job.machines
    work = wheel.folder(machines.name)
    scripts, variables = work / "scripts", work / "environment"
    given = [f"{variable}={value}" for variable, value in job.environment]
    listed = [*given, *(variable for variable, _ in job.secrets)]
    name = built.rpartition("/")[2]
    extras = ",".join(job.extras)
    install = f'pip install --quiet "mwjax[{extras}] @ file://$PWD/{name}"'
    return [
        ("mkdir", "-p", str(scripts)),
        ("cp", built, *map(str, job.files), str(scripts)),
        *([("sh", "-c", 'printf "%s\\n" "$@" > "$0"', str(variables), *listed)] if job.secrets else []),
        (
            *("xpk", "workload", "create", f"--cluster={cluster}", f"--workload={machines.name}"),
            *(f"--tpu-type={machines.slice.name}", f"--num-slices={machines.slices}", f"--zone={machines.zone}"),
            *((f"--project={machines.project}",) if machines.project else ()),
            *(f"--base-docker-image=python:{job.python}", f"--script-dir={scripts}"),
            *([f"--env-file={variables}"] if job.secrets else [f"--env={pair}" for pair in given]),
            *(f"--max-restarts={max_restarts}", f"--restart-on-exit-codes={ending.LOST}"),
            f"--command={install} && {shlex.join(job.command)}",
        ),
    ]
