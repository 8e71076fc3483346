"""Attention and decoder split over 8 simulated devices, positions of a row included: the values of one device."""

from __future__ import annotations

from tests import eight_devices

SCRIPT = """
    import re
    import jax, numpy as np
    from jax.sharding import NamedSharding
    from mwjax.model import attend, forward, init, logical_axes, sharding, small_config
    from mwjax.model.attention.sharded import on_mesh
    from mwjax.tree import Batch, Rows
    from mwjax.tree.context import split_context
    from tests.random_edges import random_edges
    from tests.random_tries import random_trie

    assert jax.device_count() == 8
    rng = np.random.default_rng(0)
    tries = [random_trie(rng, 48) for _ in range(8)]
    end, positions = (np.stack([getattr(t, name) for t in tries]) for name in ("visible_until", "position"))
    tokens = rng.integers(0, 50, (8, 48)).astype(np.int32)
    edges = random_edges(0, rows=8, tokens=48, vocabulary=50)
    plain_rows = Rows(tokens, positions, end, edges)
    query, key, value = (jax.random.normal(jax.random.key(i), (8, 48, h, 8)) for i, h in enumerate((4, 2, 2)))
    config = small_config(50, 2, 32)
    params = init(config, jax.random.key(0))

    def gradients(attention):
        return jax.jit(jax.value_and_grad(lambda q, k, v, *more: (attention(q, k, v, *more) ** 2).sum(), (0, 1, 2)))

    want = gradients(lambda *a: attend(*a, backend="blockwise"))(query, key, value, end)
    wanted_hidden = forward(params, config, tokens, positions, end)
    for shape in ((4, 1, 2, 1), (2, 1, 1, 4), (1, 2, 2, 2)):
        mesh = sharding.make_mesh(*shape, devices=jax.devices())
        rows = split_context(Batch(plain_rows), shape[3]).rows
        index = np.broadcast_to(np.arange(48), (8, 48)) if rows.index is None else rows.index
        inputs = [np.take_along_axis(x, index[:, :, None, None], axis=1) for x in (query, key, value)]
        inputs = [jax.device_put(x, NamedSharding(mesh, sharding.HEADS)) for x in inputs]
        attention = on_mesh("blockwise", mesh)
        got_value, got = gradients(attention)(*inputs, end, rows.index)
        np.testing.assert_allclose(got_value, want[0], rtol=1e-5)
        for a, b in zip(got, want[1]):
            b = np.take_along_axis(np.asarray(b), index[:, :, None, None], axis=1)
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        program = jax.jit(attention).lower(*inputs, end, rows.index).compile().as_text()
        found = set(re.findall("all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter", program))
        assert found == ({"all-gather"} if shape[3] > 1 else set()), found

        spread = jax.device_put(params, sharding.shardings(logical_axes(config), mesh))
        place = [jax.device_put(x, NamedSharding(mesh, sharding.TOKENS)) for x in (rows.tokens, rows.positions)]
        meshed = jax.jit(lambda p, t, o, e, i: forward(p, config, t, o, e, index=i, mesh=mesh, remat="full"))
        hidden = np.take_along_axis(np.asarray(wanted_hidden), index[:, :, None], axis=1)
        np.testing.assert_allclose(meshed(spread, *place, end, rows.index), hidden, rtol=1e-5, atol=1e-5)
"""


def test_eight_devices() -> None:
    eight_devices.run(SCRIPT)
