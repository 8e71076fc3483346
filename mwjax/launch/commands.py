"""The cloud client's commands, as argument lists: nothing runs here.

Syntax: https://cloud.google.com/sdk/gcloud/reference/compute/tpus/queued-resources/create (and delete, describe),
https://cloud.google.com/sdk/gcloud/reference/compute/tpus/tpu-vm/ssh (and scp); queued resources and their states:
https://docs.cloud.google.com/tpu/docs/queued-resources; several slices:
https://docs.cloud.google.com/tpu/docs/multislice-introduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mwjax.launch import remote
from mwjax.launch.job import Host, LaunchError, Machines

Command = tuple[str, ...]
QUEUED = ("gcloud", "compute", "tpus", "queued-resources")
MACHINE = ("gcloud", "compute", "tpus", "tpu-vm")
# A host that is gone must end the connection, not leave it waiting.
ALIVE = ("-oConnectTimeout=30", "-oServerAliveInterval=15", "-oServerAliveCountMax=4")


def _where(machines: Machines) -> Command:
    return (f"--zone={machines.zone}", *((f"--project={machines.project}",) if machines.project else ()), "--quiet")


def create(machines: Machines) -> Command:
    """Asks for the slices. Raises LaunchError for a generation that queued resources do not offer."""
    runtime = machines.runtime or machines.slice.generation.runtime_version
    if runtime is None:
        raise LaunchError(f"{machines.slice.name} is to be had through GKE only: give --xpk CLUSTER")
    several = (f"--node-count={machines.slices}", f"--node-prefix={machines.name}")
    return (
        *(*QUEUED, "create", machines.name),
        *(several if machines.slices > 1 else (f"--node-id={machines.name}",)),
        *(f"--accelerator-type={machines.slice.name}", f"--runtime-version={runtime}"),
        *(() if machines.capacity == "on-demand" else (f"--{machines.capacity}",)),
        *(("--internal-ips",) if machines.internal else ()),
        *((f"--valid-until-duration={machines.give_up_after}",) if machines.give_up_after else ()),
        *machines.create_flags,
        *_where(machines),
    )


def describe(machines: Machines) -> Command:
    return (*QUEUED, "describe", machines.name, "--format=json", *_where(machines))


def delete(machines: Machines) -> Command:
    """Deletes the queued resource with its slices, and waits until they are gone."""
    return (*QUEUED, "delete", machines.name, "--force", *_where(machines))


def ssh(machines: Machines, host: Host, script: str) -> Command:
    """Runs ``script`` on one host."""
    return (*_ssh(machines, host.node, str(host.worker)), f"--command={script}")


def prepare(machines: Machines, node: str) -> Command:
    """Makes the folder on all hosts of a slice."""
    return (*_ssh(machines, node, "all"), f"--command={remote.prepare()}")


def _ssh(machines: Machines, node: str, worker: str) -> Command:
    return (
        *(*MACHINE, "ssh", node, f"--worker={worker}"),
        *(f"--ssh-flag={flag}" for flag in ALIVE),
        *(("--internal-ip",) if machines.internal else ()),
        *_where(machines),
    )


def copy(machines: Machines, node: str, files: Sequence[Path]) -> Command:
    """Copies files into the folder on all hosts of a slice."""
    return (
        *(*MACHINE, "scp", *map(str, files), f"{node}:{remote.FOLDER}/", "--worker=all"),
        *(f"--scp-flag={flag}" for flag in ALIVE),
        *(("--internal-ip",) if machines.internal else ()),
        *_where(machines),
    )
