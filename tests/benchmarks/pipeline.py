"""How fast rollout files become training batches: python tests/benchmarks/pipeline.py [--rollouts 200]

A JSON Lines file of sessions like those of trees.py is scanned as `mwjax train` does (read, validate, build every
tree, measure its rows), then one epoch of steps is drawn from it; the same from the ArrayRecord set that `mwjax
pack-data` makes of it, whose measurements are kept after the first scan. "Input tokens" are prompt and completion of
every turn, as a recorder sees them; "view tokens" count a context once per branch view; "row tokens" are what the model
is given, without padding. Beside them, parsing the same lines with `json.loads` alone: that ratio travels between
machines. Medians of rounds that take turns.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from trees import rollout

from mwjax import data, rollouts
from mwjax.tree import RowShape


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--row-length", type=int, default=16_384)
    parser.add_argument("--method", default="packed")
    parser.add_argument("--workers", type=int, default=0, help="processes that build batches (0: threads)")
    options = parser.parse_args()

    rng = np.random.default_rng(0)
    made = [rollout(rng, junctions=4, turns=6) for _ in range(options.rollouts)]
    inputs = sum(len(turn.prompt_ids) + len(turn.completion_ids) for one in made for turn in one.turns)
    paired = options.method == "sdcc"
    shape = RowShape(
        options.row_length, options.row_length, 2 * options.row_length * paired, options.row_length * paired
    )
    layout = data.Layout(options.method, shape, merge=True)
    seconds: dict[str, list[float]] = {}

    def timed(stage: str, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = call()
        seconds.setdefault(stage, []).append(time.perf_counter() - start)
        return result

    with tempfile.TemporaryDirectory() as folder:
        path, packed = Path(folder, "rollouts.jsonl"), Path(folder, "packed")
        rollouts.write(path, made)
        megabytes = path.stat().st_size / 2**20
        data.pack_rollouts([path], packed)
        data.scan([str(packed)], layout)
        for _ in range(options.rounds):
            timed("json.loads alone", lambda: [json.loads(line) for line in path.read_text().splitlines()])
            for name, place in (("JSON Lines", path), ("packed set", packed)):
                index = timed(f"{name}: scan", lambda place=place: data.scan([str(place)], layout))
                source = data.StepSource(index)
                drawn = data.iterate_steps(source, 0, source.steps_in(1), workers=options.workers)
                steps = timed(f"{name}: one epoch", lambda drawn=drawn: list(drawn))
    median = {name: float(np.median(values)) for name, values in seconds.items()}
    views = int(index.view_tokens.sum())
    given = sum(step.row_tokens for step in steps)
    print(f"{len(made)} rollouts, {megabytes:.1f} MiB, {inputs:,} input tokens, {views:,} view tokens; ", end="")
    rows = sum(step.rows for step in steps)
    print(f"{options.method}: {rows} rows of {options.row_length:,} tokens in {len(steps)} steps\n")
    print(
        "| stage | s | M input tokens/s | M view tokens/s | M row tokens/s | x json.loads |\n|---|---|---|---|---|---|"
    )
    for name, at in median.items():
        rates = " | ".join(f"{count / at / 1e6:.2f}" for count in (inputs, views, given))
        print(f"| {name} | {at:.2f} | {rates} | {at / median['json.loads alone']:.1f} |")


if __name__ == "__main__":
    main()
