"""One device and eight: the same loss, gradients, metrics and log-probs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.training_runs import write

SCRIPT = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from mwjax import losses, model
from mwjax.train import state
from mwjax.train.config import MeshConfig, OptimizerConfig
from mwjax.train.mesh import by_rows, make_mesh, place, replicated
from mwjax.train.optimizer import optimizer
from mwjax.train.step import StepConfig, build
from mwjax.train.update import Comparison, update
from tests.training_runs import VOCABULARY, microbatches

jax.config.update("jax_enable_x64", True)
policy = losses.PolicyGradientConfig("gspo", 0.3, 0.4, kl_coefficient=0.1)
shape = model.small_config(VOCABULARY, layers=2, width=16)
config = StepConfig(shape, losses.LossConfig("policy_gradient", policy), sdcc=True, dtype="float64")
params = model.init(shape, jax.random.key(1), jnp.float64)
initial = jax.tree.map(lambda leaf: leaf * 1.05, params)
batches, denominator = microbatches(sys.argv[1], "sdcc", rows=8, length=64, edges=32)
transform = optimizer(OptimizerConfig(learning_rate=0.01), total=10)
found = []
for devices in (1, 8):
    mesh = make_mesh(MeshConfig(data=devices))
    begun = state.create(params, transform, replicated(mesh))
    step = build(config, transform, mesh, params, batches[0])
    compared = Comparison(jax.device_put(initial, replicated(mesh)), reference=True)
    after, outcome = update(step, begun, batches, denominator, config.loss, compared, mesh, 0.1)
    scored = step.score(compared.initial, place(batches[0], by_rows(mesh)).rows)
    spread = len(place(batches[0], by_rows(mesh)).rows.tokens.sharding.device_set)
    moments = [np.asarray(leaf) for leaf in jax.tree.leaves(after.opt_state)]
    metrics = losses.finalise(outcome.metrics)
    found.append((spread, jax.device_get(outcome.scalars), metrics, moments, np.asarray(scored)))

def difference(one, other):
    scale = max(np.abs(one).max(), np.abs(other).max(), 1e-30)
    return float(np.abs(one - other).max() / scale)

(_, scalars, metrics, moments, scored), (spread, *others) = found
print(json.dumps({
    "devices": spread,
    "scalars": max(difference(scalars[name], others[0][name]) for name in scalars),
    "metrics": max(difference(value, others[1][name]) for name, value in metrics.items() if value is not None),
    "gradients": max(difference(one, other) for one, other in zip(moments, others[2])),
    "logprobs": difference(scored, others[3]),
    "leaves": metrics["diverging_leaves"],
}))
"""


def test_eight_devices_compute_what_one_computes(tmp_path: Path) -> None:
    flags = "--xla_force_host_platform_device_count=8"
    root = Path(__file__).parent.parent
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, write(tmp_path)],
        capture_output=True, text=True, timeout=500, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result.pop("devices") == 8
    assert result.pop("leaves") > 5
    assert result.pop("metrics") < 1e-6  # sums of recorded log-probs are float32
    assert max(result.values()) < 1e-12, result
