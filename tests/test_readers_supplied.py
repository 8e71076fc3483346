"""What session files lack, given by the user: their rollouts are then what was really sent, and serve training."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest
from typer.testing import CliRunner

from mwjax import rollouts
from mwjax.cli import app, main
from mwjax.data import Layout, scan
from mwjax.rollouts.readers import (
    Found,
    Remark,
    codex,
    import_files,
    opencode,
    opening_in,
    qwen_code,
    rendering_for,
    tools_in,
)
from mwjax.rollouts.readers.rendered import rollout_items
from mwjax.rollouts.readers.seen import Seen
from mwjax.rollouts.readers.supplied import completed
from mwjax.rollouts.readers.system_prompts import steady_system
from mwjax.tree import RowShape
from tests.test_readers_claude_code import compacted, text
from tests.test_readers_requests import GO, said, user, write
from tests.test_readers_requests import chat as exchange
from tests.test_readers_sessions import OPTIONS, SESSIONS, database, seen_by, sent

__all__ = ["database"]

TOOL = {"type": "function", "function": {"name": "read", "description": "d", "parameters": {"type": "object"}}}
OWN = {"name": "read", "description": "d", "input_schema": {"type": "object"}}


def given(tmp_path, opening, tools=(TOOL,)):
    """Options with both, by way of files."""
    system, listed = tmp_path / "system", tmp_path / "tools.json"
    system.write_text(opening if isinstance(opening, str) else json.dumps(opening))
    listed.write_text(json.dumps(list(tools)))
    return dataclasses.replace(OPTIONS, opening=opening_in(str(system)), tools=tools_in(str(listed)))


def whole(message):
    calls = [(each["id"], each["function"]["name"]) for each in message.get("tool_calls", ())]
    return message["role"], message["content"], message.get("tool_call_id"), calls


def imported(path, options, tmp_path, **more):
    out = tmp_path / "out.jsonl"
    done = import_files([str(path)], out, options=options, overwrite=True, **more)
    return done, rollouts.read(out).rollouts


def sft(path):
    """Ids that SFT takes, and the fields for which it refuses others."""
    index = scan([str(path)], Layout("packed", RowShape(40_000, 40_000)))
    return index.ids, {refusal.field for refusal in index.refused}


def test_qwen_code_with_its_opening_is_what_was_sent(tmp_path, monkeypatch):
    (path,) = (SESSIONS / "qwen-code" / "chats").glob("*.jsonl")
    expected = [[whole(each) for each in messages] for messages, _, tools in sent("qwen-code") if tools]
    first, question = sent("qwen-code")[0][0][:2]
    calls, _ = seen_by(qwen_code, path, monkeypatch)
    reminder = question["content"].removesuffix(calls[0].messages[0]["content"]).removesuffix("\n")
    assert reminder.startswith("<system-reminder>")
    options = given(tmp_path, [first, user(reminder)])
    made, missing, _ = completed(
        calls, ["system prompt", "tool list", "context before the first message"], options, always_before=False
    )
    main_calls = [call for call in made if call.chain == "main"]
    assert not missing and len(main_calls) == 12
    for call in main_calls:
        assert [whole(each) for each in call.messages] in expected
        assert call.tools == (TOOL,) and call.trainable
    assert [call.trainable for call in made if call.chain != "main"] == [False]

    monkeypatch.undo()
    done, (rollout,) = imported(path, options, tmp_path)
    assert "context_incomplete" not in rollout.meta and done.supplied == 1
    assert rollout.meta["supplied"] == ["system prompt", "tool list", "context before the first message"]
    assert any("sub-agents are context only" in remark.reason for remark in done.remarks)
    assert sft(tmp_path / "out.jsonl") == ((rollout.id,), set())


def test_a_text_is_the_system_prompt_alone_and_what_else_is_missing_still_bars(tmp_path):
    (path,) = (SESSIONS / "qwen-code" / "chats").glob("*.jsonl")
    _, (rollout,) = imported(path, given(tmp_path, "Be brief."), tmp_path)
    assert rollout.meta["context_incomplete"] == ["context before the first message"]
    with pytest.raises(ValueError, match="context_incomplete"):
        sft(tmp_path / "out.jsonl")


def test_opencode_with_system_prompt_and_tools_is_what_was_sent(tmp_path, database, monkeypatch):
    mine = [messages for messages, _, tools in sent("opencode") if "task" in tools]
    system = mine[0][0]["content"]
    calls, _ = seen_by(opencode, database, monkeypatch)
    made, missing, _ = completed(calls, ["system prompt", "tool list"], given(tmp_path, system), always_before=False)
    assert not missing
    expected = [[whole(each) for each in messages] for messages in mine]
    main_calls = [call for call in made if call.chain == "main"]
    assert len(main_calls) > 5 and all([whole(each) for each in call.messages] in expected for call in main_calls)


def test_codex_gets_another_system_prompt_before_what_its_developer_says(tmp_path, monkeypatch):
    own, _ = seen_by(codex, SESSIONS / "codex.jsonl", monkeypatch)
    monkeypatch.undo()
    made = []
    items = codex.rollout_items
    monkeypatch.setattr(codex, "rollout_items", lambda *a, **k: made.extend(a[2]) or items(*a, **k))
    (found,) = [
        item
        for item in codex.read(str(SESSIONS / "codex.jsonl"), given(tmp_path, "Be brief."))
        if hasattr(item, "rollout")
    ]
    assert found.rollout.meta["supplied"] == ["system prompt", "tool list"]
    base = json.loads((SESSIONS / "codex.jsonl").read_text().splitlines()[0])["payload"]["base_instructions"]["text"]
    for before, after in zip(own, made, strict=True):
        assert before.messages[0]["content"].startswith(base)
        assert after.messages[0]["content"] == "Be brief." + before.messages[0]["content"].removeprefix(base)
        assert after.messages[1:] == before.messages[1:]


def test_claude_code_has_its_reminder_after_a_compaction_too(tmp_path):
    session = compacted()
    session.user("u9", "And?").said("a9", "m9", text("Rope."))
    options = given(tmp_path, [{"role": "system", "content": "Be brief."}, user("A reminder.")], tools=(OWN,))
    _, (rollout,) = imported(session.write(tmp_path), options, tmp_path)
    assert "context_incomplete" not in rollout.meta
    for turn in rollout.turns:
        prompt = rendering_for("test", options).decode(turn.prompt_ids.tolist())
        assert "Be brief." in prompt and prompt.count("A reminder.\n") == 1
    assert any(detail == "compaction" for detail in rollout.meta["junction_details"].values())


def test_tools_of_both_apis_are_one_form_and_files_that_do_not_do_are_messages(tmp_path):
    path = tmp_path / "f"
    for listed in ([TOOL], [OWN], {"model": "m", "tools": [OWN]}):
        path.write_text(json.dumps(listed))
        assert tools_in(str(path)) == (TOOL,)
    for content, reason in (("{}", "must be a JSON list of tools"), ("[3]", r"\[0\] is no tool"), ("x", "JSON list")):
        path.write_text(content)
        with pytest.raises(ValueError, match=reason):
            tools_in(str(path))
    for content, reason in ((" ", "is empty"), ('[{"role": "user"}]', "must begin with"), ("[3]", "no chat message")):
        path.write_text(content)
        with pytest.raises(ValueError, match=reason):
            opening_in(str(path))
    with pytest.raises(ValueError, match="cannot read"):
        opening_in(str(tmp_path / "none"))


def test_options_without_an_effect_are_said_to_have_none(tmp_path):
    path = write(tmp_path, [exchange(GO, said("Rope."), "r1")])
    options = dataclasses.replace(given(tmp_path, "Be brief."), normalise_system=True)
    done, (rollout,) = imported(path, options, tmp_path)
    reasons = " ".join(remark.reason for remark in done.remarks)
    assert "--system and --tools had no effect" in reasons and "--normalise-system had no effect" in reasons
    assert "supplied" not in rollout.meta


@pytest.mark.parametrize("normalise", [False, True])
def test_a_line_that_changes_is_said_and_made_one_whatever_the_messages_come_from(normalise):
    calls, history = [], [user("Go")]
    for place in range(3):
        system = {"role": "system", "content": f"Be brief.\nUse tools.\nAsk nothing.\nCost: {place}"}
        answer = said(f"Step {place}.")
        calls.append(Seen((system, *history), answer, line=place + 1))
        history = [*history, answer, user("More.")]
    options = dataclasses.replace(OPTIONS, normalise_system=normalise)
    items = list(rollout_items("f", "r", calls, options, rendering_for("test", options)))
    (found,) = [item for item in items if isinstance(item, Found)]
    (remark,) = [item for item in items if isinstance(item, Remark)]
    assert "changes from call to call in a line like 'Cost: 1'" in remark.reason
    details = found.rollout.meta.get("junction_details")
    assert details == (None if normalise else {"1": "system_prompt", "2": "system_prompt"})
    assert found.rollout.meta.get("system_normalised") == (2 if normalise else None)
    costs = [rendering_for("test", options).decode(turn.prompt_ids.tolist()) for turn in found.rollout.turns]
    assert ["Cost: 0" in prompt for prompt in costs] == ([True] * 3 if normalise else [True, False, False])


def test_thousands_of_calls_without_a_session_are_compared_with_those_of_their_own_conversation():
    calls = [
        Seen(({"role": "system", "content": f"Be brief.\nUse tools.\nCost: {cost}"}, user(f"Task {k}")), said("Done."))
        for cost in range(2)
        for k in range(2000)
    ]
    began = time.monotonic()
    steady, lines = steady_system(calls, one=False, normalise=True)
    assert time.monotonic() - began < 10  # comparing each call with each takes minutes
    assert lines == ["Cost: 1"] * 2000
    assert [call.messages for call in steady[2000:]] == [call.messages for call in calls[:2000]]


def test_the_command_completes_a_session(tmp_path, capsys, database):
    (tmp_path / "system.txt").write_text("Be brief.")
    (tmp_path / "tools.json").write_text(json.dumps([OWN]))
    out = tmp_path / "out.jsonl"
    files = ["--system", str(tmp_path / "system.txt"), "--tools", str(tmp_path / "tools.json")]
    model = ["--tokenizer", OPTIONS.tokenizer, "--template", OPTIONS.template]
    done = CliRunner().invoke(app, ["import", database, "--out", str(out), *files, *model])
    assert done.exit_code == 0 and "context_incomplete" not in done.output
    assert sft(out)[1] == set()
    with pytest.raises(SystemExit) as stopped:
        main(["import", database, "--out", str(out), "--overwrite", "--system", "nowhere", *model])
    assert stopped.value.code == 2 and "cannot read nowhere" in capsys.readouterr().err
