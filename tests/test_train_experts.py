"""Training a mixture of experts: what the load-balancing term counts, and that it does not depend on the packing."""

from __future__ import annotations

import functools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mwjax import data, losses, model
from mwjax.train import loop, setup
from mwjax.train.step import StepConfig, gradient_sums, routed
from mwjax.tree import Batch, Rows, RowShape, build, build_trie, collate, fragments, pack
from tests import training_runs
from tests.random_rollouts import simulate
from tests.training_runs import VOCABULARY, compile_once, configure, write

__all__ = ["compile_once"]
COEFFICIENT = 0.3
QUICK = {"xla_backend_optimization_level": 0}  # compiling is most of the time these tests take


def trees(count: int, first: int = 0) -> list[Any]:
    return [build(simulate(first + k, turns=7, vocabulary=VOCABULARY, edits=k % 2 == 0).rollout) for k in range(count)]


def counted(rows: Rows) -> Counter[tuple[int, ...]]:
    """What every distinct token (as its ids from the start on, read through the rows' own mask) counts for."""
    assert rows.token_weight is not None
    found: Counter[tuple[int, ...]] = Counter()
    for tokens, until, weight in zip(rows.tokens, rows.visible_until, rows.token_weight):
        for place in np.flatnonzero(weight):
            seen = (np.arange(len(tokens)) <= place) & (place < until)
            found[tuple(tokens[seen].tolist())] += float(weight[place])
    return found


@pytest.mark.parametrize(("method", "length"), [("logittree", 512), ("packed", 512), ("packed", None), ("sdcc", 512)])
def test_every_token_of_the_trie_counts_once(method: str, length: int | None) -> None:
    """Views repeat the trunk, and so do the parts of a trie too long for a row: each of the places counts a part."""
    repeated = 0
    for tree in trees(4):
        longest = max(len(view.ids) for view in tree.views)
        # SDCC with room for few pairs: a student goes into several rows, with its teachers.
        shape = RowShape(length or longest, 512, 512 if method == "sdcc" else 0, 5 if method == "sdcc" else 0)
        made = fragments([tree], method, shape)
        repeated += len(made) > 1
        rows = pack([fragment.needs for fragment in made], shape)
        laid_out = collate(made, rows, shape, len(rows) + 1).rows
        found = counted(laid_out)
        assert set(np.round(list(found.values()), 5)) == {1.0}
        paths = [fragment.tokens for fragment in made]
        if method == "packed":
            paths = [fragment.tokens for fragment in fragments([tree], "logittree", RowShape(1024, 1024))]
        assert len(found) == len(build_trie(paths).tokens)
        used = sum(len(fragment.tokens) for fragment in made)
        assert np.count_nonzero(laid_out.token_weight) == used  # padding counts for nothing
    assert (repeated > 0) == (method != "packed" or length is None)


def batches(path: str, method: str, *, length: int) -> tuple[tuple[Batch, ...], float]:
    """One step of one row a micro-batch."""
    layout = data.Layout(method, RowShape(length, length), 100, 1, group_tries=False)
    index = data.scan([path], layout)
    advantages = np.random.default_rng(0).normal(size=len(index.ids))
    step = data.StepSource(index, advantages=advantages)[0]
    return step.microbatches, step.denominator


def step_sums(made: tuple[Batch, ...], denominator: float) -> tuple[float, Any, dict[str, float | None]]:
    """Loss, gradients and metrics of one step in float64."""
    shape = model.small_config(VOCABULARY, 1, 16, family="qwen3_moe")
    config = StepConfig(shape, losses.LossConfig("sft", router_auxiliary=COEFFICIENT), dtype="float64")
    params = model.init(shape, jax.random.key(0), jnp.float64)
    routing = jax.jit(lambda rows: routed(params, rows, config)[1], compiler_options=QUICK)
    gradients = jax.jit(functools.partial(gradient_sums, config=config), compiler_options=QUICK)
    whole = jax.tree.map(lambda *parts: sum(parts), *[routing(batch.rows) for batch in made])
    balance = losses.Balance(np.float64(denominator), None if len(made) == 1 else whole)
    totals = [gradients(params, batch, balance=balance) for batch in made]
    numerator = sum(total.numerator for total in totals)
    summed = jax.tree.map(lambda *leaves: sum(leaves), *[total.gradients for total in totals])
    metrics = functools.reduce(losses.combine, [total.metrics for total in totals])
    return float(numerator / denominator), summed, losses.finalise(metrics)


