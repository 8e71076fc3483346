"""That all processes of a run are there, before jax connects them.

`jax.distributed.initialize` waits for every process and, when one does not come in time, aborts the others without a
word on which it was (the connection itself is its barrier, so that its key-value store is out of reach until all are
there). So the processes first check in with process 0 over a socket of our own, one port above the coordinator's, and
on a time-out all of them learn who is missing. These connections stay: see `mwjax.train.ending`.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

RETRY = 0.2  # seconds between attempts to reach process 0
STRANGER = -1  # stands for the number of a process that has not said it


class ProcessesError(ValueError):
    """The processes of a run are not what was asked for: some are missing, too many, or see other devices."""


@dataclass(eq=False)
class Peer:
    """An open connection to another process. name: of its host."""

    process: int
    name: str
    connection: socket.socket
    received: bytearray = field(default_factory=bytearray)

    def say(self, **said: Any) -> None:
        """Sends a message; a peer that is gone does not get it."""
        with contextlib.suppress(OSError):
            self.connection.sendall((json.dumps(said) + "\n").encode())

    def hear(self) -> dict[str, Any] | None:
        """Waits for the next message; None where the peer is gone."""
        while b"\n" not in self.received:
            try:
                part = self.connection.recv(65536)
            except OSError:
                part = b""
            if not part:
                return None
            self.received += part
        line, _, rest = bytes(self.received).partition(b"\n")
        self.received[:] = rest
        return dict(json.loads(line))


@dataclass(frozen=True)
class Processes:
    """Who takes part. coordinator: host:port of process 0; process: this one's number; count: how many; peers: the
    open connections, of process 0 to all others, of these to process 0."""

    coordinator: str
    process: int
    count: int
    peers: tuple[Peer, ...] = field(default=(), compare=False)


def wait_for_all(processes: Processes, timeout: float) -> tuple[Peer, ...]:
    """Returns the connections when every process has called it, within ``timeout`` seconds.

    Raises ProcessesError in every process that has come: naming those that have not, or saying that two bear one number
    or that they do not agree on how many they are.
    """
    deadline = time.monotonic() + timeout
    answer = _gate if processes.process == 0 else _check_in
    return answer(processes, deadline, timeout)


def _gate(processes: Processes, deadline: float, timeout: float) -> tuple[Peer, ...]:
    """Process 0: takes check-ins until all are there or time is up, tells everyone the verdict, and returns the
    connections. Raises ProcessesError."""
    port = _port(processes)
    came = {0: socket.gethostname()}
    guests: list[Peer] = []
    with contextlib.ExitStack() as opened, selectors.DefaultSelector() as selector:
        try:
            server = opened.enter_context(socket.create_server(("", port), backlog=max(processes.count, 16)))
        except OSError as error:
            raise ProcessesError(f"process 0 cannot listen on port {port}: {error.strerror}") from error
        selector.register(server, selectors.EVENT_READ)
        verdict = ""
        while len(came) < processes.count and not verdict:
            left = deadline - time.monotonic()
            if left <= 0:
                verdict = _missing(came, processes.count, timeout)
                break
            for key, _ in selector.select(left):
                if key.fileobj is server:
                    connection = opened.enter_context(server.accept()[0])
                    guests.append(Peer(STRANGER, "", connection))
                    selector.register(connection, selectors.EVENT_READ, guests[-1])
                else:
                    verdict = verdict or _hear(key.data, selector, came, processes.count)
        for guest in guests:
            guest.say(verdict=verdict)
        if verdict:
            raise ProcessesError(verdict)
        opened.pop_all()
    server.close()
    for guest in guests:
        if guest.process == STRANGER:
            guest.connection.close()
    return tuple(sorted((guest for guest in guests if guest.process != STRANGER), key=lambda guest: guest.process))


def _hear(guest: Peer, selector: selectors.BaseSelector, came: dict[int, str], count: int) -> str:
    """Reads what a guest says and enters it in ``came``; what is wrong with it, or an empty text."""
    try:
        part = guest.connection.recv(4096)
    except OSError:
        part = b""
    guest.received += part
    if part and not guest.received.endswith(b"\n"):
        return ""
    selector.unregister(guest.connection)
    try:
        said = json.loads(guest.received)
        process, name, counted = int(said["process"]), str(said["name"]), int(said["count"])
    except (ValueError, TypeError, KeyError):
        return ""  # a stranger, such as a port scan
    if counted != count:
        return f"process 0 was told of {count} processes, process {process} ({name}) of {counted}"
    if process in came:
        return f"two processes are number {process}: on {came[process]} and on {name}"
    came[process] = guest.name = name
    guest.process = process
    guest.received.clear()
    return ""


def _missing(came: Mapping[int, str], count: int, timeout: float) -> str:
    absent = [process for process in range(count) if process not in came]
    present = ", ".join(f"{process} ({came[process]})" for process in sorted(came))
    return (
        f"{len(absent)} of {count} hosts did not come within {timeout:g} s: {ranges(absent)}; there are {present}. "
        "Look at the logs of those missing, and whether they reach process 0"
    )


def _check_in(processes: Processes, deadline: float, timeout: float) -> tuple[Peer, ...]:
    """Every other process: says who it is and waits for the verdict of process 0. Raises ProcessesError."""
    host = processes.coordinator.rpartition(":")[0].strip("[]")
    said = {"process": processes.process, "name": socket.gethostname(), "count": processes.count}
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise ProcessesError(
                f"process 0 ({host}) did not come within {timeout:g} s: nothing answers on its port "
                f"{_port(processes)}. Look at its log, and whether a firewall is between"
            )
        with contextlib.ExitStack() as opened:
            try:
                connection = opened.enter_context(socket.create_connection((host, _port(processes)), timeout=left))
                peer = Peer(0, host, connection)
                peer.say(**said)
                # Process 0 may have begun to wait after this one: its verdict is the one that counts.
                connection.settimeout(timeout + 10)
                answer = peer.hear()
            except (OSError, ValueError):  # not listening yet
                answer = None
            if answer is not None:  # else it was gone before it answered
                if answer["verdict"]:
                    raise ProcessesError(answer["verdict"])
                opened.pop_all()
                return (peer,)
        time.sleep(min(RETRY, max(left, 0)))


def _port(processes: Processes) -> int:
    port = int(processes.coordinator.rpartition(":")[2])
    return port + 1 if port < 65535 else port - 1  # jax takes the last one too, for some jobs of Slurm


def ranges(numbers: Iterable[int]) -> str:
    """``0, 2-4`` for 0, 2, 3, 4."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
