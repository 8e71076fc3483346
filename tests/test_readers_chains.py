"""Which conversation a call belongs to, and what for: chains, episodes, summaries and sub-agents, from messages."""

from __future__ import annotations

import json
import re

import pytest

from mwjax.rollouts.readers import Options, detect
from tests.test_readers_requests import (
    GO,
    LONG,
    calling,
    chat,
    decoded,
    junctions,
    read,
    recorded,
    result,
    said,
    user,
    write,
)
from tests.test_readers_sessions import OPTIONS, SESSIONS


def test_episodes_of_no_session_keep_their_own_system_prompts(tmp_path):
    log = []
    for task in ("north", "south"):
        system = f"You are an agent.\nBe brief.\nNever lie.\nAsk when unsure.\nTask {task}."
        log.append(chat([{"role": "system", "content": system}, user(f"Go {task}.")], said("Rope."), task))
        del log[-1]["session_id"]
    asked = Options(tokenizer=OPTIONS.tokenizer, template=OPTIONS.template, normalise_system=True)
    rollouts, others = read(write(tmp_path, log), asked)
    assert [("Task south" in decoded(rollout, 0)) for rollout in rollouts] == [False, True]
    assert not any("system prompt changes" in other.reason for other in others)


def test_another_system_prompt_is_another_conversation_and_not_normalised(tmp_path):
    title = [{"role": "system", "content": "You write a title for a conversation."}, user("Go")]
    log = [chat(title, said("Rope"), "r0", tools=()), chat(GO, said("Rope."), "r1")]
    asked = Options(tokenizer=OPTIONS.tokenizer, template=OPTIONS.template, normalise_system=True)
    (rollout,), others = read(write(tmp_path, log), asked)
    assert not others and [turn.purpose for turn in rollout.turns] == ["title", "act"]
    assert "You write a title" in decoded(rollout, 0)


@pytest.mark.parametrize(
    ("name", "summaries"), [("opencode", [7, 12]), ("codex", [4, 9])], ids=["chat completions", "responses"]
)
def test_calls_of_real_programs_fall_into_their_chains(tmp_path, name, summaries):
    records = []
    for number, line in enumerate((SESSIONS / f"{name}.sent.jsonl").read_text("utf-8").splitlines()):
        call = json.loads(line)
        if "input" in call:
            tools = [{"type": "function", "name": each, "parameters": {}} for each in call["tools"]]
            request = {"model": "m", "input": call["input"], "tools": tools}
            response = {"object": "response", "id": f"r{number}", "status": "completed", "output": call["answer"]}
            records.append({"request": request, "response": response, "session_id": "s"})
        else:
            tools = [{"type": "function", "function": {"name": each, "parameters": {}}} for each in call["tools"]]
            records.append(chat(call["messages"], call["answer"], f"r{number}", tools=tools))
    path = write(tmp_path, records)
    assert detect(path).NAME == "chat"
    (rollout,), _ = read(path)
    assert [k for k, turn in enumerate(rollout.turns) if turn.purpose == "summary"] == summaries
    for summary in summaries:  # trainable in a root of its own, and named by the call that goes on from it
        assert rollout.turns[summary].trainable and rollout.turns[summary].chain != "main"
        after = rollout.turns[summary + 1]
        assert (after.chain, after.cause_turn) == ("main", summary)
    assert {summary + 1 for summary in summaries} <= {turn for turn, _ in junctions(rollout)}


def test_a_summary_that_nothing_goes_on_from_is_context_only(tmp_path):
    first = [*GO, said(LONG), user("And?")]
    wanted = [{"role": "system", "content": "You summarise."}, user("Summarise this conversation: " + LONG)]
    bad, good = "A summary nobody liked, and too long.", "The village sells rope; salt comes next."
    after = [GO[0], user(f"So far: {good}")]
    log = [
        chat(first, said("Salt."), "r1"),
        chat(wanted, said(bad), "r2", tools=()),
        chat(wanted, said(good), "r3", tools=()),
        chat(after, said("Done."), "r4"),
    ]
    (rollout,), _ = read(write(tmp_path, log))
    assert [turn.trainable for turn in rollout.turns] == [True, False, True, True]
    assert rollout.turns[3].cause_turn == 2 and rollout.turns[3].chain == "main"


