"""What mwjax record wrote, as rollouts: chains, retries, junctions, and everything accounted for."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from mwjax import rollouts, tree
from mwjax.cli import app
from mwjax.rollouts.readers import Options, import_files
from tests.scripted_engine import call, recording
from tests.test_readers_sessions import OPTIONS
from tests.toy_engine import END, Words, answer, answering, logprobs_of

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("read", "task")]
SYSTEM = {"role": "system", "content": "you are an agent"}
QUESTION = {"role": "user", "content": "which file holds the answer"}


def record(folder, exchanges, session="task-1", key="k", redact=()):
    """The log of a recorder between a harness that sends the requests and an engine that gives the answers."""
    headers = {"Authorization": f"Bearer {key}"} | ({"x-session-id": session} if session else {})
    with answering([said for _, said in exchanges]) as url, recording(url, folder, redact=redact) as recorder:
        for request, _ in exchanges:
            call(recorder.url, "/v1/chat/completions", {"model": "m", **request}, headers=headers)
    return recorder.path


def imported(log, folder, **options):
    """(result, rollouts) of an import."""
    out = folder / "rollouts.jsonl"
    result = import_files([str(log)], out, options=Options(**options), overwrite=True)
    return result, rollouts.read(out).rollouts if result.rollouts else []


def test_a_redacted_id_does_not_make_two_samples_one(harness, tmp_path):
    for name in "ab":
        harness.call(name, [SYSTEM, QUESTION], "I look")
    result, found = imported(record(tmp_path, harness.exchanges, redact=["id"]), tmp_path)
    for line in map(json.loads, (tmp_path / "calls.jsonl").read_text().splitlines()):
        assert (line["format"], line["response"]["id"]) == ("mwjax-call/1", "[redacted]")
    assert (result.used, result.merged) == (2, 0) and sum(len(rollout.turns) for rollout in found) == 2


def test_what_was_redacted_is_not_rendered(harness, tmp_path):
    harness.call("a", [SYSTEM, QUESTION], "I look")
    log = record(tmp_path, harness.exchanges, redact=["messages.*.content"])
    result = import_files([str(log)], tmp_path / "out.jsonl", format="chat", options=OPTIONS)
    (refusal,) = result.refused
    assert (refusal.field, result.rollouts) == ("ids_withheld", 0)


class Harness:
    """Conversations in messages and in the ids that the toy template makes of them."""

    def __init__(self):
        self.words = Words()
        self.exchanges = []

    def call(self, name, messages, said, *, tools=TOOLS, calls=(), ids=None, prompt=None, **more):
        """One exchange; ``messages`` are sent, ``said`` is answered. ``prompt``, ``ids``: where the engine's differ."""
        if prompt is None:
            prompt = self.words.prompt(*((each["role"], each["content"]) for each in messages))
        if ids is None:
            ids = [*self.words.ids(said), END]
        extra = {key: more.pop(key) for key in ("temperature", "top_p", "max_tokens", "n") if key in more}
        request = {"messages": messages, **({"tools": tools} if tools else {}), **extra}
        self.exchanges.append((request, answer(name, prompt, ids, said, calls, **more)))
        return {"role": "assistant", "content": said}

    def tool(self, text):
        return {"role": "tool", "content": text, "tool_call_id": "c"}


@pytest.fixture
def harness():
    return Harness()


def test_calls_that_continue_one_another_are_one_view(harness, tmp_path):
    first = harness.call("a", [SYSTEM, QUESTION], "I look", calls=[("read", {"path": "x"})])
    harness.call("b", [SYSTEM, QUESTION, first, harness.tool("it is in x")], "it is x")
    result, (rollout,) = imported(record(tmp_path, harness.exchanges), tmp_path)

    assert rollout.id == "task-1"
    assert (result.records, result.used, result.merged, result.empty, len(result.refused)) == (2, 2, 0, 0, 0)
    for turn, (_, said) in zip(rollout.turns, harness.exchanges):
        assert turn.prompt_ids.tolist() == said["prompt_token_ids"]
        assert turn.completion_ids.tolist() == said["choices"][0]["token_ids"]
        assert turn.logprobs.tolist() == logprobs_of(turn.completion_ids.tolist())
        assert (turn.chain, turn.sampling.logprobs) == ("main", "raw")
    assert [turn.finish_reason for turn in rollout.turns] == ["tool_calls", "stop"]
    built = tree.build(rollout)
    assert len(built.views) == 1 and not built.junctions
    line = json.loads((tmp_path / "rollouts.jsonl").read_text())
    assert line["turns"][1]["extends"] == 0


