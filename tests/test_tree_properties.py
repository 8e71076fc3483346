"""Trees, tries and packing against brute force, on random rollouts of a simulated harness."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mwjax.audit.inspect import built_rows, token_lines
from mwjax.audit.prefixes import crc32_of, edge_prefixes
from mwjax.rollouts.record import Edit, Rollout, Turn
from mwjax.tree import RowShape, RowTooShort, TreeError, build, build_trie, collate, fill, fragments, pack
from mwjax.tree.trie import split_paths
from tests.random_rollouts import simulate

seeds = st.integers(0, 10**6)


def generation_prefix(rollout: Rollout, turn: int, index: int) -> np.ndarray:
    return np.concatenate([rollout.turns[turn].prompt_ids, rollout.turns[turn].completion_ids[:index]])


def prefix_entry(ids: np.ndarray) -> dict[str, int]:
    return {"prefix_len": len(ids), "prefix_crc32": crc32_of(ids)}


@given(seeds)
def test_edits_give_the_origins_the_harness_knows(seed):
    simulated = simulate(seed)
    tree = build(simulated.rollout)
    view = tree.compressed
    union = tree.unions["main"]
    assert view is not None
    assert union.ids.tolist() == [token for token, _ in simulated.union]
    origins = [None if t < 0 else (int(t), int(i)) for t, i in zip(union.origin_turn, union.origin_index)]
    assert origins == [origin for _, origin in simulated.union]
    assert [origins[position] for position in view.union] == simulated.final
    last = [turn for turn in simulated.rollout.turns if turn.chain == "main"][-1]
    assert view.ids.tolist() == [*last.prompt_ids, *last.completion_ids]


@given(seeds, st.booleans())
def test_every_method_trains_under_its_prefix(seed, white_box):
    simulated = simulate(seed, edits=white_box)
    tree = build(simulated.rollout)
    compressed, union = tree.compressed.ids, tree.unions["main"].ids
    in_walk, in_union = {}, {}
    origins = [(int(t), int(i)) for t, i in zip(tree.unions["main"].origin_turn, tree.unions["main"].origin_index)]
    for place, position in reversed(list(enumerate(tree.compressed.union))):
        in_walk[origins[position]] = place
    for place, origin in reversed(list(enumerate(origins))):
        in_union[origin] = place
    for line in token_lines(tree):
        methods, where = line["methods"], (line["turn"], line["index"])
        if not line["trainable"]:
            assert set(methods.values()) == {None}
            continue
        exact = generation_prefix(simulated.rollout, *where)
        assert methods["packed"] == methods["logittree"] == prefix_entry(exact)
        kept = compressed[: in_walk[where]] if in_walk.get(where) else None
        assert methods["naive_compressed"] == methods["sdcc"] == (None if kept is None else prefix_entry(kept))
        assert methods["naive_full"] == (prefix_entry(union[: in_union[where]]) if where in in_union else None)
        diverges = kept is not None and not np.array_equal(kept, exact)
        assert methods["sdcc_teacher"] == (prefix_entry(exact) if diverges else None)


@given(seeds)
def test_missing_and_extra_tokens_of_survivors(seed):
    tree = build(simulate(seed).rollout)
    sampled, walk = tree.sampled, tree.compressed.union.tolist()
    for k in np.flatnonzero(sampled.surviving):
        view = tree.views[sampled.view[k]]
        generation = set(view.union[: sampled.prefix[k]].tolist()) if view.chain == "main" else set()
        extra_context = 0 if view.chain == "main" else int(sampled.prefix[k])
        here = set(walk[: sampled.compressed[k]])
        assert sampled.missing[k] == len(generation - here) + extra_context
        assert sampled.extra[k] == len(here - generation)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=10))
def test_trie_against_brute_force(paths):
    trie = build_trie([np.array(path, np.int32) for path in paths])
    prefixes = {tuple(path[: n + 1]) for path in paths for n in range(len(path))}
    assert len(trie.tokens) == len(prefixes)
    seen = {}
    for row in range(len(trie.tokens)):
        keys = [j for j in range(row + 1) if row < trie.visible_until[j]]
        prefix = tuple(trie.tokens[keys].tolist())
        assert trie.positions[row] == len(prefix) - 1
        seen[prefix] = row
    assert set(seen) == prefixes
    for number, path in enumerate(paths):
        rows = trie.rows_of(number, np.arange(len(path)))
        assert rows.tolist() == [seen[tuple(path[: n + 1])] for n in range(len(path))]
    ordered = [paths[k] for k in trie.order]
    for number, (before, path) in enumerate(zip([[], *ordered], ordered)):
        common = 0
        while common < min(len(before), len(path)) and before[common] == path[common]:
            common += 1
        assert trie.shared[number] == common


@given(seeds, st.sampled_from(["packed", "logittree", "naive_compressed", "naive_full", "union", "sdcc"]), st.data())
def test_rows_of_any_size_train_the_same_tokens_under_the_same_prefixes(seed, method, data):
    group = [build(simulate(seed + k, vocabulary=6, name=f"r{k}").rollout) for k in range(3)]
    whole = sorted(edge_prefixes(built_rows(group, method).rows))
    longest = max(max(len(v.ids) for v in t.views) for t in group)
    longest = max(longest, *(len(t.unions["main"].entry_position) for t in group))
    length = data.draw(st.integers(longest, 4 * longest))
    paired = method == "sdcc"
    shape = RowShape(length, length, length if paired else 0, length if paired else 0)
    made = fragments(group, method, shape)
    needs = [fragment.needs for fragment in made]
    rows = pack(needs, shape)
    assert sorted(member for row in rows for member in row) == list(range(len(made)))
    batch = collate(made, rows, shape, len(rows) + 1)
    assert sorted(edge_prefixes(batch.rows)) == whole
    used = sum(need[0] for need in needs)
    assert fill(needs, rows, shape).rate == pytest.approx(used / max(len(rows) * length, 1))
    if method in ("packed", "logittree"):
        loss_tokens = sum(int(tree.sampled.trainable.sum()) for tree in group)
        assert int((batch.rows.edges.weight > 0).sum()) == loss_tokens
    if paired:
        leaves = sum(int((tree.sampled.diverging & (tree.sampled.compressed > 0)).sum()) for tree in group)
        assert int(batch.pairs.weight.sum()) == leaves


@given(seeds, st.integers(1, 3))
def test_splitting_repeats_the_least_trunk(seed, rows):
    """The dynamic program against all ways to cut the depth-first order."""
    rng = np.random.default_rng(seed)
    paths = [rng.integers(0, 2, int(rng.integers(1, 10))).astype(np.int32) for _ in range(int(rng.integers(1, 7)))]
    trie = build_trie(paths)
    length = max(max(len(p) for p in paths), len(trie.tokens) // rows)
    ordered = [paths[k] for k in trie.order]

    def size(run):
        return len(build_trie(run).tokens)

    best = None
    for cuts in range(1 << (len(ordered) - 1)):
        runs, run = [], [ordered[0]]
        for number, path in enumerate(ordered[1:]):
            if cuts >> number & 1:
                runs.append(run)
                run = []
            run.append(path)
        runs.append(run)
        if all(size(run) <= length for run in runs):
            total = sum(size(run) for run in runs)
            best = total if best is None else min(best, total)
    found = split_paths(np.array([len(p) for p in ordered]), trie.shared, np.ones(len(paths), int), length, 99)
    assert sum(size(ordered[cut]) for cut in found) == best


def one_edit(**fields) -> Rollout:
    first = Turn(np.arange(1, 6, dtype=np.int32), np.array([6, 7], np.int32))
    second = Turn(np.array([1, 2, 5, 6, 7], np.int32), np.array([8], np.int32))
    return Rollout("r", (first, second), (Edit(before_turn=1, **fields),))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"evicted": ((2, 3),)}, r"contradicts turn 1: token 2 of its prompt is 5, but the edited context has 4"),
        ({"evicted": ((2, 9),)}, r"\[2, 9\] is outside H_T, which has 7 tokens"),
        ({"restored": ((2, 4),)}, r"H_T position 2 is in the live view already"),
        ({"evicted": ((2, 4), (3, 4))}, None),
        (
            {"evicted": ((2, 4),), "replacement_ids": np.array([9], np.int32), "inserted_at": 6},
            r"6 is not an index into the live view, which has 5 tokens",
        ),
    ],
)
def test_edits_that_contradict_the_turns_are_refused(fields, message):
    if message is None:
        build(one_edit(**fields))
        return
    with pytest.raises(TreeError, match=message) as error:
        build(one_edit(**fields))
    assert error.value.field.startswith("edits[0]")


def test_what_does_not_fit_a_row_is_refused_with_the_length_that_would_do():
    tree = build(simulate(3).rollout)
    needed = max(len(view.ids) for view in tree.views) - 1
    shape = RowShape(needed - 1, 100)
    with pytest.raises(RowTooShort, match=f"raise the row length to at least {needed}") as error:
        fragments([tree], "logittree", shape)
    assert fragments([tree], "logittree", dataclasses.replace(shape, length=error.value.needed))


def test_merged_edges_keep_their_weight():
    turn = Turn(np.array([1, 2], np.int32), np.array([3, 4], np.int32))
    tree = build(Rollout("r", (turn, turn)))
    (fragment,) = fragments([tree], "packed", RowShape(8, 8), merge=True)
    assert fragment.edges.weight.tolist() == [2, 2]
    assert fragment.edges.target.tolist() == [3, 4]


def test_restored_text_gets_a_second_entry_in_the_union_row():
    first = Turn(np.arange(1, 7, dtype=np.int32), np.array([7], np.int32))
    second = Turn(np.array([1, 2, 5, 6, 7], np.int32), np.array([8], np.int32))
    third = Turn(np.array([1, 2, 3, 4, 5, 6, 7, 8], np.int32), np.array([9], np.int32))
    edits = (Edit(1, evicted=((2, 4),)), Edit(2, restored=((2, 4),)))
    tree = build(Rollout("r", (first, second, third), edits))
    assert [j.reason for j in tree.junctions] == ["deletion", "insertion"]
    union = tree.unions["main"]
    assert union.ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert union.entry_position.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 2, 3, 8]
    assert union.entry_depth.tolist() == [0, 1, 2, 3, 4, 5, 6, 5, 2, 3, 8]
    assert union.entry_until.tolist() == [11, 11, 6, 6, 11, 11, 11, 11, 11, 11, 11]


@pytest.mark.parametrize(
    ("evicted", "replacement", "author", "detail"),
    [
        ((2, 4), [], "harness", "pruned_tool_result"),
        ((2, 4), [9], "harness", "pruned_tool_result"),
        ((4, 7), [9], "harness", "compaction"),
        ((4, 7), [9], "policy", "fold"),
        ((4, 7), [], "policy", None),
    ],
)
def test_details_of_white_box_junctions(evicted, replacement, author, detail):
    first = Turn(np.arange(1, 6, dtype=np.int32), np.array([6, 7], np.int32))
    live = [1, 2, 3, 4, 5, 6, 7]
    live[slice(*evicted)] = replacement
    second = Turn(np.array([*live, 10], np.int32), np.array([8], np.int32))
    edit = Edit(1, (evicted,), evicted[0], np.array(replacement, np.int32), author=author)
    (junction,) = build(Rollout("r", (first, second), (edit,))).junctions
    assert junction.detail == detail


def test_a_restore_that_takes_its_stub_away_is_no_pruning():
    first = Turn(np.arange(1, 6, dtype=np.int32), np.array([6], np.int32))
    second = Turn(np.array([1, 9, 4, 5, 6], np.int32), np.array([7], np.int32))
    third = Turn(np.array([1, 2, 3, 4, 5, 6, 7], np.int32), np.array([8], np.int32))
    away = Edit(1, ((1, 3),), 1, np.array([9], np.int32), stored_as="key")
    back = Edit(2, ((6, 7),), restored=((1, 3),))
    tree = build(Rollout("r", (first, second, third), (away, back)))
    assert [j.detail for j in tree.junctions] == ["pruned_tool_result", None]
