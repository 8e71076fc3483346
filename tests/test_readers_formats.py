"""Other trainers' logs and row dumps as rollouts; tests/fixtures/readers says what each file is and what wrote it."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from mwjax import rollouts, tree
from mwjax.rollouts.readers import Options, detect, import_files
from mwjax.rollouts.record import Sampling
from tests.toy_engine import logprobs_of

FIXTURES = Path(__file__).parent / "fixtures" / "readers"
LONG = [2, *range(10, 30), 1]
ASKED = [*LONG, 3, 40, 41, 1, 4]


def imported(path, folder, **options):
    """(result, rollouts) of an import."""
    out = folder / "rollouts.jsonl"
    result = import_files([str(path)], out, options=Options(**options), overwrite=True)
    return result, rollouts.read(out).rollouts if result.rollouts else []


def ids_of(rollout):
    """(prompt, completion) of every turn, as lists."""
    return [(turn.prompt_ids.tolist(), turn.completion_ids.tolist()) for turn in rollout.turns]


def check_logprobs(rollout, tolerance=0.0):
    for turn in rollout.turns:
        np.testing.assert_allclose(turn.logprobs, logprobs_of(turn.completion_ids.tolist()), rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("verifiers_traces.jsonl", "verifiers"),
        ("verifiers_steps.jsonl", "verifiers-steps"),
        ("agent_lightning_events.jsonl", "agent-lightning"),
        ("agent_lightning_event_triplets.json", "agent-lightning"),
        ("agent_lightning_spans.jsonl", "agent-lightning"),
        ("agent_lightning_triplets.jsonl", "agent-lightning"),
        ("areal_rows.jsonl", "areal"),
        ("slime_rollout_3.pt", "slime"),
        ("trl_rows.jsonl", "trl"),
        ("trl_rollout_func.jsonl", "trl"),
        ("verl_rows.jsonl", "verl"),
    ],
)
def test_the_format_is_detected_and_every_record_is_accounted_for(name, form, tmp_path):
    assert form == detect(str(FIXTURES / name)).NAME
    result, found = imported(FIXTURES / name, tmp_path)
    assert result.rollouts == len(found) > 0
    assert not result.refused
    text = (FIXTURES / name).read_bytes()
    if name.endswith(".jsonl") and form != "trl":
        assert result.records == text.count(b"\n")
    for rollout in found:
        assert rollout.meta["imported"]["format"] == form
        tree.build(rollout)


def test_a_message_graph_gives_the_prompt_of_every_call(tmp_path):
    """The prompts and completions are those that the fixture's script gave verifiers."""
    result, (compacted, respelt) = imported(FIXTURES / "verifiers_traces.jsonl", tmp_path)
    start = [2, 10, 11, 12, 13, 1, 3, 14, 15, 16, 17, 18, 1, 4]
    second = [*start, 19, 20, 1, 5, 21, 22, 23, 24, 1, 4]
    third = [*second, 21, 22, 24, 1, 3, 25, 21, 26, 1, 4]
    assert ids_of(compacted) == [
        (start, [19, 20, 1]),
        (second, [21, 22, 24, 1]),
        (third, [27, 28, 29, 30, 1]),
        (third, [17, 18, 22, 23, 15, 24, 1]),
        ([*start[:6], 3, 31, 32, 17, 18, 22, 23, 15, 24, 1, 4], [24, 1]),
    ]
    check_logprobs(compacted, tolerance=1e-4)
    assert [turn.trainable for turn in compacted.turns] == [True, True, False, True, True]
    assert [turn.purpose for turn in compacted.turns] == ["act", "act", "act", "summary", "act"]
    assert compacted.turns[4].cause_turn == 3
    assert (compacted.reward, compacted.group) == (0.5 * 2.0 + 1.0 * 0.25, "g0")
    assert {turn.policy_version for turn in compacted.turns} == {2}
    reasons = [(junction.turn, junction.reason, junction.detail) for junction in tree.build(compacted).junctions]
    assert reasons == [(3, "resample", None), (4, "replacement", "fold")]

    assert tree.build(respelt).junctions[0].detail == "retokenised"
    assert [turn.sampling for turn in respelt.turns] == [Sampling(), Sampling(0.7, 0.9)]
    assert respelt.meta["truncated_turns"] == [1]
    assert "rounded to four decimals" in result.account() and "top_p 0.9" in result.account()


