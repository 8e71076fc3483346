"""What a gradient step costs under each method, against what its tokens and visible pairs predict.

    python tests/benchmarks/step_time.py [--view 2048] [--rounds 3]       about five minutes on two cores
    python tests/benchmarks/step_time.py --view 4096 --kinds pop          longer views of one kind

Trees are shaped like the sessions of three kinds of harness, with about four junctions each. Seconds of plain causal
rows of several lengths, timed in the same rounds with the same attention, are fitted by a * tokens + b * visible pairs;
each method's time is then set beside what that fit predicts for its rows. Rounds are interleaved and medians taken,
since machines are noisy; the ratios are what travels.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from mwjax import losses, model
from mwjax.rollouts import Rollout, Turn
from mwjax.train.step import StepConfig, gradient_sums
from mwjax.tree import Batch, RowShape, build, collate, fragments, pack

VOCABULARY, BLOCK = 8192, 256
KINDS = ("pop", "fold", "offload")
METHODS = ("naive_compressed", "naive_full", "union", "packed", "logittree", "sdcc")


def session(kind: str, view: int, rng: np.random.Generator) -> Rollout:
    """``pop``: a heavy tool result goes at each junction; ``fold``: all but the newest step becomes a summary;
    ``offload``: three small spans go."""
    prompt, completion, result = view // 4, view // 20, view // 10

    def ids(count: int) -> np.ndarray:
        return rng.integers(0, VOCABULARY, count).astype(np.int32)

    live, turns = ids(prompt), []
    for _ in range(5):
        while len(live) + completion <= view:
            turns.append(Turn(live, ids(completion), np.full(completion, -1.0)))
            live = np.concatenate([live, turns[-1].completion_ids, ids(result)])
        keep = np.ones(len(live), bool)
        step = completion + result
        if kind == "pop":
            keep[prompt + completion : prompt + completion + 2 * result] = False
        elif kind == "fold":
            keep[prompt + completion : len(live) - step] = False
        else:
            for number in range(3):
                start = prompt + number * step + completion
                keep[start : start + result * 2 // 3] = False
        live = live[keep][: view - completion]
    return Rollout(kind, tuple(turns))


def rows(rollouts: Sequence[Rollout], method: str) -> Batch:
    """One method's rows, each as long as its longest piece needs, so that padding stays small."""
    trees, paired = [build(rollout) for rollout in rollouts], method == "sdcc"
    roomy = RowShape(1 << 20, 1 << 20, (1 << 20) * paired, (1 << 20) * paired)
    made = fragments(trees, method, roomy)
    needs = np.array([fragment.needs for fragment in made])
    length, edges, teacher, pairs = (-(-int(need) // BLOCK) * BLOCK for need in needs.max(axis=0))
    shape = RowShape(length, edges, teacher, pairs)
    packed = [[number] for number in range(len(made))] if method == "logittree" else pack(needs.tolist(), shape)
    return collate(made, packed, shape, len(packed))


def plain(length: int, rng: np.random.Generator) -> Batch:
    """A causal row in which one token in three is sampled."""
    half = rng.integers(0, VOCABULARY, length).astype(np.int32)
    turn = Turn(half[: length - length // 3], half[length - length // 3 :])
    return rows([Rollout("plain", (turn,))], "naive_compressed")


def size(batch: Batch) -> tuple[int, int]:
    """Tokens and visible pairs of the rows that have a backward pass, padding included."""
    until = batch.rows.visible_until
    return until.size, int((until - np.arange(until.shape[1])).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--view", type=int, default=2048, help="tokens of a view")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS, metavar="KIND", help="pop, fold, offload")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    options = parser.parse_args()
    shape = model.small_config(VOCABULARY, options.layers, options.width, heads=6, key_value_heads=2)
    params = jax.jit(model.init, static_argnums=0)(shape, jax.random.key(0))
    rng = np.random.default_rng(0)
    batches = {("plain", f"{n}"): plain(n, rng) for n in (options.view * k // 4 for k in (2, 3, 4, 6, 8))}
    for kind in options.kinds:
        rollout = session(kind, options.view, rng)
        batches |= {(kind, method): rows([rollout], method) for method in METHODS}

    run: dict[tuple[str, str], Callable[[], object]] = {}
    for name, batch in batches.items():
        config = StepConfig(shape, losses.LossConfig("sft"), sdcc=batch.pairs is not None)
        step = jax.jit(functools.partial(gradient_sums, config=config, sdcc_lambda=0.1))
        compiled = step.lower(params, batch).compile()
        run[name] = functools.partial(compiled, params, batch)
        jax.block_until_ready(run[name]())
    seconds: dict[tuple[str, str], list[float]] = {name: [] for name in run}
    for number in range(options.rounds):
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
        for name, call in run.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - start)
    median = {name: float(np.median(values)) for name, values in seconds.items()}

    fitted = [name for name in batches if name[0] == "plain"]
    sizes = np.array([size(batches[name]) for name in fitted], float)
    weight = 1 / np.array([median[name] for name in fitted])  # relative errors
    per_token, per_pair = np.linalg.lstsq(sizes * weight[:, None], np.ones(len(fitted)), rcond=None)[0]
    print(f"fit on plain rows: {per_token * 1e6:.1f} us a token, {per_pair * 1e9:.2f} ns a visible pair")
    for name in fitted:
        predicted = np.dot(size(batches[name]), (per_token, per_pair))
        print(f"  {name[1]:>6} tokens  {median[name]:6.2f} s, {median[name] / predicted:.3f} x the fit")
    print(f"{'harness':8} {'method':17} {'rows':>9} {'pairs':>6} {'s':>6} {'x naive':>8} {'x predicted':>12}")
    for (kind, method), batch in batches.items():
        if kind == "plain":
            continue
        tokens, pairs = size(batch)
        at = median[kind, method]
        # SDCC's teacher has no backward pass, so the fit says nothing about it.
        fit = "" if method == "sdcc" else f"{at / (per_token * tokens + per_pair * pairs):12.3f}"
        shape_of = "x".join(map(str, batch.rows.tokens.shape))
        ratio = at / median[kind, "naive_compressed"]
        print(f"{kind:8} {method:17} {shape_of:>9} {pairs / 1e6:5.1f}M {at:6.2f} {ratio:8.2f} {fit}")


if __name__ == "__main__":
    main()
