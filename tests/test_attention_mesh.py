"""Attention split over 8 simulated devices: the values of one device, and no communication."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

SCRIPT = """
    import re
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec
    from mwjax.model import attend, forward, init, small_config
    from mwjax.model.attention.sharded import on_mesh
    from tests.random_tries import random_trie

    assert jax.device_count() == 8
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    rng = np.random.default_rng(0)
    rows = [random_trie(rng, 48) for _ in range(8)]
    end = jnp.asarray(np.stack([row.visible_until for row in rows]))
    positions = jnp.asarray(np.stack([row.position for row in rows]))
    query, key, value = (jax.random.normal(jax.random.key(i), (8, 48, h, 8)) for i, h in enumerate((4, 2, 2)))
    batch, heads = PartitionSpec("data"), PartitionSpec("data", None, "tensor")
    specs = (heads, heads, heads, batch)
    spread = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip((query, key, value, end), specs)]

    def gradients(attention):
        return jax.jit(jax.value_and_grad(lambda q, k, v, e: (attention(q, k, v, e) ** 2).sum(), (0, 1, 2)))

    def one(q, k, v, e):
        return attend(q, k, v, e, backend="blockwise")

    expected = gradients(one)(query, key, value, end)
    for attention in (one, on_mesh("blockwise", mesh)):
        for a, b in zip(jax.tree.leaves(gradients(attention)(*spread)), jax.tree.leaves(expected)):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    program = jax.jit(on_mesh("blockwise", mesh)).lower(*spread).compile().as_text()
    assert not re.findall("all-gather|all-reduce|all-to-all|collective-permute", program)

    config = small_config(50, 2, 32)
    params = init(config, jax.random.key(0))
    tokens = jnp.asarray(rng.integers(0, 50, (8, 48)))
    plain = forward(params, config, tokens, positions, end)
    inputs = [jax.device_put(x, NamedSharding(mesh, batch)) for x in (tokens, positions, end)]
    meshed = jax.jit(lambda p, t, o, e: forward(p, config, t, o, e, attention=on_mesh("blockwise", mesh), remat="full"))
    np.testing.assert_allclose(meshed(params, *inputs), plain, rtol=1e-5, atol=1e-5)
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