def test_a_graph_whose_ids_are_not_what_the_engine_counted_is_refused(tmp_path):
    episode = json.loads((FIXTURES / "verifiers_traces.jsonl").read_text().splitlines()[0])
    trace = episode["traces"][0]
    trace["calls"][1]["usage"]["prompt_tokens"] = 99
    log = tmp_path / "traces.jsonl"
    log.write_text(json.dumps(episode) + "\n")
    result, _ = imported(log, tmp_path)
    (refusal,) = result.refused
    assert (refusal.line, refusal.field) == (1, "traces[0].calls of node 4: usage.prompt_tokens")
    assert "says 99, but there are 24 prompt ids" in refusal.reason

    trace["calls"][1]["usage"] = {"prompt_tokens": 4, "cached_input_tokens": 20, "completion_tokens": 4}
    trace["nodes"][4]["parent"] = 7
    log.write_text(json.dumps(episode) + "\n")
    result, _ = imported(log, tmp_path)
    assert result.refused[0].field == "traces[0].nodes[4].parent"
    trace["nodes"][4]["parent"] = 3
    log.write_text(json.dumps(episode) + "\n")
    assert len(imported(log, tmp_path)[1][0].turns) == 5


def test_steps_with_tokens(tmp_path):
    result, (rollout,) = imported(FIXTURES / "verifiers_steps.jsonl", tmp_path)
    assert ids_of(rollout) == [
        (ASKED, [50, 51, 1]),
        ([*ASKED, 50, 51, 1, 5, 60, 1, 4], [52, 53, 1]),
        ([*LONG, 3, 70, 50, 51, 1, 4], [54, 55]),
    ]
    check_logprobs(rollout)
    assert (rollout.id, rollout.group, rollout.reward) == ("t1", "toy/4", 0.75)
    assert [turn.finish_reason for turn in rollout.turns] == ["stop", "stop", "length"]
    assert (result.records, result.empty) == (2, 1)
    assert "the rollout has no step (ValueError)" in result.account()


@pytest.mark.parametrize("name", ["agent_lightning_events.jsonl", "agent_lightning_event_triplets.json"])
def test_events_of_agent_lightning(name, tmp_path):
    result, (rollout,) = imported(FIXTURES / name, tmp_path)
    prompt = [2, 10, 11, 1, 3, 12, 13, 1, 4]
    assert ids_of(rollout) == [(prompt, [14, 15, 1]), ([*prompt, 14, 15, 1, 5, 16, 1, 4], [17, 1])]
    check_logprobs(rollout)
    assert (rollout.id, rollout.reward) == ("ro-1", 0.5)
    assert {turn.policy_version for turn in rollout.turns} == {7}
    # The response that is there twice counts once; the server's own triplets leave it out already.
    assert result.merged == (1 if name.endswith("l") else 0)
    kinds = Counter(remark.reason for remark in result.remarks if remark.kind == "empty")
    assert kinds == {
        "the call failed (status 503)": 1,
        "an event of kind note": 1,
        "a reward, taken for its rollout": 1,
    }


@pytest.mark.parametrize("name", ["agent_lightning_spans.jsonl", "agent_lightning_triplets.jsonl"])
def test_spans_and_triplets_of_agent_lightning(name, tmp_path):
    result, (rollout,) = imported(FIXTURES / name, tmp_path)
    prompt = [2, 10, 11, 1, 3, 12, 13, 1, 4]
    assert ids_of(rollout) == [(prompt, [14, 15, 1]), ([*prompt, 14, 15, 1, 5, 16, 1, 4], [17, 1])]
    assert (rollout.id, rollout.reward) == ("ro-2", 1.0)
    if name.endswith("spans.jsonl"):
        assert {turn.sampling.temperature for turn in rollout.turns} == {0.7}
        assert result.merged == 1


