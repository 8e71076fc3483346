"""What an audit counts: by hand on the cases, by brute force on random rollouts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mwjax import audit, rollouts
from mwjax.audit.differences import fragment_differences, leaking_rows
from mwjax.audit.tables import context_facts, short
from mwjax.audit.verdict import percent
from mwjax.rollouts import Edit, Rollout, Sampling, Turn
from mwjax.tree import METHODS, RowShape, build, fragments
from tests.random_rollouts import simulate

CASES = Path(__file__).parent / "cases"
seeds = st.integers(0, 10**6)


def of_case(name: str) -> list[Rollout]:
    return [rollouts.from_json(value) for value in json.loads((CASES / f"{name}.json").read_text())["rollouts"]]


def numbers(result: audit.AuditResult, method: str) -> tuple:
    found = result.method(method)
    sizes = (found.missing_mean, found.missing_max, found.extra_mean, found.extra_max)
    return found.loss_tokens, found.lost, found.wrong, *sizes


def test_running_example():
    """In H_comp y6 y7 lack y5, y9 y10 lack y8, y12 lacks y11; H_T adds 1 to y8-y10, 2 to y11 y12, 3 to y13."""
    result = audit.run(of_case("running_example"))
    assert numbers(result, "packed") == numbers(result, "logittree") == (13, 0, 0, None, 0, None, 0)
    assert numbers(result, "naive_compressed") == numbers(result, "sdcc") == (10, 3, 5, 1, 1, 0, 0)
    assert numbers(result, "naive_full") == (13, 0, 6, 0, 0, pytest.approx(10 / 6), 3)
    assert numbers(result, "union") == (13, 0, 0, None, 0, None, 0)
    # What follows the first eviction reads keys of y6, y7, which saw y5.
    assert result.method("union").indirect == 6
    assert result.common_survivors == 10
    assert [found.common_wrong for found in result.methods] == [0, 0, 5, 4, 0, 5]
    assert result.method("naive_compressed").missing_histogram == (0, 5)
    assert result.method("naive_full").extra_histogram == (0, 3, 3)
    assert result.junctions == {"deletion": 3} and result.details == {}
    assert (result.forks_per_rollout, result.evictions, result.evictions_per_rollout) == (3, 3, 3)
    assert (result.diverging_leaves, result.evicted_span_mean) == (5, 1)
    assert (result.depth, result.frequency) == (3 / 16, 1)
    assert (result.view_tokens, result.trie_tokens, result.group_trie_tokens) == (48, 21, 21)
    assert result.trie_ratio == result.group_trie_ratio == 48 / 21
    assert not result.consistent and not result.strictly_consistent
    assert result.verdict.startswith("50.0 % of the loss tokens would be trained under a context the model never saw")
    assert "`packed`" in result.advice


def test_side_chains():
    """Turn 2's 10 tokens survive: 12 + 8 before them are folded away, 11 of a summary put in; H_T keeps those 20."""
    result = audit.run(of_case("side_chains"))
    assert (result.sampled_tokens, result.loss_tokens, result.untrainable_tokens) == (40, 37, 3)
    assert result.untrainable_share == 3 / 40
    assert (result.turns, result.chains, result.views) == (5, 3, 4)
    assert numbers(result, "packed")[:3] == (37, 0, 0)
    assert numbers(result, "naive_compressed") == (14, 23, 10, 20, 20, 11, 11)
    assert numbers(result, "naive_full") == (26, 11, 4, 0, 0, 20, 20)
    assert result.method("naive_full").row_tokens == 65 and result.method("naive_compressed").row_tokens == 45
    assert result.method("sdcc").teacher_tokens == 44
    assert result.common_survivors == 14
    assert result.depth == 20 / 66
    assert result.evicted_span_mean == 20


def test_fold_with_summary_turn():
    """The summary was sampled after the 60 tokens it replaces; turn 2 has them too many in H_T."""
    result = audit.run(of_case("fold_with_summary_turn"))
    assert numbers(result, "naive_compressed") == (13, 20, 7, 60, 60, 0, 0)
    assert numbers(result, "naive_full") == (33, 0, 6, 0, 0, 60, 60)
    assert result.depth == 60 / 88
    assert "loses 60.6 %" in result.verdict


def test_consistent_data_says_so():
    result = audit.run(of_case("no_compression"))
    assert result.consistent and result.strictly_consistent
    assert result.verdict.startswith("Consistent: no context was edited")
    assert result.frequency == 0 and result.depth is None and result.evicted_span_mean is None
    assert all(found.wrong == found.lost == found.indirect == 0 for found in result.methods)


