"""From nothing to a finished job: rent, install, start, follow, and begin again after a preemption."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console

from mwjax.launch import cloud, commands, remote, wheel
from mwjax.launch.job import Host, Job, LaunchError, Machines
from mwjax.launch.stream import Dropped, Ended, Line, Streams
from mwjax.launch.wheel import Wheel

AT_ONCE = 32  # connections made at a time
PATIENCE = 20  # attempts to reach a host that is ready, each of several by gcloud itself
GRACE = 180  # seconds a job may take to save its state when told to stop
SHORT_GRACE = 10  # seconds where a host has failed: the others cannot save without it
LOOKS = 4  # at the queue after a failure, before it is taken for the job's own
# How `mwjax train` ends its output: `train.loop.TrainResult.summary`.
SUMMARY = re.compile(r": step (?P<step>\d+) of (?P<total>\d+)(?P<saved>, saved; the same command continues)?$")
UNKNOWN = "unknown"  # a state that cannot be had at the moment
DELETED = "deleted"  # there is none


class HostUnreachable(LaunchError):
    """A host does not answer, or a script failed on it."""


class OutOfReach(LaunchError):
    """Neither hosts nor queue can be reached from here: the job may go on."""


@dataclass(frozen=True)
class End:
    """How one attempt ended. ``interrupted``: the hosts were taken away, or told the job to stop."""

    kind: Literal["done", "failed", "stopped", "interrupted"]
    status: int
    reason: str


def say(message: str) -> None:
    """For people, on stderr: stdout is the job's."""
    print(f"mwjax launch: {message}", file=sys.stderr, flush=True)


def run(
    job: Job, make_wheel: Callable[[], Wheel], *, max_restarts: int, poll: float, delete_after: bool = False
) -> int:
    """Brings the job to its end and returns its exit status.

    Machines of that name are used where they are there, and a job that runs on them is followed, not started again.
    After a preemption the machines are rented anew and the same command starts: it continues from its last checkpoint.
    That happens ``max_restarts`` times. Raises LaunchError. On KeyboardInterrupt the job goes on.

    delete_after: give the machines back also where the job cannot be brought to its end. Whatever happens, it is said
    what goes on costing money.
    """
    machines = job.machines
    attached = _attach(job)
    try:
        end = _to_the_end(job, attached, make_wheel, max_restarts, poll)
    except LaunchError as error:
        if delete_after and not isinstance(error, OutOfReach):
            try:
                delete(machines)
            except LaunchError as also:
                say(str(also))
        _tell_what_is_left(machines)
        raise
    except BaseException:  # Ctrl-C, or whoever reads the logs has seen enough
        say(
            "left; what runs on the machines goes on, and what was asked for stays in the queue. The same command goes "
            f"on from here; to end the job alone: mwjax launch {machines.name} --stop{_where(machines)}"
        )
        say(_kept(machines) + (" (--rm was for this command alone)" if delete_after else ""))
        raise
    say(end.reason)
    if not delete_after:
        say(_kept(machines))
        return end.status
    try:
        delete(machines)
    except LaunchError:
        _tell_what_is_left(machines)
        raise
    return end.status


def _tell_what_is_left(machines: Machines) -> None:
    try:
        resource = cloud.find(machines)
    except LaunchError:
        say(f"whether there are machines cannot be seen from here. {_kept(machines)}")
        return
    if resource is None:
        return
    if resource.state in cloud.NOT_PAID:
        say(
            f"{machines.name} is {resource.state}: nothing is paid for, but it may count against the quota until: "
            f"mwjax launch {machines.name} --delete{_where(machines)}"
        )
    else:
        say(_kept(machines))


def _kept(machines: Machines) -> str:
    return f"the machines are kept, and paid for, until: mwjax launch {machines.name} --delete{_where(machines)}"


def _where(machines: Machines) -> str:
    return f" --zone {machines.zone}" + (f" --project {machines.project}" if machines.project else "")


