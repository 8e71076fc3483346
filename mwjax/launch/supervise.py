"""From nothing to a finished job: rent, install, start, follow, and begin again after a preemption."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from mwjax.launch import cloud, commands, hosts, remote, rented
from mwjax.launch.hosts import PATIENCE
from mwjax.launch.job import Host, Job, LaunchError, Machines
from mwjax.launch.rented import say
from mwjax.launch.stream import Dropped, Ended, Line, Streams
from mwjax.launch.wheel import Wheel
from mwjax.train import ending, stop

# How `mwjax train` ends its output: `train.loop.TrainResult.summary`.
SUMMARY = re.compile(r": step \d+ of \d+(?P<stopped>, .*; the same command (continues|begins again))?$")
# Statuses after which the same command goes on: another process was lost; SIGTERM came before training began.
GOES_ON = (ending.LOST, stop.StoppedEarly.status)


class OutOfReach(LaunchError):
    """Neither hosts nor queue can be reached from here: the job may go on."""


@dataclass(frozen=True)
class End:
    """How one attempt ended. ``interrupted``: the hosts were taken away, or told the job to stop."""

    kind: Literal["done", "failed", "stopped", "interrupted"]
    status: int
    reason: str


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
    try:
        attached = _attach(job)
    except hosts.HostUnreachable:
        rented.tell_what_is_left(machines)
        raise
    try:
        end = _to_the_end(job, attached, make_wheel, max_restarts, poll)
    except LaunchError as error:
        if delete_after and not isinstance(error, OutOfReach):
            try:
                rented.delete(machines)
            except LaunchError as also:
                say(str(also))
        rented.tell_what_is_left(machines)
        raise
    except BaseException:  # Ctrl-C, or whoever reads the logs has seen enough
        say(
            "left; what runs on the machines goes on, and what was asked for stays in the queue. The same command goes "
            f"on from here; to end the job alone: mwjax launch {machines.name} --stop{rented.where(machines)}"
        )
        say(rented.kept(machines) + (" (--rm was for this command alone)" if delete_after else ""))
        raise
    say(end.reason)
    if not delete_after:
        say(rented.kept(machines))
        return end.status
    try:
        rented.delete(machines)
    except LaunchError:
        rented.tell_what_is_left(machines)
        raise
    return end.status


def _to_the_end(job: Job, attached: bool, make_wheel: Callable[[], Wheel], max_restarts: int, poll: float) -> End:
    machines, restarts, wheel = job.machines, 0, None
    while True:
        try:
            if attached:
                say(f"{job.describe()} is running there already: following it")
            else:
                wheel = wheel or make_wheel()
                rented.ready(machines, poll)
                hosts.install(job, wheel, poll)
                hosts.start(job)
            attached = False
            end = _follow(machines, poll)
        except hosts.HostUnreachable as error:
            if not rented.taken(machines, poll):
                raise
            end = End("interrupted", 1, str(error))
        if end.kind != "interrupted":
            return end
        if restarts == max_restarts:
            raise LaunchError(f"{end.reason}; restarted {restarts} times already (--max-restarts)")
        restarts += 1
        say(f"{end.reason}; restart {restarts} of at most {max_restarts}")


def logs(machines: Machines, poll: float) -> int:
    """Follows what runs until it has ended, and touches nothing. Returns its exit status."""
    end = _follow(machines, poll, act=False)
    say(end.reason)
    return end.status


def _attach(job: Job) -> bool:
    """Whether this job runs on all hosts. Stops what is left of it where it runs on some. Raises LaunchError where
    another job runs."""
    resource = rented.existing(job.machines)
    if resource is None or resource.state != cloud.ACTIVE:
        return False
    try:
        found = hosts.states(job.machines)
    except hosts.HostUnreachable:
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
        hosts.on_all(job.machines, tuple(running), remote.stop(hosts.SHORT_GRACE, job.id))
        return False
    return bool(running)


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
                    leaving = leaving or now + hosts.GRACE
            lost = isinstance(event, Dropped) and event.times >= PATIENCE
            if lost or now - looked >= 2 * poll or isinstance(event, Dropped):
                looked = now
                state = rented.state(machines)
                if rented.is_taken(machines, state):
                    return End("interrupted", 1, f"{machines.name} was taken away ({state})")
            if isinstance(event, Dropped) and lost:
                if state == rented.UNKNOWN or not act:
                    raise OutOfReach(f"host {event.host.label} cannot be reached ({event.said}); the job may go on")
                cloud.call(commands.delete(machines))
                return End("interrupted", 1, f"host {event.host.label} does not answer ({event.said}); deleted")
            if leaving and now > leaving:
                hosts.stop_quietly(machines, ended)
                break
    return _together(machines, ended, summaries)


def _verdict(event: Ended, summary: re.Match[str] | None) -> str:
    """How the job ended on one host. A run that was told to stop ends with status 0, as one that is finished does: its
    last line tells them apart. Status 1 is mwjax's for a finished run that left input out.
    """
    if event.stopped:
        return "stopped"
    if event.status is None or event.status in GOES_ON:
        return "interrupted"
    if event.status in (0, 1) and summary:
        return "interrupted" if summary["stopped"] else "done"
    return "done" if event.status == 0 else "failed"


def _together(machines: Machines, ended: dict[Host, Ended], summaries: dict[Host, re.Match[str]]) -> End:
    verdicts = {host: _verdict(event, summaries.get(host)) for host, event in ended.items()}
    if "stopped" in verdicts.values():
        return End("stopped", 0, "stopped as asked for; the same command continues")
    gone = [host.label for host, verdict in verdicts.items() if verdict == "interrupted"]
    if gone or len(ended) < len(machines.hosts):
        return End("interrupted", 1, f"the job was interrupted on host {', '.join(sorted(gone))}")
    failed = [host for host, verdict in verdicts.items() if verdict == "failed"]
    if failed:
        status = ended[failed[0]].status or 1
        return End("failed", status, f"failed: host {failed[0].label} first, with status {status}")
    status = max((event.status or 0 for event in ended.values()), default=0)
    return End("done", status, f"finished on all hosts with status {status}")


def _failed(machines: Machines, event: Ended, streams: Streams, width: int, poll: float) -> End:
    """One host has failed: stops the others. Its failure may come from machines that were taken away."""
    say(f"host {event.host.label} failed with status {event.status}; stopping the others")
    hosts.stop_quietly(machines, [event.host])
    until = time.monotonic() + hosts.SHORT_GRACE  # one that could not be stopped talks on
    while time.monotonic() < until and (rest := streams.next(0.5)) is not None:
        if isinstance(rest, Line):
            print(f"[{rest.host.label:>{width}}] {rest.text}", flush=True)
    if rented.taken(machines, poll):
        return End("interrupted", 1, f"{machines.name} was taken away")
    return End("failed", event.status or 1, f"failed: host {event.host.label} first, with status {event.status}")
