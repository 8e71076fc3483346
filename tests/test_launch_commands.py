"""What is planned and printed: no cloud here, only arguments."""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mwjax import cli
from mwjax.launch import commands, job, remote, topologies, wheel
from mwjax.launch.job import Job, LaunchError, Machines
from mwjax.launch.stream import LogReader
from mwjax.train.load import ConfigError

MACHINES = Machines("a", topologies.find("v5p-32"), "us-east5-a")
CONFIG = """
run_dir: runs/a
data: {paths: "gs://b/r.jsonl", rows_per_microbatch: 16}
model: {path: Qwen/Qwen3-0.6B}
mesh: {fsdp: 16}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(CONFIG)
    (tmp_path / "r.jsonl").write_text("")
    return "c.yaml"


def test_training_goes_to_the_bucket(config: str) -> None:
    plan = job.plan(MACHINES, [config, "data.steps=5"], bucket="gs://b/runs/")
    assert plan.command == ("mwjax", "train", "c.yaml", "data.steps=5", "run_dir=gs://b/runs/a")
    assert plan.files == (Path("c.yaml"),)
    assert dict(plan.environment) == {
        "PYTHONUNBUFFERED": "1",
        "JAX_COMPILATION_CACHE_DIR": "gs://b/runs/compilation-cache",
        "MWJAX_PROCESSES": "4",
        "MWJAX_LOCAL_DEVICES": "4",
    }
    own = job.plan(MACHINES, [config, "run_dir=gs://other/x"], bucket="gs://b")
    assert own.command[-1] == "run_dir=gs://other/x"
    Path(config).write_text(CONFIG.replace("run_dir: runs/a", ""))
    assert job.plan(MACHINES, [config], bucket="gs://b/runs").command[-1] == "run_dir=gs://b/runs/a"


@pytest.mark.parametrize(
    ("words", "bucket", "complaint"),
    [
        ((), "gs://b", "give what to run"),
        (("c.yaml",), None, "run_dir runs/a would be on the hosts' own disks, .*: give --bucket"),
        (("c.yaml", "run_dir=x"), "gs://b", "run_dir x would be on the hosts' own disks, .*: leave run_dir= out, or"),
        (("c.yaml",), "/tmp/b", "--bucket /tmp/b: expected gs://"),
        (("c.yaml", "data.paths=r.jsonl"), "gs://b", "r.jsonl is on this machine, not on the hosts"),
        (("c.yaml", "data.paths=[gs://x,r.jsonl]"), "gs://b", "r.jsonl is on this machine"),
        (("c.yaml", "data.stepss=5"), "gs://b", "did you mean data.steps"),
        (("c.yaml", "model.small=null", "model.path=model"), "gs://b", "model.path model: no such folder; give a hub"),
        (
            ("c.yaml", "mesh.fsdp=8"),
            "gs://b",
            "mesh: 8 of 16 devices used; on 4 hosts it must be all: mesh.fsdp=16 with",
        ),
        (
            ("c.yaml", "mesh.context=16", "data.row_length=1000"),
            "gs://b",
            r"mesh.context \(16\) must divide data.row_length \(1000\)",
        ),
        (("none.yaml",), "gs://b", "no such file"),
    ],
)
def test_what_would_fail_on_the_hosts_is_refused_before_they_cost_money(
    config: str, words: tuple[str, ...], bucket: str | None, complaint: str
) -> None:
    with pytest.raises((LaunchError, ConfigError), match=complaint):
        job.plan(MACHINES, words, bucket=bucket)


@pytest.mark.parametrize("used", [3, 16])
def test_one_host_runs_on_a_part_of_its_devices_that_divides_them(config: str, used: int) -> None:
    one = replace(MACHINES, slice=topologies.find("v5litepod-8"))
    rows = f"data.rows_per_microbatch={used}"
    with pytest.raises(LaunchError, match=rf"mesh: {used} of 8 devices used; it must be all, or a number that divides"):
        job.plan(one, [config, f"mesh.fsdp={used}", rows], bucket="gs://b")
    assert job.plan(one, [config, "mesh.fsdp=4", "data.rows_per_microbatch=4"], bucket="gs://b").command


def test_only_data_goes_over_slices(config: str) -> None:
    """The network between slices is slow; `mwjax.model.sharding.make_mesh` refuses the same on the hosts."""
    two = replace(MACHINES, slices=2)
    with pytest.raises(LaunchError, match=r"on 8 hosts it must be all: mesh.data=2 mesh.fsdp=16 with"):
        job.plan(two, [config], bucket="gs://b")
    with pytest.raises(LaunchError, match=r"mesh.data \(1\) must be a multiple of the slices \(2\)"):
        job.plan(two, [config, "mesh.fsdp=32", "data.rows_per_microbatch=32"], bucket="gs://b")
    assert job.plan(two, [config, "mesh.data=2", "data.rows_per_microbatch=32"], bucket="gs://b").command


def test_a_file_that_is_shipped_may_be_named(config: str) -> None:
    plan = job.plan(MACHINES, [config, "data.paths=r.jsonl"], bucket="gs://b", files=["r.jsonl"])
    assert [file.name for file in plan.files] == ["c.yaml", "r.jsonl"]
    with pytest.raises(LaunchError, match="overwrite each other"):
        job.plan(MACHINES, [config], bucket="gs://b", files=["r.jsonl", "./r.jsonl"])
    with pytest.raises(LaunchError, match="no such file"):
        job.plan(MACHINES, [config], bucket="gs://b", files=["q.jsonl"])
    Path("log").write_text("")
    with pytest.raises(LaunchError, match="log: mwjax keeps a file of that name"):
        job.plan(MACHINES, [config], bucket="gs://b", files=["log"])


def test_what_a_run_needs_is_installed(config: str) -> None:
    """Not only found missing on hosts that are paid for; and another Python is another installation."""
    tracked = job.plan(MACHINES, [config, "tracking.wandb=p", "tracking.tensorboard=true"], bucket="gs://b")
    assert tracked.extras == ("tpu", "gcs", "tensorboard", "wandb")
    script = remote.install(tracked, "w.whl", "d")
    assert '"mwjax[tpu,gcs,tensorboard,wandb] @ file://$PWD/w.whl"' in script
    plain = job.plan(MACHINES, [config], bucket="gs://b")
    newer = job.plan(MACHINES, [config], bucket="gs://b", python="3.13")
    made = {made: remote.install(made, "w.whl", "d").splitlines()[-1] for made in (tracked, plain, newer)}
    assert len(set(made.values())) == 3 and made[plain] == "echo 'd tpu,gcs 3.12' > installed"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("A_b", "--tpu", "v6e-8", "--zone", "z", "--", "x"), "use lower-case letters"),
        (("a", "--zone", "z", "--", "x"), "--tpu is needed"),
        (("a", "--tpu", "v6e-8", "--", "x"), "--zone is needed"),
        (("a", "--tpu", "v6e-9", "--zone", "z", "--", "x"), "no TPU slice that can be rented"),
        (("a", "--tpu", "v6e-8", "--zone", "z", "--spot", "--reserved", "--", "x"), "exclude each other"),
        (("a", "--zone", "z", "--stop", "--delete"), "one at a time: --stop, --delete"),
        (("a", "--zone", "z", "--stop", "c.yaml"), "--stop takes no command"),
        (("a", "--zone", "z", "--delete", "--dry-run"), "--delete takes no command, no --xpk, no --dry-run and no"),
        (("a", "--zone", "z", "--logs", "--rm"), "no --dry-run and no --rm"),
        (("a", "--tpu", "tpu7x-8", "--zone", "z", "--dry-run", "--", "x"), "through GKE only: give --xpk CLUSTER"),
        (("a", "--tpu", "v6e-8", "--zone", "z", "--env", "1=2", "--", "x"), "--env 1=2: expected NAME=VALUE"),
        (
            ("a", "--tpu", "v6e-8", "--zone", "z", "--wheel", "x.whl", "--dry-run", "--", "x"),
            "expected a wheel of mwjax",
        ),
        (
            ("a", "--tpu", "v6e-8", "--zone", "z", "--spot", "--rm", "--runtime", "i", "--xpk", "c", "--", "x"),
            "--spot, --rm, --runtime: with --xpk, the cluster decides",
        ),
    ],
)
def test_wrong_usage(
    arguments: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CLOUDSDK_COMPUTE_ZONE", raising=False)
    with pytest.raises(SystemExit) as caught:
        cli.main(["launch", *arguments])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert "Traceback" not in error


def test_a_dry_run_names_a_wheel_that_is_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given = tmp_path / wheel.filename()
    with zipfile.ZipFile(given, "w") as archive:
        archive.writestr("mwjax/cli.py", "")
    with pytest.raises(SystemExit) as caught:
        cli.main(["launch", "a", "--tpu", "v6e-8", "--zone", "z", "--wheel", str(given), "--dry-run", "--", "x"])
    assert caught.value.code == 0
    assert f"# The wheel\n# {given}\n" in capsys.readouterr().out


def test_xpk(config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = [
        "launch",
        "a",
        "--tpu",
        "v6e-16",
        "--slices",
        "2",
        "--zone",
        "z",
        "--project",
        "p",
        "--xpk",
        "c",
        "--dry-run",
    ]
    mesh = ("mesh.data=2", "data.rows_per_microbatch=32")
    with pytest.raises(SystemExit) as caught:
        cli.main([*words, "--bucket", "gs://b", config, *mesh])
    assert not caught.value.code
    last = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert last[:3] == ["xpk", "workload", "create"]
    scripts = tmp_path / "cache" / "mwjax" / "launch" / "a" / "scripts"
    command = (
        f'pip install --quiet "mwjax[tpu,gcs] @ file://$PWD/{wheel.filename()}" && '
        f"mwjax train c.yaml {' '.join(mesh)} run_dir=gs://b/a"
    )
    assert last[3:] == [
        *("--cluster=c", "--workload=a", "--tpu-type=v6e-16", "--num-slices=2", "--zone=z", "--project=p"),
        *("--base-docker-image=python:3.12", f"--script-dir={scripts}"),
        *("--env=PYTHONUNBUFFERED=1", "--env=JAX_COMPILATION_CACHE_DIR=gs://b/compilation-cache"),
        *("--max-restarts=20", "--restart-on-exit-codes=75", f"--command={command}"),
    ]


@given(
    lines=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n\r\x1e"), max_size=12), max_size=8),
    ending=st.sampled_from(["\n", ""]),
    data=st.data(),
)
def test_a_log_is_read_once_however_often_its_connection_breaks(
    lines: list[str], ending: str, data: st.DataObject
) -> None:
    """Cuts at any byte; what comes next is a new connection of ours, or gcloud's own with the old offset."""
    log = "\n".join(lines).encode() + (ending.encode() if lines else b"")
    reader, read, offset, came = LogReader(), [], 0, b""
    for _ in range(data.draw(st.integers(0, 4))):
        sent = f"{remote.MARK}log {offset}\n".encode() + log[offset:]
        came += sent[: data.draw(st.integers(0, len(sent)))]
        if data.draw(st.booleans()):
            read += [line for raw in io.BytesIO(came) for line in reader.take(raw)]
            offset, came = reader.position, b""
    came += f"{remote.MARK}log {offset}\n".encode() + log[offset:] + f"{remote.MARK}end 3 stopped\n".encode()
    read += [line for raw in io.BytesIO(came) for line in reader.take(raw)]
    expected = log.decode().split("\n")
    assert read == (expected if expected[-1] else expected[:-1])
    assert reader.end == (3, True)


