"""Every rule of the record, each by the field and the reason its message gives."""

from __future__ import annotations

import copy
import json
import pickle

import numpy as np
import pytest

from mwjax.rollouts import RecordError, from_json, read

GOOD = {
    "id": "r1",
    "group": "q7",
    "reward": 1,
    "turns": [
        {
            "prompt_ids": [5, 6, 7],
            "completion_ids": [1, 2],
            "logprobs": [-0.5, 0],
            "sampling": {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "logprobs": "processed"},
            "finish_reason": "stop",
            "policy_version": 3,
        },
        {"extends": 0, "append_ids": [8, 9], "completion_ids": [3], "logprobs": [-1.5], "cause_turn": 0},
        {"prompt_ids": [5, 6, 2, 4], "completion_ids": [], "chain": "side", "purpose": "title", "trainable": False},
    ],
    "edits": [
        {
            "before_turn": 2,
            "evicted": [[5, 7], [2, 4]],
            "inserted_at": 2,
            "replacement_ids": [2],
            "replacement_from": [0, 1, 2],
            "restored": [[0, 1]],
            "author": "policy",
            "trigger": "length",
            "stored_as": None,
        }
    ],
    "meta": {"task": {"n": [1, 2.5, None, True]}},
}


def changed(path: str, value: object) -> dict:
    """GOOD with the entry at a dotted path set, or deleted where the value is ``...``."""
    result = copy.deepcopy(GOOD)
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place: object = result
    for part in parents:
        place = place[part]  # type: ignore[index]
    if value is ...:
        del place[last]  # type: ignore[attr-defined]
    else:
        place[last] = value  # type: ignore[index]
    return result


def test_a_full_record_is_taken_as_it_stands() -> None:
    rollout = from_json(GOOD)
    first, second, third = rollout.turns
    assert (rollout.id, rollout.group, rollout.reward, rollout.meta) == ("r1", "q7", 1.0, GOOD["meta"])
    assert isinstance(rollout.reward, float)
    assert first.prompt_ids.tolist() == [5, 6, 7] and first.prompt_ids.dtype == np.int32
    assert first.logprobs is not None and first.logprobs.dtype == np.float64
    assert second.prompt_ids.tolist() == [5, 6, 7, 1, 2, 8, 9]
    assert second.completion_ids.tolist() == [3] and second.cause_turn == 0
    assert third.chain == "side" and third.trainable is False and third.logprobs is None
    assert first.sampling.top_k == 40 and first.sampling.logprobs == "processed"
    (edit,) = rollout.edits
    assert edit.evicted == ((5, 7), (2, 4)) and edit.replacement_from == (0, 1, 2) and edit.stored_as is None
    assert edit.replacement_ids.tolist() == [2]
    assert not first.prompt_ids.flags.writeable


def test_null_means_not_given() -> None:
    turn = {
        "prompt_ids": [1],
        "extends": None,
        "append_ids": None,
        "completion_ids": [2],
        "chain": None,
        "sampling": None,
    }
    rollout = from_json({"id": "r", "turns": [turn], "edits": None, "meta": None, "reward": None})
    assert rollout.turns[0].chain == "main" and rollout.edits == () and rollout.meta == {} and rollout.reward is None


def test_tiny_positive_rounding_is_kept_as_it_is() -> None:
    logprobs = from_json(changed("turns.0.logprobs", [1e-6, 1e-7])).turns[0].logprobs
    assert logprobs is not None and logprobs.tolist() == [1e-6, 1e-7]


def test_turns_that_extend_one_another_share_memory() -> None:
    rollout = from_json(GOOD)
    assert np.shares_memory(rollout.turns[0].prompt_ids, rollout.turns[1].prompt_ids)


