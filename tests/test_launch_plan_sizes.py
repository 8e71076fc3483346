"""Memory by kind, FLOPs and times of a plan, against sizes worked out by hand and against XLA's own count."""

from __future__ import annotations

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import pytest

from mwjax import model
from mwjax.launch import flops, memory, presets, roofline, topologies
from mwjax.losses import LossConfig
from mwjax.train.step import StepConfig, gradient_sums
from mwjax.tree import RowShape, collate
from tests.eight_devices import run
from tests.test_model_presets import PUBLISHED

VOCABULARY, LAYERS, WIDTH, INNER, HEADS, KEYS, HEAD = 64, 3, 32, 48, 4, 2, 16
SHAPE = {
    "vocab_size": VOCABULARY,
    "layers": LAYERS,
    "width": WIDTH,
    "feed_forward_width": INNER,
    "heads": HEADS,
    "key_value_heads": KEYS,
    "head_dim": HEAD,
}
TABLE = VOCABULARY * WIDTH
MATRICES = LAYERS * (2 * WIDTH * HEADS * HEAD + 2 * WIDTH * KEYS * HEAD + 3 * WIDTH * INNER)
NORMS = LAYERS * (2 * WIDTH + 2 * HEAD) + WIDTH


def small(**more: object) -> model.ModelConfig:
    return model.small_config(**{**SHAPE, **more})


@pytest.mark.parametrize("name", presets.PRESETS)
def test_presets_are_the_published_decoders(name: str) -> None:
    values, count = PUBLISHED[name.partition("/")[2]]
    assert presets.DECODERS[name] == model.ModelConfig.from_hf(values)
    sizes = jax.tree.leaves(model.abstract_params(presets.DECODERS[name]))
    assert sum(math.prod(leaf.shape) for leaf in sizes) == count


def test_flops_by_hand() -> None:
    """Two rows of 8 tokens, 5 edges each; a quarter of the causal pairs is visible."""
    work = flops.work(RowShape(8, 5), rows=2, density=0.25)
    tokens, pairs, edges = 16, 2 * 36 * 0.25, 10
    assert work == flops.Work(tokens, pairs, edges)
    params = model.abstract_params(small())
    found = flops.accumulate(StepConfig(small(), attention="pallas", remat="full"), params, params, work)
    per_pair = 2 * LAYERS * HEADS * HEAD  # one product
    assert found.model == {
        "layers": 6 * MATRICES * tokens,
        "attention": 6 * per_pair * pairs,
        "unembedding": 6 * TABLE * edges,
    }
    assert found.again == {
        "layers": 2 * (MATRICES - LAYERS * WIDTH * INNER) * tokens,
        "attention": (3 + 2) * per_pair * pairs,
        "unembedding": 2 * TABLE * edges,
    }
    assert found.total == sum(found.model.values()) + sum(found.again.values())
    kept = flops.accumulate(StepConfig(small(), attention="blockwise", remat="attention"), params, params, work)
    assert kept.model == found.model and kept.again["attention"] == per_pair * pairs
    assert flops.accumulate(StepConfig(small(), remat="none"), params, params, work).again["layers"] == 0
    assert flops.score(StepConfig(small()), params, work).model == {
        name: value / 3 for name, value in found.model.items()
    }


def test_flops_of_a_teacher() -> None:
    work = flops.work(RowShape(8, 5, 12, 3), rows=2, density=1.0)
    params = model.abstract_params(small())
    config = StepConfig(small(), sdcc=True)
    found = flops.accumulate(config, params, params, work)
    assert found.model["teacher"] == 2 * MATRICES * 24 + 4 * LAYERS * HEADS * HEAD * 2 * 78
    assert found.model["comparison"] == 8 * TABLE * 6  # forward of both, and of the student two products backward
    without = flops.accumulate(dataclasses.replace(config, sdcc=False), params, params, work)
    assert set(found.model) - set(without.model) == {"teacher", "comparison"}


