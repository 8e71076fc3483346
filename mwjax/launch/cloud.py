"""Running the cloud client and reading what it says."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass
from typing import Any

from mwjax.launch import commands
from mwjax.launch.commands import Command
from mwjax.launch.job import LaunchError, Machines

# States of a queued resource in which it can still become ACTIVE:
# https://docs.cloud.google.com/tpu/docs/queued-resources
WAITING = ("CREATING", "ACCEPTED", "PROVISIONING", "WAITING_FOR_RESOURCES", "STATE_UNSPECIFIED")
ACTIVE = "ACTIVE"
ATTEMPTS = 3  # of a look at the queue
TIMEOUT = 900  # seconds a command may take


@dataclass(frozen=True)
class Resource:
    """A queued resource. accelerator: name of its slices, and ``slices`` how many; detail: why it failed, if it did."""

    state: str
    accelerator: str
    slices: int
    detail: str


class CommandFailed(LaunchError):
    """A command of the cloud client failed. said: the end of what it said."""

    def __init__(self, command: Command, said: str) -> None:
        self.said = said
        super().__init__(f"{' '.join(command[:6])} failed:\n{said}")


def call(command: Command) -> str:
    """What the command printed. Raises CommandFailed, LaunchError where there is no client."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=TIMEOUT)
    except FileNotFoundError:
        raise LaunchError(
            f"{command[0]} is not installed: install the Google Cloud CLI (https://cloud.google.com/sdk) and log in "
            "with: gcloud auth login"
        ) from None
    except subprocess.TimeoutExpired:
        raise CommandFailed(command, f"no answer within {TIMEOUT} s") from None
    if done.returncode:
        raise CommandFailed(command, _tail(done.stderr or done.stdout) or f"exit status {done.returncode}")
    return done.stdout


def find(machines: Machines, pause: float = 1.0) -> Resource | None:
    """The queued resource of that name as it stands; None where there is none. Tries again where the client fails."""
    for attempt in range(ATTEMPTS):
        try:
            return _read(json.loads(call(commands.describe(machines))))
        except CommandFailed as error:
            if "NOT_FOUND" in error.said or "not found" in error.said.lower():
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
    several = first.get("multisliceParams", {}).get("nodeCount")
    return Resource(
        state=state.get("state", "STATE_UNSPECIFIED"),
        accelerator=first.get("node", {}).get("acceleratorType", ""),
        slices=int(several) if several else max(len(nodes), 1),
        detail=state.get("failedData", {}).get("error", {}).get("message", ""),
    )


def _tail(text: str, lines: int = 15) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])