def _to_the_end(job: Job, attached: bool, make_wheel: Callable[[], Wheel], max_restarts: int, poll: float) -> End:
    machines, restarts, wheel = job.machines, 0, None
    while True:
        try:
            if attached:
                say(f"{job.describe()} is running there already: following it")
            else:
                wheel = wheel or make_wheel()
                _ready(machines, poll)
                _install(job, wheel, poll)
                _start(job)
            attached = False
            end = _follow(machines, poll)
        except HostUnreachable as error:
            if not _taken(machines, poll):
                raise
            end = End("interrupted", 1, str(error))
        if end.kind != "interrupted":
            return end
        if restarts == max_restarts:
            raise LaunchError(f"{end.reason}; restarted {restarts} times already (--max-restarts)")
        restarts += 1
        say(f"{end.reason}; restart {restarts} of at most {max_restarts}")


def delete(machines: Machines) -> None:
    """Gives the machines back. It is no error if there are none."""
    if cloud.find(machines) is None:
        say(f"there is no queued resource {machines.name} in {machines.zone}")
        return
    say(f"deleting {machines.name}")
    cloud.call(commands.delete(machines))


def stop(machines: Machines, seconds: int = GRACE) -> None:
    """Stops the job on every host: it may save its state for so long."""
    say(f"stopping the job on {len(machines.hosts)} hosts; it has {seconds} s to save its state")
    on_all(machines, machines.hosts, remote.stop(seconds))
    say(_kept(machines))


def states(machines: Machines) -> dict[Host, str]:
    """What every host says of its job: see `remote.probe`."""
    answers = on_all(machines, machines.hosts, remote.probe())
    return {host: _said(answer) for host, answer in answers.items()}


def logs(machines: Machines, poll: float) -> int:
    """Follows what runs until it has ended, and touches nothing. Returns its exit status."""
    end = _follow(machines, poll, act=False)
    say(end.reason)
    return end.status


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


def existing(machines: Machines) -> cloud.Resource | None:
    """What there is under that name. Raises LaunchError where it is something else than what is asked for."""
    resource = cloud.find(machines)
    if resource is None or not resource.accelerator:
        return resource
    if (resource.accelerator, resource.slices) != (machines.slice.name, machines.slices):
        raise LaunchError(
            f"{machines.name} exists and has {resource.slices} x {resource.accelerator}, not {machines.slices} x "
            f"{machines.slice.name}: use another name, or delete it first with --delete"
        )
    return resource


def _attach(job: Job) -> bool:
    """Whether this job runs on all hosts. Stops what is left of it where it runs on some. Raises LaunchError where
    another job runs."""
    resource = existing(job.machines)
    if resource is None or resource.state != cloud.ACTIVE:
        return False
    try:
        found = states(job.machines)
    except HostUnreachable:
        return False  # seen to, with patience, when they are prepared
    running = {host for host, state in found.items() if state.startswith("running")}
    others = [host.label for host in running if found[host].split()[-1] != job.id]
    if others:
        raise LaunchError(
            f"another job runs on {job.machines.name} (hosts {', '.join(sorted(others))}): stop it with mwjax launch "
            f"{job.machines.name} --stop, or use another name"
        )
    if running and running != set(found):
        say("the job runs on some hosts only: stopping it there")
        on_all(job.machines, tuple(running), remote.stop(SHORT_GRACE, job.id))
        return False
    return bool(running)


def _ready(machines: Machines, poll: float) -> None:
    """Rents the machines where there are none, and waits for them. Raises LaunchError."""
    console = Console(stderr=True, highlight=False)
    waiting = console.status(f"waiting for {machines.name}") if console.is_terminal else contextlib.nullcontext()
    with waiting:
        _wait(machines, poll)


