"""The machines of a job: asked for, waited for, looked after, and given back."""

from __future__ import annotations

import contextlib
import sys
import time

from rich.console import Console

from mwjax.launch import cloud, commands
from mwjax.launch.job import LaunchError, Machines

LOOKS = 4  # at the queue after a failure, before it is taken for the job's own
BLIND = 40  # looks in a row that may fail while we wait for the machines
UNKNOWN, DELETED = "unknown", "deleted"  # states beside gcloud's own, see `state`


def say(message: str) -> None:
    """For people, on stderr: stdout is the job's."""
    print(f"mwjax launch: {message}", file=sys.stderr, flush=True)


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


def ready(machines: Machines, poll: float) -> None:
    """Rents the machines where there are none, and waits for them. Raises LaunchError."""
    console = Console(stderr=True, highlight=False)
    waiting = console.status(f"waiting for {machines.name}") if console.is_terminal else contextlib.nullcontext()
    with waiting:
        _wait(machines, poll)


def _wait(machines: Machines, poll: float) -> None:
    asked, unseen, blind, last, since = False, 0, 0, "", time.monotonic()
    while True:
        try:
            resource, blind = existing(machines), 0
        except cloud.CommandFailed as error:
            blind += 1
            if not (asked or last) or blind > BLIND:
                raise
            if blind == 1:
                say(f"the queue cannot be seen ({error.said.splitlines()[-1]}): waiting on")
            time.sleep(poll)
            continue
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
    say(f"{machines.name}: ACTIVE after {_duration(time.monotonic() - since)}, and paid for until it is deleted")


def state(machines: Machines) -> str:
    """Of the queued resource; DELETED where there is none, UNKNOWN where it cannot be had at the moment."""
    try:
        resource = cloud.find(machines)
    except cloud.CommandFailed:
        return UNKNOWN
    return resource.state if resource else DELETED


def taken(machines: Machines, poll: float) -> bool:
    """Whether the machines are being taken away. It shows in the queue a little later than on the hosts."""
    for look in range(LOOKS if machines.capacity == "spot" else 1):
        if look:
            time.sleep(poll)
        if is_taken(machines, state(machines)):
            return True
    return False


def is_taken(machines: Machines, state: str) -> bool:
    """Whether machines that were there have been taken away. Raises LaunchError where somebody has deleted them, who
    would not have them rented again."""
    if state in ("DELETING", DELETED):
        raise LaunchError(f"{machines.name} was deleted, and not by this command: it is not rented again")
    return state not in (cloud.ACTIVE, UNKNOWN)


def delete(machines: Machines) -> None:
    """Gives the machines back. It is no error if there are none."""
    if cloud.find(machines) is None:
        say(f"there is no queued resource {machines.name} in {machines.zone}")
        return
    say(f"deleting {machines.name}")
    cloud.call(commands.delete(machines))


def tell_what_is_left(machines: Machines) -> None:
    """Says what goes on costing money, if anything does."""
    try:
        resource = cloud.find(machines)
    except LaunchError:
        say(f"whether there are machines cannot be seen from here. {kept(machines)}")
        return
    if resource is None:
        return
    if resource.state in cloud.NOT_PAID:
        say(
            f"{machines.name} is {resource.state}: nothing is paid for, but it may count against the quota until: "
            f"mwjax launch {machines.name} --delete{where(machines)}"
        )
    else:
        say(kept(machines))


def kept(machines: Machines) -> str:
    """How to stop paying."""
    return f"the machines are kept, and paid for, until: mwjax launch {machines.name} --delete{where(machines)}"


def where(machines: Machines) -> str:
    """The options that say which machines of that name."""
    return f" --zone {machines.zone}" + (f" --project {machines.project}" if machines.project else "")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
