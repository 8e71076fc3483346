"""Time and memory of the attention backends on one packed tree, forward and backward: ``python attention.py --help``.

The tree is a chain of views of ``--view`` tokens, each forking from the one before at 63, 54, 68 and 59 % of its
length, as a context-editing agent leaves it (5,245 tokens for views of 2,048).
"""

from __future__ import annotations

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

from mwjax.model.attention import blockwise, oracle


def chain_of_views(view: int, forks: tuple[float, ...] = (0.63, 0.54, 0.68, 0.59), multiple: int = 1) -> np.ndarray:
    """visible_until, int32 [T], of a tree in which every view leaves the previous one at a share of its length; padded
    with positions that see only themselves to a multiple of ``multiple``."""
    parents = list(range(-1, view - 1))
    latest = list(range(view))
    for fork in forks:
        kept, first = int(view * fork), len(parents)
        added = list(range(first, first + view - kept))
        parents += [latest[kept - 1], *added[:-1]]
        latest = latest[:kept] + added
    size = np.ones(len(parents), np.int64)
    for node in reversed(range(1, len(parents))):
        size[parents[node]] += size[node]
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    order, stack = [], [0]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(reversed(children.get(node, [])))
    ends = np.arange(len(order)) + size[order]
    padding = np.arange(len(order), -(-len(order) // multiple) * multiple) + 1
    return np.concatenate([ends, padding]).astype(np.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--view", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--key-value-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--blocks", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--oracle", action="store_true", help="also the dense oracle (holds T x T)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()

    ends = chain_of_views(arguments.view)
    rows = len(ends)
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(1, rows, heads, arguments.head_dim) for heads in (arguments.heads, *[arguments.key_value_heads] * 2)]
    query, key, value = (jax.random.normal(k, shape, arguments.dtype) for k, shape in zip(keys, shapes))
    weight = jax.random.normal(keys[3], query.shape, arguments.dtype)
    index = jnp.arange(rows, dtype=jnp.int32)[None]
    visible = int((ends - np.arange(rows)).sum())
    print(f"{rows} tokens, {visible} visible pairs, {visible / (rows * (rows + 1) / 2):.3f} of causal")

    cases = {f"blockwise {block}": (blockwise.attend, {"block": block}) for block in arguments.blocks}
    if arguments.oracle:
        cases["oracle"] = (oracle.attend, {})
    for name, (function, options) in cases.items():

        def loss(query, key, value, function=function, options=options):
            output = function(query, key, value, jnp.asarray(ends)[None], index, **options)
            return (output * weight).sum(dtype=jnp.float32)

        for what, differentiated in (("forward", loss), ("forward + backward", jax.grad(loss, (0, 1, 2)))):
            compiled = jax.jit(differentiated).lower(query, key, value).compile()
            jax.block_until_ready(compiled(query, key, value))
            seconds = []
            for _ in range(arguments.repeats):
                start = time.perf_counter()
                jax.block_until_ready(compiled(query, key, value))
                seconds.append(time.perf_counter() - start)
            memory = compiled.memory_analysis().temp_size_in_bytes / 2**20
            print(f"{name:14s} {what:18s} {min(seconds):.3f} s, {memory:.0f} MiB temporary")
        if options:
            size = min(options["block"], rows)
            padded = -(-rows // size) * size
            visited = blockwise.visited_blocks(
                jnp.pad(jnp.asarray(ends), (0, padded - rows)),
                jnp.pad(index[0], (0, padded - rows), constant_values=-1),
                (size, size),
            )
            print(f"{name:14s} {int(visited.sum())} of {visited.size} pairs of blocks visited")


if __name__ == "__main__":
    main()
