"""What `mwjax launch` would run, in order, as commands to copy."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from mwjax.launch import commands, remote, wheel
from mwjax.launch.commands import Command
from mwjax.launch.hosts import SHORT_GRACE, secrets_file
from mwjax.launch.job import Job


def lines(job: Job, *, given_wheel: str | None, max_restarts: int, poll: float, delete_after: bool) -> Iterator[str]:
    """The commands of a launch with nothing there yet, by phase; the phases are comments."""
    machines = job.machines
    hosts = machines.hosts
    yield f"# {machines.slices} x {machines.slice.describe()}, {machines.zone}, {machines.capacity}"
    built, digest, build = planned_wheel(job, given_wheel)
    yield from _phase("The wheel", build, None if build else built)
    yield from _phase(
        "Rent, unless they are there", [commands.create(machines)], f"then, every {poll:g} s until it is ACTIVE:"
    )
    yield shlex.join(commands.describe(machines))
    every = "each of these on every node; where --worker is a number, on every host"
    yield from _phase(f"Install; {every}", [])
    yield shlex.join(commands.prepare(machines, hosts[0].node))
    if job.secrets:
        yield f"# {remote.SECRETS}: written for the copy, with {', '.join(name for name, _ in job.secrets)}"
    yield shlex.join(commands.copy(machines, hosts[0].node, (Path(built), *job.files, *secrets_file(job))))
    name = built.rpartition("/")[2]
    yield shlex.join(commands.ssh(machines, hosts[0], remote.install(job, name, digest)))
    yield from _phase(f"Start: {job.describe()}", [commands.ssh(machines, hosts[0], remote.start(job))])
    yield from _phase("Follow the log until the job has ended", [commands.ssh(machines, hosts[0], remote.follow(0))])
    if len(hosts) > 1:
        yield f"# hosts: {', '.join(f'{host.node} --worker={host.worker}' for host in hosts)}"
        yield from _phase(
            "If one host fails, on all others", [commands.ssh(machines, hosts[0], remote.stop(SHORT_GRACE))]
        )
    yield from _phase(
        f"If the machines are taken away, at most {max_restarts} times", [commands.delete(machines)], "and rent again"
    )
    if delete_after:
        yield from _phase("At the end", [commands.delete(machines)])


def planned_wheel(job: Job, given: str | None) -> tuple[str, str, list[Command]]:
    """Path and digest of the wheel, and the commands that would build it. Raises LaunchError."""
    root = wheel.checkout()
    if given is not None or root is None:
        made = wheel.make(job.machines.name, given)
        return str(made.path), made.digest, []
    work = wheel.folder(job.machines.name)
    return str(work / wheel.filename()), wheel.source_digest(root), wheel.build_commands(root, work)


def printed(commands_: Iterable[Command]) -> Iterator[str]:
    """As a shell takes them."""
    return (shlex.join(command) for command in commands_)


def _phase(title: str, commands_: list[Command], note: str | None = None) -> Iterator[str]:
    yield f"\n# {title}"
    yield from printed(commands_)
    if note:
        yield f"# {note}"
