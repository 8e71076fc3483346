"""Time and memory of edge log-probs by vocabulary chunks against full logits, forward and backward, in one run.

    python tests/benchmarks/edge_loss.py --edges 4096 --width 128

Times are the best of ``--repeats`` rounds in which the variants take turns; memory is XLA's temporary buffers, so it
depends on no other process. Ratios are against full logits.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from mwjax.losses.logprobs import edge_logprobs
from mwjax.losses.vocabulary import chunk_rows


def full(
    hidden: jax.Array, unembedding: jax.Array, parent: jax.Array, target: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Log-probs and entropies [1, E] from logits of size edges x vocabulary."""
    log_p = jax.nn.log_softmax(hidden[0, parent[0]] @ unembedding.T)
    logprob = jnp.take_along_axis(log_p, target[0, :, None], axis=1)[:, 0]
    return logprob[None], -(jnp.exp(log_p) * log_p).sum(-1)[None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--edges", type=int, default=4_096)
    parser.add_argument("--tokens", type=int, default=8_192, help="length of the row that the edges read from")
    parser.add_argument("--width", type=int, default=128, help="size of a hidden state")
    parser.add_argument("--chunk", type=int, nargs="*", default=[], help="further chunk sizes to measure")
    parser.add_argument("--entropy", type=float, default=0.0, help="entropy coefficient (0: entropy unused)")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()

    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (1, arguments.tokens, arguments.width))
    unembedding = jax.random.normal(keys[1], (arguments.vocabulary, arguments.width)) * arguments.width**-0.5
    parent = jnp.sort(jax.random.randint(keys[2], (1, arguments.edges), 0, arguments.tokens))
    target = jax.random.randint(keys[3], (1, arguments.edges), 0, arguments.vocabulary)

    def gradient(score: Callable[..., tuple[jax.Array, jax.Array]]) -> jax.stages.Compiled:
        def loss(hidden: jax.Array, unembedding: jax.Array) -> jax.Array:
            logprob, entropy = score(hidden, unembedding, parent, target)
            loss = -logprob.mean()
            return loss - arguments.entropy * entropy.mean() if arguments.entropy else loss

        return jax.jit(jax.value_and_grad(loss, (0, 1))).lower(hidden, unembedding).compile()

    def chunked(size: int) -> Callable[..., tuple[jax.Array, jax.Array]]:
        return lambda h, w, p, t: edge_logprobs(h, w, p, t, jnp.ones(p.shape), vocab_chunk=size)

    sizes = [chunk_rows(arguments.vocabulary, arguments.edges, None), *arguments.chunk]
    steps = {"full logits": gradient(full)} | {f"chunks of {size:,}": gradient(chunked(size)) for size in sizes}
    times = dict.fromkeys(steps, float("inf"))
    values = {name: jax.block_until_ready(step(hidden, unembedding)) for name, step in steps.items()}
    for _ in range(arguments.repeats):
        for name, step in steps.items():
            begin = time.perf_counter()
            jax.block_until_ready(step(hidden, unembedding))
            times[name] = min(times[name], time.perf_counter() - begin)

    memory = {name: getattr(step.memory_analysis(), "temp_size_in_bytes", 0) / 2**20 for name, step in steps.items()}
    print(f"{jax.devices()[0].device_kind}, {arguments.edges} edges, V {arguments.vocabulary}, D {arguments.width}")
    print(f"{'':>18} {'seconds':>8} {'MiB':>8} {'time':>6} {'memory':>6}  largest gradient difference")
    expected = values["full logits"][1]
    for name in steps:
        apart = max(float(jnp.abs(g - e).max() / jnp.abs(e).max()) for g, e in zip(values[name][1], expected))
        time_ratio, memory_ratio = times[name] / times["full logits"], memory[name] / memory["full logits"]
        print(f"{name:>18} {times[name]:8.2f} {memory[name]:8.0f} {time_ratio:6.2f} {memory_ratio:6.2f}  {apart:.1e}")


if __name__ == "__main__":
    main()
