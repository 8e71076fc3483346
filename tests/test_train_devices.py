"""One device and eight, over several meshes: the same loss, gradients, metrics, log-probs and weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import eight_devices
from tests.training_runs import write

SCRIPT = """
import dataclasses, json, sys
import jax, jax.numpy as jnp, numpy as np
from mwjax import losses, model
from mwjax.train import state
from mwjax.train.config import MeshConfig, OptimizerConfig
from mwjax.train.mesh import make_mesh, place
from mwjax.train.optimizer import optimizer
from mwjax.train.recompiles import CompileCounter
from mwjax.train.step import COMPILED, StepConfig, build, parameter_shardings
from mwjax.train.update import Comparison, update
from tests.training_runs import VOCABULARY, microbatches

jax.config.update("jax_enable_x64", True)
path, meshes, changes = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
policy = losses.PolicyGradientConfig("gspo", 0.3, 0.4, kl_coefficient=0.1)
loss = losses.LossConfig("policy_gradient", policy, router_auxiliary=changes.pop("router_auxiliary", 0.0))
lora = model.LoRA(2, 4.0) if changes.pop("lora", False) else None
shape = dataclasses.replace(model.small_config(VOCABULARY, layers=2, width=16, **changes), lora=lora)
config = StepConfig(shape, loss, sdcc=True, dtype="float64", remat="attention")
params = model.init(shape, jax.random.key(1), jnp.float64)
if lora:  # B begins at zero: where nothing flows, nothing is compared
    params = jax.tree.map(lambda leaf: leaf + 0.1 * jax.random.normal(jax.random.key(2), leaf.shape), params)
initial = jax.tree.map(lambda leaf: leaf * 1.05, params)
batches, denominator = microbatches(path, "sdcc", rows=8, length=64, edges=32)
transform = optimizer(OptimizerConfig(learning_rate=0.01), total=10)

def split(params):
    return model.split_params(params, model.adapter_names(shape)) if lora else (params, {})

def run(sizes):
    mesh = make_mesh(MeshConfig(**dict(zip(("data", "fsdp", "tensor", "context"), sizes))))
    placed = lambda tree: jax.device_put(tree, parameter_shardings(shape, mesh, tree))
    trained, frozen = map(placed, split(params))
    current = state.create(trained, transform, parameter_shardings(shape, mesh, trained))
    compared = Comparison(placed(split(initial)[0]), reference=True)
    step = build(config, transform, mesh, trained, batches[0], frozen)
    scored = step.score(current.params, place(batches[0], mesh).rows)
    current, _ = update(step, current, batches, denominator, config.loss, compared, mesh, 0.1)
    with CompileCounter(COMPILED) as compiled:
        for _ in range(2):
            current, outcome = update(step, current, batches, denominator, config.loss, compared, mesh, 0.1)
    shares = {
        jax.tree_util.keystr(name, simple=True): leaf.addressable_shards[0].data.size / leaf.size
        for name, leaf in jax.tree_util.tree_leaves_with_path((frozen, current.params))
    }
    assert [leaf.sharding for leaf in jax.tree.leaves(current.params)] == [
        leaf.sharding for leaf in jax.tree.leaves(current.opt_state[1][0].mu)
    ]
    arrays = jax.tree.map(np.asarray, (outcome.scalars, current.params, current.opt_state, scored))
    return arrays, losses.finalise(outcome.metrics), sum(compiled.counts.values()), shares

def difference(one, other):
    scale = max(np.abs(one).max(), np.abs(other).max(), 1e-30)
    return float(np.abs(one - other).max() / scale)

arrays, metrics, _, _ = run((1, 1, 1, 1))
for sizes in meshes:
    other, other_metrics, compiled, shares = run(sizes)
    print(json.dumps({
        "sizes": sizes,
        "compiled": compiled,
        "arrays": max(map(difference, jax.tree.leaves(arrays), jax.tree.leaves(other))),
        "metrics": max(difference(v, other_metrics[n]) for n, v in metrics.items() if v is not None),
        "leaves": other_metrics["diverging_leaves"],
        "shares": shares,
    }))
"""

BIASED = {"family": "qwen2", "tied": False}
EXPERTS = {"family": "qwen3_moe", "router_auxiliary": 0.5}


@pytest.mark.parametrize(
    ("meshes", "changes"),
    [
        ([(2, 2, 2, 1), (1, 2, 1, 4)], {}),
        pytest.param([(8, 1, 1, 1), (1, 8, 1, 1), (1, 1, 2, 4), (1, 2, 2, 2)], BIASED, marks=pytest.mark.slow),
        pytest.param([(1, 4, 2, 1), (2, 1, 2, 2)], {"lora": True}, marks=pytest.mark.slow),
        pytest.param([(1, 2, 2, 2), (2, 2, 2, 1), (1, 4, 1, 2)], EXPERTS, marks=pytest.mark.slow),
    ],
    ids=["qwen3", "untied with biases", "lora", "experts"],
)
def test_eight_devices_compute_what_one_computes(tmp_path: Path, meshes: Any, changes: dict[str, Any]) -> None:
    printed = eight_devices.run(SCRIPT, write(tmp_path), json.dumps(meshes), json.dumps(changes))
    results = [json.loads(line) for line in printed.splitlines()]
    assert [tuple(result["sizes"]) for result in results] == meshes
    for result in results:
        _, fsdp, tensor, _ = result["sizes"]
        assert result["compiled"] == 0
        assert result["leaves"] > 5
        assert result["metrics"] < 1e-6  # sums of recorded log-probs are float32
        assert result["arrays"] < 1e-11, result
        # A device holds its share of every matrix, and no more.
        assert min(result["shares"].values()) == 1 / (fsdp * tensor)
        assert max(share for name, share in result["shares"].items() if "norm" not in name) <= 1 / min(fsdp, tensor)