BAD = [
    ("id", ..., "id", "missing"),
    ("id", None, "id", "missing"),
    ("id", "", "id", "is empty"),
    ("id", 7, "id", 'is 7, must be a string; write "7"'),
    ("group", ["q"], "group", "is a list, must be a string"),
    ("group", "", "group", "is empty"),
    ("reward", "1", "reward", "is the string '1', must be a number"),
    ("reward", True, "reward", "is true, must be a number"),
    ("reward", float("nan"), "reward", "is NaN, must be a finite number"),
    ("reward", 10**400, "reward", "is Infinity, must be a finite number"),
    ("meta", [], "meta", "is a list, must be an object"),
    ("meta", {"a": [float("inf")]}, "meta.a[0]", "is Infinity, which JSON does not have; use null"),
    ("meta", {1: 2}, "meta", "has the key 1; keys must be strings"),
    ("meta", {"a": np.zeros(2)}, "meta.a", "is of type ndarray; use plain numbers, strings, lists and objects"),
    ("rewards", 1.0, "rewards", "unknown key; did you mean 'reward'?"),
    ("tool_calls", 3, "tool_calls", "unknown key; data of your own belongs in the rollout's meta"),
    ("turns", ..., "turns", "missing: this is no rollout; mwjax import makes rollouts of logs of other formats"),
    ("turns", [], "turns", "there are no turns"),
    ("turns", {}, "turns", "is an object, must be a list"),
    ("turns.1", [1], "turns[1]", "is a list, must be an object"),
    ("turns.0.log_probs", [], "turns[0].log_probs", "unknown key; did you mean 'logprobs'?"),
    ("turns.0.prompt_ids", ..., "turns[0].prompt_ids", "missing (or extends + append_ids)"),
    ("turns.0.prompt_ids", "abc", "turns[0].prompt_ids", "is the string 'abc', must be a list of token ids"),
    ("turns.0.prompt_ids", [], "turns[0].prompt_ids", "is empty: the first sampled token would have no context"),
    ("turns.0.prompt_ids", [1, True], "turns[0].prompt_ids[1]", "is true, must be an integer"),
    ("turns.0.prompt_ids", [1, 2.0], "turns[0].prompt_ids[1]", "is 2.0, must be an integer"),
    ("turns.0.prompt_ids", [[1]], "turns[0].prompt_ids[0]", "is a list, must be an integer"),
    ("turns.0.prompt_ids", [1, None], "turns[0].prompt_ids[1]", "is null, must be an integer"),
    ("turns.0.prompt_ids", [1, -1], "turns[0].prompt_ids[1]", "is -1, a token id must not be negative"),
    ("turns.0.prompt_ids", [2**31], "turns[0].prompt_ids[0]", "is 2147483648, beyond int32 (2147483647)"),
    ("turns.0.prompt_ids", [0, 2**70], "turns[0].prompt_ids[1]", f"is {2**70}, beyond int32 (2147483647)"),
    (
        "turns.0.prompt_ids",
        np.ones((2, 2), int),
        "turns[0].prompt_ids",
        "has shape (2, 2), must be a flat list of token ids",
    ),
    ("turns.0.prompt_ids", np.ones(2), "turns[0].prompt_ids", "has dtype float64, token ids must be integers"),
    ("turns.0.completion_ids", ..., "turns[0].completion_ids", "missing ([] when nothing was sampled)"),
    ("turns.0.completion_ids", 5, "turns[0].completion_ids", "is 5, must be a list of token ids"),
    ("turns.1.append_ids", [8, -9], "turns[1].append_ids[1]", "is -9, a token id must not be negative"),
    ("turns.1.append_ids", ..., "turns[1].append_ids", "missing; extends needs it ([] when nothing was appended)"),
    (
        "turns.0.append_ids",
        [1],
        "turns[0].append_ids",
        "given without extends; say which turn these ids were appended to",
    ),
    ("turns.1.prompt_ids", [1], "turns[1].extends", "given together with prompt_ids; give one of the two"),
    ("turns.1.extends", 1, "turns[1].extends", "is 1, this turn itself; must be an earlier turn"),
    ("turns.1.extends", 2, "turns[1].extends", "is 2, must be an earlier turn (0 to 0)"),
    ("turns.1.extends", 9, "turns[1].extends", "is 9, must be an earlier turn (0 to 0)"),
    ("turns.1.extends", -1, "turns[1].extends", "is -1, must be an earlier turn (0 to 0)"),
    ("turns.1.extends", "0", "turns[1].extends", "is the string '0', must be an integer"),
    ("turns.0.logprobs", [-1.0], "turns[0].logprobs", "has 1, must have one per completion id (2)"),
    ("turns.0.logprobs", {}, "turns[0].logprobs", "is an object, must be a list of numbers"),
    ("turns.0.logprobs", [-1.0, None], "turns[0].logprobs[1]", "is null, must be a number"),
    ("turns.0.logprobs", [False, -1.0], "turns[0].logprobs[0]", "is false, must be a number"),
    ("turns.0.logprobs", [-1, float("nan")], "turns[0].logprobs[1]", "is NaN, must be a finite number"),
    ("turns.0.logprobs", [-float("inf"), -1], "turns[0].logprobs[0]", "is -Infinity, must be a finite number"),
    ("turns.0.logprobs", [-1, 0.25], "turns[0].logprobs[1]", "is 0.25, a log-prob must not be positive"),
    ("turns.0.logprobs", [-1, -(10**400)], "turns[0].logprobs[1]", "is Infinity, must be a finite number"),
    (
        "turns.0.logprobs",
        np.zeros((2, 1)),
        "turns[0].logprobs",
        "has shape (2, 1), must have one per completion id (2)",
    ),
    ("turns.0.chain", 3, "turns[0].chain", 'is 3, must be a string; write "3"'),
    ("turns.0.chain", "", "turns[0].chain", "is empty"),
    ("turns.0.purpose", [], "turns[0].purpose", "is a list, must be a string"),
    ("turns.0.trainable", 1, "turns[0].trainable", "is 1, must be true or false"),
    ("turns.0.finish_reason", False, "turns[0].finish_reason", "is false, must be a string"),
    ("turns.0.policy_version", 1.5, "turns[0].policy_version", "is 1.5, must be an integer"),
    ("turns.0.cause_turn", 0, "turns[0].cause_turn", "is 0, this turn itself; must be an earlier turn"),
    ("turns.0.cause_turn", 1, "turns[0].cause_turn", "is 1, but no turn comes before the first"),
    ("turns.1.cause_turn", -1, "turns[1].cause_turn", "is -1, must be an earlier turn (0 to 0)"),
    ("turns.0.sampling", "raw", "turns[0].sampling", "is the string 'raw', must be an object"),
    ("turns.0.sampling.temp", 1, "turns[0].sampling.temp", "unknown key; did you mean 'temperature'?"),
    ("turns.0.sampling.temperature", -0.1, "turns[0].sampling.temperature", "is -0.1, must not be negative"),
    ("turns.0.sampling.temperature", "hot", "turns[0].sampling.temperature", "is the string 'hot', must be a number"),
    ("turns.0.sampling.top_p", 0, "turns[0].sampling.top_p", "is 0.0, must be above 0 and at most 1 (1 turns it off)"),
    ("turns.0.sampling.top_k", -1, "turns[0].sampling.top_k", "is -1, must not be negative (0 turns it off)"),
    (
        "turns.0.sampling.logprobs",
        "log",
        "turns[0].sampling.logprobs",
        'is the string \'log\', must be "raw" or "processed"',
    ),
    ("edits", {}, "edits", "is an object, must be a list"),
    ("edits.0", 3, "edits[0]", "is 3, must be an object"),
    ("edits.0.evict", [], "edits[0].evict", "unknown key; did you mean 'evicted'?"),
    ("edits.0.before_turn", ..., "edits[0].before_turn", "missing"),
    ("edits.0.before_turn", 0, "edits[0].before_turn", "is 0, but before the first turn there is no context to edit"),
    ("edits.0.before_turn", 3, "edits[0].before_turn", "is 3, but the turns are 0 to 2"),
    ("edits.0.before_turn", -1, "edits[0].before_turn", "is -1, but the turns are 0 to 2"),
    ("edits.0.evicted", [[1, 2, 3]], "edits[0].evicted[0]", "must be a half-open range [lo, hi]"),
    ("edits.0.evicted", 4, "edits[0].evicted", "is 4, must be a list of [lo, hi] ranges"),
    (
        "edits.0.evicted",
        [[3, 3]],
        "edits[0].evicted[0]",
        "is [3, 3], must be a half-open range [lo, hi] with 0 <= lo < hi",
    ),
    (
        "edits.0.evicted",
        [[-1, 2]],
        "edits[0].evicted[0]",
        "is [-1, 2], must be a half-open range [lo, hi] with 0 <= lo < hi",
    ),
    ("edits.0.evicted", [[1, 2.5]], "edits[0].evicted[0][1]", "is 2.5, must be an integer"),
    ("edits.0.evicted", [[4, 8], [0, 1], [1, 5]], "edits[0].evicted[2]", "overlaps edits[0].evicted[0]"),
    ("edits.0.restored", [[0, 2], [1, 3]], "edits[0].restored[1]", "overlaps edits[0].restored[0]"),
    ("edits.0.inserted_at", ..., "edits[0].inserted_at", "missing: say where in the live view replacement_ids went"),
    ("edits.0.inserted_at", -2, "edits[0].inserted_at", "is -2, must not be negative"),
    ("edits.0.replacement_ids", [-2], "edits[0].replacement_ids[0]", "is -2, a token id must not be negative"),
    (
        "edits.0.replacement_ids",
        [3],
        "edits[0].replacement_from",
        "turn 0's completion_ids[1:2] are not replacement_ids",
    ),
    ("edits.0.replacement_from", [0, 1], "edits[0].replacement_from", "must be [turn, lo, hi]"),
    (
        "edits.0.replacement_from",
        [2, 0, 1],
        "edits[0].replacement_from",
        "names turn 2, must be earlier than before_turn (2)",
    ),
    (
        "edits.0.replacement_from",
        [0, 1, 3],
        "edits[0].replacement_from",
        "[1, 3) is not a range of turn 0's completion, which has 2 ids",
    ),
    ("edits.0.author", 1, "edits[0].author", 'is 1, must be a string; write "1"'),
    ("edits.0.stored_as", {}, "edits[0].stored_as", "is an object, must be a string"),
]