@pytest.mark.parametrize("name", ["areal_rows.jsonl", "areal_concat.jsonl"])
def test_rows_of_areal_are_one_rollout_and_what_is_repeated_was_sampled_once(name, tmp_path):
    result, (rollout,) = imported(FIXTURES / name, tmp_path)
    assert ids_of(rollout) == [
        (ASKED, [50, 51, 1]),
        ([*ASKED, 50, 51, 1, 5, 60, 1, 4], [52, 53, 1]),
        ([*LONG, 3, 70, 50, 51, 1, 4], [54, 55]),
    ]
    check_logprobs(rollout)
    assert [turn.policy_version for turn in rollout.turns] == [3, 3, 4]
    assert (rollout.id, rollout.group, rollout.reward) == ("s1", "q7", 1.0)
    assert {turn.sampling.logprobs for turn in rollout.turns} == {"processed"}
    assert "the rows of one rollout have different rewards; the last one is taken" in result.account()


def test_a_row_that_only_repeats_is_merged(tmp_path):
    first, second, third = (FIXTURES / "areal_concat.jsonl").read_text().splitlines()
    log = tmp_path / "rows.jsonl"
    log.write_text("\n".join([second, first, third]))
    result, (rollout,) = imported(log, tmp_path)
    assert len(rollout.turns) == 3
    assert (result.records, result.used, result.merged) == (3, 2, 1)


def test_a_dump_of_slime_is_read_without_torch(tmp_path):
    result, (compacted, cut, aborted) = imported(FIXTURES / "slime_rollout_3.pt", tmp_path)
    assert ids_of(compacted) == [
        (ASKED, [50, 51, 1]),
        ([*ASKED, 50, 51, 1, 5, 60, 1, 4], [52, 1]),
        ([*LONG, 3, 70, 52, 1, 4], [53, 1]),
    ]
    for rollout in (compacted, cut, aborted):
        check_logprobs(rollout)
    assert [rollout.id for rollout in (compacted, cut, aborted)] == ["step3/7", "step3/2", "step3/3"]
    assert (compacted.group, compacted.reward, compacted.turns[0].policy_version) == ("step3/0", 0.5, 5)
    assert cut.turns[0].finish_reason == "length" and cut.turns[0].trainable
    assert not aborted.turns[0].trainable
    assert result.records == result.used == 4


class _Runs:
    def __reduce__(self):
        return print, ("this must not run",)


def test_what_a_dump_would_run_is_not_run(tmp_path, capfd):
    samples = {"rollout_id": 0, "samples": [{"tokens": [1, 2], "response_length": 1, "index": 0, "metadata": _Runs()}]}
    path = tmp_path / "data.pt"
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("data/data.pkl", pickle.dumps(samples, protocol=2))
    _, (rollout,) = imported(path, tmp_path)
    assert ids_of(rollout) == [([1], [2])]
    assert "this must not run" not in capfd.readouterr().out
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(OSError, match=r"no file of torch\.save, or it is damaged"):
        imported(path, tmp_path)


@pytest.mark.parametrize("name", ["trl_rows.jsonl", "trl_rollout_func.jsonl"])
def test_rows_of_trl(name, tmp_path):
    _, found = imported(FIXTURES / name, tmp_path)
    batch = json.loads((FIXTURES / "trl_rollout_func.jsonl").read_text())
    assert len(found) == 4
    for place, rollout in enumerate(found):
        prompt, ids = batch["prompt_ids"][place], batch["completion_ids"][place]
        assert ids_of(rollout) == [(prompt, ids[:2]), ([*prompt, *ids[:3]], ids[3:])]
        logprobs = np.concatenate([turn.logprobs for turn in rollout.turns])
        np.testing.assert_allclose(logprobs, np.delete(batch["logprobs"][place], 2), rtol=1e-6)
    if name == "trl_rows.jsonl":
        assert [(rollout.group, rollout.reward) for rollout in found] == [("q0", 0), ("q0", 1), ("q1", 0), ("q1", 1)]


