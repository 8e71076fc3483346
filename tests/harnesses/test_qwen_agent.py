"""Real Qwen-Agent, with tools called in text and through the API: it cuts old tool results, then omits them."""

import pytest

from tests.harnesses import checks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.harness,
    pytest.mark.parametrize("play", ["qwen-agent-text", "qwen-agent-raw"], indirect=True),
]


def test_all_that_it_reaches_is_the_recorder(play):
    checks.check_the_world(play)


def test_every_call_is_recorded_and_imported(play):
    checks.check_the_recording(play)
    checks.check_the_import(play)


def test_every_token_is_owned_once_behind_what_was_really_sent(play):
    checks.check_the_prefixes(play)


def test_junctions(play):
    assert set(play.kinds()) == {("act", "main")}
    checks.check_the_junctions(play)
    pruned = [each["turn"] for each in play.junctions if each["detail"] == "pruned_tool_result"]
    assert len(pruned) >= 2
    expected = dict.fromkeys(pruned, "pruned_tool_result")
    expected[play.following(play.quirky("spelled"))] = "retokenised"
    if any(each.quirk == "compact" for each in play.served):
        expected[play.following(play.quirky("compact"))] = "tool_json"
    assert {each["turn"]: each["detail"] for each in play.junctions} == expected
    assert all("omit" in str(play.served[play.of_turn[turn]].messages) for turn in pruned[1:])