def _wait(machines: Machines, poll: float) -> None:
    asked, unseen, last, since = False, 0, "", time.monotonic()
    while True:
        resource = existing(machines)
        if resource is None and not asked:
            capacity = "" if machines.capacity == "on-demand" else f", {machines.capacity}"
            say(f"asking for {machines.slices} x {machines.slice.describe()}, {machines.zone}{capacity}")
            cloud.call(commands.create(machines))
            asked = True
            continue
        state = resource.state if resource else "not listed yet"
        other = resource is not None and not (asked or last) and resource.capacity != machines.capacity
        if resource and other and state not in ("FAILED", "SUSPENDED", "SUSPENDING", "DELETING"):
            say(f"{machines.name} is there, {resource.capacity} and not {machines.capacity}: it is used as it is")
        if state == cloud.ACTIVE:
            break
        if resource is None:
            unseen += 1
            if unseen > LOOKS or last not in ("", state):
                raise LaunchError(f"{machines.name} is gone: deleted while we waited for it")
        elif state == "FAILED" and asked:
            raise LaunchError(f"{machines.name} failed: {resource.detail or 'gcloud gives no reason'}")
        elif state in ("FAILED", "SUSPENDED", "SUSPENDING"):
            say(f"{machines.name} is {state}: deleting what is left of it, to ask anew")
            cloud.call(commands.delete(machines))
            asked, last = False, ""
            continue
        elif state != "DELETING" and state not in cloud.WAITING:
            raise LaunchError(f"{machines.name} is in the state {state}, which mwjax does not know")
        if state != last:
            say(f"{machines.name}: {state} after {_duration(time.monotonic() - since)}")
        last = state
        time.sleep(poll)
    say(f"{machines.name}: ACTIVE after {_duration(time.monotonic() - since)}")


def _install(job: Job, made: Wheel, poll: float) -> None:
    """Brings the wheel and the files to all hosts. Raises HostUnreachable."""
    machines = job.machines
    say(f"installing {made.path.name} on {len(machines.hosts)} hosts")
    for node in machines.nodes:
        for attempt in range(1, PATIENCE + 1):
            try:
                cloud.call(commands.prepare(machines, node))
                break
            except cloud.CommandFailed as error:
                if attempt == PATIENCE or _is_taken(machines, _state(machines)):
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


def _start(job: Job) -> None:
    say(f"starting on {len(job.machines.hosts)} hosts: {job.describe()}")
    try:
        on_all(job.machines, job.machines.hosts, remote.start(job))
    except HostUnreachable:
        say("stopping it where it has started")
        _stop_quietly(job.machines, {}, job.id)
        raise


def _follow(machines: Machines, poll: float, act: bool = True) -> End:
    """Shows the logs until the job has ended on all hosts, or, where we may ``act``, on one in a way that ends it."""
    width = max(len(host.label) for host in machines.hosts)
    ended: dict[Host, Ended] = {}
    summaries: dict[Host, re.Match[str]] = {}
    looked = time.monotonic()
    leaving: float | None = None  # when a job that was told to stop is no longer waited for
    with Streams(machines, poll) as streams:
        while len(ended) < len(machines.hosts):
            event = streams.next(min(poll, 1.0))
            now = time.monotonic()
            if isinstance(event, Line):
                print(f"[{event.host.label:>{width}}] {event.text}", flush=True)
                if found := SUMMARY.search(event.text):
                    summaries[event.host] = found
                continue
            if isinstance(event, Ended):
                ended[event.host] = event
                verdict = _verdict(event, summaries.get(event.host))
                if verdict == "failed" and act:
                    return _failed(machines, event, streams, width, poll)
                if verdict == "interrupted" and act:
                    leaving = leaving or now + GRACE
            lost = isinstance(event, Dropped) and event.times >= PATIENCE
            if lost or now - looked >= max(poll, 0.0) * 2 or isinstance(event, Dropped):
                looked = now
                state = _state(machines)
                if _is_taken(machines, state):
                    return End("interrupted", 1, f"{machines.name} was taken away ({state})")
            if isinstance(event, Dropped) and lost:
                if state == UNKNOWN or not act:
                    raise OutOfReach(f"host {event.host.label} cannot be reached ({event.said}); the job may go on")
                cloud.call(commands.delete(machines))
                return End("interrupted", 1, f"host {event.host.label} does not answer ({event.said}); deleted")
            if leaving and now > leaving:
                _stop_quietly(machines, ended)
                break
    return _together(machines, ended, summaries)