def test_rows_of_verl_with_one_key_are_one_rollout(tmp_path):
    _, (compacted, other) = imported(FIXTURES / "verl_rows.jsonl", tmp_path)
    assert ids_of(compacted) == [
        (ASKED, [50, 51, 1]),
        ([*ASKED, 50, 51, 1, 5, 60, 61, 1, 4], [52, 1]),
        ([*LONG, 3, 40, 52, 1, 4], [53, 54, 1]),
    ]
    question = "0f3c1a52-8d7e-4b1f-9a60-2c5d4e6f7a81"
    assert (compacted.id, compacted.group, compacted.reward) == (f"{question}_0", question, 0.25)
    assert (other.id, other.group, other.reward) == (f"{question}_1", question, 1.0)
    check_logprobs(compacted)


def test_padded_rows_of_a_verl_batch(tmp_path):
    row = {
        "prompts": [0, 0, 7, 8],
        "responses": [9, 5, 0, 0],
        "response_mask": [1, 0, 0, 0],
        "attention_mask": [0, 0, 1, 1, 1, 1, 0, 0],
        "rollout_log_probs": [-0.5, 0.0, 0.0, 0.0],
        "token_level_scores": [0.0, 0.75, 0.0, 0.0],
        "uid": "a",
        "request_id": "r",
    }
    log = tmp_path / "rows.jsonl"
    log.write_text(json.dumps(row) + "\n")
    _, (rollout,) = imported(log, tmp_path)
    assert ids_of(rollout) == [([7, 8], [9])]
    assert (rollout.id, rollout.group, rollout.reward) == ("r", "a", 0.75)
    del row["attention_mask"]
    log.write_text(json.dumps(row) + "\n")
    result, _ = imported(log, tmp_path)
    assert result.refused[0].field == "attention_mask"


def test_text_dumps_are_refused_with_the_reason(tmp_path):
    result, _ = imported(FIXTURES / "verl_text.jsonl", tmp_path)
    assert "line 1: output: is decoded text without special tokens" in str(result.refused[0])
    assert not (tmp_path / "rollouts.jsonl").exists()


@pytest.mark.parametrize(
    ("name", "change", "field", "reason"),
    [
        ("areal_rows.jsonl", {"loss_mask": [[0, 1]]}, "loss_mask", "has 2 entries for 30 ids"),
        ("areal_rows.jsonl", {"input_ids": [[1, "a"]], "loss_mask": [[0, 1]]}, "logprobs", "has 30 entries for 2 ids"),
        ("areal_rows.jsonl", {"rewards": ["high"]}, "reward", "must be a number"),
        ("trl_rows.jsonl", {"tool_mask": [1, 1, 2, 1, 1]}, "tool_mask[6]", "is 2, must be 0 or 1"),
        ("trl_rows.jsonl", {"sampling_per_token_logps": [0.5] * 5}, "logprobs", "must not be positive"),
        ("verl_rows.jsonl", {"response_mask": [1]}, "response_mask", "has 1 entries for 10 ids"),
        (
            "verifiers_steps.jsonl",
            {"trajectory": [{"tokens": None, "trajectory_id": "t"}]},
            "trajectory[0].tokens",
            "without token ids",
        ),
        ("agent_lightning_events.jsonl", {"data": {"response": {}}}, "data.response", "no token ids"),
    ],
)
def test_a_bad_record_is_refused_with_its_field(name, change, field, reason, tmp_path):
    lines = (FIXTURES / name).read_text().splitlines()
    log = tmp_path / name
    log.write_text("\n".join([json.dumps({**json.loads(lines[0]), **change}), *lines[1:]]))
    result, _ = imported(log, tmp_path)
    (refusal,) = result.refused
    assert (refusal.file, refusal.line) == (str(log), 1)
    assert refusal.field.startswith(field.split("[6]")[0]) and reason in refusal.reason


