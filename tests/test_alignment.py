from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mwjax.tree import alignment
from mwjax.tree.alignment import Alignment, _kept_runs, _runs_of_unique_grams, align

CASES = sorted((Path(__file__).parent / "cases").glob("*.json"))


def run_align(old: list[int], new: list[int], ends: list[int]) -> Alignment:
    return align(np.array(old, np.int32), np.array(new, np.int32), np.array(sorted(ends), np.int64))


def brute_force(old: list[int], new: list[int], ends: list[int]) -> list[int]:
    """The rule, word by word: a dynamic programme over every rectangle."""
    origin = [-1] * len(new)
    prefix = 0
    while prefix < min(len(old), len(new)) and old[prefix] == new[prefix]:
        prefix += 1
    suffix = 0
    while suffix < min(len(old), len(new)) - prefix and old[-1 - suffix] == new[-1 - suffix]:
        suffix += 1

    def recurse(a0: int, a1: int, b0: int, b1: int) -> None:
        best = (0, 0, 0)
        below = [0] * (b1 - b0 + 1)
        for i in reversed(range(a0, a1)):
            row = [0] * (b1 - b0 + 1)
            for j in reversed(range(b0, b1)):
                if old[i] == new[j]:
                    row[j - b0] = below[j - b0 + 1] + 1
                    best = max(best, (row[j - b0], -i, -j))
            below = row
        length, i, j = best[0], -best[1], -best[2]
        if length >= 8 or (length and i + length in ends):
            origin[j : j + length] = range(i, i + length)
            recurse(a0, i, b0, j)
            recurse(i + length, a1, j + length, b1)

    origin[:prefix] = range(prefix)
    origin[len(new) - suffix :] = range(len(old) - suffix, len(old))
    recurse(prefix, len(old) - suffix, prefix, len(new) - suffix)
    return origin