def test_a_stop_token_that_opens_the_next_message_is_there_once(harness, tmp_path):
    """As with templates whose stop token is the next role's opening: the answer ends with it, and the prompt goes on
    after it."""
    words = harness.words
    opening = [3, *words.ids("which file holds the answer"), 4]
    sampled = [*words.ids("it is x"), 3]
    harness.call("a", [QUESTION], "it is x", prompt=opening, ids=sampled)
    follow = [*opening, *sampled, *words.ids("are you sure"), 4]
    messages = [QUESTION, {"role": "assistant", "content": "it is x"}, {"role": "user", "content": "are you sure"}]
    harness.call("b", messages, "yes", prompt=follow, ids=[*words.ids("yes"), 3])
    _, (rollout,) = imported(record(tmp_path, harness.exchanges), tmp_path)

    (view,) = tree.build(rollout).views
    assert view.ids.tolist() == [*follow, *words.ids("yes"), 3]
    assert rollout.turns[1].prompt_ids.tolist().count(3) == 2


def test_two_tokenisations_of_one_word_are_retokenised_and_both_scored_under_their_own_ids(harness, tmp_path):
    words = harness.words
    spelt_apart = words.ids("ant +idote")
    first = harness.call("a", [SYSTEM, QUESTION], "antidote", ids=[*spelt_apart, END])
    second = [SYSTEM, QUESTION, first, {"role": "user", "content": "once more please"}]
    harness.call("b", second, "antidote again", ids=[*words.ids("antidote again"), END])
    log = record(tmp_path, harness.exchanges)
    words.tokenizer().save(str(tmp_path / "tokenizer.json"))

    for options in ({}, {"tokenizer": str(tmp_path / "tokenizer.json")}):
        _, (rollout,) = imported(log, tmp_path, **options)
        built = tree.build(rollout)
        (junction,) = built.junctions
        assert junction.detail == "retokenised"
        assert junction.at == len(rollout.turns[0].prompt_ids)
        assert [turn.chain for turn in rollout.turns] == ["main", "main"]
        for turn, view in zip(rollout.turns, built.views):
            assert view.ids.tolist() == [*turn.prompt_ids, *turn.completion_ids]
        assert rollout.turns[0].completion_ids[:2].tolist() == spelt_apart


