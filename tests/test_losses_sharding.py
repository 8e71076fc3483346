"""The whole loss on 8 simulated devices, over several meshes: the values and gradients of one device."""

from __future__ import annotations

from tests import eight_devices

SCRIPT = """
    import re
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import NamedSharding
    from mwjax.losses.policy_gradient import PolicyGradientConfig
    from mwjax.losses.total import LossConfig, Teacher, batch_loss
    from mwjax.model import sharding
    from mwjax.tree.rows import Pairs
    from tests.random_edges import random_edges, random_states

    assert jax.device_count() == 8
    jax.config.update("jax_enable_x64", True)
    rng = np.random.default_rng(0)
    edges = random_edges(0, rows=8, tokens=8, vocabulary=64)
    hidden, unembedding = random_states(0, rows=8, tokens=8, vocabulary=64, width=8)
    pairs = Pairs(*rng.integers(0, 8, (2, 8, 8)), (rng.random((8, 8)) < 0.5).astype(np.float32))
    inputs = hidden, unembedding, edges, hidden[::-1], pairs

    def value_and_grad(config, mesh):
        def loss(hidden, unembedding, edges, teacher, pairs):
            frozen = Teacher(teacher, unembedding, pairs)
            return batch_loss(hidden, unembedding, edges, config, teacher=frozen, sdcc_lambda=0.1, mesh=mesh)

        return jax.value_and_grad(loss, (0, 1), has_aux=True)

    def close(got, want):
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-10, atol=1e-12), got, want)

    token = LossConfig(vocab_chunk=20)
    unit = LossConfig(policy_gradient=PolicyGradientConfig("gspo"), vocab_chunk=20)
    for shape, config in (((8, 1, 1, 1), token), ((1, 2, 2, 2), token), ((2, 1, 2, 2), unit)):
        mesh = sharding.make_mesh(*shape, devices=jax.devices())
        specs = (sharding.HIDDEN, sharding.TABLE, sharding.TOKENS, sharding.HIDDEN, sharding.TOKENS)
        spread = [
            jax.device_put(array, jax.tree.map(lambda _, spec=spec: NamedSharding(mesh, spec), array))
            for array, spec in zip(inputs, specs)
        ]
        want = jax.jit(value_and_grad(config, None))(*inputs)
        program = jax.jit(value_and_grad(config, mesh)).lower(*spread).compile()
        close(program(*spread), want)
        if shape[0] == 8:
            assert not re.findall("all-gather|all-to-all|collective-permute", program.as_text())
"""


def test_eight_devices() -> None:
    eight_devices.run(SCRIPT)
