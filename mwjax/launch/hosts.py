"""The hosts of a job, all at once: bring what it needs, start it, ask how it stands, stop it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mwjax.launch import cloud, commands, remote, rented, wheel
from mwjax.launch.job import Host, Job, LaunchError, Machines
from mwjax.launch.rented import say
from mwjax.launch.wheel import Wheel

AT_ONCE = 32  # connections made at a time
PATIENCE = 20  # attempts to reach a host that is ready, each of several by gcloud itself
GRACE = 180  # seconds a job may take to save its state when told to stop
SHORT_GRACE = 10  # seconds where a host has failed: the others cannot save without it


class HostUnreachable(LaunchError):
    """A host does not answer, or a script failed on it."""


def on_all(machines: Machines, hosts: tuple[Host, ...], script: str) -> dict[Host, str]:
    """Runs a script on hosts at once; returns what each printed. Raises HostUnreachable naming those it failed on."""
    answers: dict[Host, str] = {}
    failed: dict[Host, str] = {}
    cancelled = threading.Event()

    def one(host: Host) -> None:
        try:
            answers[host] = cloud.call(commands.ssh(machines, host, script), cancelled)
        except cloud.CommandFailed as error:
            failed[host] = error.said

    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            list(pool.map(one, hosts))
        except BaseException:  # interrupted: the pool would wait for those under way, and begin all others
            cancelled.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if failed:
        names = ", ".join(host.label for host in hosts if host in failed)
        first = next(host for host in hosts if host in failed)
        raise HostUnreachable(f"failed on host {names}; host {first.label} said:\n{failed[first]}")
    return answers


def states(machines: Machines) -> dict[Host, str]:
    """What every host says of its job: see `remote.probe`."""
    answers = on_all(machines, machines.hosts, remote.probe())
    return {host: _said(answer) for host, answer in answers.items()}


def _said(answer: str) -> str:
    return answer.rpartition(f"{remote.MARK}job ")[2].strip() or "none"


def install(job: Job, made: Wheel, poll: float) -> None:
    """Brings the wheel and the files to all hosts. Raises HostUnreachable."""
    machines = job.machines
    say(f"installing {made.path.name} on {len(machines.hosts)} hosts")
    for node in machines.nodes:
        for attempt in range(1, PATIENCE + 1):
            try:
                cloud.call(commands.prepare(machines, node))
                break
            except cloud.CommandFailed as error:
                if attempt == PATIENCE or rented.is_taken(machines, rented.state(machines)):
                    raise HostUnreachable(f"the hosts of {node} do not answer:\n{error.said}") from error
                say(f"the hosts of {node} do not answer yet ({error.said.splitlines()[-1]})")
                time.sleep(poll)
        try:
            with files(job) as written:
                cloud.call(commands.copy(machines, node, (made.path, *written)))
        except cloud.CommandFailed as error:
            raise HostUnreachable(f"copying to the hosts of {node}:\n{error.said}") from error
    on_all(machines, machines.hosts, remote.install(job, made.path.name, made.digest))


def secrets_file(job: Job) -> tuple[Path, ...]:
    """Where the job's secrets are while they are copied; nowhere if it has none."""
    return (wheel.folder(job.machines.name) / remote.SECRETS,) if job.secrets else ()


@contextlib.contextmanager
def files(job: Job) -> Iterator[tuple[Path, ...]]:
    """What is copied beside the wheel; the file with the secrets, which only we can read, is there for so long."""
    secret = secrets_file(job)
    try:
        for path in secret:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(remote.secrets(job))
        yield (*job.files, *secret)
    finally:
        for path in secret:
            path.unlink(missing_ok=True)


def start(job: Job) -> None:
    """Starts the job on all hosts, or on none. Raises HostUnreachable."""
    say(f"starting on {len(job.machines.hosts)} hosts: {job.describe()}")
    try:
        on_all(job.machines, job.machines.hosts, remote.start(job))
    except HostUnreachable:
        say("stopping it where it has started")
        stop_quietly(job.machines, job=job.id)
        raise


def stop(machines: Machines, seconds: int = GRACE) -> None:
    """Stops the job on every host: it may save its state for so long."""
    say(f"stopping the job on {len(machines.hosts)} hosts; it has {seconds} s to save its state")
    on_all(machines, machines.hosts, remote.stop(seconds))
    say(rented.kept(machines))


def stop_quietly(machines: Machines, ended: Collection[Host] = (), job: str | None = None) -> None:
    """Stops the job, or only the one of that id, where it has not ended. Hosts that do not answer run nothing for
    long."""
    try:
        on_all(machines, tuple(host for host in machines.hosts if host not in ended), remote.stop(SHORT_GRACE, job))
    except HostUnreachable as error:
        say(str(error))
