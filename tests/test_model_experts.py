"""Mixtures of experts: against a dense loop over all experts, on several devices, and what their routers report."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mwjax import losses, model
from mwjax.launch.plan_request import ENVIRONMENT
from mwjax.model import grouped
from mwjax.model.experts import Routing, _mixture
from tests import eight_devices

WIDTH, EXPERTS, INNER = 12, 6, 10
QUICK = {"xla_backend_optimization_level": 0}  # compiling is most of the time these tests take


def weights(skew: float = 0.0) -> dict[str, jax.Array]:
    """Of one block, float64; ``skew`` draws all tokens with a positive first feature to the first experts."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {
        "router": (WIDTH, EXPERTS),
        "gate": (EXPERTS, WIDTH, INNER),
        "up": (EXPERTS, WIDTH, INNER),
        "down": (EXPERTS, INNER, WIDTH),
    }
    made = {name: 0.5 * jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items())}
    made["router"] = made["router"].at[0].add(skew * jnp.arange(EXPERTS, 0, -1))
    return made


def dense(block: dict[str, jax.Array], x: jax.Array, per_token: int, normalised: bool) -> tuple[jax.Array, Routing]:
    """Every token through every expert, one after the other."""
    tokens = x.reshape(-1, WIDTH)
    probability = jnp.exp(tokens @ block["router"])
    probability = probability / probability.sum(-1, keepdims=True)
    smallest = jnp.sort(probability, axis=-1)[:, -per_token]
    chosen = probability >= smallest[:, None]
    share = jnp.where(chosen, probability, 0)
    share = share / share.sum(-1, keepdims=True) if normalised else share
    out = jnp.zeros_like(tokens)
    for expert in range(EXPERTS):
        gate = tokens @ block["gate"][expert]
        inner = gate / (1 + jnp.exp(-gate)) * (tokens @ block["up"][expert])
        out = out + share[:, expert : expert + 1] * (inner @ block["down"][expert])
    weight = jnp.arange(len(tokens)) / 7.0
    return out.reshape(x.shape), Routing(weight @ chosen, weight @ probability)


@pytest.mark.parametrize(
    ("per_token", "normalised", "skew"),
    [(1, False, 0.0), (3, True, 0.0), (3, False, 40.0), (1, True, 40.0), (EXPERTS, True, 0.0)],
)
def test_values_and_gradients_are_those_of_a_loop_over_all_experts(per_token, normalised, skew):
    """However uneven the load: with the skew some experts get all tokens and others none, and none is dropped."""
    with jax.enable_x64(True):
        x = jax.random.normal(jax.random.key(1), (2, 9, WIDTH), jnp.float64).at[..., 0].set(1.0)
        weight = (jnp.arange(18) / 7.0).reshape(2, 9)

        def ours(block, x):
            part, routing = _mixture(x, weight, **block, per_token=per_token, normalised=normalised, split=False)
            return part[0], routing

        def loss(function, block, x):
            out, routing = function(block, x)
            return jnp.sin(out).sum() + (routing.probability**2).sum(), (out, routing)

        def run(function):
            gradients = jax.value_and_grad(partial(loss, function), (0, 1), has_aux=True)
            return jax.jit(gradients, compiler_options=QUICK)(weights(skew), x)

        got, expected = run(ours), run(partial(dense, per_token=per_token, normalised=normalised))
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-10), got, expected)
        load = expected[0][1][1].load
        assert load.sum() == pytest.approx(per_token * weight.sum())
        if skew:
            assert np.asarray(load > 0).tolist() == [True] * per_token + [False] * (EXPERTS - per_token)


