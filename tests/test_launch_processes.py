"""Several processes on loopback: who has come, who has not, and what each sees."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import threading
import time

import pytest

from mwjax.train import check_in, distributed
from mwjax.train.check_in import Processes, ProcessesError, wait_for_all

# Stands for a run: joins, then sums over all devices of all processes.
PROGRAM = """
import sys
from mwjax.train import distributed
try:
    with distributed.joined() as joined:
        assert joined is not None
        import jax, jax.numpy as jnp
        from jax.sharding import NamedSharding, PartitionSpec
        mesh = jax.make_mesh((jax.device_count(),), ("data",))
        rows = jax.make_array_from_process_local_data(
            NamedSharding(mesh, PartitionSpec("data")), jnp.full(jax.local_device_count(), float(joined.process + 1))
        )
        print(joined.process, joined.count, jax.process_count(), jax.device_count(), float(jax.jit(jnp.sum)(rows)))
except ValueError as error:
    print(f"mwjax: {error}", file=sys.stderr)
    sys.exit(2)
"""


def free_port() -> int:
    """A port with a free one above it, below those that systems give to outgoing connections: one of theirs could take
    it before it is used."""
    while True:
        port = random.SystemRandom().randrange(12_000, 32_000)
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("127.0.0.1", port))
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def start(process: int, count: int, port: int, devices: int, **settings: str) -> subprocess.Popen[str]:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("MWJAX_")},
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "MWJAX_COORDINATOR": f"127.0.0.1:{port}",
        "MWJAX_PROCESS_ID": str(process),
        "MWJAX_PROCESSES": str(count),
        **settings,
    }
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(running: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    try:
        outputs = [process.communicate(timeout=90) for process in running]
    finally:
        for process in running:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(running, outputs)]


def test_two_processes_become_one_run() -> None:
    port = free_port()
    done = ended([start(process, 2, port, 2, MWJAX_LOCAL_DEVICES="2") for process in range(2)])
    assert [status for status, _, _ in done] == [0, 0], done
    # Two devices a process hold 1 and 2: the sum over all four is 6.
    assert [out.splitlines()[-1] for _, out, _ in done] == ["0 2 2 4 6.0", "1 2 2 4 6.0"]  # above it gloo reports


def test_every_host_names_the_one_with_fewer_devices() -> None:
    port = free_port()
    done = ended([start(process, 3, port, 1 if process == 2 else 2, MWJAX_LOCAL_DEVICES="2") for process in range(3)])
    name = socket.gethostname()
    wrong = f"expected 3 hosts with 2 devices each: host 2 ({name}) sees 1"
    expected = [f"mwjax: {wrong}\n", *[f"mwjax: process 0 ({name}) failed: {wrong}\n"] * 2]
    assert [(status, err) for status, _, err in done] == [(2, said) for said in expected], done


def test_every_host_that_came_names_those_that_did_not() -> None:
    port, name = free_port(), socket.gethostname()
    began = time.monotonic()
    done = ended([start(process, 5, port, 1, MWJAX_JOIN_TIMEOUT="8") for process in (0, 2)])
    assert time.monotonic() - began < 60
    expected = f"mwjax: 3 of 5 hosts did not come within 8 s: 1, 3-4; there are 0 ({name}), 2 ({name})."
    assert [status for status, _, _ in done] == [2, 2], done
    for _, _, err in done:
        assert err.startswith(expected)
        assert "Check failure" not in err


def together(*who: Processes, timeout: float = 5.0) -> dict[int, str]:
    """What `wait_for_all` says to each, called from as many threads."""
    said: dict[int, str] = {}

    def wait(place: int) -> None:
        try:
            wait_for_all(who[place], timeout)
            said[place] = ""
        except ProcessesError as error:
            said[place] = str(error)

    threads = [threading.Thread(target=wait, args=(place,)) for place in range(len(who))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return said


def test_all_come_in_any_order() -> None:
    at = f"127.0.0.1:{free_port()}"
    assert together(*(Processes(at, process, 8) for process in reversed(range(8)))) == dict.fromkeys(range(8), "")


def test_process_zero_missing_is_said_by_the_others() -> None:
    at = f"127.0.0.1:{free_port()}"
    said = together(Processes(at, 1, 2), timeout=0.5)
    assert said[0].startswith("process 0 (127.0.0.1) did not come within 0.5 s")


def test_two_of_one_number_and_another_count_are_refused() -> None:
    at = f"127.0.0.1:{free_port()}"
    said = together(Processes(at, 0, 3), Processes(at, 1, 3), Processes(at, 1, 3), timeout=2)
    assert said[0].startswith("two processes are number 1: on ")
    at = f"127.0.0.1:{free_port()}"
    said = together(Processes(at, 0, 2), Processes(at, 1, 4), timeout=2)
    assert set(said.values()) == {
        f"process 0 was told of 2 processes, process 1 ({socket.gethostname()}) of 4",
    }


def test_a_stranger_at_the_door_does_no_harm() -> None:
    port = free_port()
    at = f"127.0.0.1:{port}"
    strangers: list[socket.socket] = []

    def knock() -> None:
        """Strangers, and then process 1."""
        deadline = time.monotonic() + 15
        for said in (b"GET / HTTP/1.1\r\n\r\n", b"", json.dumps({"process": "x"}).encode() + b"\n"):
            while time.monotonic() < deadline:
                try:
                    strangers.append(socket.create_connection(("127.0.0.1", port + 1)))
                    break
                except OSError:
                    time.sleep(0.01)
            strangers[-1].sendall(said)
        wait_for_all(Processes(at, 1, 2), 15)

    thread = threading.Thread(target=knock)
    thread.start()
    assert together(Processes(at, 0, 2), timeout=15) == {0: ""}
    thread.join()
    assert len(strangers) == 3
    for stranger in strangers:
        stranger.close()


def test_the_last_port_has_none_above_it() -> None:
    """jax gives it to one Slurm job in 4096."""
    assert check_in._port(Processes("node:65534", 0, 2)) == 65535
    assert check_in._port(Processes("node:65535", 0, 2)) == 65534


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"MWJAX_COORDINATOR": "here:1"}, "MWJAX_PROCESS_ID must be"),
        ({"MWJAX_COORDINATOR": "here:1", "MWJAX_PROCESS_ID": "0"}, "MWJAX_PROCESSES must be"),
        ({"MWJAX_COORDINATOR": "here", "MWJAX_PROCESS_ID": "0", "MWJAX_PROCESSES": "2"}, "expected host:port"),
        ({"MWJAX_COORDINATOR": "here:1", "MWJAX_PROCESS_ID": "2", "MWJAX_PROCESSES": "2"}, "numbered 0 to 1"),
        ({"MWJAX_JOIN_TIMEOUT": "soon"}, "MWJAX_JOIN_TIMEOUT=soon"),
        ({"MWJAX_PROCESSES": "4"}, "jax finds no TPU pod"),
        ({"MWJAX_LOCAL_DEVICES": "77"}, "expected 1 hosts with 77 devices each"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, str], complaint: str) -> None:
    with pytest.raises(ProcessesError, match=complaint), distributed.joined(settings):
        pass


def test_a_run_alone_asks_nothing() -> None:
    for settings in ({}, {"MWJAX_PROCESSES": "1"}):
        with distributed.joined(settings) as joined:
            assert joined is None


def test_a_pod_that_jax_detects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for the metadata of a TPU pod: what jax finds there is what takes part, and must be what was rented."""
    from jax._src import cloud_tpu_init, clusters

    found = ("10.0.0.1:8482", 4, 3, None)
    monkeypatch.setattr(cloud_tpu_init, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(clusters.ClusterEnv, "auto_detect_unset_distributed_params", lambda *_: found)
    assert distributed._detected({}, 1) == Processes("10.0.0.1:8482", 3, 4)
    with (
        pytest.raises(ProcessesError, match="expected 8 hosts, but this job has 4"),
        distributed.joined({"MWJAX_PROCESSES": "8"}),
    ):
        pass
    monkeypatch.setattr(clusters.ClusterEnv, "auto_detect_unset_distributed_params", lambda *_: (None,) * 4)
    with distributed.joined({}) as joined:
        assert joined is None