def rows(tmp_path, *records):
    log = tmp_path / "rows.jsonl"
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    return imported(log, tmp_path)


def test_every_row_of_a_batch_is_counted(tmp_path):
    batch = {"prompt_ids": [[1, 2]] * 4, "completion_ids": [[5, 6], [7, 8], [5, 6], [0, 0]]}
    batch |= {"completion_mask": [[1, 1], [1, 1], [1, 1], [0, 0]], "rollout_id": ["a", "b", "a", "c"]}
    result, found = rows(tmp_path, batch)
    assert [(rollout.id, ids_of(rollout)) for rollout in found] == [
        ("a", [([1, 2], [5, 6])]),
        ("b", [([1, 2], [7, 8])]),
    ]
    assert (result.records, result.used, result.merged, result.empty) == (4, 2, 1, 1)
    result, _ = rows(tmp_path, {**batch, "rollout_id": ["a"]})
    (refusal,) = result.refused
    assert (refusal.field, refusal.reason) == ("rollout_id", "has 1 entries for 4 of completion_ids")


def test_questions_of_verl_whose_names_end_in_numbers_are_no_keys(tmp_path):
    row = {"prompt_ids": [1, 2], "response_ids": [5], "response_mask": [1], "reward_score": 1.0}
    names = ["gsm8k_12_3", "gsm8k_12_3", "gsm8k_12_4"]
    _, found = rows(tmp_path, *({**row, "uid": uid} for uid in names))
    assert [rollout.group for rollout in found] == names and len({rollout.id for rollout in found}) == 3


def test_the_reward_of_triplets_is_the_last_one(tmp_path):
    made = {"prompt": {"token_ids": [1, 2]}, "response": {"token_ids": [5]}}
    triplets = [{**made, "reward": reward} for reward in (0.1, 0.9, None)]
    for final, reward in ((None, 0.9), (0.5, 0.5)):
        _, (rollout,) = rows(tmp_path, {"rollout_id": "x", "triplets": triplets, "final_reward": final})
        assert rollout.reward == reward


@pytest.mark.parametrize(("prompt", "completion"), [(28, 1), (5, 0)])
def test_steps_of_verifiers_that_its_limit_cut_are_kept_as_far_as_they_go(prompt, completion, tmp_path):
    record = json.loads((FIXTURES / "verifiers_steps.jsonl").read_text().splitlines()[0])
    whole, tokens = len(record["trajectory"]), record["trajectory"][-1]["tokens"]
    for name in tokens:
        if isinstance(tokens[name], list):
            tokens[name] = tokens[name][: prompt if name.startswith("prompt") else completion]
    result, (rollout,) = rows(tmp_path, record)
    assert not result.refused and len(rollout.turns) == whole - (completion == 0)
    if completion:
        assert (len(rollout.turns[-1].completion_ids), rollout.turns[-1].finish_reason) == (1, "length")


def test_a_response_of_agent_lightning_may_be_a_list_of_chunks(tmp_path):
    choices = [
        {"index": 0, "delta": {}, "token_ids": ids, "finish_reason": end} for ids, end in (([5], None), ([6], "stop"))
    ]
    chunks = [{"prompt_token_ids": ids, "choices": [choice]} for ids, choice in zip(([1, 2], None), choices)]
    event = {"event_type": "model_request", "rollout_id": "x", "attempt_id": "0", "timestamp": 1.0}
    _, (rollout,) = rows(tmp_path, {**event, "data": {"request": {"model": "m"}, "response": chunks}})
    assert ids_of(rollout) == [([1, 2], [5, 6])] and rollout.turns[0].finish_reason == "stop"