@pytest.mark.parametrize(
    "sizes", [[300, 0, 200, 100], [0, 0, 0, 0], [0, 0, 0, 600], [512, 88, 0, 0], [1, 2, 3, 4]], ids=str
)
def test_gradient_of_the_experts_weights_on_tpus(sizes):
    """The kernel that TPUs run, in the interpreter: rows after the last group, NaN here, are not looked at."""
    rng = np.random.default_rng(0)
    rows, gradient = (rng.standard_normal((600, size)).astype(np.float32) for size in (24, 130))
    rows[sum(sizes) :] = gradient[sum(sizes) :] = np.nan
    starts = np.cumsum([0, *sizes])
    expected = [rows[a:b].T @ gradient[a:b] for a, b in itertools.pairwise(starts)]
    got = grouped._to_matrices_tpu(rows, gradient, jnp.asarray(sizes, jnp.int32), interpret=True)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def decoder(**changes: Any) -> tuple[model.ModelConfig, Any, tuple[jax.Array, ...]]:
    config = model.small_config(31, 2, 16, family="qwen3_moe", tied=False, **changes)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 31, (2, 24)), jnp.int32)
    positions = jnp.tile(jnp.arange(24), (2, 1))
    return config, model.init(config, jax.random.key(0)), (tokens, positions, jnp.full((2, 24), 24))


def value_and_gradients(**options: Any) -> Any:
    config, params, rows = decoder()
    weight = jnp.ones((2, 24)).at[1, 20:].set(0)

    def loss(params):
        hidden, routing = model.forward_routed(params, config, *rows, weight, **options)
        return (hidden.astype(jnp.float32) ** 2 * jnp.arange(16)).mean() + losses.load_balance(routing), routing

    return jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=QUICK)(params)


@pytest.mark.slow
def test_scan_remat_and_bfloat16():
    (value, routing), gradients = expected = value_and_gradients()
    assert routing.load.shape == (2, 8) and float(routing.probability.sum()) == pytest.approx(2 * 44)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(abs(b).max())),
        value_and_gradients(remat="attention", scan=False),
        expected,
    )
    (low, _), narrow = value_and_gradients(dtype=jnp.bfloat16, remat="full")
    assert float(low) == pytest.approx(float(value), rel=0.05)
    leaves = jax.tree.leaves(narrow), jax.tree.leaves(gradients)
    assert all(leaf.dtype == jnp.float32 for leaf in leaves[0])
    ours, theirs = (np.concatenate([np.ravel(leaf) for leaf in some]) for some in leaves)
    assert ours @ theirs / np.linalg.norm(ours) / np.linalg.norm(theirs) > 0.98


def test_decoding_with_a_cache_routes_as_the_whole_sequence_does():
    config, params, (tokens, positions, until) = decoder()
    expected = model.forward(params, config, tokens, positions, until)
    cache = model.init_cache(config, 2, 24)
    step = jax.jit(model.decode_step, static_argnums=1, compiler_options=QUICK)
    first, cache = step(params, config, tokens[:, :12], positions[:, :12], cache)
    rest, _ = step(params, config, tokens[:, 12:], positions[:, 12:], cache)
    np.testing.assert_allclose(jnp.concatenate([first, rest], axis=1), expected, rtol=1e-4, atol=1e-5)


def test_adapters_of_the_attention():
    config, params, rows = decoder()
    adapted = dataclasses.replace(config, lora=model.LoRA(2, 4.0, ("query", "value")))
    joined = model.join_params(params, model.init_adapters(adapted, jax.random.key(1)))
    np.testing.assert_array_equal(model.forward(joined, adapted, *rows), model.forward(params, config, *rows))
    assert {name.split(".")[2] for name in model.adapter_names(adapted)} == {"query_lora", "value_lora"}


def test_load_balance_by_hand():
    """Two layers, three experts, four tokens of weight 1 and 0.5: summed over everything, then one product."""
    probability = np.array([[[0.6, 0.3, 0.1], [0.2, 0.7, 0.1]], [[0.5, 0.1, 0.4], [0.1, 0.2, 0.7]]])
    chosen = probability.argsort(axis=-1)[..., 1:]
    weight = np.array([1.0, 0.5])
    load = np.zeros((2, 3))
    for layer, token, place in np.ndindex(2, 2, 2):
        load[layer, chosen[layer, token, place]] += weight[token]
    summed = np.einsum("t,lte->le", weight, probability)
    f, p = load.sum(0) / 3.0, summed.sum(0) / 3.0  # weights 1.5, in two layers
    whole = Routing(jnp.asarray(load), jnp.asarray(summed))
    assert float(losses.load_balance(whole)) == pytest.approx(3 * (f * p).sum(), rel=1e-6)
    parts = [
        Routing(whole.load, jnp.asarray(weight[token] * probability[:, token])) for token in range(2)
    ]  # of a part the load does not matter
    assert sum(float(losses.load_balance(part, whole)) for part in parts) == pytest.approx(3 * (f * p).sum(), rel=1e-6)
    even = Routing(jnp.full((2, 3), 2.0), jnp.full((2, 3), 1.0))
    assert float(losses.load_balance(even)) == pytest.approx(2.0)  # experts per token


