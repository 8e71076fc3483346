"""Several processes as one run: who takes part, that all are there, and that each sees the devices it should.

The first thing of a run, before any other call into jax. `jax.distributed.initialize` waits for every process and, when
one does not come in time, aborts the others without a word on which it was (the connection itself is its barrier, so
that its key-value store is out of reach until all are there). So the processes first check in with process 0 over a
socket of our own, one port above the coordinator's, and on a time-out all of them learn who is missing.

Not run on TPU hosts: on several processes of one machine only.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

TIMEOUT = 300.0  # seconds
RETRY = 0.2  # seconds between attempts to reach process 0
SETTINGS = {
    "MWJAX_COORDINATOR": "host:port of process 0; the port above it must be free too",
    "MWJAX_PROCESS_ID": "this process's number, from 0",
    "MWJAX_PROCESSES": "how many there are; alone: how many to find by jax's own detection (TPU pods, Slurm, MPI)",
    "MWJAX_LOCAL_DEVICES": "devices every process must see",
    "MWJAX_JOIN_TIMEOUT": f"seconds to wait for all ({TIMEOUT:.0f})",
}


class ProcessesError(ValueError):
    """The processes of a run are not what was asked for: some are missing, too many, or see other devices."""


@dataclass(frozen=True)
class Processes:
    """Who takes part. coordinator: host:port of process 0; process: this one's number; count: how many."""

    coordinator: str
    process: int
    count: int


def join(environment: Mapping[str, str] | None = None) -> Processes | None:
    """Makes this process part of its run and returns who takes part; None where it runs alone.

    Where ``MWJAX_COORDINATOR`` is set, by the settings in :data:`SETTINGS`; otherwise on TPU hosts, and where
    ``MWJAX_PROCESSES`` says so, by jax's own detection. Raises ProcessesError, in all processes, naming those that have
    not come in time or see another number of devices than ``MWJAX_LOCAL_DEVICES``.
    """
    settings = os.environ if environment is None else environment
    timeout = _number(settings, "MWJAX_JOIN_TIMEOUT", TIMEOUT)
    expected = int(_number(settings, "MWJAX_LOCAL_DEVICES", 0))
    processes = _given(settings) or _detected(settings, timeout)
    if processes is None or processes.count == 1:
        _check_devices({0: _Host(socket.gethostname(), _local_devices())} if expected else {}, expected)
        return None
    wait_for_all(processes, timeout)

    import jax

    jax.distributed.initialize(
        processes.coordinator, processes.count, processes.process, initialization_timeout=max(1, int(timeout))
    )
    _check_devices(_gather_devices(processes, timeout), expected)
    return processes


def _number(settings: Mapping[str, str], name: str, default: float) -> float:
    text = settings.get(name, "")
    try:
        value = float(text) if text else float(default)
    except ValueError:
        value = -1.0
    if value < 0:
        raise ProcessesError(f"{name}={text}: expected a number: {SETTINGS[name]}")
    return value


def _given(settings: Mapping[str, str]) -> Processes | None:
    coordinator = settings.get("MWJAX_COORDINATOR")
    if not coordinator:
        return None
    for name in ("MWJAX_PROCESS_ID", "MWJAX_PROCESSES"):
        if not settings.get(name, "").isdigit():
            raise ProcessesError(f"MWJAX_COORDINATOR is set, so {name} must be: {SETTINGS[name]}")
    process, count = int(settings["MWJAX_PROCESS_ID"]), int(settings["MWJAX_PROCESSES"])
    if process >= count:
        raise ProcessesError(f"MWJAX_PROCESS_ID={process}: {count} processes are numbered 0 to {count - 1}")
    host, colon, port = coordinator.rpartition(":")
    if not (host and colon and port.isdigit() and 0 < int(port) < 65535):
        raise ProcessesError(f"MWJAX_COORDINATOR={coordinator}: expected {SETTINGS['MWJAX_COORDINATOR']}")
    return Processes(coordinator, process, count)


def _detected(settings: Mapping[str, str], timeout: float) -> Processes | None:
    """Who takes part as jax finds out by itself; asked before `initialize`, which aborts where one is missing."""
    wanted = int(_number(settings, "MWJAX_PROCESSES", 0))
    if wanted == 1:
        return None
    from jax._src import cloud_tpu_init, clusters

    if not wanted and not cloud_tpu_init.running_in_cloud_tpu_vm:
        return None
    coordinator, count, process, _ = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, None, int(timeout)
    )
    if coordinator is None or count is None or process is None:
        if not wanted:
            return None  # a TPU without the metadata of a pod, as in a notebook
        raise ProcessesError(
            f"MWJAX_PROCESSES={wanted}, but jax finds no TPU pod, Slurm or MPI job here: set MWJAX_COORDINATOR and "
            "MWJAX_PROCESS_ID too"
        )
    if wanted and wanted != count:
        raise ProcessesError(f"expected {wanted} hosts, but this job has {count}")
    return Processes(coordinator, process, count)