def test_a_title_a_summariser_and_a_subagent_are_other_chains(harness, tmp_path):
    title = {"role": "system", "content": "generate a title for this conversation"}
    harness.call("t", [title, QUESTION], "Finding the file", tools=())
    first = harness.call(
        "a", [SYSTEM, QUESTION], "I ask", calls=[("task", {"prompt": 'read "all" the files\nin the folder'})]
    )
    sub = [
        {"role": "system", "content": "you are a helper"},
        {"role": "user", "content": 'read "all" the files\nin the folder'},
    ]
    step = harness.call("s1", sub, "I read", tools=TOOLS[:1], calls=[("read", {"path": "y"})])
    harness.call("s2", [*sub, step, harness.tool("y holds nothing")], "only x holds anything", tools=TOOLS[:1])
    history = [SYSTEM, QUESTION, first, harness.tool("the helper says only x holds anything")]
    second = harness.call("b", history, "then it is x")
    summariser = [{"role": "system", "content": "summarise"}, {"role": "user", "content": "which file ... x"}]
    harness.call("r", summariser, "x cannot be ruled out", tools=())
    harness.call("u", summariser, "the helper found that only x holds anything", tools=())
    folded = [SYSTEM, {"role": "user", "content": "so far: the helper found that only x holds anything"}, second]
    harness.call("c", [*folded, {"role": "user", "content": "continue"}], "x")
    result, (rollout,) = imported(record(tmp_path, harness.exchanges), tmp_path)

    assert [turn.chain for turn in rollout.turns] == [
        "title-1", "main", "subagent-1", "subagent-1", "main", "summary-1", "summary-1", "main",
    ]  # fmt: skip
    assert [turn.cause_turn for turn in rollout.turns] == [None, None, 1, None, 3, None, None, 6]
    assert [turn.purpose for turn in rollout.turns] == [
        "title", "act", "act", "act", "act", "summary", "summary", "act",
    ]  # fmt: skip
    # Of two attempts at a summary the rejected one is context only.
    assert [turn.trainable for turn in rollout.turns] == [True] * 5 + [False, True, True]
    (junction,) = [each for each in tree.build(rollout).junctions if each.chain == "main"]
    assert (junction.turn, junction.detail) == (7, "fold")
    assert result.records == result.used == 8


def test_a_subagent_at_work_beside_the_main_conversation_is_no_summary(harness, tmp_path):
    """As Qwen Code does: the task stands after words of the harness, and the result comes back with other words."""
    task = "count the files in it"
    first = harness.call("a", [SYSTEM, QUESTION], "I ask", calls=[("task", {"prompt": task, "kind": "general"})])
    history = [SYSTEM, QUESTION, first, harness.tool("launched")]
    second = harness.call("b", history, "I wait", calls=[("read", {"path": "x"})])
    sub = [
        {"role": "system", "content": "you are a helper"},
        {"role": "user", "content": [{"type": "text", "text": text} for text in ("the date is today", task)]},
    ]
    prompt = harness.words.prompt(("system", "you are a helper"), ("user", f"the date is today {task}"))
    step = harness.call("s1", sub, "I list", tools=TOOLS[:1], calls=[("read", {"path": "."})], prompt=prompt)
    more = [*prompt, *harness.words.ids("I list"), END, *harness.words.prompt(("tool", "x y z"))]
    harness.call("s2", [*sub, step, harness.tool("x y z")], "there are three files in it", tools=TOOLS[:1], prompt=more)
    told = {"role": "user", "content": "the helper says there are three files in it"}
    reminder = {"role": "user", "content": "a reminder"}
    harness.call("c", [SYSTEM, reminder, QUESTION, first, harness.tool("launched"), second, told], "thanks")
    _, (rollout,) = imported(record(tmp_path, harness.exchanges), tmp_path)

    assert [turn.chain for turn in rollout.turns] == ["main", "main", "subagent-1", "subagent-1", "main"]
    assert [turn.cause_turn for turn in rollout.turns] == [None, None, 0, None, 3]
    assert all(turn.purpose == "act" and turn.trainable for turn in rollout.turns)
    (junction,) = tree.build(rollout).junctions
    assert (junction.turn, junction.detail) == (4, "injected_turn")


def test_a_summary_in_the_conversation_itself_that_came_to_nothing_is_context_only(harness, tmp_path):
    first = harness.call("a", [SYSTEM, QUESTION], "I look", calls=[("read", {"path": "x"})])
    history = [SYSTEM, QUESTION, first, harness.tool("it is in x")]
    ask = {"role": "user", "content": "summarize this conversation"}
    harness.call("b", [*history, ask], "the user looks for the answer")
    second = harness.call("c", history, "it is x")
    harness.call("d", [*history, second, ask], "the answer was found in x")
    folded = [SYSTEM, {"role": "user", "content": "so far: the answer was found in x"}]
    harness.call("e", folded, "bye")
    _, (rollout,) = imported(record(tmp_path, harness.exchanges), tmp_path)

    assert {turn.chain for turn in rollout.turns} == {"main"}
    assert [turn.purpose for turn in rollout.turns] == ["act", "summary", "act", "summary", "act"]
    assert [turn.trainable for turn in rollout.turns] == [True, False, True, True, True]
    assert rollout.turns[4].cause_turn == 3


