"""Several processes as one run: who takes part, that all are there, what they agree on, and that they end together.

How to start a run on several hosts by hand: the same command on each, a number for each, and one address of process 0
that all can reach. On machines ``node0`` and ``node1`` with 8 GPUs each, and a run directory that both see::

    node0$ export MWJAX_COORDINATOR=node0:8476 MWJAX_PROCESSES=2 MWJAX_LOCAL_DEVICES=8
    node0$ MWJAX_PROCESS_ID=0 mwjax train run.yaml run_dir=/shared/run mesh.fsdp=16 data.rows_per_microbatch=16
    node1$ (the same, with MWJAX_PROCESS_ID=1)

Under Slurm or MPI ``srun -N2 --ntasks-per-node=1 env MWJAX_PROCESSES=2 mwjax train ...`` is enough, on the hosts of a
TPU pod ``mwjax train ...`` alone: jax finds address and numbers itself. To try it on one machine, without an
accelerator::

    $ export JAX_PLATFORMS=cpu MWJAX_COORDINATOR=127.0.0.1:8476 MWJAX_PROCESSES=2
    $ MWJAX_PROCESS_ID=1 mwjax train configs/sft.yaml mesh.data=2 data.rows_per_microbatch=2 &
    $ MWJAX_PROCESS_ID=0 mwjax train configs/sft.yaml mesh.data=2 data.rows_per_microbatch=2

The mesh must use all devices of all processes. Every process reads all rollouts once, to plan (packed sets: only the
first time); afterwards only those of its rows. Ctrl-C or SIGTERM to any process stops all of them after the same step.

Joining is the first thing of a run, before any other call into jax. `jax.distributed.initialize` waits for every
process and, when one does not come in time, aborts the others without a word on which it was (the connection itself is
its barrier, so that its key-value store is out of reach until all are there). So the processes first check in with
process 0 over a socket of our own, one port above the coordinator's, and on a time-out all of them learn who is
missing. These connections stay: a process that fails says why, one that is killed is noticed at once (the system
closes its connection), and the others, which would wait for it in a collective, end with a message.

Run on several processes of one machine only: not on TPU or GPU hosts.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from etils import epath

TIMEOUT = 300.0  # seconds
HEARTBEAT = 100.0  # seconds
NOTICED = 1.0  # seconds in which a closed connection is seen
LINGER = 5.0  # seconds that process 0 waits for the others to end
SHARED = 30.0  # seconds in which a new file is seen on all hosts
FAILED, LOST = 70, 75  # exit status: a defect; another process was lost, and the same command goes on
DAY = 86_400_000  # milliseconds
RETRY = 0.2  # seconds between attempts to reach process 0
STRANGER = -1  # stands for the number of a process that has not said it
SETTINGS = {
    "MWJAX_COORDINATOR": "host:port of process 0; the port above it must be free too",
    "MWJAX_PROCESS_ID": "this process's number, from 0",
    "MWJAX_PROCESSES": "how many there are; alone: how many to find by jax's own detection (TPU pods, Slurm, MPI)",
    "MWJAX_LOCAL_DEVICES": "devices every process must see",
    "MWJAX_JOIN_TIMEOUT": f"seconds to wait for all ({TIMEOUT:.0f})",
    "MWJAX_HEARTBEAT_TIMEOUT": f"seconds of silence after which a host is taken for dead ({HEARTBEAT:.0f})",
}


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
    heartbeat = max(1, int(_number(settings, "MWJAX_HEARTBEAT_TIMEOUT", HEARTBEAT)))
    processes = replace(processes, peers=wait_for_all(processes, timeout))
    for peer in processes.peers:
        _notice_silence(peer.connection, heartbeat)

    import jax

    # It would take SIGTERM for itself: the loop has its own way to agree on the step after which all stop.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        processes.coordinator,
        processes.count,
        processes.process,
        initialization_timeout=max(1, int(timeout)),
        heartbeat_timeout_seconds=heartbeat,
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


def _notice_silence(connection: socket.socket, seconds: int) -> None:
    """Has the system ask a silent connection now and then whether the other side is there; that also keeps firewalls
    from forgetting it."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    times = {"TCP_KEEPIDLE": seconds / 2, "TCP_KEEPINTVL": seconds / 10, "TCP_KEEPCNT": 5}
    for name, value in times.items():
        if hasattr(socket, name):  # macOS lacks some
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), max(1, int(value)))


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
        f"{len(absent)} of {count} hosts did not come within {timeout:g} s: {_ranges(absent)}; there are {present}. "
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
    client = _store()
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


_rounds = itertools.count()


def gathered(value: Any) -> list[Any]:
    """A JSON value of every process, by number. All must ask, as often as each other and in the same order."""
    import jax

    if jax.process_count() == 1:
        return [value]
    client, place = _store(), f"mwjax/{next(_rounds)}"
    client.key_value_set(f"{place}/{jax.process_index()}", json.dumps(value))
    # Others may come hours later; one that is lost is noticed elsewhere (`ending_together`).
    said = [client.blocking_key_value_get(f"{place}/{process}", DAY) for process in range(jax.process_count())]
    return [json.loads(text) for text in said]


