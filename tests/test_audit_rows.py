"""A user's own training rows, checked against the rollouts they were made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mwjax import audit, rollouts
from mwjax.audit.result import RowsAudit
from mwjax.audit.row_matching import EXACT, WRONG_PREFIX, build_index, check_rows, match
from mwjax.audit.text import decoder
from mwjax.audit.training_rows import read_rows
from mwjax.rollouts import Rollout, Turn
from mwjax.tree import RowShape, Tree, build, fragments
from tests.random_rollouts import simulate

CASES = Path(__file__).parent / "cases"
seeds = st.integers(0, 10**6)
LARGE = RowShape(10**6, 10**6, 10**6, 10**6)


def row(ids: Any, targets: Any, name: str = "r", **rest: Any) -> dict[str, Any]:
    mask = np.zeros(len(ids), int)
    mask[list(targets)] = 1
    return {"rollout_id": name, "input_ids": [int(x) for x in ids], "loss_mask": mask.tolist(), **rest}


def rows_of(tree: Tree, method: str) -> list[dict[str, Any]]:
    """The rows a trainer would write for a method that shows plain sequences."""
    made = []
    for fragment in fragments([tree], method, LARGE):
        ids = np.append(fragment.tokens, 0)
        targets = fragment.edges.parent + 1
        ids[targets] = fragment.edges.target
        made.append(row(ids, targets, tree.rollout.id))
    return made


def check(folder: Path, given: Rollout | list[Rollout], lines: list[Any], **options: Any) -> RowsAudit:
    path = folder / "rows.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    result = audit.run(given if isinstance(given, list) else [given], rows=path, **options).rows
    assert result is not None
    assert result.loss_tokens == (
        result.exact + result.wrong_prefix + result.untrainable + result.not_sampled + result.without_context
    )
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("rows")


def example() -> Rollout:
    case = json.loads((Path(__file__).parent / "cases" / "running_example.json").read_text())
    return rollouts.from_json(case["rollouts"][0])


def turns(*pairs: tuple[list[int], list[int]], **rest: Any) -> Rollout:
    return Rollout("r", tuple(Turn(np.array(p, np.int32), np.array(c, np.int32), **rest) for p, c in pairs))


@given(seeds, st.booleans())
def test_one_row_per_view_is_exact(folder, seed, white_box):
    rollout = simulate(seed, edits=white_box).rollout
    found = check(folder, rollout, rows_of(build(rollout), "logittree"))
    assert found.exact == found.loss_tokens == sum(len(t.completion_ids) for t in rollout.turns if t.trainable)
    assert found.double == found.never == found.position_gaps == 0
    assert found.consistent and found.mismatches == ()


@given(seeds, st.booleans())
def test_views_packed_with_restarting_position_ids_are_exact(folder, seed, white_box):
    rollout = simulate(seed, edits=white_box).rollout
    views = rows_of(build(rollout), "logittree")
    packed = {"rollout_id": "r", "input_ids": [], "loss_mask": [], "position_ids": []}
    for view in views:
        packed["input_ids"] += view["input_ids"]
        packed["loss_mask"] += view["loss_mask"]
        packed["position_ids"] += range(len(view["input_ids"]))
    if not views:
        return
    found = check(folder, rollout, [packed])
    assert found.consistent and found.segments == len(views)
    assert found.never == 0
    if len(views) > 1:
        found = check(folder, rollout, [{**packed, "position_ids": None}])
        assert found.segments == 1 and not found.consistent


@given(seeds, st.booleans(), st.sampled_from(["naive_compressed", "naive_full"]))
def test_naive_rows_are_wrong_exactly_where_the_audit_says(folder, seed, white_box, method):
    rollout = simulate(seed, edits=white_box, vocabulary=1000).rollout
    tree = build(rollout)
    expected = audit.run([rollout]).method(method)
    found = check(folder, rollout, rows_of(tree, method))
    assert (found.loss_tokens, found.wrong_prefix) == (expected.loss_tokens, expected.wrong)
    assert found.exact == expected.loss_tokens - expected.wrong
    assert found.never == expected.lost and found.double == 0
    if method == "naive_compressed":
        assert found.wrong_prefix == int((tree.sampled.diverging & (tree.sampled.compressed > 0)).sum())
    assert all(mismatch.certain for mismatch in found.mismatches)


@given(seeds, st.booleans(), st.integers(2, 5))
def test_exact_means_that_someone_sampled_this_token_after_this_prefix(seed, white_box, vocabulary):
    """Against a set of all (prefix, token) pairs, on rows cut from anywhere, with a small vocabulary."""
    rng = np.random.default_rng(seed)
    tree = build(simulate(seed, edits=white_box, vocabulary=vocabulary).rollout)
    pairs = set()
    for turn in tree.rollout.turns:
        walk = [*turn.prompt_ids.tolist(), *turn.completion_ids.tolist()]
        pairs |= {tuple(walk[: k + 1]) for k in range(len(turn.prompt_ids), len(walk)) if turn.trainable}
    untrainable = set()
    for turn in tree.rollout.turns:
        walk = [*turn.prompt_ids.tolist(), *turn.completion_ids.tolist()]
        untrainable |= {tuple(walk[: k + 1]) for k in range(len(turn.prompt_ids), len(walk)) if not turn.trainable}
    index = build_index(tree)
    view = tree.views[int(rng.integers(len(tree.views)))].ids.copy()
    for place in rng.integers(0, len(view), int(rng.integers(0, 3))):
        view[place] = rng.integers(0, vocabulary)
    found = match(tree, index, view, np.arange(1, len(view)))
    for place, kind, owner in zip(found.place.tolist(), found.kind.tolist(), found.owner.tolist()):
        sequence = tuple(view[: place + 1].tolist())
        assert (kind == EXACT) == (sequence in pairs)
        if kind == WRONG_PREFIX:
            assert tree.sampled.token[owner] == view[place]
            assert sequence not in untrainable


def test_running_example_on_the_last_context(folder):
    rollout = example()
    last = [*rollout.turns[-1].prompt_ids, *rollout.turns[-1].completion_ids]
    found = check(folder, rollout, [row(last, range(3, 13), "r")])
    assert (found.exact, found.wrong_prefix, found.never) == (5, 5, 3)
    assert not found.consistent
    first, second, third = found.mismatches
    assert (first.line, first.position, first.tokens, first.token) == (1, 7, 2, 106)
    assert (first.turn, first.index, first.certain) == (0, 5, True)
    assert (first.agree, first.expected_length, first.found_length) == (7, 8, 7)
    assert (first.expected, first.found) == ("[558]", "")
    assert (second.position, second.tokens, third.position, third.tokens) == (9, 2, 11, 1)
    assert found.verdict.startswith("50.0 % of the loss tokens are trained under a context the model never saw")
    assert check(folder, rollout, [row(last, range(3, 13), "r")], shown=1).mismatches == (first,)


def test_counted_double_and_never(folder):
    rollout = turns(([1, 2], [3, 4]), ([1, 2, 9], [5]))
    whole, short = row([1, 2, 3, 4], [2, 3]), row([1, 2, 3], [2])
    found = check(folder, rollout, [whole, short, whole])
    assert (found.exact, found.double, found.surplus, found.never) == (5, 2, 3, 1)
    assert found.consistent and "3 times too often" in found.verdict


def test_one_prefix_sampled_twice_may_be_trained_twice(folder):
    rollout = turns(([1, 2], [3, 4]), ([1, 2], [3, 5]))
    one, other = row([1, 2, 3, 4], [2, 3]), row([1, 2, 3, 5], [2, 3])
    found = check(folder, rollout, [one, other])
    assert (found.exact, found.double, found.never) == (4, 0, 0)
    found = check(folder, rollout, [one, other, other])
    assert (found.exact, found.double, found.surplus, found.never) == (6, 2, 2, 0)
    assert check(folder, rollout, [one]).never == 2


def test_what_the_policy_did_not_write(folder):
    rollout = turns(([1, 2], [3, 4]), ([1, 2, 3, 4, 7, 8], [5]))
    found = check(folder, rollout, [row([1, 2, 3, 4, 7, 8, 5], range(7))])
    assert (found.exact, found.not_sampled, found.without_context, found.wrong_prefix) == (3, 3, 1, 0)
    first, second = found.mismatches
    assert (first.position, first.kind, first.turn) == (1, "not_sampled", None)
    assert (second.position, second.tokens) == (4, 2)
    found = check(folder, turns(([1, 2], [3, 4]), trainable=False), [row([1, 2, 3, 4], [2, 3])])
    assert (found.untrainable, found.never, found.consistent) == (2, 0, False)


def test_a_changed_context_is_traced_to_the_token_it_trains(folder):
    rollout = turns((list(range(10, 30)), [40, 41, 42]), (list(range(50, 60)), [60]))
    changed = [*range(10, 20), 99, *range(21, 30), 40, 41, 42]
    found = check(folder, rollout, [row(changed, [20, 21, 22])])
    (mismatch,) = found.mismatches
    assert (found.wrong_prefix, mismatch.turn, mismatch.index, mismatch.certain) == (3, 0, 0, True)
    assert mismatch.agree == 10
    assert mismatch.expected.startswith("[20 21") and mismatch.found.startswith("[99 21")


def test_a_piece_of_a_completion_out_of_any_context_is_only_likely(folder):
    rollout = turns(([1, 2], [30, 31, 32]), ([5, 6, 7], [30, 31, 33]))
    found = check(folder, rollout, [row([8, 7, 30, 31], [2, 3])])
    (mismatch,) = found.mismatches
    assert found.wrong_prefix == 2
    assert (mismatch.turn, mismatch.index, mismatch.certain) == (1, 0, False)  # its context ends alike: 7
    found = check(folder, rollout, [row([8, 7, 30, 99], [2, 3])])
    assert (found.wrong_prefix, found.not_sampled) == (0, 2)


def test_position_ids_must_be_gap_free(folder):
    rollout = turns(([1, 2, 3], [4, 5, 6]))
    plain = row([1, 2, 3, 4, 5, 6], [3, 4, 5])
    assert check(folder, rollout, [{**plain, "position_ids": [0, 1, 2, 3, 4, 5]}]).position_gaps == 0
    found = check(folder, rollout, [{**plain, "position_ids": [0, 1, 2, 3, 7, 8]}])
    assert (found.position_gaps, found.exact, found.consistent) == (1, 3, False)  # only the last one sees position 7
    assert check(folder, rollout, [{**plain, "position_ids": [3, 4, 5, 6, 7, 8]}]).position_gaps == 3
    assert "position ids with gaps" in found.verdict


def test_padding_that_nobody_sees(folder):
    rollout = turns(([1, 2, 3], [4, 5, 6]))
    padded = row([0, 0, 1, 2, 3, 4, 5, 6, 0], [5, 6, 7], attention_mask=[0, 0, 1, 1, 1, 1, 1, 1, 0])
    assert check(folder, rollout, [padded]).consistent
    assert check(folder, rollout, [{**padded, "position_ids": [1, 1, 0, 1, 2, 3, 4, 5, 1]}]).consistent
    found = check(folder, rollout, [{**padded, "attention_mask": None}])
    assert found.wrong_prefix == 3 and found.mismatches[0].position == 5


def test_rollouts_without_rows_and_rows_without_rollouts(folder):
    one, other = turns(([1], [2, 3])), Rollout("other", turns(([1], [4, 5, 6])).turns)
    found = check(folder, [one, other], [row([1, 2, 3], [1, 2]), row([1, 2], [1], "nobody")])
    assert (found.rows, found.exact, found.never) == (1, 2, 3)
    assert (found.unnamed_rollouts, found.unnamed_tokens) == (1, 3)
    (refusal,) = found.refused
    assert (refusal.line, refusal.field) == (2, "rollout_id")
    assert "'nobody'" in refusal.reason


@pytest.mark.parametrize(
    ("line", "field", "reason"),
    [
        ('{"rollout_id": "r", "input_ids": [1', "", "is not JSON"),
        ("[1]", "", "is a list, must be an object"),
        ({"input_ids": [1], "loss_mask": [1]}, "rollout_id", "missing"),
        ({"rollout_id": 7, "input_ids": [1], "loss_mask": [1]}, "rollout_id", 'write "7"'),
        ({"rollout_id": "r", "loss_mask": [1]}, "input_ids", "missing"),
        ({"rollout_id": "r", "input_ids": [1]}, "loss_mask", "missing"),
        (row([], []), "input_ids", "is empty"),
        ({**row([1, 2], [1]), "input_ids": [1, -2]}, "input_ids[1]", "must not be negative"),
        ({**row([1, 2], [1]), "loss_mask": [1]}, "loss_mask", "has 1, must have one per input id (2)"),
        ({**row([1, 2], [1]), "loss_mask": [0, "x"]}, "loss_mask[1]", "must be 0 or 1"),
        ({**row([1, 2], [1]), "loss_mask": [0, -1]}, "loss_mask[1]", "must be 0 or 1"),
        ('{"rollout_id": "r", "input_ids": [1, 2], "loss_mask": [0, NaN]}', "loss_mask[1]", "must be 0 or 1"),
        (row([1, 2], [1], position_ids=[0]), "position_ids", "has 1, must have one per input id (2)"),
        (row([1, 2], [1], position_ids=[0, 1.5]), "position_ids[1]", "must be an integer"),
        (row([1, 2], [1], attention_mask=[1, 2]), "attention_mask[1]", "told apart by position_ids"),
        (row([1, 2], [1], attention_mask=[1, 0]), "loss_mask[1]", "is set where attention_mask is 0"),
    ],
)
def test_a_bad_row_is_refused_with_file_line_field_and_reason(folder, line, field, reason):
    rollout = turns(([1], [2]))
    found = check(folder, rollout, [row([1, 2], [1]), line, row([1, 2], [1])])
    assert found.rows == 2
    (refusal,) = found.refused
    assert (Path(refusal.file).name, refusal.line, refusal.field) == ("rows.jsonl", 2, field)
    assert reason in refusal.reason


def test_keys_and_forms_that_are_fine(folder):
    rollout = turns(([1, 2], [3]))
    lines = [
        {"id": "r", "input_ids": [1, 2, 3], "loss_mask": [False, False, True], "labels": [1]},
        {"id": "row-7", "rollout_id": "r", "input_ids": [1, 2, 3], "loss_mask": [0, 0.0, 0.5], "position_ids": None},
        "",
    ]
    found = check(folder, rollout, lines)
    assert (found.rows, found.exact, found.ignored_keys) == (2, 2, ("labels",))
    nothing = check(folder, rollout, [row([1, 2, 3], [])])
    assert nothing.loss_tokens == 0 and "train nothing" in nothing.verdict


def test_compressed_rows_and_missing_files(folder, tmp_path):
    import gzip

    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as out:
        out.write(json.dumps(row([1, 2, 3], [2])) + "\n")
    assert list(read_rows(tmp_path / "rows.jsonl.gz").of_rollout) == ["r"]
    with pytest.raises(rollouts.RolloutFileError, match="no such file"):
        read_rows(tmp_path / "none.jsonl")


class Letters:
    def decode(self, ids: list[int]) -> str:
        return "".join(chr(97 + token) if token < 26 else "\n" for token in ids)


def test_contexts_are_decoded_with_a_tokenizer(folder, tmp_path):
    rollout = turns(([0, 1, 26, 2], [3, 4]))
    found = check(folder, rollout, [row([0, 1, 25, 2, 3, 4], [4, 5])], tokenizer=Letters())
    (mismatch,) = found.mismatches
    assert (mismatch.token_text, mismatch.expected, mismatch.found) == ("'d'", "'\\nc'", "'zc'")
    from tokenizers import Tokenizer, models

    path = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(path))
    assert decoder(path)([0, 1]) == "'a b'"
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is not a tokenizer\.json"):
        decoder(tmp_path / "bad.json")


def test_mismatches_are_the_first_of_the_file(folder):
    made = [Rollout(name, turns(([1, 2], [3])).turns) for name in "ab"]
    wrong = [row([9, 2, 3], [2], name) for name in "baab"]
    found = check(folder, made, wrong, shown=3)
    assert [(m.line, m.rollout) for m in found.mismatches] == [(1, "b"), (2, "a"), (3, "a")]
    assert found.wrong_prefix == 4


def test_no_rows_at_all(folder):
    tree = build(turns(([1], [2])))
    facts = check_rows(tree, [], "rows", decoder(None), 5)
    assert (facts.rows, facts.never) == (0, 1)


def test_more_loss_tokens_than_were_ever_sampled(folder):
    nothing = Rollout("r", (Turn(np.array([1, 2], np.int32), np.zeros(0, np.int32)),))
    result = check(folder, nothing, [row([1, 2, 3], [1, 2])])
    assert (result.not_sampled, result.mismatches[0].tokens, result.never) == (2, 2, 0)
    few = Rollout("r", (Turn(np.array([9, 8, 7, 6, 5, 4], np.int32), np.array([1, 1, 1], np.int32)),))
    result = check(folder, few, [row([3, 9, 8, 7, 6, 5, 4, 2, 2, 1, 1, 1, 1, 1, 1, 2], range(9, 15))])
    assert (result.not_sampled, result.never) == (6, 3)


def test_a_summary_in_its_own_chain_is_known_behind_padding(folder):
    (side,) = [rollouts.from_json(v) for v in json.loads((CASES / "side_chains.json").read_text())["rollouts"]]
    ids = np.concatenate([np.zeros(7, int), side.turns[3].prompt_ids, side.turns[3].completion_ids])
    count = len(side.turns[3].completion_ids)
    result = check(folder, side, [row(ids, range(len(ids) - count, len(ids)))])
    assert (result.wrong_prefix, result.not_sampled) == (count, 0)
    assert result.mismatches[0].turn == 3 and result.mismatches[0].certain
