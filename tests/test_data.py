"""The data pipeline: every loss token once an epoch, the same batches for any number of workers and processes."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from mwjax import rollouts
from mwjax.data import Layout, StepSource, iterate_steps, plan_epoch, scan
from mwjax.tree import METHODS, RowShape
from tests.fake_cloud import wait_until
from tests.random_rollouts import simulate


@pytest.fixture
def dataset(tmp_path):
    made = [simulate(seed, name=f"r{seed}").rollout for seed in range(18)]
    made = [dataclasses.replace(r, group=f"g{k // 3}") for k, r in enumerate(made)]
    path = tmp_path / "rollouts.jsonl.zst"
    rollouts.write(path, made)
    return str(path), made


def layout(method="packed", **changes):
    paired = method == "sdcc"
    shape = RowShape(160, 160, 160 if paired else 0, 160 if paired else 0)
    return Layout(method, shape, **{"rollouts_per_step": 5, "rows_per_microbatch": 2, **changes})


def leaves(batch):
    rows = [batch.rows.tokens, batch.rows.positions, batch.rows.visible_until, *batch.rows.edges]
    return rows + ([] if batch.pairs is None else [batch.teacher.tokens, batch.teacher.visible_until, *batch.pairs])


def assert_equal(left, right):
    for one, other in zip(left, right, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("method", METHODS)
def test_every_loss_token_once_an_epoch_in_batches_of_one_shape(dataset, method):
    path, made = dataset
    index = scan([path], layout(method))
    source = StepSource(index, seed=3)
    seen, shapes, total = [], set(), 0.0
    for step in range(source.steps_in(1)):
        batches = source[step]
        assert batches.epoch == 0
        edge_count = 0
        for batch in batches.microbatches:
            shapes.add(batch.rows.tokens.shape + batch.rows.edges.parent.shape)
            edges = batch.rows.edges
            real = edges.weight > 0
            edge_count += int(real.sum())
            seen += zip(edges.rollout[real].tolist(), edges.turn[real].tolist(), edges.index[real].tolist())
        assert batches.denominator == batches.loss_tokens == edge_count
        assert len(batches.numbers) <= 5
        total += len(batches.numbers)
    assert total == len(made)
    assert shapes == {(2, 160, 2, 160)}
    assert len(seen) == len(set(seen)) == index.edges.sum()
    if method in ("packed", "logittree"):
        everything = {
            (number, turn, position)
            for number, rollout in enumerate(made)
            for turn, record in enumerate(rollout.turns)
            if record.trainable
            for position in range(len(record.completion_ids))
        }
        assert set(seen) == everything


def test_epochs_differ_and_a_step_is_a_pure_function_of_its_number(dataset):
    path, _ = dataset
    index = scan([path], layout("logittree"))
    source, again = StepSource(index, seed=1), StepSource(index, seed=1)
    per_epoch = source.steps_in(1)
    late = again[per_epoch + 2]  # asked for first, out of order
    steps = [source[step] for step in range(per_epoch + 3)]
    assert late.epoch == 1
    for one, other in zip(steps[-1].microbatches, late.microbatches, strict=True):
        assert_equal(leaves(one), leaves(other))
    first = [step.microbatches[0].rows.tokens.tolist() for step in steps[:3]]
    assert first != [step.microbatches[0].rows.tokens.tolist() for step in steps[per_epoch : per_epoch + 3]]
    assert StepSource(index, seed=2)[0].microbatches[0].rows.tokens.tolist() != first[0]


def test_threads_that_plan_an_epoch_at_once_change_no_other_epoch(dataset, monkeypatch):
    path, _ = dataset
    index = scan([path], layout("logittree"))
    expected = StepSource(index, seed=1)
    together = threading.Barrier(2, timeout=10)

    def plan_together(*arguments):
        together.wait()  # until both threads have found that epoch 0 is not planned yet
        return plan_epoch(*arguments)

    source = StepSource(index, seed=1)
    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as threads:
        patch.setattr("mwjax.data.steps.plan_epoch", plan_together)
        list(threads.map(source.__getitem__, (0, 1)))
    second_epoch = expected.steps_in(1)
    for one, other in zip(source[second_epoch].microbatches, expected[second_epoch].microbatches, strict=True):
        assert_equal(leaves(one), leaves(other))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_same_batches_for_any_number_of_workers(dataset, workers):
    path, _ = dataset
    source = StepSource(scan([path], layout("sdcc")), seed=7)
    steps = list(iterate_steps(source, 1, 6, workers=workers))
    assert [step.step for step in steps] == [1, 2, 3, 4, 5]
    for step in steps:
        for one, other in zip(step.microbatches, source[step.step].microbatches, strict=True):
            assert_equal(leaves(one), leaves(other))


WITH_A_WORKER = """
import multiprocessing, sys
from mwjax.data import Layout, StepSource, iterate_steps, scan
from mwjax.tree import RowShape

if __name__ == "__main__":
    source = StepSource(scan([sys.argv[1]], Layout("packed", RowShape(512, 256))))
    steps = iterate_steps(source, 0, 100, workers=1)
    next(steps)
    (worker,) = multiprocessing.active_children()
    print(worker.pid, flush=True)
    sys.stdin.readline()
    print([next(steps).step for _ in range(9)], flush=True)
    sys.stdin.readline()