def test_a_summary_whose_tags_the_harness_takes_off_is_linked(tmp_path):
    text = "The village sells rope; salt comes next."
    wanted = [{"role": "system", "content": "You summarise."}, user("Summarise this conversation: " + LONG)]
    summary = f"<analysis>\nThere was rope.\n</analysis>\n\n<summary>\n{text}\n</summary>"
    log = [
        chat([*GO, said(LONG), user("And?")], said("Salt."), "r1"),
        chat(wanted, said(summary), "r2", tools=()),
        chat([GO[0], user(f"So far:\nAnalysis:\nThere was rope.\n\nSummary:\n{text}")], said("Done."), "r3"),
    ]
    (rollout,), _ = read(write(tmp_path, log))
    assert [(turn.chain, turn.purpose, turn.cause_turn) for turn in rollout.turns] == [
        ("main", "act", None),
        ("summary-1", "summary", None),
        ("main", "act", 1),
    ]
    assert rollout.turns[1].trainable and junctions(rollout) == [(2, "fold")]


def test_calls_of_no_session_are_rollouts_by_what_they_share(tmp_path):
    log = []
    for name in ("north", "south"):
        opening = [GO[0], user(f"Tell me of the village in the {name}, please.")]
        log += [
            chat(opening, said(f"The {name}ern one sells rope."), f"{name}1"),
            chat([*opening, said(f"The {name}ern one sells rope."), user("And?")], said("Salt."), f"{name}2"),
        ]
    log = [log[0], log[2], log[1], log[3]]
    for record in log:
        del record["session_id"]
    rollouts, _ = read(write(tmp_path, log))
    assert [len(rollout.turns) for rollout in rollouts] == [2, 2]
    assert not any(junctions(rollout) for rollout in rollouts)


def test_episodes_that_share_a_key_are_rollouts_of_their_own(tmp_path):
    log = []
    for place in ("north", "south"):
        opening = [GO[0], user(f"Count the villages of the {place}, please.")]
        first = said(f"There are nine of them in the {place}.")
        log += [chat(opening, first, f"{place}1"), chat([*opening, first, user("Sure?")], said("Yes."), f"{place}2")]
    rollouts, others = read(write(tmp_path, [recorded(each, k) for k, each in enumerate(log)]))
    assert "without a name of its own held several conversations" in others[-1].reason
    assert [(rollout.id, [turn.chain for turn in rollout.turns]) for rollout in rollouts] == [
        ("k7/1", ["main", "main"]),
        ("k7/2", ["main", "main"]),
    ]
    (rollout,), _ = read(write(tmp_path, [recorded(each, k, "header x-session-id") for k, each in enumerate(log)]))
    assert (rollout.id, len(rollout.turns)) == ("k7", 4)
    named = Options(tokenizer=OPTIONS.tokenizer, template=OPTIONS.template, session_by="session")
    (rollout,), _ = read(write(tmp_path, [recorded(each, k) for k, each in enumerate(log)]), named)
    assert (rollout.id, len(rollout.turns)) == ("k7", 4)


@pytest.mark.parametrize("words", [("", ""), ("I look. ", "Let me see. ")])
def test_episodes_that_call_a_tool_in_the_same_words_are_rollouts_of_their_own(tmp_path, words):
    call = '<tool_call>\n{"name": "list", "arguments": {"path": "."}}\n</tool_call>'
    log = []
    for place, before in zip(("north", "south"), words):
        opening = [GO[0], user(f"Count the villages of the {place}, please.")]
        seen = [*opening, said(before + call), user("<tool_response>\nnine\n</tool_response>")]
        log += [chat(opening, said(before + call), f"{place}1"), chat(seen, said(f"Nine, {place}."), f"{place}2")]
    for record in log:
        del record["session_id"]
    found, _ = read(write(tmp_path, log))
    assert [len(rollout.turns) for rollout in found] == [2, 2]
    assert all(turn.cause_turn is None for rollout in found for turn in rollout.turns)


