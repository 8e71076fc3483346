"""Running the cloud client and reading what it says."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import Any

from mwjax.launch import commands
from mwjax.launch.commands import Command
from mwjax.launch.job import Capacity, LaunchError, Machines

# States of a queued resource in which it can still become ACTIVE:
# https://docs.cloud.google.com/tpu/docs/queued-resources
WAITING = ("CREATING", "ACCEPTED", "PROVISIONING", "WAITING_FOR_RESOURCES", "STATE_UNSPECIFIED")
ACTIVE = "ACTIVE"
NOT_PAID = ("FAILED", "SUSPENDED")  # nothing is rented, and only the request is left
ATTEMPTS = 3  # of a look at the queue
TIMEOUT = 900  # seconds a command may take


@dataclass(frozen=True)
class Resource:
    """A queued resource. accelerator: name of its slices, and ``slices`` how many; capacity: as `Machines` has it;
    detail: why it failed, if it did."""

    state: str
    accelerator: str
    slices: int
    capacity: Capacity
    detail: str


class CommandFailed(LaunchError):
    """A command of the cloud client failed. said: the end of what it said."""

    def __init__(self, command: Command, said: str) -> None:
        self.said = said
        super().__init__(f"{' '.join(command[:6])} failed:\n{said}")


def call(command: Command, cancelled: threading.Event | None = None) -> str:
    """What the command printed. Raises CommandFailed, LaunchError where there is no client.

    Interrupted, or once ``cancelled`` is set, it ends with the ssh it has started: Ctrl-C leaves nothing behind here.
    """
    # A session of its own: without a terminal ssh cannot wait for a password, and Ctrl-C is for us to handle.
    how = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    try:
        process = subprocess.Popen(command, text=True, start_new_session=True, **how)  # type: ignore[call-overload]
    except FileNotFoundError:
        raise LaunchError(
            f"{command[0]} is not installed: install the Google Cloud CLI (https://cloud.google.com/sdk) and log in "
            "with: gcloud auth login"
        ) from None
    deadline = time.monotonic() + TIMEOUT
    while True:
        try:
            out, err = process.communicate(timeout=0.2)
            break
        except subprocess.TimeoutExpired:
            late = time.monotonic() > deadline
            if late or (cancelled and cancelled.is_set()):
                end(process)
                raise CommandFailed(command, f"no answer within {TIMEOUT} s" if late else "cancelled") from None
        except BaseException:
            end(process)
            raise
    if process.returncode:
        raise CommandFailed(command, _tail(err or out) or f"exit status {process.returncode}")
    return out


def end(process: subprocess.Popen[Any]) -> None:
    """Ends the client and the ssh it has started, which would keep our pipe open."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def find(machines: Machines, pause: float = 1.0) -> Resource | None:
    """The queued resource of that name as it stands; None where there is none. Tries again where the client fails."""
    for attempt in range(ATTEMPTS):
        try:
            return _read(json.loads(call(commands.describe(machines))))
        except CommandFailed as error:
            if "NOT_FOUND" in error.said:  # others may say "not found" of a credential, or of a host
                return None
            if attempt == ATTEMPTS - 1:
                raise
        except json.JSONDecodeError as error:
            raise LaunchError(f"gcloud did not answer in JSON: {error}") from error
        time.sleep(pause)
    raise AssertionError("unreachable")


def _read(answer: dict[str, Any]) -> Resource:
    """https://docs.cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.queuedResources"""
    state = answer.get("state", {})
    nodes = answer.get("tpu", {}).get("nodeSpec", [])
    first = nodes[0] if nodes else {}
    capacity: Capacity = "on-demand"
    if "spot" in answer:
        capacity = "spot"
    elif answer.get("guaranteed", {}).get("reserved"):
        capacity = "reserved"
    several = first.get("multisliceParams", {}).get("nodeCount")
    return Resource(
        state=state.get("state", "STATE_UNSPECIFIED"),
        accelerator=first.get("node", {}).get("acceleratorType", ""),
        slices=int(several) if several else max(len(nodes), 1),
        capacity=capacity,
        detail=state.get("failedData", {}).get("error", {}).get("message", ""),
    )


def _tail(text: str, lines: int = 15) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])
