"""Several processes as one run: who takes part, and that each sees the devices it should.

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

The files beside this one: `check_in` (all are there), `agreement` (what they tell each other) and `ending` (they end
together).

Run on several processes of one machine only: not on TPU or GPU hosts.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from mwjax.train import agreement
from mwjax.train.check_in import Processes, ProcessesError, ranges, wait_for_all
from mwjax.train.ending import ending_together

TIMEOUT = 300.0  # seconds
HEARTBEAT = 100.0  # seconds
SETTINGS = {
    "MWJAX_COORDINATOR": "host:port of process 0; the port above it must be free too",
    "MWJAX_PROCESS_ID": "this process's number, from 0",
    "MWJAX_PROCESSES": "how many there are; alone: how many to find by jax's own detection (TPU pods, Slurm, MPI)",
    "MWJAX_LOCAL_DEVICES": "devices every process must see",
    "MWJAX_JOIN_TIMEOUT": f"seconds to wait for all ({TIMEOUT:.0f})",
    "MWJAX_HEARTBEAT_TIMEOUT": f"seconds of silence after which a host is taken for dead ({HEARTBEAT:.0f})",
}


@contextlib.contextmanager
def joined(environment: Mapping[str, str] | None = None) -> Iterator[Processes | None]:
    """Makes this process part of its run for as long as the context lasts, and gives who takes part; None where it runs
    alone. The first thing of a run, before any other call into jax; see `mwjax.train.ending` on how it ends.

    Where ``MWJAX_COORDINATOR`` is set, by the settings in :data:`SETTINGS`; otherwise on TPU hosts, and where
    ``MWJAX_PROCESSES`` says so, by jax's own detection. Raises ProcessesError, in all processes, naming those that have
    not come in time; where some see another number of devices than ``MWJAX_LOCAL_DEVICES``, all end with their names.
    """
    settings = os.environ if environment is None else environment
    timeout = _number(settings, "MWJAX_JOIN_TIMEOUT", TIMEOUT)
    heartbeat = max(1, int(_number(settings, "MWJAX_HEARTBEAT_TIMEOUT", HEARTBEAT)))
    expected = int(_number(settings, "MWJAX_LOCAL_DEVICES", 0))
    processes = _given(settings) or _detected(settings, timeout)
    if processes is None or processes.count == 1:
        _check_devices({0: _Host(socket.gethostname(), _local_devices())} if expected else {}, expected)
        yield None
        return
    processes = replace(processes, peers=wait_for_all(processes, timeout))
    for peer in processes.peers:
        _notice_silence(peer.connection, heartbeat)
    with ending_together(processes):
        _connect(processes, timeout, heartbeat)
        hosts = _gather_devices(processes, timeout)
        if processes.process == 0:
            _check_devices(hosts, expected)
        agreement.gathered("checked")  # the others are ended by process 0
        yield processes


def _connect(processes: Processes, timeout: float, heartbeat: int) -> None:
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


@dataclass(frozen=True)
class _Host:
    name: str
    devices: int


def _local_devices() -> int:
    import jax

    return jax.local_device_count()


def _gather_devices(processes: Processes, timeout: float) -> dict[int, _Host]:
    """What every process sees, through the key-value store of the coordinator. Raises ProcessesError."""
    client = agreement.store()
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
            f"hosts {ranges(silent)} came but did not say within {timeout:g} s what devices they see: their "
            "accelerator does not start; look at their logs"
        )
    return hosts


def _check_devices(hosts: Mapping[int, _Host], expected: int) -> None:
    wrong = {process: host for process, host in hosts.items() if expected and host.devices != expected}
    if wrong:
        seen = ", ".join(f"host {process} ({host.name}) sees {host.devices}" for process, host in wrong.items())
        raise ProcessesError(f"expected {len(hosts)} hosts with {expected} devices each: {seen}")