def _verdict(event: Ended, summary: re.Match[str] | None) -> str:
    """How the job ended on one host. A run that was told to stop has saved its state and ends with status 0, as one
    that is finished does: its last line tells them apart. Status 1 is mwjax's for a finished run that left input out.
    """
    if event.stopped:
        return "stopped"
    if event.status is None:
        return "interrupted"
    if event.status in (0, 1) and summary:
        return "interrupted" if summary["saved"] else "done"
    return "done" if event.status == 0 else "failed"


def _together(machines: Machines, ended: dict[Host, Ended], summaries: dict[Host, re.Match[str]]) -> End:
    verdicts = {host: _verdict(event, summaries.get(host)) for host, event in ended.items()}
    if "stopped" in verdicts.values():
        return End("stopped", 0, "stopped as asked for; the same command continues")
    hosts = [host.label for host, verdict in verdicts.items() if verdict == "interrupted"]
    if hosts or len(ended) < len(machines.hosts):
        return End("interrupted", 1, f"the job was interrupted on host {', '.join(sorted(hosts))}")
    failed = [host for host, verdict in verdicts.items() if verdict == "failed"]
    if failed:
        status = ended[failed[0]].status or 1
        return End("failed", status, f"failed: host {failed[0].label} first, with status {status}")
    status = max((event.status or 0 for event in ended.values()), default=0)
    return End("done", status, f"finished on all hosts with status {status}")


def _failed(machines: Machines, event: Ended, streams: Streams, width: int, poll: float) -> End:
    """One host has failed: stops the others. Its failure may come from machines that were taken away."""
    say(f"host {event.host.label} failed with status {event.status}; stopping the others")
    _stop_quietly(machines, {event.host: event})
    while (rest := streams.next(0.5)) is not None:
        if isinstance(rest, Line):
            print(f"[{rest.host.label:>{width}}] {rest.text}", flush=True)
    if _taken(machines, poll):
        return End("interrupted", 1, f"{machines.name} was taken away")
    return End("failed", event.status or 1, f"failed: host {event.host.label} first, with status {event.status}")


def _stop_quietly(machines: Machines, ended: dict[Host, Ended], job: str | None = None) -> None:
    """Stops the job where it has not ended. Hosts that do not answer run nothing for long."""
    hosts = tuple(host for host in machines.hosts if host not in ended)
    try:
        on_all(machines, hosts, remote.stop(SHORT_GRACE, job))
    except HostUnreachable as error:
        say(str(error))


def _taken(machines: Machines, poll: float) -> bool:
    """Whether the machines are being taken away. It shows in the queue a little later than on the hosts."""
    for look in range(LOOKS if machines.capacity == "spot" else 1):
        if look:
            time.sleep(poll)
        if _is_taken(machines, _state(machines)):
            return True
    return False


def _is_taken(machines: Machines, state: str) -> bool:
    """Whether machines that were there have been taken away. Raises LaunchError where somebody has deleted them, who
    would not have them rented again."""
    if state in ("DELETING", DELETED):
        raise LaunchError(f"{machines.name} was deleted, and not by this command: it is not rented again")
    return state not in (cloud.ACTIVE, UNKNOWN)


def _state(machines: Machines) -> str:
    try:
        resource = cloud.find(machines)
    except cloud.CommandFailed:
        return UNKNOWN
    return resource.state if resource else DELETED


def _said(answer: str) -> str:
    return answer.rpartition(f"{remote.MARK}job ")[2].strip() or "none"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
