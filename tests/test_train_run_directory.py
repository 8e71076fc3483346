"""One run at a time in a run directory, and nothing done before it is there."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from mwjax import data
from mwjax.train import loop, metrics_log, setup
from mwjax.train.run_directory import RunDirectoryError, claimed
from tests.training_runs import configure, recorded, write

HOLD = """
import sys
from mwjax.train.run_directory import claimed
with claimed(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_another_process_holds_the_directory_until_it_dies(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(RunDirectoryError, match="another run is writing there"), claimed(folder):
            pass
    finally:
        holder.kill()
        holder.wait()
    with claimed(folder) as made:
        assert made.is_dir()


def test_a_path_that_cannot_be_a_run_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match=r"run_dir: .*file is a file"), claimed(str(tmp_path / "file")):
        pass
    with pytest.raises(RunDirectoryError, match="run_dir: nothing://x/y: no kind of address"), claimed("nothing://x/y"):
        pass


def test_a_rollout_without_log_probs_is_refused_before_the_run_where_ratios_need_them(tmp_path: Path) -> None:
    made = list(recorded())
    turns = [dataclasses.replace(turn, logprobs=None) if turn.trainable else turn for turn in made[3].turns]
    made[3] = dataclasses.replace(made[3], turns=tuple(turns))
    path = write(tmp_path, made)
    for options, refused in (
        (["loss.task=grpo", "loss.kl=0"], 1),
        (["loss.task=grpo", "loss.kl=0", "loss.old_logprobs=recompute"], 0),
        (["loss.task=sft"], 0),
    ):
        config = configure(tmp_path, *options)
        index = data.scan([str(path)], setup.layout(config), vocab_size=40)
        assert [(one.field, one.line) for one in index.refused] == [("turns[0].logprobs", 4)] * refused
    assert "loss.old_logprobs=recompute" in str(
        data.scan([str(path)], setup.layout(configure(tmp_path, "loss.task=grpo"))).refused[0]
    )


def test_evaluation_options_without_held_out_rollouts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"evaluation\.every: without effect unless evaluation\.paths"):
        configure(tmp_path, "evaluation.every=2")


def test_a_run_leaves_its_directory_free(tmp_path: Path) -> None:
    write(tmp_path)
    config = configure(tmp_path, "data.steps=1")
    loop.run(config)
    with claimed(config.run_dir):
        pass


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a file that is always full")
def test_a_full_disk_is_said_with_the_name_of_the_file() -> None:
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        metrics_log.append("/dev", {"step": 1}, "full")