def test_the_term_does_not_depend_on_rows_packing_or_micro_batches(tmp_path: Path) -> None:
    """All in one row; rows too short for some tries, one a batch; a row per view."""
    path = write(tmp_path, training_runs.recorded(9))
    with jax.enable_x64(True):
        made = [batches(path, "packed", length=320), batches(path, "packed", length=30)]
        made.append(batches(path, "logittree", length=30))
        assert len(made[0][0]) == 1 and len(made[1][0]) > 9 and len(made[2][0]) > 9
        assert any(np.any((batch.rows.token_weight % 1) != 0) for batch in made[1][0])  # tries were cut
        loss, gradients, metrics = step_sums(*made[0])
        for other in made[1:]:
            other_loss, other_gradients, other_metrics = step_sums(*other)
            assert other_loss == pytest.approx(loss, rel=1e-6)
            for one, two in zip(jax.tree.leaves(gradients), jax.tree.leaves(other_gradients), strict=True):
                np.testing.assert_allclose(one, two, rtol=0, atol=1e-6 * float(np.abs(one).max()))
            for name in ("router_auxiliary", "router_load_entropy", "router_load_max"):
                assert other_metrics[name] == pytest.approx(metrics[name], rel=1e-6)


def test_a_run_writes_what_the_routers_do_and_adds_the_term(tmp_path: Path) -> None:
    write(tmp_path)
    moe = ["model.small.family=qwen3_moe", "model.small.experts=4", "data.row_length=40", "data.edges_per_row=40"]

    def run(name: str, *changes: str) -> dict[str, Any]:
        loop.run(configure(tmp_path, *moe, *changes, "data.steps=1", "tracking.plots=false", run_dir=name))
        return json.loads((tmp_path / name / "metrics.jsonl").read_text())

    plain, balanced = run("plain"), run("balanced", "loss.router_auxiliary=3")
    assert balanced["microbatches"] > 1
    for name in ("router_auxiliary", "router_load_entropy", "router_load_max"):
        assert plain[name] == pytest.approx(balanced[name], rel=1e-5)  # of the same weights
    assert balanced["loss"] == pytest.approx(plain["loss"] + 3 * plain["router_auxiliary"], rel=1e-5)
    assert balanced["gradient_norm"] != pytest.approx(plain["gradient_norm"], rel=1e-3)
    assert 0 < balanced["router_load_entropy"] < 1 < balanced["router_load_max"] <= 4 / 2


def test_steps_of_one_and_of_several_micro_batches_are_one_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no step puts an array of the host on all devices by `jax.device_put`, which waits for all processes."""
    put = jax.device_put

    def no_numpy(tree: Any, *rest: Any, **options: Any) -> Any:
        assert not any(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(tree))
        return put(tree, *rest, **options)

    monkeypatch.setattr(jax, "device_put", no_numpy)
    write(tmp_path)
    settings = ("model.small.family=qwen3_moe", "loss.router_auxiliary=0.1", "data.rollouts_per_step=2")
    settings += ("data.row_length=48", "data.edges_per_row=48", "data.rows_per_microbatch=1", "data.epochs=1")
    config = configure(tmp_path, *settings, "tracking.plots=false")
    loop.run(config)
    made = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {row["microbatches"] == 1 for row in made} == {True, False}
    assert [row["recompiles"] for row in made] == [0] * len(made)


def test_what_is_of_experts_is_refused_for_others(tmp_path: Path) -> None:
    write(tmp_path)
    config = configure(tmp_path, "loss.router_auxiliary=0.1")
    with pytest.raises(ValueError, match="router_auxiliary is of mixtures of experts"):
        setup.step_config(config, model.small_config(VOCABULARY))
    with pytest.raises(ValueError, match="experts: without effect on family qwen3"):
        configure(tmp_path, "model.small.experts=4")
    with pytest.raises(ValueError, match=r"experts_per_token \(9\) is more than there are experts \(8\)"):
        configure(tmp_path, "model.small.family=qwen3_moe", "model.small.experts_per_token=9")
    adapters = configure(tmp_path, "model.small.family=qwen3_moe", "model.lora.rank=2")
    with pytest.raises(ValueError, match="adapters of experts are not implemented"):
        setup.decoder(adapters.model)
    chosen = configure(tmp_path, "model.small.family=qwen3_moe", "model.lora.targets=[query,value]")
    assert setup.decoder(chosen.model)[0].lora is not None