def of_leader(value: Any) -> Any:
    """Process 0's JSON value. All must ask, as often as each other and in the same order."""
    import jax

    if jax.process_count() == 1:
        return value
    client, place = _store(), f"mwjax/{next(_rounds)}"
    if jax.process_index() == 0:
        client.key_value_set(place, json.dumps(value))
    return json.loads(client.blocking_key_value_get(place, DAY))


def differing(some: Mapping[str, Any], where: str, others: Mapping[str, Any], elsewhere: str) -> list[str]:
    """A line for every key on which two mappings differ, with both values and where each stands."""
    missing = object()
    return [
        f"  {key}: {some.get(key, 'not set')!r} {where}, {others.get(key, 'not set')!r} {elsewhere}"
        for key in sorted({*some, *others})
        if some.get(key, missing) != others.get(key, missing)
    ]


def check_alike(values: Mapping[str, Any], what: str) -> None:
    """Raises ProcessesError where some JSON values are not those of process 0, which would train something else."""
    import jax

    lines = differing(of_leader(values), "in process 0", json.loads(json.dumps(values)), "here")
    if lines:
        raise ProcessesError(
            f"process {jax.process_index()} ({socket.gethostname()}) has {what} that process 0 has not:\n"
            + "\n".join(lines)
            + "\nStart the same command, with the same files, on all hosts."
        )


def check_shared(folder: epath.PathLike) -> None:
    """Raises ProcessesError where a folder is not one and the same on all hosts."""
    import jax

    if jax.process_count() == 1:
        return
    mark = epath.Path(folder) / f".shared-{of_leader(secrets.token_hex(8))}"
    if jax.process_index() == 0:
        mark.touch()
    gathered("written")
    deadline = time.monotonic() + SHARED
    while not (seen := mark.exists()) and time.monotonic() < deadline:
        time.sleep(RETRY)
    blind = [process for process, sees in enumerate(gathered(seen)) if not sees]
    if jax.process_index() == 0:
        mark.unlink()
    if blind:
        raise ProcessesError(
            f"run_dir: {folder}: what process 0 writes there is not seen by process {_ranges(blind)}: give a folder "
            "that all hosts share, such as gs://BUCKET/RUN or one on a network file system"
        )


@contextlib.contextmanager
def ending_together(processes: Processes | None) -> Iterator[None]:
    """For as long as the context lasts, an error of one process, or its death, ends all of them.

    A process that leaves with an exception tells it to the others; they print it and exit at once, wherever they wait,
    with status 2 for what the user can put right (ValueError, OSError), 130 after a second Ctrl-C, else 70. Where a
    process is gone without a word (killed, or its machine is), the others exit with status 75. Without other processes
    it does nothing.
    """
    if processes is None:
        yield
        return
    listening = _Listening(processes)
    try:
        yield
    except BaseException as error:
        listening.failed(error)
        raise
    listening.done()


class _Listening:
    """A thread for every connection, which waits for the end of the other side."""

    def __init__(self, processes: Processes) -> None:
        self.processes, self.leaving = processes, threading.Lock()
        self.threads = [threading.Thread(target=self._listen, args=(peer,), daemon=True) for peer in processes.peers]
        for thread in self.threads:
            thread.start()

    def done(self) -> None:
        """This process has come to a good end."""
        for peer in self.processes.peers:
            peer.say(done=True)

    def failed(self, error: BaseException) -> None:
        """This process is about to leave with an error."""
        time.sleep(NOTICED)  # it may come from another's death: then this process ends with that
        self.leaving.acquire()  # from here on the end of the others is no news
        words = str(error).strip() or type(error).__name__
        status = 2 if isinstance(error, ValueError | OSError) else FAILED
        status = 130 if isinstance(error, KeyboardInterrupt) else status
        self._tell(f"process {self.processes.process} ({socket.gethostname()}) failed: {words}", status)
        # Before jax's own hook, which would wait for processes that are gone.
        atexit.register(self._exit, status)

    def _listen(self, peer: Peer) -> None:
        said = peer.hear()
        if said is not None and said.get("done"):
            return
        if said is None:
            said = {
                "end": f"process {peer.process} ({peer.name}) is gone without a word: killed, or its machine is. All "
                "processes end; look at its log. The same command on all of them goes on from the last checkpoint",
                "status": LOST,
            }
        if self.leaving.acquire(blocking=False):
            self._tell(said["end"], said["status"])
            print(f"mwjax: {said['end']}", file=sys.stderr, flush=True)
            self._exit(said["status"])

    def _tell(self, end: str, status: int) -> None:
        for peer in self.processes.peers:
            peer.say(end=end, status=status)

    def _exit(self, status: int) -> NoReturn:
        if self.processes.process == 0:  # jax's coordinator: the others abort once it is gone
            deadline = time.monotonic() + LINGER
            for thread in self.threads:
                if thread is not threading.current_thread():
                    thread.join(max(0.0, deadline - time.monotonic()))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _store() -> Any:
    """The key-value store of jax's coordinator."""
    from jax._src import distributed

    return distributed.global_state.client


def _ranges(numbers: Iterable[int]) -> str:
    """``0, 2-4`` for 0, 2, 3, 4."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
