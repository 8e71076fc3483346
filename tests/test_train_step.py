"""The step's invariances: micro-batches, lambda 0, what is compared with, steps without loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mwjax import data, losses, model
from mwjax.train import exact, state
from mwjax.train.config import MeshConfig, OptimizerConfig
from mwjax.train.mesh import make_mesh, replicated
from mwjax.train.optimizer import optimizer
from mwjax.train.step import Step, StepConfig, Total, build, gradient_sums, logprobs
from mwjax.train.update import Comparison, Outcome, unit_log_ratios, update
from mwjax.tree import Batch, Edges, Rows, RowShape, collate
from tests.training_runs import VOCABULARY, microbatches, recorded, write

GRPO = losses.LossConfig("policy_gradient", losses.PolicyGradientConfig(kl_coefficient=0.0))
GSPO = losses.LossConfig("policy_gradient", losses.PolicyGradientConfig("gspo", 0.3, 0.4, kl_coefficient=0.0))
SFT = losses.LossConfig("sft")
TRANSFORM, MESH = optimizer(OptimizerConfig(learning_rate=0.01), total=10), make_mesh(MeshConfig())

QUICK = {"xla_backend_optimization_level": 0}  # compiling is most of the time these tests take
sums = jax.jit(gradient_sums, static_argnums=2, compiler_options=QUICK)
scores = jax.jit(logprobs, static_argnums=2, compiler_options=QUICK)


@pytest.fixture(scope="module")
def rollouts_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("rollouts"))


def configured(loss: losses.LossConfig, dtype: str = "float64", **changes: Any) -> tuple[StepConfig, Any]:
    shape = model.small_config(VOCABULARY, layers=2, width=16)
    config = StepConfig(shape, loss, dtype=dtype, attention="oracle", **changes)
    return config, model.init(shape, jax.random.key(1), jnp.dtype(dtype))


def summed(config: StepConfig, params: Any, batches: Sequence[Batch]) -> Total:
    parts = [sums(params, batch, config) for batch in batches]
    metrics = parts[0].metrics
    for part in parts[1:]:
        metrics = losses.combine(metrics, part.metrics)
    gradients = jax.tree.map(lambda *leaves: sum(leaves), *[part.gradients for part in parts])
    return Total(gradients, sum(part.numerator for part in parts), metrics)


def one_update(
    step: Step,
    config: StepConfig,
    params: Any,
    batches: Sequence[Batch],
    denominator: float,
    comparison: Comparison | None = None,
) -> tuple[state.TrainState, Outcome]:
    begun = state.create(params, TRANSFORM, replicated(MESH))
    return update(step, begun, batches, denominator, config.loss, comparison or Comparison(), MESH)


def assert_close(left: Any, right: Any, tolerance: float) -> None:
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        scale = max(float(np.abs(np.asarray(other)).max()), 1e-30)
        assert np.abs(np.asarray(one) - np.asarray(other)).max() <= tolerance * scale


def norm(gradients: Any) -> float:
    return float(np.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(gradients))))


def test_micro_batches_change_neither_loss_nor_gradients_nor_metrics(rollouts_file: str) -> None:
    with jax.enable_x64(True):
        config, params = configured(GRPO)
        few, denominator = microbatches(rollouts_file, rows=8, length=128)
        many, same_denominator = microbatches(rollouts_file, rows=1, length=64)
        assert len(many) > len(few) + 3
        assert denominator == same_denominator
        expected, got = summed(config, params, few), summed(config, params, many)
        assert_close((got.gradients, got.numerator), (expected.gradients, expected.numerator), 1e-10)
        measured, same = losses.finalise(expected.metrics), losses.finalise(got.metrics)
        assert {k: v for k, v in same.items() if v is not None} == pytest.approx(
            {k: v for k, v in measured.items() if v is not None}, rel=1e-6
        )


def test_a_gspo_unit_spread_over_micro_batches_keeps_its_one_ratio(rollouts_file: str) -> None:
    with jax.enable_x64(True):
        config, params = configured(GSPO)
        whole, denominator = microbatches(rollouts_file, rows=8, length=128)
        assert len(whole) == 1
        expected = sums(params, whole[0], config)  # of one batch the loss takes the unit means itself
        split, _ = microbatches(rollouts_file, rows=1, length=64)
        step = build(config, TRANSFORM, MESH, params, split[0])
        _, outcome = one_update(step, config, params, split, denominator)
        assert outcome.scalars is not None
        np.testing.assert_allclose(outcome.scalars["loss"], expected.numerator / denominator, rtol=1e-10)
        np.testing.assert_allclose(outcome.scalars["gradient_norm"], norm(expected.gradients) / denominator, rtol=1e-9)


@pytest.mark.parametrize("unit", ["rollout", "view"])
def test_unit_means_over_micro_batches_are_those_of_all_at_once(rollouts_file: str, unit: Any) -> None:
    split, _ = microbatches(rollouts_file, rows=1, length=64)
    made = np.random.default_rng(2).normal(size=(len(split), *split[0].rows.edges.target.shape)).astype(np.float32)
    replies = iter(made)
    got = unit_log_ratios(lambda rows: next(replies), split, losses.PolicyGradientConfig("gspo", unit=unit), MESH)
    edges = Edges(*(np.stack(columns) for columns in zip(*(batch.rows.edges for batch in split))))
    view = edges.view if unit == "view" else None
    ratio = losses.edge_log_ratio(jnp.asarray(made), edges)
    expected = losses.unit_means(ratio, jnp.asarray(edges.weight != 0), edges.rollout, view)
    np.testing.assert_allclose(np.stack(got), expected, rtol=1e-4, atol=1e-6)


def test_without_distillation_a_teacher_is_never_looked_at(rollouts_file: str) -> None:
    config, params = configured(GRPO, "float32")
    (batch, *_), _ = microbatches(rollouts_file, "sdcc", rows=8)
    assert batch.pairs is not None
    poisoned = batch._replace(pairs=batch.pairs._replace(weight=np.full_like(batch.pairs.weight, np.nan)))
    expected = sums(params, Batch(batch.rows), config)
    jax.tree.map(np.testing.assert_array_equal, sums(params, poisoned, config), expected)
    # As a number, at the ramp's first step, lambda 0 adds exactly nothing either.
    ramped = sums(params, batch, dataclasses.replace(config, sdcc=True), sdcc_lambda=jnp.float32(0))
    assert_close(ramped.gradients, expected.gradients, 1e-6)
    assert float(ramped.metrics.sums["sdcc_kl"]) > 0


def test_distillation_is_towards_a_constant_teacher_the_same_weights_or_others(rollouts_file: str) -> None:
    with jax.enable_x64(True):
        config, params = configured(SFT, sdcc=True)
        (batch, *_), _ = microbatches(rollouts_file, "sdcc", rows=8)
        weight = jnp.float64(0.5)
        assert batch.teacher is not None and batch.pairs is not None
        teacher_rows, pairs, edges = batch.teacher, batch.pairs, batch.rows.edges

        def log_softmax(params: Any, rows: Rows) -> jax.Array:
            triple = (jnp.asarray(part) for part in rows[:3])
            hidden = model.forward(params, config.model, *triple, attention="oracle", dtype="float64")
            return jax.nn.log_softmax(hidden @ model.unembedding(params, config.model).T)

        @jax.jit
        @jax.grad
        def by_hand(student: Any, taught_by: Any) -> jax.Array:
            log_p, row = log_softmax(student, batch.rows), np.arange(len(batch.rows.tokens))[:, None]
            task = -(edges.weight * log_p[row, edges.parent, edges.target]).sum()
            at, to = log_p[row, pairs.student], log_softmax(taught_by, teacher_rows)[row, pairs.teacher]
            return task + weight * (pairs.weight[..., None] * jnp.exp(to) * (to - at)).sum()

        got = sums(params, batch, config, sdcc_lambda=weight)
        assert float(got.metrics.sums["sdcc_kl"]) > 0.1
        assert_close(got.gradients, by_hand(params, params), 1e-9)
        other = jax.tree.map(lambda leaf: leaf * 1.2, params)
        assert_close(
            sums(params, batch, config, sdcc_lambda=weight, teacher=other).gradients, by_hand(params, other), 1e-9
        )


def test_reference_log_probs_are_of_the_same_row_and_parent_and_sums_are_divided_once(rollouts_file: str) -> None:
    with jax.enable_x64(True):
        config, params = configured(
            losses.LossConfig("policy_gradient", losses.PolicyGradientConfig(kl_coefficient=0.1))
        )
        initial = jax.tree.map(lambda leaf: leaf * 1.1, params)
        batches, denominator = microbatches(rollouts_file, "naive_compressed", rows=1)
        assert len(batches) > 1
        step = build(config, TRANSFORM, MESH, params, batches[0])
        _, outcome = one_update(step, config, params, batches, denominator, Comparison(initial, reference=True))
        assert outcome.metrics is not None and outcome.scalars is not None
        filled, reference_k3 = [], 0.0
        for batch in batches:
            edges = batch.rows.edges
            reference = np.asarray(scores(initial, batch.rows, config))
            filled.append(batch._replace(rows=batch.rows._replace(edges=edges._replace(ref_logprob=reference))))
            d = (reference - np.asarray(scores(params, batch.rows, config)))[edges.weight != 0]
            reference_k3 += float((np.exp(d) - d - 1).sum())
        expected = summed(config, params, filled)
        np.testing.assert_allclose(outcome.scalars["loss"], expected.numerator / denominator, rtol=1e-10)
        np.testing.assert_allclose(outcome.scalars["gradient_norm"], norm(expected.gradients) / denominator, rtol=1e-9)
        np.testing.assert_allclose(outcome.metrics.sums["reference_k3"], reference_k3, rtol=1e-9)
        assert reference_k3 > 0.01


def sampled_logprobs(config: StepConfig, params: Any, made: Sequence[Any], length: int = 128) -> dict[Any, float]:
    """By the record alone: (rollout, turn, index) -> log-prob of that token after its prompt and completion so far."""
    turns = [(rollout.id, number, turn) for rollout in made for number, turn in enumerate(rollout.turns)]
    tokens: Any = np.zeros((len(turns), length), np.int32)
    for row, (_, _, turn) in enumerate(turns):
        ids = np.concatenate([turn.prompt_ids, turn.completion_ids])
        tokens[row, : len(ids)] = ids
    positions: Any = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    causal: Any = np.full(tokens.shape, length, np.int32)
    hidden = model.forward(params, config.model, tokens, positions, causal, attention="oracle", dtype="float64")
    logits = np.asarray(hidden @ model.unembedding(params, config.model).T)
    found = {}
    for row, (name, number, turn) in enumerate(turns):
        temperature = turn.sampling.temperature if turn.sampling.logprobs == "processed" else 1.0
        log_p = np.asarray(jax.nn.log_softmax(logits[row] / temperature))
        for index, token in enumerate(turn.completion_ids):
            found[name, number, index] = float(log_p[len(turn.prompt_ids) + index - 1, token])
    return found


def test_old_log_probs_are_taken_under_the_generation_prefix(rollouts_file: str) -> None:
    with jax.enable_x64(True):
        config, params = configured(GRPO)
        expected = sampled_logprobs(config, params, recorded())
        for method in ("naive_compressed", "naive_full", "union", "logittree"):
            index = data.scan([rollouts_file], data.Layout(method, RowShape(128, 96), rows_per_microbatch=2))
            batches = data.StepSource(index)[0].microbatches
            source = exact.plan(index, 128)
            exact.fill_old_logprobs(batches, source, lambda r: (r.edges, np.asarray(scores(params, r, config))))
            checked = 0
            for batch in batches:
                edges = batch.rows.edges
                for place in zip(*np.nonzero(edges.weight)):
                    token = index.ids[edges.rollout[place]], int(edges.turn[place]), int(edges.index[place])
                    assert edges.old_logprob[place] == pytest.approx(expected[token], rel=1e-6)
                    checked += 1
            assert checked > 50


def test_old_log_probs_of_the_own_rows_make_every_ratio_1(rollouts_file: str) -> None:
    config, params = configured(GRPO, "float32")
    batches, denominator = microbatches(rollouts_file, "naive_full", rows=2)
    step = build(config, TRANSFORM, MESH, params, batches[0])
    _, record = one_update(step, config, params, batches, denominator)
    _, own = one_update(step, config, params, batches, denominator, Comparison(params, own_rows=True))
    assert record.metrics is not None and own.metrics is not None
    assert losses.finalise(own.metrics)["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert losses.finalise(record.metrics)["ratio_mean"] != pytest.approx(1.0, abs=1e-2)


def test_missing_log_probs_are_refused(tmp_path: Path) -> None:
    blind = [
        dataclasses.replace(r, turns=tuple(dataclasses.replace(t, logprobs=None) for t in r.turns)) for r in recorded(5)
    ]
    config, params = configured(GRPO, "float32")
    batches, denominator = microbatches(write(tmp_path, blind))
    step = build(config, TRANSFORM, MESH, params, batches[0])
    with pytest.raises(losses.LossError, match="behaviour log-prob is missing"):
        one_update(step, config, params, batches, denominator)


def test_a_row_too_long_for_a_kernel_is_no_reason_to_refuse_what_context_spreads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The functions are built from the shapes of whole rows."""
    monkeypatch.setattr("mwjax.train.step.check_platform", lambda *_: None)
    config, params = configured(SFT, "float32")
    batch = collate([], [], RowShape(2**19, 8), 1)
    example = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch)
    build(dataclasses.replace(config, attention="pallas"), TRANSFORM, MESH, params, example)


def test_a_step_without_loss_tokens_only_counts(rollouts_file: str) -> None:
    config, params = configured(SFT, "float32")
    batches, _ = microbatches(rollouts_file)
    empty = [
        b._replace(rows=b.rows._replace(edges=b.rows.edges._replace(weight=np.zeros_like(b.rows.edges.weight))))
        for b in batches
    ]
    after, outcome = one_update(build(config, TRANSFORM, MESH, params, batches[0]), config, params, empty, 0.0)
    assert outcome == Outcome(None, None)
    assert int(after.step) == 1
    jax.tree.map(np.testing.assert_array_equal, after.params, params)
