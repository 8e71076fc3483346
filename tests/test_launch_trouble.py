"""`mwjax launch` when people or machines get in its way: nothing goes on costing money without a word, and no secret is
shown."""

from __future__ import annotations

import json
import os
import signal
import stat
import time
from pathlib import Path

import pytest

from mwjax.launch import cloud as client
from mwjax.launch import hosts, job, supervise
from mwjax.launch.job import Job
from tests import launching
from tests.fake_cloud import Cloud, wait_until
from tests.launching import LONG, WHERE, abandon, arguments, background, launch, lines_of, log, shell, status

cloud = launching.cloud
PAID = "the machines are kept, and paid for, until: mwjax launch job --delete --zone us-east5-a"
SECRET = 'hf_$it\'s "secret"\nof two lines'


def test_a_secret_reaches_the_job_in_no_command_and_no_output(
    cloud: Cloud, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    options = ("--env", "HF_TOKEN", "--env", "PLAIN=seen")
    prints = shell('printf %s "$HF_TOKEN" > got; echo "$PLAIN"')
    assert launch(cloud, *prints, options=(*options, "--dry-run")) == 0
    dry = capsys.readouterr().out
    assert "written for the copy, with HF_TOKEN" in dry and "secret" in dry and "of two lines" not in dry
    assert launch(cloud, *prints, options=options) == 0
    for host in ("job.0", "job.1"):
        folder = cloud.host(host) / "mwjax-launch"
        assert (folder / "got").read_text() == SECRET
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / "secrets").stat().st_mode) == 0o600
    said = capsys.readouterr()
    assert lines_of(said.out, "0") == ["seen"]
    assert "two lines" not in said.out + said.err + json.dumps(cloud.calls())
    assert not list(cloud.folder.glob("cache/**/secrets"))  # gone once it is copied


def test_what_is_called_a_key_is_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A", "from here")
    given = ["WANDB_API_KEY=w", "hf_token=h", "KEYS=plain", "A", "B=1", "B=2", "A=given"]
    made = job.plan(launching.machines("v6e-8"), ["x"], bucket=None, environment=given, counted=False)
    assert dict(made.secrets) == {"WANDB_API_KEY": "w", "hf_token": "h"}
    assert dict(made.environment) == {"PYTHONUNBUFFERED": "1", "KEYS": "plain", "B": "2", "A": "given"}


def test_another_value_of_a_secret_is_no_other_job() -> None:
    """A token that was renewed: what runs is followed."""
    one, other, none = (Job(launching.machines("v6e-8"), ("x",), secrets=s) for s in ((("A", "1"),), (("A", "2"),), ()))
    assert one.id == other.id != none.id
    assert "'1'" not in repr(one)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [("NOT_SET_ANYWHERE", "NOT_SET_ANYWHERE is not set here; export it"), ("9=1", "expected NAME=VALUE, or NAME")],
)
def test_an_environment_that_cannot_be_had(
    cloud: Cloud, capsys: pytest.CaptureFixture[str], given: str, complaint: str
) -> None:
    assert launch(cloud, *shell("true"), options=("--env", given)) == 2
    assert complaint in capsys.readouterr().err
    assert cloud.calls() == []


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("phase", ["queue", "install", "follow"])
def test_ctrl_c_says_what_stays(cloud: Cloud, phase: str, sent: signal.Signals) -> None:
    if phase == "queue":
        cloud.goes_through(["WAITING_FOR_RESOURCES"])
    if phase == "install":
        cloud.hangs("uv venv")
    running = background(cloud, *shell(LONG), options=("--rm",))
    seen = {"queue": "describe", "install": "install", "follow": "follow"}[phase]
    wait_until(lambda: cloud.verbs().count(seen) >= 2)
    begun = time.monotonic()
    running.send_signal(sent)
    _, err = running.communicate(timeout=30)
    assert time.monotonic() - begun < 6
    assert running.returncode == 130
    assert "what was asked for stays in the queue" in err
    assert f"{PAID} (--rm was for this command alone)" in err
    calls = len(cloud.calls())
    time.sleep(0.5)
    assert len(cloud.calls()) == calls  # nothing of ours goes on here


