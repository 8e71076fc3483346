"""Real OpenCode, Qwen Code and Qwen-Agent through ``mwjax record``, each until its own compaction or truncation has
fired at least twice: what they did, from what was recorded."""

import pytest

from tests.harnesses import checks
from tests.harnesses.play import HARNESSES, missing, played

pytestmark = [pytest.mark.slow, pytest.mark.harness]


@pytest.fixture(scope="module")
def play(request, tmp_path_factory):
    """A harness, played once for all tests of it, and what was imported."""
    if reason := missing(request.param):
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp(request.param)
    played(request.param, folder)
    return checks.imported(folder)


def of(*names):
    return pytest.mark.parametrize("play", names, indirect=True)


@of(*HARNESSES)
def test_all_that_it_reaches_is_the_recorder(play):
    checks.check_the_world(play)


@of(*HARNESSES)
def test_every_call_is_recorded_and_imported(play):
    checks.check_the_recording(play)
    checks.check_the_import(play)


@of(*HARNESSES)
def test_every_token_is_owned_once_behind_what_was_really_sent(play):
    checks.check_the_prefixes(play)


@of(*HARNESSES)
def test_contexts_part_where_the_engine_saw_them_part(play):
    checks.check_the_junctions(play)


@of("opencode")
def test_opencode(play):
    """A title call, a sub-agent, summaries in a root of their own, a refused call and one that broke off."""
    kinds = {("title", "title-1"), ("act", "main"), ("help", "subagent-1"), ("summary", "summary-1")}
    assert set(play.kinds()) == kinds
    assert {turn.purpose for turn in play.rollout.turns if turn.chain == "summary-1"} == {"summary"}
    checks.check_the_helper(play)
    expected = dict.fromkeys(checks.check_the_folds(play), "fold")
    again = play.following(play.quirky("cut"))
    expected[again] = None
    reasons = {each["turn"]: each["reason"] for each in play.junctions}
    assert reasons[again] == "resample"
    # Of the answer that broke off, what had arrived may stay in the history, as a message of its own.
    left = play.following(play.of_turn[again])
    if reasons.get(left) == "insertion":
        expected[left] = None
    checks.check_the_details(play, expected)


@of("qwen-code")
def test_qwen_code(play):
    """Summaries asked for in the conversation itself, and a sub-agent that works beside it."""
    assert set(play.kinds()) == {("act", "main"), ("help", "subagent-1"), ("summary", "main")}
    purposes = {(play.served[number].kind, turn.purpose) for number, turn in zip(play.of_turn, play.rollout.turns)}
    assert purposes == {("act", "act"), ("help", "act"), ("summary", "summary")}
    checks.check_the_helper(play)
    folds = checks.check_the_folds(play)
    # At the call after a fold it puts its opening reminders back.
    back = dict.fromkeys((play.following(play.of_turn[turn]) for turn in folds), "injected_turn")
    checks.check_the_details(play, {**dict.fromkeys(folds, "fold"), **back})


@of("qwen-agent-text", "qwen-agent-raw")
def test_qwen_agent(play):
    """Tools called in text and through the API: it cuts old tool results, then omits them."""
    assert set(play.kinds()) == {("act", "main")}
    pruned = [each["turn"] for each in play.junctions if each["detail"] == "pruned_tool_result"]
    assert len(pruned) >= 2
    assert all("omit" in str(play.served[play.of_turn[turn]].messages) for turn in pruned[1:])
    checks.check_the_details(play, dict.fromkeys(pruned, "pruned_tool_result"))
