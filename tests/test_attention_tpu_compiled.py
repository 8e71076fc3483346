"""The TPU attention backends through XLA's real TPU compiler: needs libtpu (extra "tpu"), and no TPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from mwjax.launch.plan_request import ENVIRONMENT

pytestmark = pytest.mark.skipif(find_spec("libtpu") is None, reason="compiles with libtpu, of the extra 'tpu'")

SCRIPT = """
import json, re, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding
from mwjax.model import sharding
from mwjax.model.attention.blockwise import LOG_SUM_EXP_NAME, OUTPUT_NAME
from mwjax.model.attention.sharded import on_mesh

backend, topology, lengths, head_dims, dtypes, remat, context = json.loads(sys.argv[1])
devices = topologies.get_topology_desc(topology, "tpu").devices
mesh = sharding.make_mesh(data=2, context=context, devices=devices)
names = (OUTPUT_NAME, LOG_SUM_EXP_NAME) if remat == "attention" else ()
policy = jax.checkpoint_policies.save_only_these_names(*names)
attention = on_mesh(backend, mesh)

def gradients(query, key, value, end, index, cotangent):
    def run(q, k, v):
        return jnp.sin(attention(jnp.cos(q), k, v, end, index if context > 1 else None))
    if remat != "none":
        run = jax.checkpoint(run, policy=policy)
    output, pull = jax.vjp(run, query, key, value)
    return output, pull(cotangent)  # without the output, the first of two forward kernels would be dead code

for length in lengths:
    for head_dim in head_dims:
        for dtype in dtypes:
            def array(*shape, dtype=dtype, spec=sharding.HEADS):
                return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
            query, key = (array(4, length, heads, head_dim) for heads in (4, 2))
            end = array(4, length, dtype=jnp.int32, spec=jax.sharding.PartitionSpec(sharding.ROWS, None))
            index = array(4, length, dtype=jnp.int32, spec=sharding.TOKENS)
            compiled = jax.jit(gradients).lower(query, key, key, end, end, query).compile()
            kernels = re.findall(r'%([a-z_]+)[.\\d]* = [^\\n]*custom_call_target="tpu_custom_call"', compiled.as_text())
            print(json.dumps([length, head_dim, dtype, sorted(kernels)]))
"""
PALLAS = ["tree_attention_forward", "tree_attention_key_value_gradient", "tree_attention_query_gradient"]
SPLASH = ["splash_mha_dkv_no_residuals", "splash_mha_dq_no_residuals", "splash_mha_fwd_residuals"]


def kernels_of(backend, topology, lengths, head_dims, dtypes, remat="attention", context=1):
    """The kernels in each compiled gradient, once per place in the program."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([backend, topology, lengths, head_dims, dtypes, remat, context])],
        env={
            **os.environ,
            **ENVIRONMENT,
            "XLA_FLAGS": "",
            "PYTHONPATH": str(Path(__file__).parent.parent),
        },
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row[:3] for row in found] == [[n, d, t] for n in lengths for d in head_dims for t in dtypes]
    return [row[3] for row in found]


@pytest.mark.parametrize(("backend", "kernels"), [("pallas", PALLAS), ("splash", SPLASH)])
def test_compiles_and_keeps_the_forward_kernel_from_running_again(backend, kernels):
    assert kernels_of(backend, "v5e:2x2", [1024], [128], ["bfloat16"]) == [kernels]


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize(("backend", "kernels"), [("pallas", PALLAS), ("splash", SPLASH)])
def test_compiles_for_every_generation_up_to_long_rows(backend, kernels, topology):
    assert kernels_of(backend, topology, [8192, 32768, 131072], [128], ["bfloat16"]) == [kernels] * 3


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "kernels"), [("pallas", PALLAS), ("splash", SPLASH)])
def test_compiles_for_narrow_heads_and_float32(backend, kernels):
    assert kernels_of(backend, "v5e:2x2", [8192], [64, 128], ["bfloat16", "float32"]) == [kernels] * 4


@pytest.mark.slow
def test_pallas_compiles_for_rows_of_a_quarter_of_a_million():
    assert kernels_of("pallas", "v5e:2x2", [262144], [128], ["bfloat16", "float32"]) == [PALLAS] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "kernels"), [("pallas", PALLAS), ("splash", SPLASH)])
def test_compiles_under_context_parallelism(backend, kernels):
    assert kernels_of(backend, "v5e:2x2", [8192], [128], ["bfloat16"], context=2) == [kernels]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "kernels"), [("pallas", PALLAS), ("splash", SPLASH)])
def test_full_rematerialisation_runs_the_forward_kernel_twice(backend, kernels):
    """The check above can fail: without the names, there is a second forward kernel."""
    (found,) = kernels_of(backend, "v5e:2x2", [1024], [128], ["bfloat16"], remat="full")
    assert len(found) == 4 and set(found) == set(kernels)
