"""A stand-in for the cloud: a ``gcloud`` on PATH whose hosts are folders here, in which the scripts really run.

What it does is scripted by files in its folder: ``script.json`` has the states a queued resource goes through, one at
every look, a list for each time it is created; ``failures.json`` what fails, and how often; where the file ``taken``
is, the machines are being taken away.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

GCLOUD = r"""
import fcntl, json, os, pathlib, re, shutil, signal, subprocess, sys
root = pathlib.Path(os.environ["FAKE_CLOUD"])
arguments = sys.argv[1:]
lock = open(root / "lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
with open(root / "calls.jsonl", "a") as calls:
    calls.write(json.dumps(["gcloud", *arguments]) + "\n")

def option(name, default=None):
    given = [a.partition("=")[2] for a in arguments if a.startswith(f"--{name}=")]
    return given[0] if given else default

def load(name, default):
    path = root / name
    return json.loads(path.read_text()) if path.exists() else default

def save(name, value):
    (root / name).write_text(json.dumps(value))

def fail(text, status=1):
    print(text, file=sys.stderr)
    sys.exit(status)

failures = load("failures.json", [])
for rule in failures:
    if rule["times"] and re.search(rule["match"], " ".join(arguments), re.S):
        rule["times"] -= 1
        save("failures.json", failures)
        fail(rule["says"], rule["status"])

hanging = load("hanging.json", None)
if hanging and re.search(hanging, " ".join(arguments), re.S):
    fcntl.flock(lock, fcntl.LOCK_UN)
    subprocess.run(["sleep", "60"])

def hosts(node=None):
    found = sorted((root / "hosts").glob("*"), key=lambda path: (path.name.rpartition(".")[0], int(path.suffix[1:])))
    return [path for path in found if node is None or path.name.rpartition(".")[0] == node]

def power_off():
    for host in hosts():
        pid = host / "mwjax-launch" / "pid"
        if pid.exists():
            try:
                os.killpg(int(pid.read_text()), signal.SIGKILL)
            except ProcessLookupError:
                pass

service, verb, name = arguments[2], arguments[3], arguments[4]
resource = load("resource.json", None)
if service == "queued-resources":
    if verb == "create":
        if resource:
            fail("ERROR: (gcloud) ALREADY_EXISTS: Resource already exists")
        made = load("made.json", 0)
        scripts = load("script.json", [["ACTIVE"]])
        count = int(option("node-count", "1"))
        resource = {
            "states": scripts[min(made, len(scripts) - 1)],
            "accelerator": option("accelerator-type"),
            "count": count,
            "capacity": [kind for kind in ("spot", "reserved") if f"--{kind}" in arguments],
        }
        save("resource.json", resource)
        save("made.json", made + 1)
        for number in range(count):
            node = option("node-id") or f"{option('node-prefix')}-{number}"
            for worker in range(load("hosts_per_slice.json", 1)):
                host = root / "hosts" / f"{node}.{worker}"
                (host / "bin").mkdir(parents=True)
                uv = host / "bin" / "uv"
                uv.write_text('#!/bin/sh\necho "$@" >> "$HOME/uv.log"\n[ "$1" != venv ] || mkdir -p venv/bin\n')
                uv.chmod(0o755)
    elif not resource:
        fail("ERROR: (gcloud) NOT_FOUND: Resource was not found")
    elif verb == "describe":
        state = "SUSPENDED" if (root / "taken").exists() else resource["states"][0]
        if (root / "taken").exists():
            power_off()
        if len(resource["states"]) > 1:
            resource["states"].pop(0)
            save("resource.json", resource)
        state, _, reason = state.partition(": ")
        node = {"node": {"acceleratorType": resource["accelerator"]}, "nodeId": name}
        if resource["count"] > 1:
            node["multisliceParams"] = {"nodeCount": resource["count"]}
        answer = {"name": name, "tpu": {"nodeSpec": [node]}, "state": {"state": state}}
        if "spot" in resource["capacity"]:
            answer["spot"] = {}
        if "reserved" in resource["capacity"]:
            answer["guaranteed"] = {"reserved": True}
        if reason:
            answer["state"]["failedData"] = {"error": {"message": reason}}
        print(json.dumps(answer))
    elif verb == "delete":
        power_off()
        for path in ("resource.json", "taken"):
            (root / path).unlink(missing_ok=True)
        kept = root / "gone" / str(load("made.json", 0))
        kept.mkdir(parents=True)
        for host in hosts():
            shutil.move(host, kept)
    sys.exit(0)

def run(script, environment, host):
    # As on a host: what the script leaves running gets a parent that takes note of its death.
    if "setsid" not in script:
        return subprocess.run(["bash", "-c", script], env=environment, cwd=host).returncode
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        return int(os.read(reading, 16))
    import ctypes

    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    os.setsid()
    status = subprocess.run(["bash", "-c", script], env=environment, cwd=host).returncode
    os.write(writing, str(status).encode())
    lock.close()
    for descriptor in (0, 1, 2, writing):
        os.close(descriptor)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            os._exit(0)

chosen = lambda node: [h for h in hosts(node) if option("worker") in ("all", h.suffix[1:])]
if (root / "taken").exists():
    fail("ssh: connect to host: Connection timed out", 255)
if verb == "scp":
    *files, target = [a for a in arguments[4:] if not a.startswith("--")]
    node, _, folder = target.partition(":")
    for host in chosen(node):
        for file in files:
            shutil.copy(file, host / folder)
    sys.exit(0)
fcntl.flock(lock, fcntl.LOCK_UN)
script = option("command")
for host in chosen(name):
    path = f"{host}/bin:{os.environ['PATH']}"
    environment = {"HOME": str(host), "PATH": path, "FAKE_CLOUD": str(root), "HOST": host.name}
    cut = root / "cuts" / host.name
    print("SSH: Attempting to connect to worker...", file=sys.stderr)
    if "mwjax-log" in script and cut.exists():  # a connection that breaks after so many bytes
        size = int(cut.read_text())
        cut.unlink()
        script = f"({script}) | head -c {size}"
        subprocess.run(["bash", "-c", script], env=environment, cwd=host)
        sys.exit(255)
    status = run(script, environment, host)
    if status:
        sys.exit(status)
"""


class Cloud:
    """The stand-in, in ``folder``; `environment` puts it on PATH."""

    def __init__(self, folder: Path, hosts_per_slice: int = 2) -> None:
        self.folder = folder
        for name in ("bin", "hosts", "cuts", "cache"):
            (folder / name).mkdir(parents=True)
        client = folder / "bin" / "gcloud"
        client.write_text(f"#!{sys.executable} -IS\n{GCLOUD}")
        client.chmod(client.stat().st_mode | stat.S_IXUSR)
        self.launches: list[subprocess.Popen[str]] = []  # ended with the cloud
        self.write("hosts_per_slice.json", hosts_per_slice)
        self.wheel = folder / "mwjax-0.1.0-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr("mwjax/cli.py", "")

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "FAKE_CLOUD": str(self.folder),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
        }

    def write(self, name: str, value: Any) -> None:
        (self.folder / name).write_text(json.dumps(value))

    def goes_through(self, *states: list[str]) -> None:
        """The states of the queued resource; the last one stays. One list for every time it is created."""
        self.write("script.json", states)

    def fails(self, match: str, says: str, *, times: int = 1, status: int = 1) -> None:
        """Commands that match fail so often."""
        path = self.folder / "failures.json"
        rules = json.loads(path.read_text()) if path.exists() else []
        self.write("failures.json", [*rules, {"match": match, "says": says, "times": times, "status": status}])

    def hangs(self, match: str) -> None:
        """Commands that match do not answer."""
        self.write("hanging.json", match)

    def cuts(self, host: str, after: int) -> None:
        """The next connection that follows the log of ``host`` breaks after so many bytes."""
        (self.folder / "cuts" / host).write_text(str(after))

    def take_away(self) -> None:
        (self.folder / "taken").touch()

    def host(self, name: str) -> Path:
        return self.folder / "hosts" / name

    def calls(self) -> list[list[str]]:
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def verbs(self) -> list[str]:
        """What was called, in short: create, describe, prepare, scp, install, start, follow, probe, stop, delete."""
        return [_verb(call) for call in self.calls()]

    def end(self) -> None:
        """Ends whatever still runs on the hosts, and what looks after it."""
        for launch in self.launches:
            launch.kill()
            launch.wait()
        for pid in self.folder.rglob("pid"):
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.killpg(int(pid.read_text()), signal.SIGKILL)


def _verb(call: list[str]) -> str:
    if call[3] == "queued-resources" or call[4] == "scp":
        return call[4]
    script = next(argument for argument in call if argument.startswith("--command="))
    known = {
        "mkdir -p": "prepare",
        "uv venv": "install",
        "setsid": "start",
        "mwjax-log": "follow",
        "kill -TERM": "stop",
    }
    return next((verb for sign, verb in known.items() if sign in script), "probe")


def wait_until(condition: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("it did not happen")
        time.sleep(0.02)