def test_thinking_that_the_template_dropped_is_its_doing_and_every_id_keeps_its_own_log_prob(harness, tmp_path):
    harness.call("a", [SYSTEM, QUESTION], "hm I look")
    message = harness.exchanges[0][1]["choices"][0]["message"]
    message |= {"content": "I look", "reasoning_content": "hm"}
    harness.call("b", [SYSTEM, QUESTION, message, {"role": "user", "content": "go on"}], "done")
    _, (rollout,) = imported(record(tmp_path, harness.exchanges), tmp_path)

    assert [(each.turn, each.detail) for each in tree.build(rollout).junctions] == [(1, "template")]
    for turn, (_, said) in zip(rollout.turns, harness.exchanges, strict=True):
        assert turn.prompt_ids.tolist() == said["prompt_token_ids"] and turn.trainable
        assert turn.completion_ids.tolist() == said["choices"][0]["token_ids"]
        assert turn.logprobs.tolist() == logprobs_of(turn.completion_ids.tolist())
    assert harness.words.ids("hm")[0] not in rollout.turns[1].prompt_ids


def test_a_system_line_that_changes_is_told_and_recorded_ids_stay(harness, tmp_path):
    said = []
    for cost in (1, 2):
        system = {"role": "system", "content": f"you are an agent\nbe brief\ncost {cost}"}
        messages = [system, QUESTION, *said, *([{"role": "user", "content": "go on"}] if said else [])]
        said.append(harness.call(f"r{cost}", messages, "I look"))
    log = record(tmp_path, harness.exchanges)
    result, (rollout,) = imported(log, tmp_path, normalise_system=True)
    assert [(each.turn, each.detail) for each in tree.build(rollout).junctions] == [(1, "system_prompt")]
    assert rollout.turns[1].prompt_ids.tolist() == harness.exchanges[1][1]["prompt_token_ids"]
    reasons = " ".join(remark.reason for remark in result.remarks)
    assert "the system prompt changes from call to call" in reasons
    assert "--normalise-system had no effect" in reasons and "recorded ids stay as they are" in reasons


def test_arguments_spelt_anew_are_told_from_a_template_whatever_was_thought_before(harness, tmp_path):
    words = harness.words
    first = harness.call("a", [SYSTEM, QUESTION], "hm I look", calls=[("read", {"path": "x"})])
    first |= {"content": "I look", "reasoning_content": "hm"}
    prompt = [*harness.exchanges[0][1]["prompt_token_ids"], *words.ids("hm I look"), END]
    prompt += words.prompt(("tool", "no"))
    sampled = [*words.ids("I look y:1"), END]
    looks = [SYSTEM, QUESTION, first, harness.tool("no")]
    harness.call("b", looks, "I look", calls=[("read", {"path": "y"})], prompt=prompt, ids=sampled)
    second = harness.exchanges[-1][1]["choices"][0]["message"]
    after = [*prompt, *words.ids("I look y: 1"), END, *words.prompt(("tool", "yes"))]
    harness.call("c", [*looks, second, harness.tool("yes")], "done", prompt=after)
    _, (rollout,) = imported(record(tmp_path, harness.exchanges), tmp_path)

    assert [(each.turn, each.detail) for each in tree.build(rollout).junctions] == [(2, "tool_json")]


@pytest.mark.parametrize(
    ("before", "after", "detail"),
    [
        ("<tool_response>it is in x", "<tool_response>omit...", "pruned_tool_result"),
        ("look again", "the date is today\nlook again", "injected_turn"),
        ("look again", "never mind", None),
    ],
)
def test_what_became_of_a_user_message_is_told(harness, tmp_path, before, after, detail):
    first = harness.call("a", [SYSTEM, QUESTION], "I call a tool", tools=())
    second = [SYSTEM, QUESTION, first, {"role": "user", "content": before}]
    said = harness.call("b", second, "hm", tools=())
    third = [SYSTEM, QUESTION, first, {"role": "user", "content": after}, said, {"role": "user", "content": "go on"}]
    harness.call("c", third, "yes", tools=())
    _, (rollout,) = imported(record(tmp_path, harness.exchanges), tmp_path)

    assert [(each.turn, each.detail) for each in tree.build(rollout).junctions] == [(2, detail)]