@st.composite
def views(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """An old view, a prompt made of pieces of it and of unrelated ids, and completion ends."""
    vocabulary = draw(st.sampled_from([1, 2, 3, 4, 5, 6, 30, 1000]))
    ids = st.integers(0, vocabulary - 1)
    words = draw(st.lists(st.lists(ids, min_size=1, max_size=14), min_size=1, max_size=4))
    word = st.sampled_from(words) | st.lists(ids, max_size=6)
    old = [token for part in draw(st.lists(word, max_size=9)) for token in part]
    new: list[int] = []
    for _ in range(draw(st.integers(0, 6))):
        if draw(st.booleans()):
            lo, hi = sorted((draw(st.integers(0, len(old))), draw(st.integers(0, len(old)))))
            new += old[lo:hi]
        else:
            new += draw(word)
    ends = draw(st.sets(st.integers(1, max(1, len(old))), max_size=12)) if old else set()
    return old, new[:120], sorted(ends)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(views())
def test_equals_brute_force(case: tuple[list[int], list[int], list[int]]) -> None:
    old, new, ends = case
    found = run_align(old, new, ends)
    expected = brute_force(old, new, ends)
    assert found.origin.tolist() == expected
    assert found.origin.dtype == np.int32
    assert found.inserted == expected.count(-1)
    assert found.evicted == len(old) - len(new) + expected.count(-1)


@pytest.mark.parametrize("vocabulary", [2, 3, 4, 6])
def test_equals_brute_force_on_random_text_of_few_ids(vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    for size in (60, 150, 200):
        old, new = rng.integers(0, vocabulary, size).tolist(), rng.integers(0, vocabulary, size + 20).tolist()
        ends = np.flatnonzero(rng.random(size) < 0.2).tolist()
        assert run_align(old, new, ends).origin.tolist() == brute_force(old, new, ends)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(views())
def test_renumbered_keys_change_nothing(case: tuple[list[int], list[int], list[int]]) -> None:
    """Texts too long for packed keys take the renumbered ones."""
    expected = run_align(*case).origin.tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alignment, "_KEY_LIMIT", 0)
        assert run_align(*case).origin.tolist() == expected


@settings(max_examples=100, deadline=None, derandomize=True)
@given(views())
def test_matches_are_equal_ids_and_rise(case: tuple[list[int], list[int], list[int]]) -> None:
    old, new, ends = case
    origin = run_align(old, new, ends).origin
    matched = origin[origin >= 0]
    assert [old[at] for at in matched] == [token for token, at in zip(new, origin) if at >= 0]
    assert (np.diff(matched) > 0).all()


def test_a_run_of_seven_is_kept_only_at_a_completion_end() -> None:
    run = list(range(100, 107))
    old, new = [1, 2, *run, 3, 4], [5, 6, 7, *run, 8]
    assert run_align(old, new, []).inserted == len(new)
    assert run_align(old, new, [8, 10]).inserted == len(new)
    assert run_align(old, new, [9]).origin.tolist() == [-1, -1, -1, *range(2, 9), -1]


def test_a_longer_run_not_kept_hides_a_shorter_completion_tail() -> None:
    old, new = [1, 10, 11, 12, 2, 20, 21, 3], [4, 10, 11, 12, 5, 20, 21, 6]
    assert run_align(old, new, [7]).inserted == len(new)
    assert run_align(old, new, [4, 7]).origin.tolist() == [-1, 1, 2, 3, -1, 5, 6, -1]


def test_ties_go_to_the_leftmost_in_old_then_in_new() -> None:
    run = list(range(100, 108))
    assert run_align([1, *run, 2, *run, 3], [4, *run, 5], []).origin.tolist() == [-1, *range(1, 9), -1]
    assert run_align([1, *run, 2], [4, *run, 5, *run, 6], []).origin.tolist() == [-1, *range(1, 9), *[-1] * 10]


def test_prefix_and_suffix_do_not_overlap() -> None:
    found = run_align([7, 7, 7], [7, 7, 7, 7, 7], [])
    assert (found.prefix, found.evicted, found.inserted) == (3, 0, 2)
    found = run_align([7, 7, 7, 7], [7, 7], [])
    assert (found.prefix, found.evicted, found.inserted) == (2, 2, 0)


@pytest.mark.parametrize(("old", "new"), [([], []), ([], [1, 2]), ([1, 2], [])])
def test_empty_sides(old: list[int], new: list[int]) -> None:
    found = run_align(old, new, [])
    assert found.origin.tolist() == [-1] * len(new)
    assert (found.prefix, found.evicted, found.inserted) == (0, len(old), len(new))


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_case_junctions(path: Path) -> None:
    case = json.loads(path.read_text())
    for rollout, expected in zip(case["rollouts"], case["expect"]["summary"], strict=True):
        view: list[int] = []
        ends: list[int] = []
        junctions = []
        for number, turn in enumerate(rollout["turns"]):
            if turn.get("chain", "main") != "main":
                continue
            prompt = turn["prompt_ids"]
            if prompt[: len(view)] != view:
                found = run_align(view, prompt, ends)
                facts = {"turn": number, "at": found.prefix, "evicted": found.evicted, "inserted": found.inserted}
                junctions.append(facts)
                ends = [at + 1 for at, origin in enumerate(found.origin.tolist()) if origin + 1 in ends]
            view = prompt + turn["completion_ids"]
            ends += [len(view)] * bool(turn["completion_ids"])
        assert junctions == [
            {key: fact[key] for key in ("turn", "at", "evicted", "inserted")} for fact in expected["junctions"]
        ]


def test_long_repetitive_views_match_end_to_end() -> None:
    old = np.concatenate([[5], np.zeros(20_000, int), [6]])
    new = np.concatenate([[7], np.zeros(15_000, int), [8]])
    found = align(old, new, np.zeros(0, np.int64))
    assert found.origin[1:-1].tolist() == list(range(1, 15_001))
    assert (found.prefix, found.evicted, found.inserted) == (0, 5002, 2)


@given(st.integers(0, 10**6))
@settings(max_examples=300)
def test_the_fast_path_finds_what_the_general_one_does(seed):
    rng = np.random.default_rng(seed)
    vocabulary, size = int(rng.choice([3, 6, 20, 1000])), int(rng.integers(1, 90))
    old = rng.integers(0, vocabulary, size)
    parts = [old[: int(rng.integers(0, 20))]]
    for _ in range(int(rng.integers(1, 6))):
        start = int(rng.integers(0, size))
        parts += [old[start : start + int(rng.integers(1, 25))], rng.integers(0, vocabulary, int(rng.integers(0, 6)))]
    new = np.concatenate(parts)
    is_end = rng.random(size + 1) < rng.choice([0, 0.1, 1])
    is_end[0] = False
    fast = _runs_of_unique_grams(old, new, is_end)
    if fast is not None:
        assert sorted(fast) == sorted(_kept_runs(old, new, is_end))