@pytest.mark.parametrize(("path", "value", "field", "reason"), BAD)
def test_a_broken_rule_is_named(path: str, value: object, field: str, reason: str) -> None:
    with pytest.raises(RecordError) as caught:
        from_json(changed(path, value))
    assert (caught.value.field, caught.value.reason) == (field, reason)
    assert str(caught.value) == f"{field}: {reason}"


def test_what_is_no_object_is_refused() -> None:
    with pytest.raises(RecordError, match=r"^this is a list, must be one JSON object, a rollout$"):
        from_json([GOOD])


def test_meta_may_not_be_bottomless() -> None:
    nested: dict = {}
    nested["deeper"] = nested
    with pytest.raises(RecordError, match=r"nested more than 100 levels deep"):
        from_json(changed("meta", nested))


def test_ids_outside_the_vocabulary() -> None:
    assert from_json(GOOD, vocab_size=10).id == "r1"
    with pytest.raises(RecordError) as caught:
        from_json(GOOD, vocab_size=9)
    assert caught.value.field == "turns[1].append_ids[1]"
    assert caught.value.reason == "is 9, outside the vocabulary of 9 ids; is this the tokenizer that was used?"
    for path in ("turns.0.completion_ids", "turns.0.prompt_ids"):
        with pytest.raises(RecordError, match=r"is 10, outside the vocabulary of 10 ids"):
            from_json(changed(path, [1, 10]), vocab_size=10)
    outside = changed("edits.0.replacement_ids", [11])
    with pytest.raises(RecordError, match=r"edits\[0\].replacement_ids\[0\]: is 11, outside"):
        from_json(outside, vocab_size=10)