def test_a_retried_call_counts_once_if_it_is_one_response_and_twice_if_both_were_sampled(harness, tmp_path):
    harness.call("a", [SYSTEM, QUESTION], "I think it is x")
    harness.call("a", [SYSTEM, QUESTION], "I think it is x")
    second = harness.call("b", [SYSTEM, QUESTION], "I think it is x")
    harness.call("c", [SYSTEM, QUESTION, second, {"role": "user", "content": "good"}], "thanks")
    result, (rollout,) = imported(record(tmp_path, harness.exchanges), tmp_path)

    assert (result.records, result.used, result.merged) == (4, 3, 1)
    assert len(rollout.turns) == 3
    assert np.array_equal(rollout.turns[0].completion_ids, rollout.turns[1].completion_ids)
    assert all(turn.trainable for turn in rollout.turns)
    assert [junction.reason for junction in tree.build(rollout).junctions] == ["resample"]


def test_a_second_answer_that_the_harness_did_not_take_is_a_chain_of_its_own(harness, tmp_path):
    first = harness.call("a", [SYSTEM, QUESTION], "I think it is x")
    harness.call("b", [SYSTEM, QUESTION], "I think it is y")
    harness.call("c", [SYSTEM, QUESTION, first, {"role": "user", "content": "good"}], "thanks")
    _, (rollout,) = imported(record(tmp_path, harness.exchanges), tmp_path)

    assert [turn.chain for turn in rollout.turns] == ["main", "resample-1", "main"]
    assert not tree.build(rollout).junctions


def test_ids_that_disagree_with_reported_usage_are_refused_with_both_numbers(harness, tmp_path):
    first = harness.call("a", [SYSTEM, QUESTION], "it is x")
    more = [SYSTEM, QUESTION, first, {"role": "user", "content": "sure"}]
    harness.call("b", more, "yes it is", usage={"prompt_tokens": 15, "completion_tokens": 7})
    harness.call("c", more, "yes it is", usage={"prompt_tokens": 99, "completion_tokens": 4})
    result, (rollout,) = imported(record(tmp_path, harness.exchanges), tmp_path)

    assert len(rollout.turns) == 1
    assert rollout.meta["refused_lines"] == [2, 3]
    told = [str(refusal) for refusal in result.refused]
    prompt = len(harness.exchanges[1][1]["prompt_token_ids"])
    assert "line 2: usage." in told[0] and ("says 15" in told[0] or "says 7, but there are 4 completion ids" in told[0])
    assert f"line 3: usage.prompt_tokens: says 99, but there are {prompt} prompt ids" in told[1]


def test_a_truncated_completion_is_kept_and_flagged_and_a_failed_call_is_counted(harness, tmp_path):
    harness.call("a", [SYSTEM, QUESTION], "it is", finish_reason="length", max_tokens=3)
    harness.exchanges.append(({"messages": [SYSTEM, QUESTION]}, 429))
    result, (rollout,) = imported(record(tmp_path, harness.exchanges), tmp_path)

    assert (result.records, result.used, result.empty) == (2, 1, 1)
    assert rollout.turns[0].finish_reason == "length" and rollout.turns[0].trainable
    assert rollout.meta["truncated_turns"] == [0]
    assert "truncated at the token limit; kept" in result.account()
    assert "nothing sampled: the call failed (http_status)" in result.account()