def test_frozen_weights_have_no_gradient_of_theirs() -> None:
    adapted = dataclasses.replace(small(), lora=model.LoRA(2, 4.0, ("query",)))
    whole = model.abstract_params(adapted)
    trained, _ = model.split_params(whole, model.adapter_names(adapted))
    adapters = LAYERS * 2 * (WIDTH + HEADS * HEAD)
    work = flops.work(RowShape(8, 5), rows=1, density=1.0)
    found = flops.accumulate(StepConfig(adapted), trained, whole, work).model
    assert found["layers"] == 8 * (4 * (MATRICES + adapters) + 2 * adapters)
    assert found["unembedding"] == 4 * TABLE * 5


def test_a_token_meets_only_its_experts() -> None:
    experts = model.Experts(count=8, per_token=2, width=20)
    shape = small(family="qwen3_moe", experts=experts)
    dense = LAYERS * (2 * WIDTH * HEADS * HEAD + 2 * WIDTH * KEYS * HEAD)
    router, met = LAYERS * WIDTH * 8, LAYERS * 2 * 3 * WIDTH * 20
    params = model.abstract_params(shape)
    assert flops.matrices(shape, params) == dense + router + met
    assert flops.matrices(shape, params, "down") == met / 3


def test_flops_against_xla() -> None:
    """Without loops over layers or vocabulary, and with dense attention, XLA's own count of the gradient agrees, up to
    the operations between the products."""
    shape = model.small_config(512, 2, 256, heads=4, key_value_heads=2, head_dim=64, feed_forward_width=768)
    config = StepConfig(shape, LossConfig("sft", vocab_chunk=512), attention="oracle", scan=False)
    params, rows = model.abstract_params(shape), RowShape(256, 256)
    batch = collate([], [], rows, 2)
    compiled = jax.jit(lambda p, b: gradient_sums(p, b, config)).lower(params, batch).compile()
    dense = 2 * 256 / 257  # all pairs of a row, not only the causal ones
    counted = flops.accumulate(config, params, params, flops.work(rows, 2, dense)).total
    assert compiled.cost_analysis()["flops"] == pytest.approx(counted, rel=0.03)


LOWERED = """
import json, sys
import jax
from mwjax.launch import ahead
from mwjax.model.sharding import make_mesh
from mwjax.train import load, setup

config = setup.resolved(load.load(None, json.loads(sys.argv[1])))
mesh = make_mesh(**config.mesh.model_dump(), devices=jax.devices())
lowering = ahead.lower(config, setup.decoder_shape(config.model), mesh, microbatches=3, density=1.0)
print(json.dumps([lowering.resident._asdict(), lowering.arguments, list(lowering.functions)]))
"""


def test_memory_by_kind_by_hand() -> None:
    """What a device of a mesh of 2 x 2 x 2 holds of a decoder in float32, with a reference and bfloat16 moments."""
    length, edges, rows, cut = 128, 96, 4, 4  # rows are cut in 4, over data and fsdp
    options = [
        *(
            "run_dir=x",
            "data.paths=x",
            "model.dtype=float32",
            f"data.row_length={length}",
            f"data.edges_per_row={edges}",
        ),
        *(f"data.rows_per_microbatch={rows}", "loss.task=memorywalker", "optimizer.moments_dtype=bfloat16"),
        *(f"model.small.{key}={value}" for key, value in SHAPE.items()),
        *("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"),
    ]
    resident, arguments, functions = json.loads(run(LOWERED, json.dumps(options)))
    assert functions == ["accumulate", "apply", "score"]
    head_norms = LAYERS * 2 * HEAD  # on every device; other norms are cut over fsdp, matrices over tensor as well
    parameters = (TABLE + MATRICES) // 4 + (NORMS - head_norms) // 2 + head_norms
    batch = sum(array.nbytes for array in jax.tree.leaves(collate([], [], RowShape(length, edges), rows))) // cut
    assert resident["parameters"] == resident["reference"] == 4 * parameters
    assert 0 <= resident["optimiser"] - 2 * 2 * parameters <= 16  # and counters
    assert 0 <= resident["gradients"] - 4 * parameters <= 40 * 4  # and metrics
    assert (resident["batch"], resident["frozen"], resident["teacher"]) == (3 * batch, 0, 0)
    assert arguments["accumulate"] == 4 * parameters + resident["gradients"] + batch + 4
    assert arguments["apply"] == 4 * parameters + resident["optimiser"] + 4 + resident["gradients"] + 4
    assert arguments["score"] == 4 * parameters + batch


