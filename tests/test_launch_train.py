"""`mwjax train` under `mwjax launch`, its machines taken away in the middle."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import pytest

from mwjax import cli
from mwjax.train import load
from tests import training_runs
from tests.fake_cloud import Cloud, wait_until


@pytest.mark.slow
def test_a_run_goes_on_from_its_last_checkpoint_on_new_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud = Cloud(tmp_path / "cloud", hosts_per_slice=1)
    for name, value in cloud.environment.items():
        monkeypatch.setenv(name, value)
    training_runs.write(tmp_path)
    steps, run_dir = 60, tmp_path / "run"  # stands for a bucket: it outlives the machines
    config = training_runs.configure(tmp_path, f"data.steps={steps}", "checkpoint.every=5")
    (tmp_path / "run.yaml").write_text(load.dump(config))

    def take_away() -> None:
        wait_until(lambda: (run_dir / "checkpoints" / "5").exists(), 120)
        cloud.take_away()

    thief = threading.Thread(target=take_away)
    thief.start()
    options = ["--tpu", "v5p-8", "--zone", "z", "--spot", "--poll", "0.1", "--wheel", str(cloud.wheel)]
    environment = ["--env", "JAX_PLATFORMS=cpu", "--env", "XLA_FLAGS=--xla_force_host_platform_device_count=4"]
    files = ["--file", str(tmp_path / "run.yaml")]
    words = [sys.executable, "-m", "mwjax", "train", "run.yaml"]
    try:
        with pytest.raises(SystemExit) as caught:
            cli.main(["launch", "job", *options, *environment, *files, "--", *words])
    finally:
        cloud.end()
        thief.join(130)
    said = capsys.readouterr()
    assert not caught.value.code, said
    assert "job was taken away (SUSPENDED); restart 1 of at most 20" in said.err
    resumed = next(line for line in said.out.splitlines() if "continuing at step" in line)
    assert int(resumed.split()[-3]) >= 5
    assert f"[0] {run_dir}: step {steps} of {steps}" in said.out.splitlines()
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))  # none lost, none twice
