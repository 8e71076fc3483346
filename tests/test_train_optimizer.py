from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mwjax.train.config import OptimizerConfig
from mwjax.train.load import ConfigError, load
from mwjax.train.optimizer import ScheduleError, decayed, learning_rate, optimizer, schedule_on


def test_three_updates_agree_with_adamw_written_out() -> None:
    config = OptimizerConfig(learning_rate=0.01, warmup_steps=2, clip_norm=1.0, weight_decay=0.1)
    transform = optimizer(config, total=3)
    rng = np.random.default_rng(0)
    params = {"weight": jnp.asarray(rng.normal(size=(3, 2))), "norm": jnp.ones(3), "bias": jnp.ones(2)}
    state = transform.init(params)
    expected = {name: np.asarray(value, np.float64) for name, value in params.items()}
    first = {name: np.zeros_like(value) for name, value in expected.items()}
    second = {name: np.zeros_like(value) for name, value in expected.items()}
    for step in range(1, 4):
        gradients = {
            name: rng.normal(size=value.shape) * (10.0 if step == 2 else 0.1) for name, value in expected.items()
        }
        updates, state = transform.update(jax.tree.map(jnp.asarray, gradients), state, params)
        params = jax.tree.map(jnp.add, params, updates)
        norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
        for name, gradient in gradients.items():
            clipped = gradient * min(1.0, 1.0 / norm)
            first[name] = 0.9 * first[name] + 0.1 * clipped
            second[name] = 0.98 * second[name] + 0.02 * clipped**2
            direction = first[name] / (1 - 0.9**step) / (np.sqrt(second[name] / (1 - 0.98**step)) + 1e-8)
            decay = 0.1 * expected[name] if name == "weight" else 0.0
            expected[name] = expected[name] - 0.01 * min(1.0, step / 3) * (direction + decay)
    for name in expected:
        np.testing.assert_allclose(params[name], expected[name], rtol=2e-5)


def test_decay_spares_norms_and_biases_wherever_they_are() -> None:
    params = {"layers": {"attention": {"query": 0, "query_norm": 0, "query_bias": 0}}, "final_norm": 0, "embedding": 0}
    assert decayed(params) == {
        "layers": {"attention": {"query": True, "query_norm": False, "query_bias": False}},
        "final_norm": False,
        "embedding": True,
    }


def after_warmup(schedule: str, since: int, left: int, final: float, decaying: int) -> float:
    """Closed forms of the share of the peak, ``since`` steps after a warm-up that left ``left`` of them."""
    done = since / left
    if schedule == "linear":
        return 1 - (1 - final) * done
    if schedule == "cosine":
        return final + (1 - final) * (1 + math.cos(math.pi * done)) / 2
    if schedule == "warmup_stable_decay":
        return 1 - (1 - final) * max(0, since - (left - decaying)) / decaying
    return 1.0


@pytest.mark.parametrize("final", [0.0, 0.1])
@pytest.mark.parametrize("warmup", [0, 1, 3])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "warmup_stable_decay"])
def test_rates_follow_their_closed_forms(schedule: Any, warmup: int, final: float) -> None:
    config = OptimizerConfig(
        learning_rate=2.0, schedule=schedule, warmup_steps=warmup, final_rate=final, decay_share=0.25
    )
    total = 20
    rate = learning_rate(config, total)
    expected = [
        (step + 1) / (warmup + 1)
        if step < warmup
        else after_warmup(schedule, step - warmup, total - warmup, final, decaying=5)
        for step in range(total)
    ]
    made = [float(rate(jnp.asarray(step))) for step in range(total)]
    np.testing.assert_allclose(made, 2 * np.array(expected), rtol=1e-5)
    assert min(made) > 0, "an update at rate 0 is a wasted one"
    assert float(rate(total)) == pytest.approx(2.0 if schedule == "constant" else 2 * final, abs=1e-6)


def test_a_warm_up_over_all_steps_leaves_nothing_to_decay() -> None:
    assert float(learning_rate(OptimizerConfig(learning_rate=1.0, warmup_steps=8), 4)(3)) == pytest.approx(4 / 9)
    with pytest.raises(ScheduleError, match=r"optimizer\.warmup_steps: 8 of the run's 8 steps leave none"):
        optimizer(OptimizerConfig(warmup_steps=8, schedule="cosine"), total=8)


def test_a_step_without_an_update_moves_the_schedule_on_and_nothing_else() -> None:
    config = OptimizerConfig(learning_rate=1.0, schedule="linear", weight_decay=0.0, clip_norm=None)
    transform, params = optimizer(config, total=4), {"weight": jnp.array(1.0)}
    state = transform.init(params)
    sizes = []
    for step in range(4):
        if step == 1:
            before = state
            state = schedule_on(state)
            changed = [not np.array_equal(a, b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(state))]
            assert sum(changed) == 1
            continue
        updates, state = transform.update({"weight": jnp.array(3.0)}, state, params)
        sizes.append(-float(updates["weight"]))  # Adam's direction is 1 for equal gradients
    np.testing.assert_allclose(sizes, [1.0, 0.5, 0.25], rtol=1e-5)


def test_bfloat16_moments_are_rounded_where_they_are_stored_only() -> None:
    rng = np.random.default_rng(1)
    params = {"weight": jnp.asarray(rng.normal(size=(4, 3)), jnp.float32)}
    made, exact = optimizer(OptimizerConfig(moments_dtype="bfloat16"), 9), optimizer(OptimizerConfig(), 9)
    state, reference = made.init(params), exact.init(params)
    for _ in range(3):
        gradients = {"weight": jnp.asarray(rng.normal(size=(4, 3)), jnp.float32)}
        before = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, state)
        updates, state = made.update(gradients, state, params)
        from_rounded, rounded = exact.update(gradients, before, params)
        np.testing.assert_array_equal(updates["weight"], from_rounded["weight"])
        for stored, full in zip(jax.tree.leaves(state), jax.tree.leaves(rounded)):
            np.testing.assert_array_equal(stored, full.astype(stored.dtype))
        full_updates, reference = exact.update(gradients, reference, params)
        np.testing.assert_allclose(updates["weight"], full_updates["weight"], rtol=0.02, atol=1e-8)
    assert updates["weight"].dtype == jnp.float32
    sizes = {leaf.dtype.name for leaf in jax.tree.leaves(state)}
    assert sizes == {"bfloat16", "int32"}
    with pytest.raises(ConfigError, match=r"optimizer: moments_dtype bfloat16 needs b2 of at most 0\.99, got 0\.999"):
        load(
            None,
            ["run_dir=x", "data.paths=x", "model.path=x", "optimizer.moments_dtype=bfloat16", "optimizer.b2=0.999"],
        )