def test_nothing_wrong_but_tokens_lost():
    result = audit.run(of_case("three_levels"))
    assert numbers(result, "naive_compressed")[:3] == (3, 18, 0)
    assert not result.consistent and result.strictly_consistent
    assert "loses 85.7 % of the loss tokens" in result.verdict


def test_groups_share_their_prompt():
    result = audit.run(of_case("group_of_four"))
    alone = audit.run(of_case("group_of_four"), group_tries=False)
    expected = json.loads((CASES / "group_of_four.json").read_text())["expect"]["group_trie_tokens"]
    assert (result.groups, result.group_trie_tokens) == (1, expected)
    assert result.trie_tokens > expected
    assert (result.trie_ratio, result.group_trie_ratio) == (1, result.view_tokens / expected)
    assert alone == replace(result, groups=None, group_trie_tokens=None, group_trie_ratio=None)


def visible(fragment, row: int) -> list[int]:
    return [j for j in range(row + 1) if row < fragment.visible_until[j]]


@given(seeds, st.booleans(), st.sampled_from(METHODS), st.sampled_from([6, 40]))
def test_differences_against_brute_force(seed, white_box, method, vocabulary):
    """Every token's row prefix, key by key through the mask, against its recorded prompt and completion."""
    tree = build(simulate(seed, edits=white_box, vocabulary=vocabulary).rollout)
    union, sampled = tree.unions["main"], tree.sampled
    places = {"naive_full": np.arange(len(union.ids)), "union": union.entry_position}
    identity = places.get(method, tree.compressed.union if method in ("naive_compressed", "sdcc") else None)
    made = fragments([tree], method, RowShape(10**6, 10**6, 10**6, 10**6))
    wrong_total = 0
    for fragment in made:
        found = fragment_differences(tree, fragment, identity)
        for edge in range(len(fragment.edges.parent)):
            turn, index = int(fragment.edges.turn[edge]), int(fragment.edges.index[edge])
            record, which = tree.rollout.turns[turn], int(found.sampled[edge])
            assert (sampled.turn[which], sampled.index[which]) == (turn, index)
            keys = visible(fragment, int(fragment.edges.parent[edge]))
            shown = fragment.tokens[keys].tolist()
            generated = [*record.prompt_ids.tolist(), *record.completion_ids[:index].tolist()]
            assert found.wrong[edge] == (shown != generated)
            saw_more = any(set(visible(fragment, j)) - set(keys) for j in keys)
            gaps = fragment.positions[keys].tolist() != list(range(len(keys)))
            assert found.indirect[edge] == (shown == generated and (saw_more or gaps))
            if identity is None:
                assert found.missing[edge] == found.extra[edge] == 0
                continue
            view = tree.views[sampled.view[which]]
            seen = set(identity[keys].tolist())
            had = set(view.union[: len(generated)].tolist()) if view.chain == "main" else set()
            common = len(seen & had)
            assert (found.missing[edge], found.extra[edge]) == (len(generated) - common, len(shown) - common)
            wrong_total += int(found.wrong[edge])
            if method == "naive_compressed":
                assert found.wrong[edge] == sampled.diverging[which]
                assert (found.missing[edge], found.extra[edge]) == (sampled.missing[which], sampled.extra[which])
    total = audit.run([tree.rollout]).method(method)
    assert total.wrong == (wrong_total if identity is not None else 0)
    assert total.loss_tokens == sum(len(fragment.edges.parent) for fragment in made)
    assert total.lost == int(sampled.trainable.sum()) - total.loss_tokens
    assert sum(total.missing_histogram) == sum(total.extra_histogram) == total.wrong


@given(st.lists(st.integers(1, 12), min_size=1, max_size=12))
def test_leaking_rows_against_brute_force(spans):
    until = np.minimum(np.arange(len(spans)) + spans, len(spans)).astype(np.int32)

    def sees(row: int) -> set[int]:
        return {j for j in range(row + 1) if row < until[j]}

    expected = [any(sees(j) - sees(row) for j in sees(row)) for row in range(len(spans))]
    assert leaking_rows(until).tolist() == expected


@given(st.lists(seeds, min_size=1, max_size=4, unique=True))
def test_totals_are_sums_and_do_not_depend_on_order(some):
    made = [simulate(seed, name=f"r{seed}").rollout for seed in some]
    result, reverse = audit.run(made, shown=0), audit.run(made[::-1], shown=0)
    apart = [audit.run([one], shown=0) for one in made]
    for name in ("turns", "view_tokens", "trie_tokens", "sampled_tokens", "diverging_leaves", "evictions"):
        assert getattr(result, name) == getattr(reverse, name) == sum(getattr(one, name) for one in apart)
    assert result.methods == reverse.methods
    for place, found in enumerate(result.methods):
        assert found.wrong == sum(one.methods[place].wrong for one in apart)


