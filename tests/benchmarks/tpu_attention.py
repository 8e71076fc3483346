"""Memory and block visits of the attention backends, compiled for a TPU that need not be there: ``python -m
tests.benchmarks.tpu_attention --help``.

Needs libtpu (extra "tpu"). Per length and backend: the peak memory of one layer's attention, forward and backward, as
XLA's TPU compiler plans it, and how many pairs of blocks the kernel computes on a tree and on a causal row of that
length. The tree is a chain of five views (tests/benchmarks/attention.py) that fills the row. No times: they need a TPU.
"""

from __future__ import annotations

import argparse
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from mwjax.launch.plan_request import ENVIRONMENT
from mwjax.model.attention import blockwise, splash
from mwjax.model.attention.block_pairs import BLOCKS, block_sizes
from mwjax.model.attention.sharded import on_mesh
from mwjax.model.sharding import HEADS, ROWS, make_mesh
from tests.benchmarks.attention import chain_of_views

MIB = 2**20


def tree_of(length: int) -> np.ndarray:
    """visible_until of the longest chain of five views that fits, and padding."""
    view = int(length / (1 + sum(1 - fork for fork in (0.63, 0.54, 0.68, 0.59))))
    while len(ends := chain_of_views(view)) > length:
        view -= 1
    return np.concatenate([ends, np.arange(len(ends), length) + 1]).astype(np.int32)


def sizes_of(backend: str, length: int) -> tuple[int, int]:
    if backend == "blockwise":
        return blockwise.BLOCK, blockwise.BLOCK
    return block_sizes(length, length, splash.BLOCKS if backend == "splash" else BLOCKS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="v5e:2x2", help="v5e:2x2, v5p:2x2x1, v6e:2x2, ...")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--backends", nargs="+", default=["blockwise", "splash", "pallas"])
    parser.add_argument("--rows", type=int, default=1, help="rows on the device")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--key-value-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    os.environ |= ENVIRONMENT
    jax.config.update("jax_platforms", "cpu")
    mesh = make_mesh(devices=topologies.get_topology_desc(arguments.topology, "tpu").devices)

    print(
        f"jax {jax.__version__}, {arguments.topology}, {arguments.rows} row(s), {arguments.heads} query heads on ",
        end="",
    )
    print(f"{arguments.key_value_heads} key heads of {arguments.head_dim}, {arguments.dtype}; block visits per head\n")
    print("| tokens | backend | peak MiB | beyond the arrays | block | visits, tree | visits, causal |")
    print("|---|---|---|---|---|---|---|")
    for length in arguments.lengths:
        shapes = [
            jax.ShapeDtypeStruct(
                (arguments.rows, length, heads, arguments.head_dim),
                arguments.dtype,
                sharding=NamedSharding(mesh, HEADS),
            )
            for heads in (arguments.heads, *[arguments.key_value_heads] * 2, arguments.heads)
        ]
        end = jax.ShapeDtypeStruct(
            (arguments.rows, length), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec(ROWS, None))
        )
        tree, causal = tree_of(length), np.full(length, length, np.int32)
        for backend in arguments.backends:
            attention = on_mesh(backend, mesh)

            def gradients(query, key, value, cotangent, end, attention=attention):
                output, pull = jax.vjp(lambda q, k, v: attention(q, k, v, end), query, key, value)
                return output, *pull(cotangent)

            peak = jax.jit(gradients).lower(*shapes, end).compile().memory_analysis().peak_memory_in_bytes
            # query, key, value and the output's gradient go in; the output and three gradients come out
            arrays = 2 * sum(shape.size * shape.dtype.itemsize for shape in shapes)
            sizes = sizes_of(backend, length)
            found = [
                int(blockwise.visited_blocks(jnp.asarray(ends), jnp.arange(length), sizes).sum())
                for ends in (tree, causal)
            ]
            memory = f"{peak / MIB:,.0f} | {(peak - arrays) / MIB:,.0f}"
            print(f"| {length:,} | {backend} | {memory} | {sizes[0]} | {found[0]:,} | {found[1]:,} |", flush=True)


if __name__ == "__main__":
    main()