def test_descending_the_term_evens_the_load():
    """From a router that sends most tokens to the same expert, and one to another."""
    block, x = weights(skew=1.0), jax.random.normal(jax.random.key(1), (4, 32, WIDTH)).at[..., 0].set(1.0)
    rest = {name: leaf for name, leaf in block.items() if name != "router"}

    def loss(router):
        everything = jnp.ones(x.shape[:2])
        routing = _mixture(x, everything, router, **rest, per_token=2, normalised=True, split=False)[1]
        return losses.load_balance(jax.tree.map(lambda leaf: leaf[None], routing)), routing.load

    step = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=QUICK)
    router, (_, first) = block["router"], step(block["router"])[0]
    for _ in range(300):
        (value, load), gradient = step(router)
        router = router - 0.3 * gradient
    assert (max(first), min(first)) == (114, 1)
    assert min(load) > 38 and max(load) < 48  # of 128 tokens, each with 2 of 6 experts
    assert 1.95 < float(value) < 2.05


def test_router_metrics():
    load = np.array([[6.0, 2, 0, 0], [2, 2, 2, 2]])
    probability = np.array([[1.0, 1, 1, 1], [2, 1, 1, 0]])
    sums = dict.fromkeys(("loss_tokens", "rollout_known", "entropy", "logdiff_signed"), 0.0)
    sums |= dict.fromkeys(("logdiff", "mismatch_k3", "mismatch_ratio", "mismatch_ratio_squared"), 0.0)
    sums |= dict.fromkeys(("train_nll", "rollout_nll"), 0.0)
    metrics = losses.Metrics(
        {**sums, "router_load": load, "router_probability": probability}, {"logdiff_max_token": 0.0}
    )
    done = losses.finalise(metrics)
    assert done["router_load_max"] == pytest.approx(4 * 6 / 8)
    skewed = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25)) / np.log(4)
    assert done["router_load_entropy"] == pytest.approx((skewed + 1) / 2)
    assert done["router_auxiliary"] == pytest.approx(4 * (load.sum(0) / 8 * probability.sum(0) / 8).sum())


DEVICES = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding
from functools import partial
from mwjax import losses, model
from mwjax.model import experts, sharding

jax.config.update("jax_enable_x64", True)

@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def past(x, here, ahead, back):
    return jnp.where(here, x, ahead)

past.defvjp(
    lambda x, here, ahead, back: (past(x, here, ahead, back), here),
    lambda ahead, back, here, gradient: (jnp.where(here, gradient, back), None),
)

def rows_of_no_group_are_nan(rows, matrices, sizes, product=experts.grouped_matmul):
    here = (jnp.arange(len(rows)) < sizes.sum())[:, None]
    return past(product(past(rows, here, 0, jnp.nan), matrices, sizes), here, jnp.nan, 0)

experts.grouped_matmul = rows_of_no_group_are_nan
config = model.small_config(32, 2, 16, family="qwen3_moe", tied=False, experts=model.Experts(8, 3, 6))
params = model.init(config, jax.random.key(0), jnp.float64)
tokens = jnp.asarray(np.random.default_rng(0).integers(0, 32, (4, 16)), jnp.int32)
positions, until = jnp.tile(jnp.arange(16), (4, 1)), jnp.full((4, 16), 16)
weight = jax.random.uniform(jax.random.key(1), (4, 16), jnp.float64)