def test_a_job_whose_status_found_no_room_on_the_disk_has_ended(tmp_path: Path) -> None:
    folder = tmp_path / remote.FOLDER
    folder.mkdir()
    ended = subprocess.Popen(["true"])
    ended.wait()
    for name, text in (("pid", str(ended.pid)), ("log", "last words\n"), ("status", "")):
        (folder / name).write_text(text)
    home = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(["bash", "-c", remote.follow(0)], env=home, stdout=subprocess.PIPE, timeout=60)
    reader = LogReader()
    assert [line for raw in io.BytesIO(done.stdout) for line in reader.take(raw)] == ["last words"]
    assert reader.end == (None, False)


def test_a_progress_bar_is_its_last_state() -> None:
    reader = LogReader()
    assert reader.take(b"10%\r50%\r100%\n") == ["100%"]
    assert reader.position == 13


def samples() -> list[commands.Command]:
    several = Machines(
        "a", topologies.find("v5litepod-16"), "z", 2, "p", "spot", None, True, "6h", ("--network=n", "--labels=x=y")
    )
    found: list[commands.Command] = []
    for machines in (MACHINES, several):
        host, todo = machines.hosts[-1], Job(machines, ("mwjax", "train", "it's.yaml"))
        scripts = (
            *(remote.install(todo, "w.whl", "d"), remote.start(todo), remote.probe()),
            *(remote.follow(7), remote.stop(10), remote.stop(10, todo.id)),
        )
        found += [commands.create(machines), commands.describe(machines), commands.delete(machines)]
        found += [commands.prepare(machines, host.node), commands.copy(machines, host.node, [Path("w.whl"), Path("c")])]
        found += [commands.ssh(machines, host, script) for script in scripts]
    return found


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcloud") is None, reason="needs the Google Cloud CLI")
def test_the_real_client_accepts_every_command(tmp_path: Path) -> None:
    """Its parser only; nothing is sent, and it has no configuration to send it with."""
    environment = {
        **os.environ,
        "CLOUDSDK_CONFIG": str(tmp_path),
        "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "true",
        "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "true",
    }
    listed = tmp_path / "commands.json"
    # A script is one argument, whatever is in it; this checker would take a # for a comment, and break at line ends.
    texts = [re.sub("--command=[^']*'.*", "--command=x'", shlex.join(command), flags=re.S) for command in samples()]
    texts = list(dict.fromkeys(text.replace("'", "") for text in texts))
    assert len(texts) == 12  # scripts aside
    listed.write_text(json.dumps([{"command_string": text} for text in texts]))
    done = subprocess.run(
        ["gcloud", "meta", "lint-gcloud-commands", f"--commands-file={listed}"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
    )
    answers = json.loads(done.stdout)
    assert len(answers) == len(texts)
    assert [(answer["command_string"], answer["error_message"]) for answer in answers if not answer["success"]] == []


@pytest.mark.parametrize("script", [word for c in samples() for word in c if word.startswith("--command=")])
def test_scripts_are_good_shell(script: str) -> None:
    checked = subprocess.run(["bash", "-n", "-c", script.removeprefix("--command=")], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.slow
def test_a_wheel_built_and_one_put_together_from_the_installed_files_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    built = wheel.make("a")
    with zipfile.ZipFile(built.path) as archive:
        names = set(archive.namelist())
        assert {"mwjax/cli.py", "mwjax/published/table1.csv", "mwjax/quickstart/data/tokenizer.json"} <= names
    root = wheel.checkout()
    assert root is not None
    assert built.digest == wheel.source_digest(root)
    target = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--target", str(target), str(built.path)], check=True, capture_output=True)
    installed = next(iter(importlib.metadata.distributions(name="mwjax", path=[str(target)])))
    again = wheel.repack(installed, tmp_path)
    with zipfile.ZipFile(built.path) as first, zipfile.ZipFile(again) as second:
        for name in set(first.namelist()) | set(second.namelist()):
            if not name.endswith("/RECORD"):
                assert first.read(name) == second.read(name), name
    subprocess.run([*pip, "--target", str(tmp_path / "again"), str(again)], check=True, capture_output=True)
    assert (tmp_path / "again" / "mwjax" / "cli.py").exists()
