"""Random rollouts from a simulated harness that evicts, folds, offloads, restores, retries and opens side chains.

The simulation keeps its own plain lists, so that what it knows (which token is where) is independent of mwjax.tree.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mwjax.rollouts.record import Edit, Rollout, Sampling, Turn


@dataclass
class Simulated:
    """A rollout and what the simulated harness knows of it.

    final: for the last live view of the main chain, each token's origin (turn, index) or None.
    union: ``H_T`` of the main chain as (id, origin or None).
    """

    rollout: Rollout
    final: list[tuple[int, int] | None] = field(default_factory=list)
    union: list[tuple[int, tuple[int, int] | None]] = field(default_factory=list)


def simulate(seed: int, *, turns: int = 6, vocabulary: int = 40, edits: bool = True, name: str = "r") -> Simulated:
    """Simulate one episode; with ``edits=False`` the same turns without the edit records (a black box)."""
    rng = np.random.default_rng(seed)

    def ids(low: int, high: int) -> list[int]:
        return rng.integers(0, vocabulary, int(rng.integers(low, high))).tolist()

    union: list[tuple[int, tuple[int, int] | None]] = []
    text: list[int] = []  # H_T positions in the order of the text, evicted ones too
    live: set[int] = set()
    made: list[Turn] = []
    recorded: list[Edit] = []

    def view() -> list[int]:
        return [position for position in text if position in live]

    def append(values: list[int], origin: int | None = None, first: int = 0) -> list[int]:
        new = list(range(len(union), len(union) + len(values)))
        union.extend((v, None if origin is None else (origin, first + k)) for k, v in enumerate(values))
        live.update(new)
        return new

    def ranges(positions: list[int]) -> tuple[tuple[int, int], ...]:
        spans: list[list[int]] = []
        for position in sorted(positions):
            if spans and spans[-1][1] == position:
                spans[-1][1] += 1
            else:
                spans.append([position, position + 1])
        return tuple((lo, hi) for lo, hi in spans)

    text += append(ids(2, 9))
    for _ in range(turns):
        number = len(made)
        if number and rng.random() < 0.15:  # a side call in a root of its own
            completion = ids(0, 5)
            made.append(turn_of(rng, ids(1, 6), completion, chain="side", trainable=bool(rng.random() < 0.5)))
            number = len(made)
        if any(turn.chain == "main" for turn in made):
            kind = rng.choice(["none", "evict", "fold", "restore", "cut", "tool"])
            if kind == "tool":
                text += append(ids(1, 6))
            elif kind != "none":
                now = view()
                evicted: list[int] = []
                restored: list[int] = []
                replacement: list[int] = []
                source = None
                at = 0
                gone = [position for position in range(len(union)) if position not in live]
                if kind == "restore" and gone:
                    start = int(rng.integers(len(gone)))
                    restored = gone[start : start + int(rng.integers(1, 8))]
                elif kind == "cut" and len(now) > 2:
                    evicted = now[int(rng.integers(1, len(now))) :]
                elif len(now) > 3:
                    for _ in range(int(rng.integers(1, 3))):
                        low = int(rng.integers(1, len(now) - 1))
                        evicted += now[low : low + int(rng.integers(1, 8))]
                    evicted = sorted(set(evicted))
                    if len(evicted) == len(now):
                        evicted = evicted[1:]
                if kind == "fold" and evicted:
                    replacement = ids(1, 5)
                    sources = [k for k, turn in enumerate(made) if len(turn.completion_ids) > 1]
                    if sources and rng.random() < 0.6:
                        turn = int(rng.choice(sources))
                        source = (turn, 0, len(made[turn].completion_ids))
                        replacement = made[turn].completion_ids.tolist()
                    left = [position for position in now if position not in evicted]
                    at = int(rng.integers(1, len(left) + 1))
                live.difference_update(evicted)
                if replacement:
                    before = view()[at - 1]
                    new = append(replacement, None if source is None else source[0], 0)
                    where = text.index(before) + 1
                    text[where:where] = new
                live.update(restored)
                if evicted or restored:
                    recorded.append(
                        Edit(
                            before_turn=number,
                            evicted=ranges(evicted),
                            inserted_at=at if replacement else None,
                            replacement_ids=np.array(replacement, np.int32),
                            replacement_from=source,
                            restored=ranges(restored),
                            author="policy" if rng.random() < 0.5 else "harness",
                        )
                    )
        prompt = [union[position][0] for position in view()]
        completion = ids(0, 7)
        made.append(turn_of(rng, prompt, completion, trainable=bool(rng.random() < 0.85)))
        text += append(completion, number)
    final = [union[position][1] for position in view()]
    rollout = Rollout(name, tuple(made), tuple(recorded) if edits else (), group="g", reward=float(rng.integers(0, 2)))
    return Simulated(rollout, final, union)


def turn_of(rng: np.random.Generator, prompt: list[int], completion: list[int], **rest: object) -> Turn:
    """A turn with made-up log-probs."""
    return Turn(
        prompt_ids=np.array(prompt, np.int32),
        completion_ids=np.array(completion, np.int32),
        logprobs=-rng.uniform(0.1, 2.0, len(completion)),
        sampling=Sampling(),
        **rest,  # type: ignore[arg-type]
    )