@pytest.mark.slow
def test_ctrl_c_does_not_go_on_to_the_next_hosts(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections are made some at a time; those that wait for their turn are not made any more."""
    machines = launching.machines("v5p-32")
    monkeypatch.setattr(hosts, "AT_ONCE", 1)
    cloud.write("hosts_per_slice.json", 4)
    assert launch(cloud, *shell("true"), tpu="v5p-32") == 0
    before = len(cloud.calls())
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    signal.setitimer(signal.ITIMER_REAL, 0.7)
    with pytest.raises(KeyboardInterrupt):
        hosts.on_all(machines, machines.hosts, "sleep 60; : uv venv")
    assert len(cloud.calls()) - before == 1


def test_a_deletion_by_somebody_else_is_final(cloud: Cloud) -> None:
    """They want to pay no longer: nothing is rented again."""
    running = background(cloud, *shell(LONG), options=("--spot",))
    wait_until(lambda: log(cloud, "job.0") and log(cloud, "job.1"))
    assert status("launch", "job", *WHERE, "--delete") == 0
    _, err = running.communicate(timeout=60)
    assert running.returncode == 2, err
    assert "job was deleted, and not by this command: it is not rented again" in err
    assert "the machines are kept" not in err
    assert cloud.verbs().count("create") == 1


@pytest.mark.slow
def test_of_two_launches_of_one_name_the_second_is_refused(cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    first = background(cloud, *shell(LONG))
    wait_until(lambda: cloud.verbs().count("follow") == 2)
    assert launch(cloud, *shell(LONG)) == 2
    assert "another mwjax launch job is at work on this machine" in capsys.readouterr().err
    (cloud.folder / "enough").touch()
    first.communicate(timeout=60)
    assert first.returncode == 0
    assert launch(cloud, *shell("echo well")) == 0  # it is free again


@pytest.mark.slow
def test_machines_are_deleted_also_where_the_job_could_not_start(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud.fails("--worker=1 .*uv venv", "no space left on device", times=9)
    assert launch(cloud, *shell("echo well"), options=("--rm",)) == 2
    assert cloud.verbs()[-2:] == ["delete", "describe"]
    error = capsys.readouterr().err
    assert "no space left on device" in error and "the machines are kept" not in error


@pytest.mark.slow
@pytest.mark.parametrize("ends", [True, False])
def test_machines_that_cannot_be_deleted(cloud: Cloud, capsys: pytest.CaptureFixture[str], ends: bool) -> None:
    cloud.fails("delete", "ERROR: PERMISSION_DENIED", times=9)
    cloud.fails("scp", "lost connection", times=0 if ends else 9)
    assert launch(cloud, *shell("true"), options=("--rm",)) == 2
    error = capsys.readouterr().err
    assert "PERMISSION_DENIED" in error and PAID in error


@pytest.mark.slow
def test_whoever_reads_the_logs_may_leave(cloud: Cloud) -> None:
    running = background(cloud, *shell(LONG))
    assert running.stdout is not None and running.stderr is not None
    assert "line 1" in running.stdout.readline()
    running.stdout.close()
    assert PAID in running.stderr.read()
    assert running.wait(30) == 0


@pytest.mark.slow
def test_another_job_is_not_deleted_with_its_machines(cloud: Cloud) -> None:
    abandon(cloud)
    assert launch(cloud, *shell("echo other"), options=("--rm",)) == 2
    assert "delete" not in cloud.verbs()


def test_where_one_host_does_not_start_the_others_are_stopped(cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    cloud.fails("--worker=1 .*setsid", "fork: Resource temporarily unavailable", times=9)
    assert launch(cloud, *shell(LONG)) == 2
    error = capsys.readouterr().err
    assert "failed on host 1; host 1 said:\nfork: Resource temporarily unavailable" in error
    assert PAID in error
    pid = int((cloud.host("job.0") / "mwjax-launch" / "pid").read_text())
    wait_until(lambda: ended(pid))


def ended(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.slow
def test_a_host_that_cannot_be_stopped_is_not_listened_to_for_ever(
    cloud: Cloud, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "SHORT_GRACE", 1)
    cloud.fails("kill -TERM", "ssh: Connection timed out", times=9, status=255)
    begun = time.monotonic()
    assert launch(cloud, *shell(f'[ "$HOST" = job.0 ] || exit 7; {LONG}')) == 7
    assert time.monotonic() - begun < 15
    error = capsys.readouterr().err
    assert "failed on host 0; host 0 said:\nssh: Connection timed out" in error and PAID in error


@pytest.mark.slow
def test_a_running_job_is_not_installed_over(cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    """Its hosts did not answer when they were asked what runs there."""
    abandon(cloud)
    installed = (cloud.host("job.0") / "uv.log").read_text()
    for host in ("job.0", "job.1"):
        (cloud.host(host) / "mwjax-launch" / "installed").write_text("another wheel")
    cloud.fails("mwjax-job", "ssh: Connection timed out", times=2, status=255)
    assert launch(cloud, *shell("echo other")) == 2
    assert "another job is running here" in capsys.readouterr().err
    assert (cloud.host("job.0") / "uv.log").read_text() == installed
    assert "start" not in cloud.verbs()[-6:] and "stop" not in cloud.verbs()


@pytest.mark.slow
def test_machines_of_another_price_are_used_with_a_word(cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(cloud, *shell("true")) == 0
    assert "it is used as it is" not in capsys.readouterr().err
    assert launch(cloud, *shell("true"), options=("--spot",)) == 0
    assert "job is there, on-demand and not spot: it is used as it is" in capsys.readouterr().err


@pytest.mark.slow
def test_what_is_left_of_a_failed_request_is_no_machine(cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    cloud.goes_through(["WAITING_FOR_RESOURCES", "FAILED: no capacity before the deadline"])
    assert launch(cloud, *shell("true")) == 2
    error = capsys.readouterr().err
    assert "job is FAILED: nothing is paid for, but it may count against the quota until: mwjax launch job" in error
    assert PAID not in error


def test_only_a_missing_resource_counts_as_missing(
    cloud: Cloud, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a missing credential, say: a second request would be paid for."""
    monkeypatch.setattr(client, "ATTEMPTS", 1)
    cloud.fails("describe", "ERROR: (gcloud.auth) Your default credentials were not found", times=9)
    assert launch(cloud, *shell("true")) == 2
    assert "credentials were not found" in capsys.readouterr().err
    assert "create" not in cloud.verbs()


@pytest.mark.slow
def test_a_cloud_that_is_gone_when_the_job_ends_badly(
    cloud: Cloud, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "ATTEMPTS", 1)
    cloud.fails("scp", "lost connection", times=9)
    cloud.goes_through(["ACTIVE"])
    found = supervise.cloud.find
    looks: list[int] = []

    def find(machines: object) -> object:
        looks.append(1)
        if len(looks) > 4:
            raise client.CommandFailed(("gcloud",), "no network")
        return found(machines)  # type: ignore[arg-type]

    monkeypatch.setattr(supervise.cloud, "find", find)
    assert launch(cloud, *shell("true"), options=("--spot",)) == 2
    assert f"whether there are machines cannot be seen from here. {PAID}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_client_that_hangs_is_ended_with_its_ssh(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "TIMEOUT", 0.5)
    pid = cloud.folder / "child"
    with pytest.raises(client.CommandFailed, match=r"no answer within 0.5 s"):
        client.call(("bash", "-c", f"sleep 60 & echo $! > {pid}; wait"))
    time.sleep(0.2)
    state = Path(f"/proc/{pid.read_text().strip()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_names_of_files_and_buckets(cloud: Cloud, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows, mesh = "rows_per_microbatch: 8", "mesh: {fsdp: 8}"
    (tmp_path / "c.yaml").write_text(
        f"run_dir: gs://mine/a\ndata: {{paths: gs://b/r, {rows}}}\nmodel: {{path: a/b}}\n{mesh}\n"
    )
    where = [*arguments(cloud)[:-1], "--dry-run"]
    for given, complaint in (
        (("--bucket", "gs://", "c.yaml"), "--bucket gs://: expected gs://BUCKET"),
        (("--bucket", "gs:///x", "c.yaml"), "expected gs://BUCKET"),
        (("--bucket", "gs://b/a b", "c.yaml"), "expected gs://BUCKET"),
        (("data.steps=3", "c.yaml"), "data.steps=3: the configuration comes first"),
        (("c.yaml", "data.paths=missing.jsonl"), "missing.jsonl: no such file, here or among what is copied"),
        (("c.yaml", "evaluation.paths=c.yaml"), "c.yaml is on this machine"),
    ):
        assert status(*where, *given) == 2
        assert complaint in capsys.readouterr().err
    assert status(*where, "--bucket", "gs://b/", "c.yaml") == 0
    assert "run_dir" not in capsys.readouterr().out  # the file's own is in a bucket already


def test_xpk_takes_secrets_by_name(
    cloud: Cloud, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    assert launch(cloud, "true", options=("--xpk", "c", "--env", "WANDB_API_KEY", "--env", "A=b", "--dry-run")) == 0
    out = capsys.readouterr().out
    assert "two lines" not in out
    *_, write, create = out.splitlines()
    file = Path(os.environ["XDG_CACHE_HOME"], "mwjax", "launch", "job", "environment")
    assert f"--env-file={file}" in create and "--env=" not in create
    file.parent.mkdir(parents=True, exist_ok=True)
    assert os.system(write) == 0
    assert file.read_text().splitlines() == ["PYTHONUNBUFFERED=1", "A=b", "WANDB_API_KEY"]
