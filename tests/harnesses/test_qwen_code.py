"""Real Qwen Code: summaries asked for in the conversation itself, and a sub-agent that works beside it."""

import pytest

from tests.harnesses import checks

pytestmark = [pytest.mark.slow, pytest.mark.harness]
HARNESS = "qwen-code"


def test_all_that_it_reaches_is_the_recorder(play):
    checks.check_the_world(play)


def test_every_call_is_recorded_and_imported(play):
    checks.check_the_recording(play)
    checks.check_the_import(play)


def test_every_token_is_owned_once_behind_what_was_really_sent(play):
    checks.check_the_prefixes(play)


def test_chains(play):
    assert set(play.kinds()) == {("act", "main"), ("help", "subagent-1"), ("summary", "main")}
    helper = play.rollout.turns[play.kinds().index(("help", "subagent-1"))]
    assert '"agent"' in play.served[play.of_turn[helper.cause_turn]].answer
    purposes = {(play.served[number].kind, turn.purpose) for number, turn in zip(play.of_turn, play.rollout.turns)}
    assert purposes == {("act", "act"), ("help", "act"), ("summary", "summary")}


def test_junctions(play):
    checks.check_the_junctions(play)
    folds = checks.check_the_folds(play)
    assert play.detail_at(play.following(play.quirky("spelled"))) == "retokenised"
    assert play.detail_at(play.following(play.quirky("compact"))) == "tool_json"
    # After a fold it puts its opening reminders back.
    rest = {each["detail"] for each in play.junctions if each["turn"] not in folds}
    assert rest == {"retokenised", "tool_json", "injected_turn"}
