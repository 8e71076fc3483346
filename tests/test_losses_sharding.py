"""The whole loss on 8 simulated devices: the values of one device, and nothing of logits' size communicated."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

SCRIPT = """
    import re
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    from mwjax.losses.metrics import all_reduce
    from mwjax.losses.policy_gradient import PolicyGradientConfig
    from mwjax.losses.total import LossConfig, Teacher, batch_loss
    from mwjax.tree.rows import Pairs
    from tests.random_edges import random_edges, random_states

    assert jax.device_count() == 8
    jax.config.update("jax_enable_x64", True)
    rng = np.random.default_rng(0)
    edges = random_edges(0, rows=8, vocabulary=64)
    hidden, unembedding = random_states(0, rows=8, vocabulary=64, width=8)
    pairs = Pairs(*rng.integers(0, 9, (2, 8, 6)), (rng.random((8, 6)) < 0.5).astype(np.float32))
    inputs = hidden, unembedding, edges, hidden[::-1], pairs

    def value_and_grad(config):
        def loss(hidden, unembedding, edges, teacher, pairs):
            frozen = Teacher(teacher, unembedding, pairs)
            return batch_loss(hidden, unembedding, edges, config, teacher=frozen, sdcc_lambda=0.1)

        return jax.value_and_grad(loss, (0, 1), has_aux=True)

    def close(got, want):
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-10, atol=1e-12), got, want)

    token = value_and_grad(LossConfig(vocab_chunk=20))
    unit = value_and_grad(LossConfig(policy_gradient=PolicyGradientConfig("gspo"), vocab_chunk=20))
    want = jax.jit(token)(*inputs)
    for names, shape, rows, table in (
        (("data", "tensor"), (4, 2), P("data"), P("tensor")),
        (("data", "fsdp"), (4, 2), P(("data", "fsdp")), P(None, "fsdp")),
    ):
        mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))
        specs = (rows, table, rows, rows, rows)
        spread = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(inputs, specs)]
        close(jax.jit(token)(*spread), want)

    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    specs = (P("data"), P(), P("data"), P("data"), P("data"))
    spread = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(inputs, specs)]
    close(jax.jit(unit)(*spread), jax.jit(unit)(*inputs))
    program = jax.jit(token).lower(*spread).compile()
    close(program(*spread), want)
    assert not re.findall("all-gather|all-to-all|collective-permute", program.as_text())

    def local(*inputs):
        (value, metrics), (by_hidden, by_unembedding) = token(*inputs)
        value, by_unembedding = jax.lax.psum((value, by_unembedding), "data")
        return (value, all_reduce(metrics, "data")), (by_hidden, by_unembedding)

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=specs, out_specs=((P(), P()), (P("data"), P())), check_vma=False
    )
    close(jax.jit(mapped)(*inputs), want)
"""


def test_eight_devices():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)],
        env={**environment, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