RUNS = """
import json, sys
import jax
from mwjax.launch import ahead
from mwjax.model.sharding import make_mesh
from mwjax.train import load, setup

base = ["run_dir=x", "data.paths=x", "data.row_length=64", "model.small.vocab_size=64", "model.dtype=float32"]
for options in json.loads(sys.argv[1]):
    config = setup.resolved(load.load(None, [*base, *options]))
    mesh = make_mesh(devices=jax.devices()[:1])
    lowering = ahead.lower(config, setup.decoder_shape(config.model), mesh, microbatches=3, density=1.0)
    print(json.dumps([dict(lowering.runs), sorted(lowering.functions) == sorted(lowering.runs)]))
"""


def test_how_often_a_function_runs_by_hand() -> None:
    """The initial weights score a micro-batch once, whatever for; GSPO's ratios take the weights as they are now."""
    old = "loss.old_logprobs=recompute"
    cases = [
        (["loss.task=grpo", "loss.kl=0"], 0),
        (["loss.task=grpo", "loss.kl=0.1"], 1),
        (["loss.task=grpo", "loss.kl=0.1", old], 1),
        (["loss.task=gspo", "loss.kl=0"], 1),
        (["loss.task=gspo", "loss.kl=0.1"], 2),
        (["loss.task=grpo", "loss.kl=0", old], 1),
        (["loss.task=grpo", "loss.kl=0", old, "data.method=naive_compressed"], 0),  # rows of other lengths are
    ]
    printed = run(RUNS, json.dumps([given for given, _ in cases])).splitlines()
    assert len(printed) == len(cases)
    for line, (_, scores) in zip(printed, cases):
        expected = {"accumulate": 3, "apply": 1} | ({"score": 3 * scores} if scores else {})
        assert json.loads(line) == [expected, True]


def test_bytes_of_a_shard() -> None:
    mesh = jax.sharding.AbstractMesh((4, 2), ("a", "b"))
    whole = jax.ShapeDtypeStruct((8, 6), jnp.float32)
    cut = jax.ShapeDtypeStruct((8, 6), jnp.bfloat16, sharding=jax.sharding.NamedSharding(mesh, jax.P("a", "b")))
    assert memory.shard_bytes({"x": whole, "y": [cut, None]}) == 8 * 6 * 4 + 2 * 3 * 2


def test_the_fullest_moment() -> None:
    resident = memory.Resident(100, 0, 200, 0, 50, 100, 7)
    programs = {"accumulate": (460, 207), "apply": (420, 400), "score": (300, 107)}
    first, *others = memory.peaks(resident, programs, code=5)
    assert first.function == "accumulate"
    assert first.kinds == {
        "parameters": 100,
        "optimiser": 200,
        "reference": 50,
        "gradients": 100,
        "batch": 7,
        "temporaries": 253,
        "code": 5,
    }
    assert first.total == 715
    assert [peak.function for peak in others] == ["score", "apply"]
    assert "gradients" not in others[0].kinds and others[0].total == 357 + 193 + 5


def test_roofline() -> None:
    chip = topologies.V5E
    found = roofline.limits(chip, 4, flops=4 * chip.flops, hbm_bytes=2 * chip.hbm_bandwidth, sent=chip.ici_bandwidth)
    assert found == pytest.approx((1.0, 2.0, 2.0, 0.0)) and found.seconds == 2.0 and found.by == "memory"
    slowest = roofline.limits(chip, 4, chip.flops, 0, 0, to_slices=3 * chip.dcn_bandwidth)
    assert slowest.seconds == pytest.approx(3.0) and slowest.by == "network"
    whole = roofline.limits(topologies.TPU7X, 2, topologies.TPU7X.flops, 0, 0)  # a chip is two devices
    assert whole.compute == pytest.approx(1.0)
    assert roofline.estimate(chip, 4, 2.0, 1000, 4 * chip.flops) == (2.0, 500.0, pytest.approx(0.5))