def test_compression_counts_what_came_back_as_evicted_once():
    first = Turn(np.arange(1, 9, dtype=np.int32), np.array([9, 10], np.int32))
    second = Turn(np.array([1, 2, 7, 8, 9, 10], np.int32), np.array([11], np.int32))
    third = Turn(np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], np.int32), np.array([12], np.int32))
    fourth = Turn(np.array([1, 2, 7, 8, 9, 10, 11, 12], np.int32), np.array([13], np.int32))
    edits = (Edit(1, evicted=((2, 6),)), Edit(2, restored=((2, 6),)), Edit(3, evicted=((2, 6),)))
    result = audit.run([Rollout("r", (first, second, third, fourth), edits)])
    assert result.evictions == 2 and result.forks_per_rollout == 3 and result.evicted_span_mean == 4
    assert result.depth == 4 / 13
    assert result.details == {"pruned_tool_result": 2, "restored": 1}


def warned(**fields) -> str:
    turn = Turn(np.array([1, 2], np.int32), np.array([3, 4], np.int32), logprobs=np.array([-1.0, -1.0]))
    return " ".join(audit.run([Rollout("r", (replace(turn, **fields),))]).warnings)


def test_warnings():
    assert warned() == ""
    assert "2 tokens have processed log-probs under top-p" in warned(sampling=Sampling(top_p=0.9, logprobs="processed"))
    assert "2 tokens have processed log-probs under top-p" in warned(sampling=Sampling(top_k=5, logprobs="processed"))
    assert warned(sampling=Sampling(top_p=0.9)) == ""
    assert "at temperature 0" in warned(sampling=Sampling(temperature=0.0, logprobs="processed"))
    assert "other than 1" in warned(sampling=Sampling(temperature=0.7))
    assert warned(sampling=Sampling(temperature=0.7, logprobs="processed")) == ""
    assert "2 of 2 sampled tokens have no recorded log-probs" in warned(logprobs=None)
    assert "1 of 1 completions ended by length" in warned(finish_reason="length")
    assert "100.0 % of the sampled tokens are in turns marked not trainable" in warned(trainable=False)
    assert "no loss token" in warned(trainable=False)
    assert "no turn on chain 'main'" in warned(chain="side")


def test_what_cannot_be_used_is_refused_with_its_place(tmp_path):
    good = of_case("running_example")[0]
    bad = Rollout("bad", good.turns, (Edit(1, evicted=((2, 3),)),))
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    rollouts.write(one, [good, bad])
    rollouts.write(two, [good])
    two.write_text(two.read_text() + '{"id": "x"}\n')
    result = audit.run([one, two])
    assert result.rollouts == 1 and result.any_refused
    places = [(Path(refusal.file).name, refusal.line, refusal.field) for refusal in result.refused]
    assert places == [("one.jsonl", 2, "edits[0]"), ("two.jsonl", 1, "id"), ("two.jsonl", 2, "turns")]
    assert "contradicts turn 1" in result.refused[0].reason
    assert f"already used in {one}, line 1" in result.refused[1].reason
    nothing = audit.run([bad])
    assert not nothing.usable and nothing.methods[0].wrong_share is None


def test_no_loss_token_is_not_consistent():
    turn = Turn(np.array([1], np.int32), np.array([2], np.int32), trainable=False)
    assert "no loss token" in audit.run([Rollout("r", (turn,))]).verdict


def test_percentages_and_counts_never_round_to_a_claim():
    assert [percent(x) for x in (None, 0.0, 1e-6, 0.5, 0.99999, 1.0)] == [
        "N/A",
        "0.0 %",
        "<0.1 %",
        "50.0 %",
        ">99.9 %",
        "100.0 %",
    ]
    assert [short(x) for x in (0, 999, 99_999, 123_456, 1_234_567, 2.5e9)] == [
        "0",
        "999",
        "99,999",
        "123k",
        "1.23M",
        "2.5G",
    ]


def test_the_trie_ratio_is_how_many_times_the_trie_saves():
    facts = dict(context_facts(audit.run(of_case("group_of_four"))))
    assert facts["trie ratio"] == "1.00 (140 view tokens, 140 in tries); over groups 2.64 (53)"