def wait_for_all(processes: Processes, timeout: float) -> None:
    """Returns when every process has called it, within ``timeout`` seconds.

    Raises ProcessesError in every process that has come: naming those that have not, or saying that two bear one number
    or that they do not agree on how many they are.
    """
    deadline = time.monotonic() + timeout
    verdict = _gate(processes, deadline, timeout) if processes.process == 0 else _check_in(processes, deadline, timeout)
    if verdict:
        raise ProcessesError(verdict)


@dataclass
class _Guest:
    """A connection that has not been answered. name: of its host, empty until it has said who it is."""

    connection: socket.socket
    name: str = ""
    received: bytearray = field(default_factory=bytearray)


def _gate(processes: Processes, deadline: float, timeout: float) -> str:
    """Process 0: takes check-ins until all are there or time is up, tells everyone the verdict, and returns it."""
    port = _port(processes)
    came = {0: socket.gethostname()}
    guests: list[_Guest] = []
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
                    guests.append(_Guest(connection))
                    selector.register(connection, selectors.EVENT_READ, guests[-1])
                else:
                    verdict = verdict or _hear(key.data, selector, came, processes.count)
        for guest in guests:
            with contextlib.suppress(OSError):
                guest.connection.sendall((json.dumps({"verdict": verdict}) + "\n").encode())
    return verdict


def _hear(guest: _Guest, selector: selectors.BaseSelector, came: dict[int, str], count: int) -> str:
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
    return ""


def _missing(came: Mapping[int, str], count: int, timeout: float) -> str:
    absent = [process for process in range(count) if process not in came]
    present = ", ".join(f"{process} ({came[process]})" for process in sorted(came))
    return (
        f"{len(absent)} of {count} hosts did not come within {timeout:g} s: {_ranges(absent)}; there are {present}. "
        "Look at the logs of those missing, and whether they reach process 0"
    )


def _check_in(processes: Processes, deadline: float, timeout: float) -> str:
    """Every other process: says who it is and returns the verdict of process 0."""
    host = processes.coordinator.rpartition(":")[0].strip("[]")
    said = {"process": processes.process, "name": socket.gethostname(), "count": processes.count}
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            return (
                f"process 0 ({host}) did not come within {timeout:g} s: nothing answers on its port "
                f"{_port(processes)}. Look at its log, and whether a firewall is between"
            )
        try:
            with socket.create_connection((host, _port(processes)), timeout=left) as connection:
                connection.sendall((json.dumps(said) + "\n").encode())
                # Process 0 may have begun to wait after this one: its verdict is the one that counts.
                connection.settimeout(timeout + 10)
                line = connection.makefile("r", encoding="utf-8").readline()
                return str(json.loads(line)["verdict"])
        except (OSError, ValueError):  # not listening yet, or gone before it answered
            time.sleep(min(RETRY, max(left, 0)))


def _port(processes: Processes) -> int:
    return int(processes.coordinator.rpartition(":")[2]) + 1


@dataclass(frozen=True)
class _Host:
    name: str
    devices: int


def _local_devices() -> int:
    import jax

    return jax.local_device_count()


def _gather_devices(processes: Processes, timeout: float) -> dict[int, _Host]:
    """What every process sees, through the key-value store of the coordinator. Raises ProcessesError."""
    from jax._src import distributed

    client: Any = distributed.global_state.client
    mine = {"name": socket.gethostname(), "devices": _local_devices()}
    client.key_value_set(f"mwjax/devices/{processes.process}", json.dumps(mine))
    deadline = time.monotonic() + timeout
    hosts: dict[int, _Host] = {}
    for process in range(processes.count):
        left = max(deadline - time.monotonic(), 0.1)
        with contextlib.suppress(Exception):  # a time-out: the runtime's own error type
            said = json.loads(client.blocking_key_value_get(f"mwjax/devices/{process}", int(left * 1000)))
            hosts[process] = _Host(said["name"], said["devices"])
    silent = [process for process in range(processes.count) if process not in hosts]
    if silent:
        raise ProcessesError(
            f"hosts {_ranges(silent)} came but did not say within {timeout:g} s what devices they see: their "
            "accelerator does not start; look at their logs"
        )
    return hosts


def _check_devices(hosts: Mapping[int, _Host], expected: int) -> None:
    wrong = {process: host for process, host in hosts.items() if expected and host.devices != expected}
    if wrong:
        seen = ", ".join(f"host {process} ({host.name}) sees {host.devices}" for process, host in wrong.items())
        raise ProcessesError(f"expected {len(hosts)} hosts with {expected} devices each: {seen}")


def _ranges(numbers: Iterable[int]) -> str:
    """``0, 2-4`` for 0, 2, 3, 4."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