def test_errors_cross_process_boundaries() -> None:
    error = pickle.loads(pickle.dumps(RecordError("turns[0]", "is bad")))
    assert (error.field, error.reason, str(error)) == ("turns[0]", "is bad", "turns[0]: is bad")


LINE = json.dumps({"id": "a", "turns": [{"prompt_ids": [1, 2], "completion_ids": [3], "logprobs": [-1.25]}]})
BAD_LINES = [
    (b"[1, 2]", "", "this is a list, must be one JSON object, a rollout"),
    (b"hello", "", "is not JSON: Expecting value at column 1"),
    (b'{"id": "a", "turns": oops}', "", "is not JSON: Expecting value at column 22"),
    (LINE.encode() * 2, "", f"goes on after the end of the object (column {len(LINE) + 1}); write one rollout a line"),
    (b'{"id": "a", "id": "b", "turns": []}', "", "the key 'id' is given twice in one object"),
    (b'{"id": "\xff"}', "", "is not UTF-8 text (byte 9)"),
    (b"[" * 200_000, "", "is nested too deeply"),
    (LINE.replace("-1.25", "NaN").encode(), "turns[0].logprobs[0]", "is NaN, must be a finite number"),
    (LINE.replace("-1.25", "1e999").encode(), "turns[0].logprobs[0]", "is Infinity, must be a finite number"),
]


@pytest.mark.parametrize(("line", "field", "reason"), BAD_LINES)
def test_a_bad_line_is_refused_and_its_neighbours_kept(tmp_path, line: bytes, field: str, reason: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(LINE.replace('"a"', '"first"').encode() + b"\n" + line + b"\n" + LINE.encode() + b"\n\n")
    result = read(path)
    assert [rollout.id for rollout in result.rollouts] == ["first", "a"]
    (refusal,) = result.refused
    assert (refusal.file, refusal.line, refusal.field, refusal.reason) == (str(path), 2, field, reason)
    assert str(refusal) == f"{path}, line 2: {field + ': ' if field else ''}{reason}"


def test_a_number_of_thousands_of_digits(tmp_path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"id": "a", "turns": ' + "9" * 5000 + "}\n")
    assert read(path).refused[0].reason.startswith("is not readable JSON: Exceeds the limit")


@pytest.mark.parametrize("kept", range(1, len(LINE)))
def test_a_line_cut_anywhere_is_said_to_end_early(tmp_path, kept: int) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(LINE[:kept])
    (refusal,) = read(path).refused
    assert refusal.line == 1
    assert refusal.reason.startswith(f"the line ends early (after {len(LINE[:kept].rstrip())} characters)")
