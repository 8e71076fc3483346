"""`mwjax launch` against a stand-in for the cloud: the commands in their order, the logs, and what happens when things
break."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from pathlib import Path

import pytest

from mwjax.launch import supervise
from tests import launching
from tests.fake_cloud import Cloud, wait_until
from tests.launching import LONG, WHERE, abandon, background, launch, lines_of, log, shell, status

cloud = launching.cloud


def test_from_nothing_to_the_end(cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    cloud.goes_through(["WAITING_FOR_RESOURCES", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"])
    extra = Path("extra.txt")
    extra.write_text("shipped\n")
    options = ("--spot", "--project", "p", "--bucket", "gs://b/runs/", "--file", "extra.txt", "--env", "A=two words")
    job = 'echo "$HOST"; cat extra.txt; echo "$MWJAX_PROCESSES $MWJAX_LOCAL_DEVICES $JAX_COMPILATION_CACHE_DIR $A"'
    assert launch(cloud, *shell(job), options=options) == 0
    said = capsys.readouterr()
    for worker in ("0", "1"):
        assert lines_of(said.out, worker) == [
            f"job.{worker}",
            "shipped",
            "2 4 gs://b/runs/compilation-cache two words",
        ]
    verbs = cloud.verbs()
    assert verbs[:7] == ["describe", "describe", "create", *["describe"] * 4]
    assert verbs[7:13] == ["prepare", "scp", "install", "install", "start", "start"]
    assert [verb for verb in verbs[13:] if verb != "describe"] == ["follow", "follow"]
    create = cloud.calls()[2]
    assert create == shlex.split(
        "gcloud compute tpus queued-resources create job --node-id=job --accelerator-type=v5p-16 "
        "--runtime-version=v2-alpha-tpuv5 --spot --zone=us-east5-a --project=p --quiet"
    )
    for state in ("WAITING_FOR_RESOURCES after", "PROVISIONING after", "ACTIVE after"):
        assert said.err.count(state) == 1
    assert "the machines are kept, and paid for, until: mwjax launch job --delete" in said.err
    uv = (cloud.host("job.1") / "uv.log").read_text()
    assert "venv --quiet --clear --python 3.12 venv" in uv
    assert f"mwjax[tpu,gcs] @ file://{cloud.host('job.1')}/mwjax-launch/{cloud.wheel.name}" in uv


def test_a_dry_run_prints_the_commands_that_a_run_makes(cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    words = shell("echo 'it is'")
    assert launch(cloud, *words, options=("--dry-run", "--rm")) == 0
    assert cloud.calls() == []
    printed = shlex.split(capsys.readouterr().out, comments=True)
    starts = [place for place, word in enumerate(printed) if word == "gcloud"]
    commands = [printed[start:end] for start, end in zip(starts, [*starts[1:], len(printed)])]
    assert launch(cloud, *words, options=("--rm",)) == 0
    made = cloud.calls()
    first = [call for call in made if "--worker=1" not in call and not any("mwjax-job" in word for word in call)]
    stops = [command for command in commands if any("kill -TERM" in word for word in command)]
    # All but the stop that only a failure would make, in this order; --rm deletes as a preemption would.
    assert [c for c in commands if c not in stops] == [*dict_order(first), first[-1]]
    on_other = [call for call in made if "--worker=1" in call and not any("mwjax-job" in word for word in call)]
    assert [[w.replace("--worker=1", "--worker=0") for w in call] for call in on_other] == [
        call for call in dict_order(first) if "--worker=0" in call
    ]


def dict_order(calls: list[list[str]]) -> list[list[str]]:
    """Each once, in the order of their first; describe comes after create, as a dry run has it."""
    unique = [list(call) for call in dict.fromkeys(tuple(call) for call in calls)]
    describes = [call for call in unique if "describe" in call]
    rest = [call for call in unique if "describe" not in call]
    return [rest[0], *describes, *rest[1:]]


@pytest.mark.slow
def test_words_reach_the_job_as_they_are(cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    nasty = ["$HOME", "`id`", "a b", "it's", '"q"', "a;b", "é\\n", "*", "--x=1", "\t"]
    program = "import sys; [print(repr(word)) for word in sys.argv[1:]]"
    assert launch(cloud, sys.executable, "-c", program, *nasty, options=("--env", "V=$X 'y'")) == 0
    assert lines_of(capsys.readouterr().out, "1") == [repr(word) for word in nasty]


@pytest.mark.slow
def test_several_slices(cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    job = shell('echo "$HOST $MWJAX_PROCESSES"')
    assert launch(cloud, *job, options=("--slices", "2", "--reserved")) == 0
    out = capsys.readouterr().out
    assert [lines_of(out, host) for host in ("0/0", "0/1", "1/0", "1/1")] == [
        ["job-0.0 4"],
        ["job-0.1 4"],
        ["job-1.0 4"],
        ["job-1.1 4"],
    ]
    create = next(call for call in cloud.calls() if "create" in call)
    assert {"--node-count=2", "--node-prefix=job", "--reserved"} <= set(create)
    assert cloud.verbs().count("scp") == 2


# A job that is taken away in its first life, and finishes in its second.
TAKEN_ONCE = """
echo "life $(ls "$FAKE_CLOUD/gone" 2>/dev/null | wc -l)"
if [ ! -d "$FAKE_CLOUD/gone" ]; then
  if [ "$HOST" = job.0 ]; then
    until [ "$(grep -c mwjax-log "$FAKE_CLOUD/calls.jsonl")" -ge 2 ]; do sleep 0.1; done  # its log is being read
    sleep 1; touch "$FAKE_CLOUD/taken"
  fi
  exec sleep 60
