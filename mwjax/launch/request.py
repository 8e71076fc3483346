"""`mwjax launch` from its options to its exit status."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import FrameType

from mwjax.launch import cloud, dry_run, hosts, job, rented, supervise, topologies, wheel, xpk
from mwjax.launch.job import Capacity, Job, LaunchError, Machines

LEFT = 130  # exit status after Ctrl-C


@dataclass(frozen=True)
class Request:
    """The options as given. capacities: of spot and reserved, those that were; actions: of status, logs, stop and
    delete. remove: delete the machines when the job has ended."""

    name: str
    words: tuple[str, ...]
    zone: str | None
    tpu: str | None
    slices: int
    project: str | None
    capacities: tuple[str, ...]
    bucket: str | None
    files: tuple[str, ...]
    environment: tuple[str, ...]
    max_restarts: int
    remove: bool
    dry_run: bool
    actions: tuple[str, ...]
    xpk: str | None
    python: str
    wheel: str | None
    runtime: str | None
    internal_ips: bool
    give_up_after: str | None
    create_flags: tuple[str, ...]
    poll: float


def carry_out(request: Request) -> int:
    """Does what was asked for; the exit status. Raises LaunchError, ConfigError, UnknownSlice."""
    _check(request)
    if request.actions:
        return _act(request, request.actions[0])
    if request.tpu is None:
        raise LaunchError("--tpu is needed, such as --tpu v5p-32")
    machines = _machines(request, topologies.find(request.tpu))
    todo = job.plan(
        machines,
        request.words,
        bucket=request.bucket,
        files=request.files,
        environment=request.environment,
        python=request.python,
        counted=request.xpk is None,
    )
    if request.xpk:
        return _submit(request, todo, request.xpk)
    if request.dry_run:
        lines = dry_run.lines(
            todo,
            given_wheel=request.wheel,
            max_restarts=request.max_restarts,
            poll=request.poll,
            delete_after=request.remove,
        )
        print("\n".join(lines))
        return 0
    try:
        with _alone(machines), _sigterm_interrupts():
            return supervise.run(
                todo,
                lambda: wheel.make(machines.name, request.wheel),
                max_restarts=request.max_restarts,
                poll=request.poll,
                delete_after=request.remove,
            )
    except KeyboardInterrupt:
        return LEFT


def _check(request: Request) -> None:
    job.check_name(request.name)
    if request.zone is None:
        raise LaunchError("--zone is needed, such as --zone us-east5-a")
    if len(request.actions) > 1:
        raise LaunchError(f"one at a time: --{', --'.join(request.actions)}")
    if len(request.capacities) > 1:
        raise LaunchError("--spot and --reserved exclude each other")
    if request.actions and (request.words or request.xpk or request.dry_run or request.remove):
        raise LaunchError(f"--{request.actions[0]} takes no command, no --xpk, no --dry-run and no --rm")
    of_machines = {
        **dict.fromkeys((f"--{kind}" for kind in request.capacities), True),
        "--rm": request.remove,
        "--runtime": request.runtime,
        "--internal-ips": request.internal_ips,
        "--give-up-after": request.give_up_after,
        "--create-flag": request.create_flags,
    }
    given = [option for option, value in of_machines.items() if value]
    if request.xpk and given:
        raise LaunchError(f"{', '.join(given)}: with --xpk, the cluster decides")


def _machines(request: Request, slice_: topologies.Slice) -> Machines:
    assert request.zone is not None
    capacity: Capacity = "on-demand"
    if request.capacities:
        capacity = "spot" if request.capacities[0] == "spot" else "reserved"
    return Machines(
        name=request.name,
        slice=slice_,
        zone=request.zone,
        slices=request.slices,
        project=request.project,
        capacity=capacity,
        runtime=request.runtime,
        internal=request.internal_ips,
        give_up_after=request.give_up_after,
        create_flags=request.create_flags,
    )


def _act(request: Request, action: str) -> int:
    """What concerns machines that are there: their slices are looked up."""
    unknown = _machines(request, next(iter(topologies.SLICES.values())))
    if action == "delete":
        rented.delete(unknown)
        return 0
    resource = cloud.find(unknown)
    if resource is None:
        raise LaunchError(f"there is no queued resource {request.name} in {request.zone}")
    machines = replace(unknown, slice=topologies.find(resource.accelerator), slices=resource.slices)
    if action == "status":
        print("\n".join(_status(machines, resource)))
        return 0
    if resource.state != cloud.ACTIVE:
        raise LaunchError(f"{request.name} is {resource.state}: nothing runs there")
    if action == "stop":
        hosts.stop(machines)
        return 0
    try:
        return supervise.logs(machines, request.poll)
    except KeyboardInterrupt:
        return LEFT


def _status(machines: Machines, resource: cloud.Resource) -> Iterator[str]:
    yield f"{machines.name}: {resource.state}, {machines.slices} x {machines.slice.describe()}"
    if resource.detail:
        yield resource.detail
    if resource.state == cloud.ACTIVE:
        for host, state in hosts.states(machines).items():
            yield f"host {host.label}: {state}"


def _submit(request: Request, todo: Job, cluster: str) -> int:
    built, _, build = dry_run.planned_wheel(todo, request.wheel)
    if request.dry_run:
        print("\n".join(dry_run.printed([*build, *xpk.submit_commands(todo, cluster, built, request.max_restarts)])))
        return 0
    built = str(wheel.make(todo.machines.name, request.wheel).path)
    for command in xpk.submit_commands(todo, cluster, built, request.max_restarts):
        try:
            status = subprocess.run(command, env={**os.environ, **dict(todo.secrets)}).returncode
        except FileNotFoundError:
            raise LaunchError(f"{command[0]} is not installed: pip install xpk") from None
        if status:
            return status
    return 0


@contextlib.contextmanager
def _alone(machines: Machines) -> Iterator[None]:
    """While the block runs, no other launch of that name does on this machine: after a preemption, each would delete
    what the other has rented. Raises LaunchError."""
    name = machines.name
    lock = wheel.folder(name).with_name(f"{name}.lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with open(lock, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LaunchError(
                f"another mwjax launch {name} is at work on this machine; to see what it follows: mwjax launch {name} "
                f"--logs --zone {machines.zone}"
            ) from None
        yield


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """While the block runs, SIGTERM does what Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
