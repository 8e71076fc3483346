"""Time and memory of blockwise against dense attention, forward and backward, on trees and on plain causal rows.

    python tests/benchmarks/attention.py                                      # 1k to 8k beside dense, to 32k alone
    python tests/benchmarks/attention.py --lengths 65536 131072 --rounds 1    # about ten minutes
    python tests/benchmarks/attention.py --lengths 4096 --blocks 128 256 512  # block sizes

A tree is a chain of five views, each forking from the one before at 63, 54, 68 and 59 % of its length, as a
context-editing agent leaves it. Dense is `jax.nn.dot_product_attention` under the mask written out (three times faster
than the oracle of the tests). Medians of rounds in which the two take turns on one row. Memory is the temporary
buffers that XLA plans, inputs and gradients not counted: it depends on no other process.
"""

from __future__ import annotations

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from mwjax.model.attention import blockwise
from mwjax.tree import build_trie

FORKS = (0.63, 0.54, 0.68, 0.59)


def chain_of_views(view: int, multiple: int = 1) -> np.ndarray:
    """visible_until, int32 [T], of the tree of five views of ``view`` tokens; padded with positions that see only
    themselves to a multiple of ``multiple``."""
    views = [np.zeros(view, np.int32)]
    for number, fork in enumerate(FORKS, 1):
        views.append(np.where(np.arange(view) < int(view * fork), views[-1], number).astype(np.int32))
    until = build_trie(views).visible_until
    padding = np.arange(len(until), -(-len(until) // multiple) * multiple) + 1
    return np.concatenate([until, padding]).astype(np.int32)


def dense(query, key, value, visible_until, query_index):
    keys = jnp.arange(key.shape[1])
    visible = (keys <= query_index[:, :, None]) & (query_index[:, :, None] < visible_until[:, None, :])
    return jax.nn.dot_product_attention(query, key, value, mask=visible[:, None])


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.grad, argnums=(2, 3, 4))
def gradient(attend, weight, query, key, value, visible_until, query_index):
    return (attend(query, key, value, visible_until, query_index) * weight).sum(dtype=jnp.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--dense-until", type=int, default=8192, help="longest row for dense attention (holds T x T)")
    parser.add_argument("--blocks", type=int, nargs="+", default=[blockwise.BLOCK], help="block sizes")
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--key-value-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()

    print(f"{options.heads} query heads of {options.head_dim}, {options.key_value_heads} key heads, {options.dtype}\n")
    print("| tokens | row | visible pairs | attention | s | MiB | ns a pair | time / dense | memory / dense |")
    print("|---|---|---|---|---|---|---|---|---|")
    for length in options.lengths:
        keys = jax.random.split(jax.random.key(0), 4)
        shapes = [(1, length, heads, options.head_dim) for heads in (options.heads, *[options.key_value_heads] * 2)]
        inputs = [jax.random.normal(k, shape, options.dtype) for k, shape in zip(keys, shapes)]
        weight = jax.random.normal(keys[3], shapes[0], options.dtype)
        index = jnp.arange(length, dtype=jnp.int32)[None]
        backends = {f"blockwise {size}": functools.partial(blockwise.attend, block=size) for size in options.blocks}
        if length <= options.dense_until:
            backends = {"dense": dense, **backends}

        tree = chain_of_views(int(length / (1 + sum(1 - fork for fork in FORKS))), multiple=length)
        for kind, ends in (("tree", tree), ("causal", np.full(length, length, np.int32))):
            until = jnp.asarray(ends)[None]
            compiled = {
                name: gradient.lower(attend, weight, *inputs, until, index).compile()
                for name, attend in backends.items()
            }
            seconds: dict[str, list[float]] = {name: [] for name in backends}
            for _ in range(options.rounds):
                for name, call in compiled.items():
                    start = time.perf_counter()
                    jax.block_until_ready(call(weight, *inputs, until, index))
                    seconds[name].append(time.perf_counter() - start)
            median = {name: float(np.median(values)) for name, values in seconds.items()}
            memory = {name: call.memory_analysis().temp_size_in_bytes / 2**20 for name, call in compiled.items()}
            pairs = int((ends - np.arange(length)).sum())
            for name, at in median.items():
                row = f"| {length:,} | {kind} | {pairs / 1e6:.1f}M | {name} | {at:.3f} | {memory[name]:,.0f} "
                row += f"| {at / pairs * 1e9:.0f} |"
                if "dense" in median:
                    row += f" {at / median['dense']:.2f} | {memory[name] / memory['dense']:.3f} |"
                print(row if "dense" in median else row + " | |", flush=True)


if __name__ == "__main__":
    main()