@pytest.mark.parametrize("query", ["Which of the villages is the oldest one?", "of the villages is the oldest one?"])
def test_whoever_searches_for_the_question_hands_nothing_over(tmp_path, query):
    opening = [GO[0], user("Which of the villages is the oldest one?")]
    search = calling(json.dumps({"query": query}))
    before = [chat(opening, search, "r1"), chat([*opening, search, result("Nothing.")], said("Hard to say."), "r2")]
    folded = [*opening, user("So far nothing was found in the books.")]
    (rollout,), _ = read(write(tmp_path, [*before, chat(folded, said("Perhaps none."), "r3")]))
    assert [turn.chain for turn in rollout.turns] == ["main"] * 3 and len(junctions(rollout)) == 1
    # The same question to an agent with other tools is a sub-agent's task.
    other = chat(opening, said("Perhaps none."), "r3", tools=())
    (rollout,), _ = read(write(tmp_path, [*before, other]))
    assert rollout.turns[2].chain.startswith("subagent") and rollout.turns[2].cause_turn == 0
    # And of two episodes without a name, neither is a part of the other.
    again = [
        chat(opening, said("The northern one."), "r4"),
        chat([*opening, said("The northern one."), user("Sure?")], said("Yes."), "r5"),
    ]
    log = [{key: value for key, value in record.items() if key != "session_id"} for record in (*before, *again)]
    assert [len(found.turns) for found in read(write(tmp_path, log))[0]] == [2, 2]


def test_a_sub_agent_whose_context_was_compacted_goes_on_and_another_task_is_another_one(tmp_path):
    tasks = ["Find all the trains that go to the north.", "Find all the hotels that are in the north."]
    handed = [
        calling(json.dumps({"prompt": task}), f"task {k}", f"c{k}")["tool_calls"][0] for k, task in enumerate(tasks)
    ]
    opening, both = [GO[0], user("Plan the trip to the north, please.")], said("", tool_calls=handed)
    log, found = [chat(opening, both, "r0")], []
    for k, task in enumerate(tasks):
        start, first, last = (
            [GO[0], user(task)],
            said("There is much to read here."),
            said(f"There are three of kind {k}."),
        )
        log += [chat(start, first, f"a{k}"), chat([*start, user("So far: much was read.")], last, f"b{k}")]
        found.append(result(last["content"], f"c{k}"))
    log.append(chat([*opening, both, *found], said("Take the first one."), "r1"))
    (rollout,), _ = read(write(tmp_path, log))
    chains = ["main", *["subagent-1"] * 2, *["subagent-2"] * 2, "main"]
    assert [turn.chain for turn in rollout.turns] == chains
    assert [turn.cause_turn for turn in rollout.turns] == [None, 0, None, 0, None, 4]


def test_episodes_of_one_question_that_begin_alike_at_the_same_time_are_told_apart(tmp_path):
    said_by = [["I look into it now.", f"Found {count} of them.", f"It is number {count}."] for count in range(3)]
    prompts, log = [list(GO) for _ in said_by], []
    for step in range(3):
        for k, answers in enumerate(said_by):
            log.append(chat(prompts[k], said(answers[step]), f"r{k}.{step}"))
            prompts[k] = [*prompts[k], said(answers[step]), user(f"Book {step} of shelf {k}.")]
    for record in log:
        del record["session_id"]
    found, _ = read(write(tmp_path, log))
    shelves = [[int(shelf) for shelf in re.findall(r"shelf (\d)", decoded(rollout, 2))] for rollout in found]
    assert sorted(shelves) == [[0, 0], [1, 1], [2, 2]]
    assert [len(rollout.turns) for rollout in found] == [3, 3, 3] and not any(map(junctions, found))
