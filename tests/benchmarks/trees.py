"""How fast rollouts become packed rows, on one core: python tests/benchmarks/trees.py [--rollouts 100]

"Input tokens" are what a recorder logs: prompt and completion of every turn. "View tokens" count a context once per
branch view. The ratio to a plain copy of the same tokens is the figure that travels between machines.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from mwjax.rollouts import Rollout, Turn
from mwjax.tree import RowShape, build, collate, fill, fragments, pack


def rollout(rng: np.random.Generator, *, junctions: int, turns: int) -> Rollout:
    """A coding agent's session in kind: tool rounds, then two stretches of tool results are dropped, and so on."""
    made = []
    live = rng.integers(0, 50_000, 800).astype(np.int32)
    for _ in range(junctions + 1):
        for _ in range(turns):
            completion = rng.integers(0, 50_000, 80).astype(np.int32)
            made.append(Turn(live, completion, np.full(80, -1.0)))
            live = np.concatenate([live, completion, rng.integers(0, 50_000, 120).astype(np.int32)])
        keep = np.ones(len(live), bool)
        keep[900:1000] = keep[1300:1700] = False
        live = live[keep]
    return Rollout(f"r{rng.integers(1 << 30)}", tuple(made))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=100)
    parser.add_argument("--row-length", type=int, default=16_384)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    rollouts = [rollout(rng, junctions=4, turns=6) for _ in range(options.rollouts)]
    turns = [turn for r in rollouts for turn in r.turns]
    inputs = sum(len(turn.prompt_ids) + len(turn.completion_ids) for turn in turns)
    shape = RowShape(options.row_length, options.row_length)
    start = time.perf_counter()
    copies = [np.concatenate([turn.prompt_ids, turn.completion_ids]) for turn in turns]
    copied = time.perf_counter()
    trees = [build(r) for r in rollouts]
    built = time.perf_counter()
    made = [fragment for tree in trees for fragment in fragments([tree], "packed", shape)]
    needs = [fragment.needs for fragment in made]
    rows = pack(needs, shape)
    batch = collate(made, rows, shape, len(rows))
    done = time.perf_counter()
    views = sum(len(view.ids) for tree in trees for view in tree.views)
    total = done - copied
    print(f"{len(copies)} turns, {inputs:,} input tokens, {views:,} view tokens -> {batch.rows.tokens.shape} rows")
    print(f"trees {built - copied:.2f} s, rows {done - built:.2f} s, fill rate {fill(needs, rows, shape).rate:.3f}")
    print(f"{inputs / total / 1e6:.1f} M input tokens/s, {views / total / 1e6:.1f} M view tokens/s", end=", ")
    print(f"{total / (copied - start):.0f} x a plain copy")


if __name__ == "__main__":
    main()