def test_sampling_settings_are_kept_and_a_bias_of_ratios_is_told(harness, tmp_path):
    first = harness.call("a", [SYSTEM, QUESTION], "it is x", temperature=0.7)
    more = [SYSTEM, QUESTION, first, {"role": "user", "content": "sure"}]
    harness.call("b", more, "yes", temperature=1.0, top_p=0.9)
    log = record(tmp_path, harness.exchanges)
    result, (rollout,) = imported(log, tmp_path)

    assert [(turn.sampling.temperature, turn.sampling.top_p) for turn in rollout.turns] == [(0.7, 1.0), (1.0, 0.9)]
    assert "sampled at temperature 0.7, log-probs of temperature 1" in result.account()
    assert "sampled with top_p 0.9: ratios are biased" in result.account()
    result, (rollout,) = imported(log, tmp_path, logprobs="processed")
    assert {turn.sampling.logprobs for turn in rollout.turns} == {"processed"}
    assert "temperature 0.7" not in result.account()  # training divides by the temperature too
    assert "top_p 0.9" in result.account()


def test_episodes_that_share_a_key_are_told_apart_by_what_they_share(harness, tmp_path):
    other = {"role": "user", "content": "who wrote the file"}
    first = harness.call("a", [SYSTEM, QUESTION], "it is x")
    harness.call("b", [SYSTEM, other], "nobody knows that")
    harness.call("c", [SYSTEM, QUESTION, first, {"role": "user", "content": "sure"}], "yes")
    result, found = imported(record(tmp_path, harness.exchanges, session=None), tmp_path)

    assert [len(each.turns) for each in found] == [2, 1]
    assert found[0].id.endswith("/1") and found[1].id.endswith("/2")
    assert "held several conversations" in result.account()


def test_a_bad_line_is_refused_and_the_rest_is_kept(harness, tmp_path):
    first = harness.call("a", [SYSTEM, QUESTION], "it is x")
    harness.call("b", [SYSTEM, QUESTION, first, {"role": "user", "content": "sure"}], "yes")
    log = record(tmp_path, harness.exchanges)
    lines = log.read_text().splitlines()
    broken = json.loads(lines[1])
    broken["completions"][0]["logprobs"] = [-0.5]
    without = json.loads(lines[1])
    del without["prompt_ids"]
    log.write_text("\n".join([lines[0], json.dumps(broken), lines[1][:200], json.dumps(without), "7", lines[1]]))
    result, (rollout,) = imported(log, tmp_path)

    assert len(rollout.turns) == 2
    assert [(refusal.line, refusal.field) for refusal in result.refused] == [
        (2, "completions[0].logprobs"),
        (3, ""),
        (4, "prompt_ids"),
        (5, "format"),
    ]
    assert "has 1, must have one per completion id (2)" in result.refused[0].reason
    assert result.records == 6


def test_the_command_says_what_became_of_every_record(harness, tmp_path):
    first = harness.call("a", [SYSTEM, QUESTION], "it is x")
    harness.call("b", [SYSTEM, QUESTION, first, {"role": "user", "content": "sure"}], "yes")
    log, out = record(tmp_path, harness.exchanges), tmp_path / "out.jsonl.gz"
    (tmp_path / "rewards.jsonl").write_text('{"id": "task-1", "reward": 0.5, "group": "g"}\n')
    arguments = ["import", str(log), "--out", str(out)]
    done = CliRunner().invoke(app, [*arguments, "--rewards", str(tmp_path / "rewards.jsonl")])

    assert done.exit_code == 0, done.output
    assert f"1 rollout, 2 turns, 6 sampled ids: {out}" in done.stdout
    assert "2 records read: 2 in rollouts, 0 merged, 0 with nothing sampled, 0 refused" in done.stderr
    (rollout,) = rollouts.read(out).rollouts
    assert (rollout.reward, rollout.group) == (0.5, "g")
    with pytest.raises(OSError, match="exists already; give --overwrite"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    before = out.read_bytes()
    log.write_text("{}\n")
    done = CliRunner().invoke(app, [*arguments, "--overwrite", "--format", "mwjax"])
    assert done.exit_code == 2 and out.read_bytes() == before
    assert "is not written" in done.stdout
