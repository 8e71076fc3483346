from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mwjax.train.config import OptimizerConfig
from mwjax.train.optimizer import decayed, learning_rate, optimizer


def test_three_updates_agree_with_adamw_written_out() -> None:
    config = OptimizerConfig(learning_rate=0.01, warmup_steps=2, clip_norm=1.0, weight_decay=0.1)
    transform = optimizer(config)
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


@pytest.mark.parametrize(("warmup", "rates"), [(0, [1.0, 1.0, 1.0]), (1, [0.5, 1.0, 1.0]), (3, [0.25, 0.5, 0.75])])
def test_the_rate_warms_up_to_a_constant(warmup: int, rates: list[float]) -> None:
    schedule = learning_rate(OptimizerConfig(learning_rate=2.0, warmup_steps=warmup))
    np.testing.assert_allclose(
        [float(schedule(jnp.asarray(count))) for count in range(3)], np.array(rates) * 2, rtol=1e-6
    )