fi
"""


def test_after_a_preemption_the_same_command_runs_on_new_machines(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(cloud, *shell(TAKEN_ONCE), options=("--spot",)) == 0
    said = capsys.readouterr()
    assert lines_of(said.out, "0") == ["life 0", "life 1"]
    assert "job was taken away (SUSPENDED); restart 1 of at most 20" in said.err
    verbs = [verb for verb in cloud.verbs() if verb not in ("describe", "follow")]
    once = ["create", "prepare", "scp", "install", "install", "start", "start"]
    assert verbs == [*once, "delete", *once]
    starts = [call for call in cloud.calls() if any("setsid" in word for word in call)]
    assert sorted(starts[:2]) == sorted(starts[2:])


@pytest.mark.slow
def test_restarts_are_bounded(cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    always = shell('touch "$FAKE_CLOUD/taken"; exec sleep 60')
    assert launch(cloud, *always, options=("--spot", "--max-restarts", "1")) == 2
    assert "restarted 1 times already (--max-restarts)" in capsys.readouterr().err
    assert cloud.verbs().count("create") == 2


@pytest.mark.slow
def test_a_crash_that_comes_from_a_preemption_is_one(cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    """The host that is left fails before the queue shows that the other was taken away."""
    job = """
[ ! -d "$FAKE_CLOUD/gone" ] || { echo again; exit 0; }
[ "$HOST" = job.0 ] || exit 1
trap '(sleep 0.3; touch "$FAKE_CLOUD/taken") & exit 1' TERM
while true; do sleep 0.05; done
"""
    assert launch(cloud, *shell(job), options=("--spot", "--poll", "0.5")) == 0
    said = capsys.readouterr()
    assert lines_of(said.out, "1") == ["again"]
    assert "host 1 failed with status 1; stopping the others" in said.err
    assert "job was taken away; restart 1" in said.err


def test_one_failing_host_stops_the_others_and_its_status_is_ours(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    job = """
if [ "$HOST" = job.1 ]; then sleep 0.3; echo broken; exit 7; fi
trap 'echo told to stop; exit 0' TERM
while true; do sleep 0.05; done
"""
    assert launch(cloud, *shell(job)) == 7
    said = capsys.readouterr()
    assert lines_of(said.out, "1") == ["broken"]
    assert "told to stop" in lines_of(said.out, "0")
    assert "failed: host 1 first, with status 7" in said.err
    assert cloud.verbs().count("create") == 1
    assert cloud.verbs().count("stop") == 1


def summary(step: int, *, stopped: bool) -> str:
    from mwjax.train.loop import TrainResult

    result = TrainResult("gs://b/job", step, 10, 0, stopped, {"loss": 1.0, "recompiles": 0})
    return result.summary()


@pytest.mark.parametrize(
    ("step", "words"),
    [(5, "saved; the same command continues"), (0, "nothing to save yet; the same command begins again")],
)
def test_a_run_that_was_told_to_stop_is_not_taken_for_finished(
    cloud: Cloud, capsys: pytest.CaptureFixture[str], tmp_path: Path, step: int, words: str
) -> None:
    """Both end with status 0; the last words of `mwjax train` tell them apart."""
    cloud.write("hosts_per_slice.json", 1)
    (tmp_path / "stopped.txt").write_text(summary(step, stopped=True) + "\n")
    (tmp_path / "finished.txt").write_text(summary(10, stopped=False) + "\n")
    job = "if mkdir ran; then cat stopped.txt; else cat finished.txt; fi"
    options = ("--file", "stopped.txt", "--file", "finished.txt")
    assert launch(cloud, *shell(job), options=options, tpu="v5p-8") == 0
    said = capsys.readouterr()
    assert [line for line in lines_of(said.out, "0") if "step" in line] == [
        f"gs://b/job: step {step} of 10, {words}",
        "gs://b/job: step 10 of 10",
    ]
    assert "the job was interrupted on host 0; restart 1" in said.err
    verbs = cloud.verbs()
    assert (verbs.count("create"), verbs.count("start")) == (1, 2)  # the machines are still there


def test_a_lost_process_and_sigterm_before_training_are_no_failure(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    """The queue may show only much later that machines were taken away."""
    job = 'mkdir ran 2>/dev/null || { echo well; exit 0; }; [ "$HOST" = job.0 ] && exit 75; exit 143'
    assert launch(cloud, *shell(job)) == 0
    said = capsys.readouterr()
    assert "the job was interrupted on host 0, 1; restart 1" in said.err
    assert lines_of(said.out, "0") == lines_of(said.out, "1") == ["well"]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "code"), [("step 10 of 10", 1), ("", 3)])
def test_status_1_of_a_finished_run_is_no_failure(cloud: Cloud, words: str, code: int) -> None:
    """mwjax ends with 1 where it is done but refused some input."""
    rest = f'sleep {0.3 if code == 1 else 60}; touch "$FAKE_CLOUD/$HOST"'
    job = f'echo "gs://b/job: {words}"; [ "$HOST" != job.0 ] || exit {code}; {rest}'
    assert launch(cloud, *shell(job)) == code
    assert (cloud.folder / "job.1").exists() == (code == 1)


@pytest.mark.slow
def test_a_host_that_dies_without_a_word_restarts_the_job(cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    job = 'if [ "$HOST" = job.0 ] && [ ! -d ran ]; then mkdir ran; kill -KILL 0; fi; echo well'
    assert launch(cloud, *shell(job)) == 0
    said = capsys.readouterr()
    assert "the job was interrupted on host 0; restart 1" in said.err
    assert lines_of(said.out, "0") == ["well"]


@pytest.mark.slow
def test_hosts_that_do_not_answer_at_first(cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    cloud.fails("mkdir -p", "ssh: connect to host 10.0.0.2 port 22: Connection timed out", times=3, status=255)
    assert launch(cloud, *shell("echo well")) == 0
    assert capsys.readouterr().err.count("do not answer yet (ssh: connect to host 10.0.0.2") == 3
    assert cloud.verbs().count("prepare") == 4


@pytest.mark.slow
def test_a_host_on_which_the_installation_fails_is_named(cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    cloud.fails("--worker=1 .*uv venv", "no space left on device", times=9)
    assert launch(cloud, *shell("echo well")) == 2
    error = capsys.readouterr().err
    assert "failed on host 1; host 1 said:\nno space left on device" in error
    assert "the machines are kept" in error
    assert "start" not in cloud.verbs()


def test_a_broken_connection_loses_and_repeats_no_line(cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    cloud.cuts("job.0", 60)
    cloud.cuts("job.1", 333)
    job = "for i in $(seq 100); do echo line $i; done; sleep 0.4; printf 'no newline at the end'"
    assert launch(cloud, *shell(job)) == 0
    out = capsys.readouterr().out
    expected = [*(f"line {number}" for number in range(1, 101)), "no newline at the end"]
    assert lines_of(out, "0") == lines_of(out, "1") == expected
    assert cloud.verbs().count("follow") == 4


@pytest.mark.slow
def test_a_cloud_that_stutters_is_asked_again(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    from mwjax.launch import cloud as client

    monkeypatch.setattr(client.time, "sleep", lambda _: None)
    cloud.fails("describe", "503 Service Unavailable", times=2)
    assert launch(cloud, *shell("true")) == 0


def test_a_wait_of_hours_outlasts_a_cloud_that_does_not_answer(
    cloud: Cloud, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise.cloud, "ATTEMPTS", 1)
    cloud.goes_through(["WAITING_FOR_RESOURCES", "WAITING_FOR_RESOURCES", "ACTIVE"])
    found, looks = supervise.cloud.find, 0

    def find(machines: object) -> object:
        nonlocal looks
        looks += 1
        if looks in (4, 5, 6):
            raise supervise.cloud.CommandFailed(("gcloud",), "Could not resolve host")
        return found(machines)  # type: ignore[arg-type]

    monkeypatch.setattr(supervise.cloud, "find", find)
    assert launch(cloud, *shell("echo well")) == 0
    said = capsys.readouterr()
    assert said.err.count("the queue cannot be seen (Could not resolve host): waiting on") == 1
    assert lines_of(said.out, "0") == ["well"]
    assert cloud.verbs().count("create") == 1


@pytest.mark.slow
def test_machines_that_are_there_are_used(cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(cloud, *shell("echo first")) == 0
    installed = (cloud.host("job.0") / "uv.log").read_text()
    assert launch(cloud, *shell("echo second")) == 0
    assert lines_of(capsys.readouterr().out, "0") == ["first", "second"]
    assert cloud.verbs().count("create") == 1
    assert (cloud.host("job.0") / "uv.log").read_text() == installed  # the same wheel is not installed twice


@pytest.mark.slow
def test_what_an_installation_that_failed_left_is_not_used(cloud: Cloud) -> None:
    assert launch(cloud, *shell("true")) == 0
    uv = cloud.host("job.1") / "bin" / "uv"
    works = uv.read_text()
    uv.write_text(works + '[ "$1" != pip ]\n')
    assert launch(cloud, *shell("true"), options=("--python", "3.13")) == 2
    uv.write_text(works)
    assert launch(cloud, *shell("true")) == 0
    made = [line for line in (uv.parent.parent / "uv.log").read_text().splitlines() if line.startswith("venv")]
    assert [line.split()[4] for line in made] == ["3.12", "3.13", "3.12"]


@pytest.mark.slow
def test_machines_of_another_kind_are_left_alone(cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(cloud, *shell("true")) == 0
    assert launch(cloud, *shell("true"), tpu="v5p-32") == 2
    assert "job exists and has 1 x v5p-16, not 1 x v5p-32" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("state", ["SUSPENDED", "FAILED: too old"])
def test_what_an_earlier_preemption_left_is_replaced(cloud: Cloud, state: str) -> None:
    cloud.goes_through(["ACTIVE"], ["ACTIVE"])
    assert launch(cloud, *shell("true")) == 0
    resource = cloud.folder / "resource.json"
    resource.write_text(resource.read_text().replace('"ACTIVE"', f'"{state}"'))
    assert launch(cloud, *shell("true")) == 0
    verbs = [verb for verb in cloud.verbs() if verb in ("create", "delete")]
    assert verbs == ["create", "delete", "create"]


@pytest.mark.slow
def test_taken_away_while_installing(cloud: Cloud) -> None:
    cloud.goes_through(["ACTIVE"] * 2 + ["SUSPENDED"], ["ACTIVE"])
    cloud.fails("scp", "lost connection", status=255)
    assert launch(cloud, *shell("echo well"), options=("--spot",)) == 0
    assert [verb for verb in cloud.verbs() if verb in ("create", "delete", "start")] == [
        "create",
        "delete",
        "create",
        "start",
        "start",
    ]


def test_no_quota(cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    cloud.fails(
        "create", "ERROR: RESOURCE_EXHAUSTED: Quota limit 'TPUV5PPerProjectPerZone' has been exceeded. Limit: 0"
    )
    assert launch(cloud, *shell("true")) == 2
    error = capsys.readouterr().err
    assert "Quota limit 'TPUV5PPerProjectPerZone' has been exceeded" in error
    assert "Traceback" not in error
    assert "kept, and paid for" not in error


@pytest.mark.slow
def test_a_request_that_fails_in_the_queue(cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    cloud.goes_through(["WAITING_FOR_RESOURCES", "FAILED: no capacity before the deadline"])
    assert launch(cloud, *shell("true"), options=("--give-up-after", "6h")) == 2
    assert "job failed: no capacity before the deadline" in capsys.readouterr().err
    assert "--valid-until-duration=6h" in cloud.calls()[2]


def test_no_client(cloud: Cloud, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert launch(cloud, *shell("true")) == 2
    assert "gcloud is not installed" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_leaves_the_job_running(cloud: Cloud, sent: signal.Signals) -> None:
    first = background(cloud, *shell(LONG))
    wait_until(lambda: log(cloud, "job.0").count("\n") > 3 and log(cloud, "job.1"))
    first.send_signal(sent)
    _, err = first.communicate(timeout=30)
    assert first.returncode == 130
    assert "left; what runs on the machines goes on" in err
    before = log(cloud, "job.0")
    wait_until(lambda: len(log(cloud, "job.0")) > len(before))  # it does


@pytest.mark.slow
def test_the_same_command_follows_a_running_job_without_starting_it(cloud: Cloud) -> None:
    first = background(cloud, *shell(LONG))
    wait_until(lambda: cloud.verbs().count("follow") == 2)
    first.kill()
    first.communicate()
    second = background(cloud, *shell(LONG))
    wait_until(lambda: cloud.verbs().count("follow") == 4)
    (cloud.folder / "enough").touch()
    out, err = second.communicate(timeout=60)
    assert second.returncode == 0
    assert "is running there already: following it" in err
    assert lines_of(out, "0")[0] == "line 1"  # from the beginning
    verbs = cloud.verbs()
    assert (verbs.count("start"), verbs.count("install")) == (2, 2)


@pytest.mark.slow
def test_another_job_is_not_disturbed_and_stop_lets_it_save(
    cloud: Cloud, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = 'trap "echo saved; exit 0" TERM; echo up; while true; do sleep 0.05; done'
    first = background(cloud, *shell(job))
    wait_until(lambda: "up" in log(cloud, "job.0") and "up" in log(cloud, "job.1"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cloud.folder / "another machine"))
    assert launch(cloud, *shell("echo other")) == 2
    assert "another job runs on job (hosts 0, 1): stop it with mwjax launch job --stop" in capsys.readouterr().err
    assert status("launch", "job", *WHERE, "--status") == 0
    shown = capsys.readouterr().out
    assert "job: ACTIVE, 1 x v5p-16: 8 chips (v5p:2x2x2) on 2 hosts of 4 chips" in shown
    assert "host 1: running " in shown
    assert status("launch", "job", *WHERE, "--stop") == 0
    out, err = first.communicate(timeout=60)
    assert first.returncode == 0
    for worker in ("0", "1"):
        assert [line for line in lines_of(out, worker) if line != "Terminated"] == ["up", "saved"]
    assert "stopped as asked for" in err
    assert cloud.verbs().count("create") == 1  # and it does not come back
    assert status("launch", "job", *WHERE, "--status") == 0
    assert "host 0: ended 0" in capsys.readouterr().out


@pytest.mark.slow
def test_a_job_on_some_hosts_only_is_started_anew(cloud: Cloud) -> None:
    abandon(cloud)
    os.killpg(int((cloud.host("job.1") / "mwjax-launch" / "pid").read_text()), signal.SIGKILL)
    second = background(cloud, *shell(LONG))
    wait_until(lambda: cloud.verbs().count("start") == 4)
    (cloud.folder / "enough").touch()
    _, err = second.communicate(timeout=60)
    assert second.returncode == 0
    assert "the job runs on some hosts only: stopping it there" in err
    assert cloud.verbs().count("create") == 1


@pytest.mark.slow
def test_logs_and_delete(cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("launch", "job", *WHERE, "--logs") == 2
    assert "there is no queued resource job in us-east5-a" in capsys.readouterr().err
    assert launch(cloud, *shell("echo well")) == 0
    capsys.readouterr()
    assert status("launch", "job", *WHERE, "--logs") == 0
    assert lines_of(capsys.readouterr().out, "1") == ["well"]
    assert launch(cloud, *shell("exit 5")) == 5
    assert status("launch", "job", *WHERE, "--logs") == 5
    assert status("launch", "job", *WHERE, "--delete") == 0
    assert status("launch", "job", *WHERE, "--delete") == 0
    assert cloud.verbs().count("delete") == 1
    assert "there is no queued resource" in capsys.readouterr().err


@pytest.mark.slow
def test_machines_go_when_the_job_has_ended(cloud: Cloud) -> None:
    assert launch(cloud, *shell("exit 3"), options=("--rm",)) == 3
    assert cloud.verbs()[-1] == "delete"


@pytest.mark.slow
def test_a_host_that_never_answers_again_is_replaced(
    cloud: Cloud, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "PATIENCE", 3)
    cloud.fails("--worker=1 .*mwjax-log", "ssh: connect to host 10.0.0.2: No route to host", times=3, status=255)
    job = 'while [ ! -d "$FAKE_CLOUD/gone" ]; do sleep 0.05; done; echo well'
    assert launch(cloud, *shell(job)) == 0
    said = capsys.readouterr()
    assert "host 1 does not answer (ssh: connect to host 10.0.0.2: No route to host); deleted; restart 1" in said.err
    assert lines_of(said.out, "1") == ["well"]


@pytest.mark.slow
def test_a_cloud_out_of_reach_touches_nothing(
    cloud: Cloud, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "PATIENCE", 2)
    job = 'echo up; touch "$FAKE_CLOUD/offline"; while true; do sleep 0.05; done'
    monkeypatch.setattr(supervise.cloud, "ATTEMPTS", 1)
    cloud.fails("mwjax-log", "ssh: Could not resolve hostname", times=99, status=255)
    found = supervise.cloud.find

    def find(machines: object) -> object:
        if (cloud.folder / "offline").exists():
            raise supervise.cloud.CommandFailed(("gcloud",), "no network")
        return found(machines)  # type: ignore[arg-type]

    monkeypatch.setattr(supervise.cloud, "find", find)
    assert launch(cloud, *shell(job), options=("--spot",)) == 2
    assert "cannot be reached (ssh: Could not resolve hostname); the job may go on" in capsys.readouterr().err
    assert cloud.verbs().count("delete") == cloud.verbs().count("stop") == 0
    assert log(cloud, "job.0") == "up\n"
