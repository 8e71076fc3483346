"""Session files of real programs: what their readers say the model saw is what the programs really sent.

The files and what was sent were made by tests/fixtures/sessions/make.py.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import sqlite3
from pathlib import Path

import pytest

from mwjax.quickstart import tokenizer_path
from mwjax.rollouts import Refusal, RolloutFileError
from mwjax.rollouts.readers import (
    Found,
    Options,
    Remark,
    chat,
    codex,
    detect,
    import_files,
    opencode,
    qwen_code,
    rendering_for,
)
from mwjax.tree import build

FIXTURES = Path(__file__).parent / "fixtures"
SESSIONS = FIXTURES / "sessions"
OPTIONS = Options(tokenizer=str(tokenizer_path()), template=str(FIXTURES / "templates" / "chatml.jinja"))


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    path = tmp_path_factory.mktemp("opencode") / "opencode.db"
    with sqlite3.connect(path) as connection:
        connection.executescript(f"BEGIN; {(SESSIONS / 'opencode.sql').read_text('utf-8')} COMMIT;")
    connection.close()
    return str(path)


def seen_by(reader, path, monkeypatch):
    """The calls that a reader finds, and its items."""
    calls = []
    made = reader.rollout_items

    def noting(path, name, found, *arguments, **options):
        calls.extend(found)
        return made(path, name, found, *arguments, **options)

    monkeypatch.setattr(reader, "rollout_items", noting)
    return calls, list(reader.read(str(path), OPTIONS))


def sent(name):
    """(messages, answer, tool names) of every call, in the form of the readers."""
    found = []
    for line in (SESSIONS / f"{name}.sent.jsonl").read_text("utf-8").splitlines():
        call = json.loads(line)
        if "input" in call:
            messages, answer = chat.from_responses(call["input"], ""), chat.from_responses(call["answer"], "")[0]
        else:
            messages = [chat.from_openai(each, "") for each in call["messages"]]
            answer = chat.from_openai(call["answer"], "")
        found.append((messages, answer, call["tools"]))
    return found


def plain(message):
    """Without what is not text; arguments parsed, since they are cut apart from each other."""
    calls = [
        (each["id"], each["function"]["name"], _parsed(each["function"]["arguments"]))
        for each in message.get("tool_calls", ())
    ]
    return message["role"], message["content"], message.get("reasoning_content"), message.get("tool_call_id"), calls


def _parsed(arguments):
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def body(messages, answer):
    return [plain(each) for each in (*messages, answer) if each["role"] not in ("system", "developer")]


def rollout_of(items):
    (found,) = [item for item in items if isinstance(item, Found)]
    assert not [item for item in items if isinstance(item, Refusal)]
    return found.rollout


def test_opencode_database_is_what_was_sent_sub_agent_included(database, monkeypatch):
    calls, items = seen_by(opencode, database, monkeypatch)
    expected = [body(messages, answer) for messages, answer, tools in sent("opencode") if tools]
    assert [body(call.messages, call.answer) for call in calls] == expected
    rollout = rollout_of(items)
    (agent,) = [k for k, turn in enumerate(rollout.turns) if turn.chain == "subagent-1"]
    parent = rollout.turns[agent].cause_turn
    assert calls[parent].answer["tool_calls"][0]["function"]["name"] == "task"
    junctions = [junction for junction in build(rollout).junctions if junction.chain == "main"]
    assert [junction.detail for junction in junctions] == ["compaction", "compaction"]
    assert rollout.meta["context_incomplete"] == ["system prompt", "tool list"]


def test_opencode_export_is_the_main_chain_of_the_database(database):
    whole, exported = (
        rollout_of(list(opencode.read(path, OPTIONS))) for path in (database, str(SESSIONS / "opencode-export.json"))
    )
    assert exported.id == whole.id
    main = [turn for turn in whole.turns if turn.chain == "main"]
    assert [turn.prompt_ids.tolist() for turn in exported.turns] == [turn.prompt_ids.tolist() for turn in main]
    assert [turn.completion_ids.tolist() for turn in exported.turns] == [turn.completion_ids.tolist() for turn in main]


def changed(database, tmp_path, *statements):
    path = tmp_path / "changed.db"
    path.write_bytes(Path(database).read_bytes())
    with sqlite3.connect(path) as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()
    return import_files([str(path)], tmp_path / "out.jsonl", options=OPTIONS, overwrite=True)


def test_opencode_rows_that_are_damaged_or_left_over_are_refused_and_the_rest_is_kept(database, tmp_path):
    whole = changed(database, tmp_path)
    assert (whole.used, whole.records) == (20, 20)
    child = "session_id IN (SELECT id FROM session WHERE parent_id IS NOT NULL)"
    with contextlib.closing(sqlite3.connect(database)) as connection:
        ((size,),) = connection.execute(f"SELECT count(*) FROM message WHERE {child}").fetchall()
    for broken in ("{", "null", "[1]"):
        done = changed(database, tmp_path, f"UPDATE message SET data = '{broken}' WHERE {child}")
        assert (done.used, len(done.refused), done.rollouts) == (20 - size, size, 1)
        assert "is no object" in done.refused[0].reason
    done = changed(database, tmp_path, f"UPDATE part SET data = '[1]' WHERE {child}")
    assert (done.used, len(done.refused)) == (20 - size, size)
    done = changed(database, tmp_path, "DELETE FROM session WHERE parent_id IS NOT NULL")
    assert (done.used, len(done.refused)) == (20 - size, size)
    assert "not in the database" in done.refused[0].reason


def test_opencode_calls_that_saw_a_picture_are_refused_and_those_before_it_kept(tmp_path):
    export = json.loads((SESSIONS / "opencode-export.json").read_text("utf-8"))
    users = [each for each in export["messages"] if each["info"]["role"] == "user"]
    users[-1]["parts"].append({"type": "file", "mime": "image/png", "url": "data:"})
    path = tmp_path / "export.json"
    path.write_text(json.dumps(export))
    done = import_files([str(path)], tmp_path / "out.jsonl", options=OPTIONS)
    assert done.rollouts == 1 and done.refused and done.records == len(export["messages"])
    assert all("image/png; only text can become" in refusal.reason for refusal in done.refused)


def test_opencode_database_that_is_locked_or_compressed_says_what_to_do(database, tmp_path, monkeypatch):
    monkeypatch.setattr(opencode, "LOCKED_SECONDS", 0.1)
    path, packed = tmp_path / "locked.db", tmp_path / "opencode.db.gz"
    path.write_bytes(Path(database).read_bytes())
    packed.write_bytes(gzip.compress(path.read_bytes()))
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        with pytest.raises(RolloutFileError, match=r"locked; a program writes to it: close that, or import a copy"):
            list(opencode.read(str(path), OPTIONS))
    with pytest.raises(RolloutFileError, match="decompress it first"):
        list(opencode.read(str(packed), OPTIONS))


def test_opencode_clears_old_tool_results_from_the_time_it_did(tmp_path):
    value = json.loads((SESSIONS / "opencode-export.json").read_text("utf-8"))
    tools = [part for each in value["messages"] for part in each["parts"] if part["type"] == "tool"]
    third = [each for each in value["messages"] if each["info"]["role"] == "assistant"][2]["info"]["time"]["created"]
    tools[0]["state"]["time"]["compacted"] = third
    path = tmp_path / "export.json"
    path.write_text(json.dumps(value))
    rollout = rollout_of(list(opencode.read(str(path), OPTIONS)))
    junctions = build(rollout).junctions
    assert (junctions[0].turn, junctions[0].detail) == (2, "pruned_tool_result")
    assert rollout.meta["junction_details"]["2"] == "pruned_tool_result"


def test_codex_rollout_is_what_was_sent(monkeypatch):
    calls, items = seen_by(codex, SESSIONS / "codex.jsonl", monkeypatch)
    expected = [body(messages, answer) for messages, answer, tools in sent("codex") if tools]
    assert [body(call.messages, call.answer) for call in calls] == expected
    developer = [each["content"] for each in sent("codex")[0][0] if each["role"] == "developer"][1]
    assert calls[0].messages[0]["role"] == "system" and developer in calls[0].messages[0]["content"]
    rollout = rollout_of(items)
    assert [junction.detail for junction in build(rollout).junctions] == ["compaction", "compaction"]
    assert any("text is context only" in item.reason for item in items if isinstance(item, Remark))


def test_qwen_code_session_is_what_was_sent(monkeypatch):
    (path,) = (SESSIONS / "qwen-code" / "chats").glob("*.jsonl")
    calls, items = seen_by(qwen_code, path, monkeypatch)
    expected = [body(messages, answer) for messages, answer, tools in sent("qwen-code") if tools]
    found = [body(call.messages, call.answer) for call in calls]
    first = next(k for k, call in enumerate(calls) if call.detail == "compaction")
    assert len(found[first:]) >= 8 and all(each in expected for each in found[first:])
    for each in found[:first]:  # what the program puts into the first user message is not in its file
        (like,) = [other for other in expected if other[1:] == each[1:]]
        assert like[0][1].startswith("<system-reminder>") and like[0][1].endswith(each[0][1])
    rollout = rollout_of(items)
    details = [junction.detail for junction in build(rollout).junctions if junction.chain == "main"]
    assert len(details) >= 2 and set(details) == {"compaction"}
    assert [turn.chain for turn in rollout.turns].count("subagent-1") == 1
    assert "context before the first message" in rollout.meta["context_incomplete"]


def test_every_session_is_known_by_its_looks(database):
    (chat_file,) = (SESSIONS / "qwen-code" / "chats").glob("*.jsonl")
    files = [database, str(SESSIONS / "opencode-export.json"), str(SESSIONS / "codex.jsonl"), str(chat_file)]
    assert [detect(file).NAME for file in files] == ["opencode", "opencode", "codex", "qwen-code"]


def test_without_a_tokenizer_the_message_says_what_to_give():
    with pytest.raises(ValueError, match=r"codex logs hold messages, not token ids: give .*--tokenizer"):
        list(codex.read(str(SESSIONS / "codex.jsonl"), Options()))


def lines_of_codex():
    return [json.loads(line) for line in (SESSIONS / "codex.jsonl").read_text("utf-8").splitlines()]


def edited(tmp_path, change):
    path = tmp_path / "codex.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in change(lines_of_codex())))
    return str(path)


def test_codex_encrypted_compaction_refuses_what_follows_it(tmp_path):
    def encrypt(lines):
        at = next(k for k, line in enumerate(lines) if line["type"] == "compacted")
        lines[at]["payload"]["replacement_history"] = [{"type": "compaction", "encrypted_content": "x"}]
        return lines

    whole = rollout_of(list(codex.read(str(SESSIONS / "codex.jsonl"), OPTIONS)))
    items = list(codex.read(edited(tmp_path, encrypt), OPTIONS))
    (found,) = [item for item in items if isinstance(item, Found)]
    refused = [item for item in items if isinstance(item, Refusal)]
    first = int(min(whole.meta["junction_details"], key=int))
    second = int(max(whole.meta["junction_details"], key=int))
    # The second compaction gives the history again.
    kept = [*range(first), *range(second, len(whole.turns))]
    assert len(found.rollout.turns) == len(kept)
    assert [len(turn.prompt_ids) for turn in found.rollout.turns] == [len(whole.turns[k].prompt_ids) for k in kept]
    assert len(refused) == 1 + second - first
    assert all("encrypted compaction" in each.reason for each in refused)


def test_codex_answers_of_several_items_are_one_turn(tmp_path):
    def add(lines):
        stamp = lines[-1]["timestamp"]
        thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "More."}]}
        said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": " Indeed."}]}
        more = [{"timestamp": stamp, "type": "response_item", "payload": item} for item in (thought, said)]
        last = next(k for k in reversed(range(len(lines))) if lines[k]["type"] == "response_item")
        return lines[: last + 1] + more + lines[last + 1 :]

    rollout = rollout_of(list(codex.read(edited(tmp_path, add), OPTIONS)))
    text = rendering_for("test", OPTIONS).decode(rollout.turns[-1].completion_ids.tolist())
    assert text.endswith("All files are read: the last village sells rope. Indeed.<|im_end|>") and "More." in text


def test_codex_items_that_are_no_text_are_refused_and_make_the_context_incomplete(tmp_path):
    def add(lines):
        stamp = lines[0]["timestamp"]
        kinds = ("ghost_snapshot", "web_search_call")
        made = [{"timestamp": stamp, "type": "response_item", "payload": {"type": kind}} for kind in kinds]
        return lines[:4] + made + lines[4:]

    items = list(codex.read(edited(tmp_path, add), OPTIONS))
    (refusal,) = [item for item in items if isinstance(item, Refusal)]
    assert refusal.line == 6 and "'web_search_call'" in refusal.reason
    (found,) = [item for item in items if isinstance(item, Found)]
    assert "items that are no text" in found.rollout.meta["context_incomplete"]


def test_codex_rolled_back_turns_are_not_in_later_prompts(tmp_path):
    def roll_back(lines):
        user = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Now?"}]}
        said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "No."}]}
        event = {"type": "thread_rolled_back", "num_turns": 1}
        turn = [("response_item", user), ("response_item", said)]
        tail = [*turn, ("event_msg", event), *turn]
        stamp = lines[-1]["timestamp"]
        return lines + [{"timestamp": stamp, "type": kind, "payload": payload} for kind, payload in tail]

    rollout = rollout_of(list(codex.read(edited(tmp_path, roll_back), OPTIONS)))
    asked, again = rollout.turns[-2:]
    assert asked.prompt_ids.tolist() == again.prompt_ids.tolist()
    assert build(rollout).junctions[-1].reason == "resample"


def test_codex_lines_that_cannot_be_read_make_what_follows_them_incomplete(tmp_path):
    gap = "messages before a line that is missing"

    def missing(change):
        found = [item for item in codex.read(edited(tmp_path, change), OPTIONS) if isinstance(item, Found)]
        return found[0].rollout.meta["context_incomplete"]

    assert gap not in missing(lambda lines: lines)
    assert gap in missing(lambda lines: [*lines[:4], {"half": "a line"}, *lines[5:]])
    assert gap not in missing(lambda lines: [*lines, {"half": "a line"}])  # nothing was seen after it
    done = next(k for k, line in enumerate(lines_of_codex()) if line["type"] == "compacted")
    # A compaction says anew what there was.
    assert gap not in missing(lambda lines: [*lines[:done], {"half": "a line"}, *lines[done:]])


def test_codex_history_that_is_no_text_refuses_the_calls_that_saw_it_and_not_the_file(tmp_path):
    picture = {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}

    def paint(lines):
        last = next(line for line in reversed(lines) if line["type"] == "compacted")
        last["payload"]["replacement_history"].insert(0, picture)
        while lines[-1]["type"] != "response_item":  # the file of a program that was killed ends with an answer
            lines.pop()
        return lines

    items = list(codex.read(edited(tmp_path, paint), OPTIONS))
    refused = [item for item in items if isinstance(item, Refusal)]
    assert refused and all("only text can become token ids" in item.reason for item in refused)
    (found,) = [item for item in items if isinstance(item, Found)]
    whole = rollout_of(list(codex.read(str(SESSIONS / "codex.jsonl"), OPTIONS)))
    assert len(found.rollout.turns) + len(refused) == len(whole.turns)


def test_an_answer_of_opencode_that_failed_is_context_only_and_said_so(tmp_path):
    export = json.loads((SESSIONS / "opencode-export.json").read_text("utf-8"))
    failed = [message["info"] for message in export["messages"] if message["info"]["role"] == "assistant"][-1]
    failed["error"] = {"name": "MessageAbortedError", "data": {}}
    (tmp_path / "export.json").write_text(json.dumps(export))
    items = list(opencode.read(str(tmp_path / "export.json"), OPTIONS))
    turns = rollout_of(items).turns
    assert [turn.trainable for turn in turns] == [True] * (len(turns) - 1) + [False]
    assert any("the answer broke off" in item.reason for item in items if isinstance(item, Remark))


def test_an_answer_of_codex_that_was_aborted_is_context_only(tmp_path):
    aborted = {"timestamp": "2026-01-01T00:00:00Z", "type": "event_msg", "payload": {"type": "turn_aborted"}}

    def abort(lines, place):
        counts = [k for k, line in enumerate(lines) if line["type"] == "token_usage_record"]
        return [*lines[: counts[1] + place], aborted, *lines[counts[1] + place :]]

    for place, trainable in ((0, False), (1, True)):  # before the answer's token count, or while its tool runs
        path = edited(tmp_path, lambda lines, place=place: abort(lines, place))
        assert rollout_of(list(codex.read(path, OPTIONS))).turns[1].trainable is trainable


def test_qwen_code_lines_that_are_missing_make_the_context_incomplete(tmp_path):
    (path,) = (SESSIONS / "qwen-code" / "chats").glob("*.jsonl")
    lines = path.read_text("utf-8").splitlines()
    answers = [k for k, line in enumerate(lines) if json.loads(line)["type"] == "assistant"]
    copy = tmp_path / "session.jsonl"
    copy.write_text("\n".join([*lines[: answers[0]], lines[answers[0]][:40], *lines[answers[0] + 1 :]]))
    (found,) = [item for item in qwen_code.read(str(copy), OPTIONS) if isinstance(item, Found)]
    assert "messages before a line that is missing" in found.rollout.meta["context_incomplete"]


def test_an_answer_of_qwen_code_without_the_counts_that_others_have_broke_off(tmp_path):
    (path,) = (SESSIONS / "qwen-code" / "chats").glob("*.jsonl")
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    answers = [line for line in lines if line["type"] == "assistant"]
    copy = tmp_path / "session.jsonl"
    for without, trainable in ((answers[:1], [False, *[True] * (len(answers) - 1)]), (answers, [True] * len(answers))):
        for line in without:
            line.pop("usageMetadata", None)
        copy.write_text("\n".join(map(json.dumps, lines)))
        (found,) = [item for item in qwen_code.read(str(copy), OPTIONS) if isinstance(item, Found)]
        assert [turn.trainable for turn in found.rollout.turns] == trainable


def test_sessions_without_an_answer_are_accounted_for(tmp_path):
    (path,) = (SESSIONS / "qwen-code" / "chats").glob("*.jsonl")
    export = json.loads((SESSIONS / "opencode-export.json").read_text("utf-8"))
    export["messages"] = [message for message in export["messages"] if message["info"]["role"] == "user"]
    asked = [line for line in path.read_text("utf-8").splitlines() if json.loads(line)["type"] == "user"]
    for name, text, count in (
        ("qwen.jsonl", "\n".join(asked), len(asked)),
        ("open.json", json.dumps(export), len(export["messages"])),
    ):
        (tmp_path / name).write_text(text)
        done = import_files([str(tmp_path / name)], tmp_path / "out.jsonl", options=OPTIONS)
        assert count and (done.records, done.empty) == (count, count) and "has no answer of a model" in done.account()
