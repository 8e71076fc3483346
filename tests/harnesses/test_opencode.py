"""Real OpenCode: a title call, a sub-agent, summaries in a root of their own, a refused call and one that broke off."""

import pytest

from tests.harnesses import checks

pytestmark = [pytest.mark.slow, pytest.mark.harness]
HARNESS = "opencode"


def test_all_that_it_reaches_is_the_recorder(play):
    checks.check_the_world(play)


def test_every_call_is_recorded_and_imported(play):
    checks.check_the_recording(play)
    checks.check_the_import(play)


def test_every_token_is_owned_once_behind_what_was_really_sent(play):
    checks.check_the_prefixes(play)


def test_chains(play):
    assert set(play.kinds()) == {
        ("title", "title-1"),
        ("act", "main"),
        ("help", "subagent-1"),
        ("summary", "summary-1"),
    }
    helper = play.rollout.turns[play.kinds().index(("help", "subagent-1"))]
    assert "task" in play.served[play.of_turn[helper.cause_turn]].answer
    assert {turn.purpose for turn in play.rollout.turns if turn.chain == "summary-1"} == {"summary"}


def test_junctions(play):
    checks.check_the_junctions(play)
    folds = checks.check_the_folds(play)
    expected = dict.fromkeys(folds, "fold")
    expected[play.following(play.quirky("spelled"))] = "retokenised"
    expected[play.following(play.quirky("compact"))] = "tool_json"
    again = play.following(play.quirky("cut"))
    expected[again] = None
    reasons = {each["turn"]: each["reason"] for each in play.junctions}
    assert reasons[again] == "resample"
    # Of the answer that broke off, what had arrived may stay in the history, as a message of its own.
    left = play.following(play.of_turn[again])
    if reasons.get(left) == "insertion":
        expected[left] = None
    assert {each["turn"]: each["detail"] for each in play.junctions} == expected