"""


def test_a_worker_outlives_a_signal_to_all_processes_but_not_the_training_process(dataset, tmp_path):
    """Ctrl-C, or SIGTERM to a job: steps are still needed. SIGKILL: a process of many gigabytes would be left."""
    script = tmp_path / "script.py"
    script.write_text(WITH_A_WORKER)
    command, there = [sys.executable, str(script), dataset[0]], {**os.environ, "PYTHONPATH": os.getcwd()}
    training = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=there)
    watch = threading.Timer(240, training.kill)
    watch.start()
    try:
        worker = int(training.stdout.readline())
        for sent in (signal.SIGINT, signal.SIGTERM):
            os.kill(worker, sent)
        training.stdin.write("\n")
        training.stdin.flush()
        assert training.stdout.readline() == f"{list(range(1, 10))}\n"
    finally:
        watch.cancel()
        training.kill()
        training.communicate()
    wait_until(lambda: not alive(worker))


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")  # one that nobody has taken note of counts as dead
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"


def test_processes_share_the_rows_of_one_process(dataset):
    path, _ = dataset
    index = scan([path], layout("packed", rows_per_microbatch=4))
    whole = StepSource(index, seed=7)
    parts = [StepSource(index, seed=7, process=process, processes=2) for process in range(2)]
    for step in range(4):
        halves = [part[step] for part in parts]
        for number, batch in enumerate(whole[step].microbatches):
            both = [leaves(half.microbatches[number]) for half in halves]
            assert_equal(leaves(batch), [np.concatenate(pair) for pair in zip(*both, strict=True)])
        assert {half.denominator for half in halves} == {whole[step].denominator}
    with pytest.raises(ValueError, match=r"rows_per_microbatch \(4\) must be a multiple of the 3 processes"):
        StepSource(index, processes=3)


def sequence_mean(rollout_of_edge, group_of_rollout):
    return 1 / np.bincount(rollout_of_edge)[rollout_of_edge], float(len(group_of_rollout))


def test_weights_and_advantages_reach_the_edges(dataset):
    path, made = dataset
    index = scan([path], layout("packed"))
    advantages = np.arange(len(made)) - 3.0
    source = StepSource(index, seed=0, advantages=advantages, edge_weights=functools.partial(sequence_mean))
    for step in iterate_steps(source, 0, 3):
        sums = np.zeros(len(made))
        for batch in step.microbatches:
            edges = batch.rows.edges
            np.testing.assert_array_equal(edges.advantage, advantages[edges.rollout] * (edges.weight > 0))
            np.add.at(sums, edges.rollout, edges.weight)
        np.testing.assert_allclose(sums[sums > 0], 1, rtol=1e-5)
        assert step.denominator == len(step.numbers)


def test_groups_share_their_prompt(tmp_path):
    """tests/cases/group_of_four: the prompt is computed once, 53 tokens in all."""
    prompt = np.arange(29, dtype=np.int32)
    group = [
        rollouts.Rollout(f"r{k}", (rollouts.Turn(prompt, np.arange(30, 36, dtype=np.int32) + 6 * k),), group="g")
        for k in range(4)
    ]
    path = tmp_path / "g.jsonl"
    rollouts.write(path, group)
    together = StepSource(scan([str(path)], layout(rollouts_per_step=4)))[0]
    apart = StepSource(scan([str(path)], layout(rollouts_per_step=4, group_tries=False)))[0]
    # The last sampled token of a rollout is a target only, so its position need not be computed.
    assert (together.row_tokens, apart.row_tokens) == (53 - 4, 4 * (35 - 1))
    assert (together.trie_tokens, apart.trie_tokens) == (53, 4 * 35)
    assert together.view_tokens == apart.view_tokens == 4 * 35


def test_what_cannot_be_used_is_refused_by_name_and_the_rest_is_kept(tmp_path):
    good = simulate(1, name="good").rollout
    long = rollouts.Rollout("long", (rollouts.Turn(np.arange(200, dtype=np.int32), np.arange(5, dtype=np.int32)),))
    wrong = dataclasses.replace(
        rollouts.Rollout(
            "wrong",
            (
                rollouts.Turn(np.array([1, 2, 3], np.int32), np.array([4], np.int32)),
                rollouts.Turn(np.array([1, 2, 3, 4], np.int32), np.array([5], np.int32)),
            ),
        ),
        edits=(rollouts.Edit(1, evicted=((1, 2),)),),
    )
    path, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    rollouts.write(path, [good, long, wrong])
    with path.open("a") as handle:
        handle.write('{"id": "torn", "turns": [')
    rollouts.write(other, [good])
    index = scan([str(path), str(other)], layout())
    assert index.ids == ("good",)
    reasons = {(refusal.line, refusal.field): refusal.reason for refusal in index.refused}
    assert "raise the row length to at least 204" in reasons[2, "turns"]
    assert "contradicts turn 1" in reasons[3, "edits[0]"]
    assert (4, "") in reasons
    assert "'good' stands in" in reasons[1, "id"]
    with pytest.raises(ValueError, match="no usable rollout"):
        scan([str(path)], layout(method="packed", rollouts_per_step=1), vocab_size=1)
