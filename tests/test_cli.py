from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mwjax import cli


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mwjax", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment})


def status(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    return int(caught.value.code or 0)


def test_help_shows_examples_and_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("--help") == 0
    shown = capsys.readouterr().out
    assert "mwjax train configs/sft.yaml" in shown
    assert "Train on recorded rollouts" in shown


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("--version") == 0
    assert capsys.readouterr().out.strip()[0].isdigit()


def test_the_command_line_imports_neither_jax_nor_the_rest() -> None:
    code = "import mwjax.cli, sys; print([m for m in ('jax', 'flax', 'optax', 'numpy') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout
    assert shown.strip() == "[]"


@pytest.mark.parametrize("arguments", [("nothing",), ("train",), ("train", "--nothing"), ()])
def test_wrong_usage_is_status_2(arguments: tuple[str, ...]) -> None:
    assert status(*arguments) == 2


def test_a_users_mistake_is_a_message_without_traceback() -> None:
    done = run("train", "no-such.yaml")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "mwjax: no-such.yaml: no such file; give the path of a YAML configuration\n"
    assert "Traceback" in run("--traceback", "train", "no-such.yaml").stderr
    assert "Traceback" in run("train", "no-such.yaml", MWJAX_TRACEBACK="1").stderr


def test_a_defect_shows_its_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    def fail_outside(*_: object, **__: object) -> None:
        int("x")

    for broken in (fail, fail_outside):
        monkeypatch.setattr("mwjax.train.load.load", broken)
        assert status("train", "x.yaml") == 70
        assert "Traceback" in capsys.readouterr().err


def test_all_options_are_listed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert status("train", "--keys") == 0
    assert "optimizer.learning_rate = 1.0e-06" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [(), ("--json", "--tokens")])
def test_a_reader_that_leaves_early_is_no_failure(arguments: tuple[str, ...], tmp_path: Path) -> None:
    turn = {"prompt_ids": list(range(1, 99)), "completion_ids": list(range(200))}
    rollouts = tmp_path / "rollouts.jsonl"
    rollouts.write_text("".join(json.dumps({"id": f"r{k}", "turns": [turn]}) + "\n" for k in range(20)))
    command = [sys.executable, "-m", "mwjax", "inspect", str(rollouts), *arguments]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
