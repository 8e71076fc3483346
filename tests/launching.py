"""Driving `mwjax launch` against the stand-in for the cloud."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mwjax import cli
from mwjax.launch import topologies
from mwjax.launch.job import Machines
from tests.fake_cloud import Cloud, wait_until

WHERE = ("--zone", "us-east5-a", "--poll", "0.05")


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    made = Cloud(tmp_path / "cloud")
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    yield made
    made.end()


def arguments(cloud: Cloud, *words: str, options: tuple[str, ...] = (), tpu: str = "v5p-16") -> list[str]:
    return ["launch", "job", "--tpu", tpu, *WHERE, "--wheel", str(cloud.wheel), *options, "--", *words]


def launch(cloud: Cloud, *words: str, options: tuple[str, ...] = (), tpu: str = "v5p-16") -> int:
    return status(*arguments(cloud, *words, options=options, tpu=tpu))


def status(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    return int(caught.value.code or 0)


def background(cloud: Cloud, *words: str, options: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mwjax", *arguments(cloud, *words, options=options)]
    environment = {**os.environ, **cloud.environment}
    running = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    cloud.launches.append(running)
    return running


def abandon(cloud: Cloud) -> None:
    """A launch of `LONG` that is killed once the job runs on both hosts, where it goes on."""
    first = background(cloud, *shell(LONG))
    wait_until(lambda: log(cloud, "job.0") and log(cloud, "job.1"))
    first.kill()
    first.communicate()


def machines(tpu: str) -> Machines:
    return Machines("job", topologies.find(tpu), "us-east5-a")


def shell(text: str) -> tuple[str, ...]:
    return "bash", "-c", text


def lines_of(out: str, host: str) -> list[str]:
    start = f"[{host}] "
    return [line.removeprefix(start) for line in out.splitlines() if line.startswith(start)]


LONG = 'for i in $(seq 600); do echo line $i; sleep 0.05; [ ! -f "$FAKE_CLOUD/enough" ] || exit 0; done'


def log(cloud: Cloud, host: str) -> str:
    path = cloud.host(host) / "mwjax-launch" / "log"
    return path.read_text() if path.exists() else ""
