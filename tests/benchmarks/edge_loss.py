"""Time and memory of edge log-probs by vocabulary chunks against full logits, forward and backward, in one run.

    python tests/benchmarks/edge_loss.py                              # 2,048 edges, vocabulary 151,936, width 128
    python tests/benchmarks/edge_loss.py --chunk 2374 4748 18992      # other chunk sizes beside the default

Medians of rounds in which the variants take turns; memory is the temporary buffers that XLA plans, so it depends on no
other process. Ratios are against full logits, and so is the largest difference of a gradient.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

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
    parser.add_argument("--edges", type=int, default=2_048)
    parser.add_argument("--tokens", type=int, default=4_096, help="length of the row that the edges read from")
    parser.add_argument("--width", type=int, default=128, help="size of a hidden state")
    parser.add_argument("--chunk", type=int, nargs="*", default=[], help="further chunk sizes to measure")
    parser.add_argument("--entropy", type=float, default=0.0, help="entropy coefficient (0: entropy unused)")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()

    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (1, options.tokens, options.width))
    unembedding = jax.random.normal(keys[1], (options.vocabulary, options.width)) * options.width**-0.5
    parent = jnp.sort(jax.random.randint(keys[2], (1, options.edges), 0, options.tokens))
    target = jax.random.randint(keys[3], (1, options.edges), 0, options.vocabulary)

    def gradient(score: Callable[..., tuple[jax.Array, jax.Array]]) -> jax.stages.Compiled:
        def loss(hidden: jax.Array, unembedding: jax.Array) -> jax.Array:
            logprob, entropy = score(hidden, unembedding, parent, target)
            loss = -logprob.mean()
            return loss - options.entropy * entropy.mean() if options.entropy else loss

        return jax.jit(jax.value_and_grad(loss, (0, 1))).lower(hidden, unembedding).compile()

    def chunked(size: int) -> Callable[..., tuple[jax.Array, jax.Array]]:
        return lambda h, w, p, t: edge_logprobs(h, w, p, t, jnp.ones(p.shape), vocab_chunk=size)

    sizes = [chunk_rows(options.vocabulary, options.edges, None), *options.chunk]
    steps = {"full logits": gradient(full)} | {f"chunks of {size:,}": gradient(chunked(size)) for size in sizes}
    values = {name: jax.block_until_ready(step(hidden, unembedding)) for name, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(step(hidden, unembedding))
            seconds[name].append(time.perf_counter() - start)
    median = {name: float(np.median(values)) for name, values in seconds.items()}
    memory = {name: step.memory_analysis().temp_size_in_bytes / 2**20 for name, step in steps.items()}

    print(f"{options.edges:,} edges, vocabulary {options.vocabulary:,}, width {options.width}\n")
    print("| log-probs | s | MiB | time / full | memory / full | gradients apart |\n|---|---|---|---|---|---|")
    expected = values["full logits"][1]
    for name, at in median.items():
        apart = max(float(jnp.abs(g - e).max() / jnp.abs(e).max()) for g, e in zip(values[name][1], expected))
        ratios = f"{at / median['full logits']:.2f} | {memory[name] / memory['full logits']:.3f}"
        print(f"| {name} | {at:.2f} | {memory[name]:,.0f} | {ratios} | {apart:.1e} |")


if __name__ == "__main__":
    main()