def run(sizes):
    mesh = sharding.make_mesh(*sizes, devices=jax.devices())
    split = mesh if mesh.size > 1 else None
    placed = jax.device_put(params, sharding.shardings(model.logical_axes(config), mesh))
    order = jnp.tile(jnp.arange(16), (4, 1)) if sizes[3] > 1 else None

    def loss(params):
        rows, options = (tokens, positions, until, weight), {"dtype": "float64", "remat": "attention"}
        hidden, routing = model.forward_routed(params, config, *rows, mesh=split, index=order, **options)
        return (jnp.sin(hidden) * jnp.arange(16)).sum() + 3 * losses.load_balance(routing), routing

    result = jax.jit(jax.value_and_grad(loss, has_aux=True))(placed)
    gate = placed["layers"]["feed_forward"]["gate"]
    return jax.tree.map(np.asarray, result), gate.addressable_shards[0].data.shape

expected, _ = run((1, 1, 1, 1))
for sizes in json.loads(sys.argv[1]):
    got, shape = run(sizes)
    errors = jax.tree.map(lambda a, b: float(np.abs(a - b).max() / np.abs(b).max()), got, expected)
    print(json.dumps({"sizes": sizes, "error": max(jax.tree.leaves(errors)), "shape": shape}))
"""


def compare_devices(meshes: list[tuple[int, ...]]) -> None:
    results = [json.loads(line) for line in eight_devices.run(DEVICES, json.dumps(meshes)).splitlines()]
    assert [tuple(result["sizes"]) for result in results] == meshes
    for result in results:
        _, fsdp, tensor, _ = result["sizes"]
        assert result["error"] < 1e-11, result
        assert result["shape"] == [2, 8 // tensor, 16 // fsdp, 6]  # a device holds its own experts


def test_experts_spread_over_eight_devices():
    """On TPUs rows of other devices' experts hold whatever was in memory, in both directions: NaN here."""
    compare_devices([(1, 2, 2, 2)])


@pytest.mark.slow
def test_experts_spread_over_eight_devices_in_other_ways():
    compare_devices([(1, 4, 2, 1), (2, 2, 1, 2), (1, 1, 2, 4), (4, 1, 2, 1)])


COMPILED = """
import json, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding
from mwjax import losses, model
from mwjax.model import sharding

topology, dtype = sys.argv[1:]
mesh = sharding.make_mesh(fsdp=2, tensor=2, devices=topologies.get_topology_desc(topology, "tpu").devices)
experts = model.Experts(count=32, per_token=4, width=384)
config = model.small_config(512, 1, 512, family="qwen3_moe", experts=experts)
place = lambda shape, dtype, spec: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
params = jax.tree.map(
    lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
    model.abstract_params(config), sharding.shardings(model.logical_axes(config), mesh),
)
rows = place((4, 2048), jnp.int32, sharding.TOKENS)

def gradients(params, tokens, positions, until, weight):
    def loss(params):
        attention = lambda query, key, value, *_: query  # only the experts are of interest
        rows = tokens, positions, until, weight
        hidden, routing = model.forward_routed(params, config, *rows, attention=attention, dtype=dtype, mesh=mesh)
        return hidden.astype(jnp.float32).sum() + losses.load_balance(routing)
    return jax.grad(loss)(params)

compiled = jax.jit(gradients).lower(params, rows, rows, rows, place((4, 2048), jnp.float32, sharding.TOKENS)).compile()
pairs = 2 * 2048 * 4  # of one device: its rows times the experts of each token
print(json.dumps([compiled.cost_analysis()["flops"] / (3 * 3 * 2 * pairs * 512 * 384), "tgmm" in compiled.as_text()]))
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="compiles with libtpu, of the extra 'tpu'")
@pytest.mark.parametrize(
    ("topology", "dtype"),
    [("v5e:2x2", "bfloat16"), ("v5e:2x2", "float32"), ("v5p:2x2x1", "bfloat16"), ("v6e:2x2", "bfloat16")],
)
def test_on_tpus_the_work_is_that_of_the_chosen_experts(topology, dtype):
    """By XLA's TPU compiler: three products of three matrices, forward and backward, and little else. Were every
    expert applied to every pair, the work of one of the products alone would be 16 times as much."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILED, topology, dtype],
        env={
            **os.environ,
            **ENVIRONMENT,
            "PYTHONPATH": str(eight_devices.ROOT),
        },
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    work, kernel = json.loads(done.stdout.splitlines()[-1])
    assert kernel
    assert 1 < work < 1.4
