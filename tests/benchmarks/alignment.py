"""Seconds to align 100,000 ids with 100,000 ids, per family of content: ``python tests/benchmarks/alignment.py [ids]``.

The claim is that every family stays within 2 s on one core. The last group is built to need as many splits at
different lengths, one inside the other, as this many ids allow.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import numpy as np

from mwjax.tree.alignment import align

Pair = tuple[np.ndarray, np.ndarray]


def join(parts: Sequence[np.ndarray | list[int]]) -> np.ndarray:
    return np.concatenate([np.asarray(part, np.int32) for part in parts])


def repeat(unit: list[int], length: int) -> np.ndarray:
    return np.resize(np.array(unit, np.int32), length)


def wrapped(old: np.ndarray, new: np.ndarray) -> Pair:
    """Different ends, so that neither prefix nor suffix takes anything."""
    return join([[-1], old, [-2]]), join([[-3], new, [-4]])


def zipf(rng: np.random.Generator, length: int, vocabulary: int = 50_000) -> np.ndarray:
    return (rng.zipf(1.2, length) % vocabulary).astype(np.int32)


def blocks(lengths: np.ndarray, separator: int) -> np.ndarray:
    """A block of equal ids of each length, each followed by the separator."""
    return join([np.append(np.zeros(length, int), separator) for length in lengths])


def thinking_dropped(rng: np.random.Generator, size: int) -> Pair:
    text = zipf(rng, size)
    cuts = np.sort(rng.choice(size, 100, replace=False))
    kept = np.ones(size, bool)
    for lo, hi in cuts.reshape(-1, 2):
        kept[lo:hi] = False
    return text, join([text[kept], zipf(rng, size // 10)])


def short_runs(rng: np.random.Generator, size: int, vocabulary: int) -> Pair:
    runs = rng.integers(0, vocabulary, (size // 9, 8))
    separators = np.arange(len(runs))[:, None]
    return join([np.append(runs, 10**6 + separators, 1).ravel()]), join(
        [np.append(runs, 10**7 + separators, 1).ravel()]
    )


def fibonacci(size: int) -> np.ndarray:
    a, b = [0], [0, 1]
    while len(b) < size:
        a, b = b, b + a
    return np.array(b[:size], np.int32)


def thue_morse(size: int) -> np.ndarray:
    return np.array([i.bit_count() & 1 for i in range(size)], np.int32)


def ladder(size: int) -> np.ndarray:
    return np.arange(1, int((2 * size) ** 0.5))


def families(rng: np.random.Generator, size: int) -> dict[str, Callable[[], Pair]]:
    def text(vocabulary: int, length: int = size) -> np.ndarray:
        return rng.integers(0, vocabulary, length).astype(np.int32)

    def shuffled_blocks() -> Pair:
        return blocks(rng.permutation(ladder(size)), 1), blocks(rng.permutation(ladder(size)), 2)

    def copies_of_one_paragraph() -> Pair:
        paragraph = text(50_000, 1000)
        changed = [paragraph.copy() for _ in range(size // 1000)]
        for copy in changed:
            copy[rng.integers(0, 1000, 5)] = rng.integers(10**6, 10**7, 5)
        return wrapped(repeat(list(paragraph), size), join(changed))

    def long_periods() -> Pair:
        unit = list(text(50_000, 1000))
        return wrapped(repeat(unit, size), repeat(unit[1:], size))

    def noisy(vocabulary: int) -> Pair:
        old = text(vocabulary)
        new = old.copy()
        places = rng.choice(size, size // 12, replace=False)
        new[places] = rng.integers(0, vocabulary, places.size)
        return wrapped(old, np.delete(new, places[::3]))

    def shrinking_partners() -> Pair:
        steps = ladder(size)[::-1]
        return blocks(np.full(size // steps[0], steps[0]), 1), blocks(steps, 2)

    def nested_pairs() -> Pair:
        """Distinct words of lengths 8, 9, 10, ...: each split takes only the longest off one end."""
        words = [rng.integers(0, 50_000, length) for length in range(8, int((2 * size) ** 0.5))]
        old = join([np.append(word, 10**6 + at) for at, word in enumerate(words)])
        new = join([np.append(word, 10**7 + at) for at, word in enumerate(words)])
        return old, new

    return {
        "thinking dropped, 50 spans": lambda: thinking_dropped(rng, size),
        "unrelated text, 50k ids": lambda: (text(50_000), text(50_000)),
        "unrelated text, zipf": lambda: (zipf(rng, size), zipf(rng, size)),
        "unrelated, 2 ids": lambda: (text(2), text(2)),
        "unrelated, 4 ids": lambda: (text(4), text(4)),
        "unrelated, 20 ids": lambda: (text(20), text(20)),
        "all equal": lambda: wrapped(repeat([0], size), repeat([0], size - size // 10)),
        "periodic, 3": lambda: wrapped(repeat([0, 1, 2], size), repeat([1, 2, 0], size - 7)),
        "periodic, 7 against 11": lambda: wrapped(
            repeat([0, 0, 0, 0, 0, 0, 1], size), repeat([0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1], size)
        ),
        "periodic, 1000 against 999": long_periods,
        "every twelfth id changed, 2 ids": lambda: noisy(2),
        "every twelfth id changed, 50k ids": lambda: noisy(50_000),
        "short runs of 8": lambda: short_runs(rng, size, 50_000),
        "short equal runs of 8": lambda: short_runs(rng, size, 1),
        "short runs of 8 over 2 ids": lambda: short_runs(rng, size, 2),
        "copies of one paragraph": copies_of_one_paragraph,
        "Fibonacci word, shifted": lambda: wrapped(fibonacci(size + 777)[777:], fibonacci(size)),
        "Fibonacci word, reversed half": lambda: wrapped(fibonacci(size)[size // 2 :], fibonacci(size)[::-1]),
        "Thue-Morse word, shifted": lambda: wrapped(thue_morse(size + 777)[777:], thue_morse(size)),
        "Thue-Morse against Fibonacci": lambda: wrapped(thue_morse(size), fibonacci(size)),
        "ladder: shuffled": shuffled_blocks,
        "ladder: rising, rising": lambda: (blocks(ladder(size), 1), blocks(ladder(size), 2)),
        "ladder: falling, falling": lambda: (blocks(ladder(size)[::-1], 1), blocks(ladder(size)[::-1], 2)),
        "ladder: rising, falling": lambda: (blocks(ladder(size), 1), blocks(ladder(size)[::-1], 2)),
        "ladder: shrinking partners": shrinking_partners,
        "ladder: distinct words": nested_pairs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ids", type=int, nargs="?", default=100_000)
    size = parser.parse_args().ids
    rng = np.random.default_rng(0)
    for name, make in families(rng, size).items():
        old, new = make()
        for label, ends in (("", np.zeros(0, np.int64)), (", ends everywhere", np.arange(1, old.size + 1))):
            start = time.perf_counter()
            found = align(old, new, ends)
            seconds = time.perf_counter() - start
            kept = new.size - found.inserted
            print(f"{seconds:7.3f} s  {name + label:45s} {old.size:7d} x {new.size:7d}  matched {kept}", flush=True)


if __name__ == "__main__":
    main()
