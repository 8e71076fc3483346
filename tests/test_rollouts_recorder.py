"""The recorder: what is logged is checked, what is closed is on the disk, and a crash costs no more than a line."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mwjax.rollouts import (
    Recorder,
    RecordError,
    Rollout,
    RolloutFileError,
    Sampling,
    journal,
    read,
    recorder,
    rollouts_equal,
    to_json,
)
from tests.random_rollouts import simulate


def log(into: Recorder, rollout: Rollout) -> Rollout:
    """Record a rollout again, edits where they happened."""
    entry = into.rollout(rollout.id, group=rollout.group, meta=rollout.meta)
    for index, turn in enumerate(rollout.turns):
        for edit in rollout.edits:
            if edit.before_turn == index:
                fields = {name: getattr(edit, name) for name in edit.__dataclass_fields__ if name != "before_turn"}
                entry.edit(**fields)
        fields = {name: getattr(turn, name) for name in turn.__dataclass_fields__}
        assert entry.turn(fields.pop("prompt_ids"), fields.pop("completion_ids"), **fields) == index
    return entry.close(reward=rollout.reward)


def test_the_documented_example_runs(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = textwrap.dedent(str(recorder.__doc__).split("\n\n", 1)[1].rsplit("\n\n", 1)[0])
    assert len([line for line in example.split("with Recorder")[1].splitlines() if line.strip()]) == 10
    names: dict[str, Any] = {
        "context": list(range(1, 9)),
        "steps": 4,
        "limit": 19,
        "note": [90, 91],
        "generate": lambda context: ([20 + len(context), 30], [-0.5, -0.25]),
        "tool_result": lambda completion: [40, 41],
    }
    exec(example, names)
    (rollout,) = read("rollouts.jsonl").rollouts
    assert (rollout.id, rollout.group, rollout.reward) == ("task-7/sample-0", "task-7", 1.0)
    assert [len(turn.prompt_ids) for turn in rollout.turns] == [8, 12, 16, 16]
    assert rollout.turns[3].prompt_ids.tolist()[:8] == [1, 2, 3, 4, 90, 91, 40, 41]
    (edit,) = rollout.edits
    assert edit.before_turn == 3 and edit.evicted == ((4, 10),) and edit.replacement_ids.tolist() == [90, 91]


def test_recorded_is_read_back(tmp_path) -> None:
    path = tmp_path / "x.jsonl"
    given = [simulate(seed, name=f"r{seed}").rollout for seed in range(6)]
    with Recorder(path) as into:
        for k, rollout in enumerate(given):
            assert rollouts_equal(log(into, rollout), rollout)
            assert len(read(path).rollouts) == k + 1  # at once
    result = read(path)
    assert result.refused == [] and all(map(rollouts_equal, result.rollouts, given))
    assert [json.loads(line) for line in path.read_text().splitlines()] == [to_json(rollout) for rollout in given]
    assert os.listdir(tmp_path) == ["x.jsonl"]


def test_what_was_handed_in_may_change_afterwards(tmp_path) -> None:
    prompt, completion, logprobs = np.array([1, 2], np.int32), np.array([3], np.int32), np.array([-0.5])
    replacement = np.array([7], np.int32)
    with Recorder(tmp_path / "x.jsonl") as into:
        entry = into.rollout("r")
        entry.turn(prompt, completion, logprobs=logprobs)
        entry.edit(inserted_at=0, replacement_ids=replacement)
        for array in (prompt, completion, logprobs, replacement):
            array[:] = 0
        entry.turn([7, 1, 2, 3], [4])
        rollout = entry.close()
    assert rollout.turns[0].prompt_ids.tolist() == [1, 2] and rollout.turns[0].completion_ids.tolist() == [3]
    assert rollout.turns[0].logprobs is not None and rollout.turns[0].logprobs.tolist() == [-0.5]
    assert rollout.edits[0].replacement_ids.tolist() == [7]


def test_meta_and_sampling(tmp_path) -> None:
    with Recorder(tmp_path / "x.jsonl") as into:
        entry = into.rollout("r", meta={"a": 1, "b": 1})
        entry.turn([1], [2], sampling=Sampling(0.5, 0.9, 3, "processed"))
        rollout = entry.close(meta={"b": 2})
    assert rollout.meta == {"a": 1, "b": 2} and rollout.turns[0].sampling == Sampling(0.5, 0.9, 3, "processed")
    assert rollouts_equal(read(tmp_path / "x.jsonl").rollouts[0], rollout)


def test_mistakes_are_told_when_they_are_made(tmp_path) -> None:
    path = tmp_path / "x.jsonl"
    with Recorder(path, vocab_size=100) as into:
        entry = into.rollout("r")
        with pytest.raises(RecordError, match=r"^id: 'r' is already being recorded$"):
            into.rollout("r")
        with pytest.raises(RecordError, match=r"^id: is 3, must be a string"):
            into.rollout(3)  # type: ignore[arg-type]
        with pytest.raises(RecordError, match=r"^turns: there are no turns$"):
            entry.close()
        with pytest.raises(
            RecordError, match=r"^turns\[0\].prompt_ids\[1\]: is 100, outside the vocabulary of 100 ids"
        ):
            entry.turn([1, 100], [2])
        with pytest.raises(RecordError, match=r"^turns\[0\].logprobs: has 2, must have one per completion id \(1\)$"):
            entry.turn([1], [2], logprobs=[-1, -1])
        with pytest.raises(RecordError, match=r"^turns\[0\].cause_turn: is 0, this turn itself"):
            entry.turn([1], [2], cause_turn=0)
        with pytest.raises(RecordError, match=r"^turns\[0\].sampling: is an object, must be a Sampling"):
            entry.turn([1], [2], sampling={"temperature": 1})  # type: ignore[arg-type]
        with pytest.raises(RecordError, match=r"^edits\[0\].before_turn: is 0, but before the first turn"):
            entry.edit(evicted=[(0, 1)])
        assert entry.turn([1], [2]) == 0  # none of the refused calls counts
        with pytest.raises(RecordError, match=r"^edits\[0\].replacement_from: turn 0's completion_ids\[0:1\] are not"):
            entry.edit(inserted_at=0, replacement_ids=[3], replacement_from=(0, 0, 1))
        with pytest.raises(RecordError, match=r"^edits\[0\].evicted\[1\]: overlaps edits\[0\].evicted\[0\]$"):
            entry.edit(evicted=[(0, 2), (1, 3)])
        with pytest.raises(RecordError, match=r"^reward: is NaN"):
            entry.close(reward=float("nan"))
        entry.close(reward=0.5)
        for call in (entry.close, entry.edit, lambda: entry.turn([1], [2])):
            with pytest.raises(RecordError, match=r"^id: rollout 'r' is closed$"):
                call()
        with pytest.raises(RecordError, match=r"^id: 'r' is already in .*x.jsonl$"):
            into.rollout("r")
    with pytest.raises(RolloutFileError, match=r"^the recorder of .* is closed$"):
        into.rollout("s")
    assert [rollout.reward for rollout in read(path).rollouts] == [0.5]


def test_an_edit_that_no_turn_followed_is_left_out_and_said(tmp_path) -> None:
    warned = pytest.warns(UserWarning, match=r"^not in .*x.jsonl: 1 edit\(s\) that no turn followed, of 'r'$")
    with warned, Recorder(tmp_path / "x.jsonl") as into:
        entry = into.rollout("r")
        entry.turn([1, 2], [3])
        entry.edit(evicted=[(0, 1)])
        rollout = entry.close()
    assert rollout.edits == () and len(rollout.turns) == 1 and into.left_out == {"r": 1}


def test_an_exception_keeps_what_was_finished(tmp_path) -> None:
    path = tmp_path / "x.jsonl"
    warned = pytest.warns(UserWarning, match=r"x.jsonl: 2 rollout\(s\) that were never closed: 'b', 'c'$")
    with warned, pytest.raises(ZeroDivisionError), Recorder(path) as into:
        for name in "abc":
            entry = into.rollout(name)
            entry.turn([1], [2])
            if name == "a":
                entry.close()
        raise ZeroDivisionError
    assert [rollout.id for rollout in read(path).rollouts] == ["a"]
    assert into.unfinished == ["b", "c"]
    with pytest.raises(RolloutFileError, match=r"is closed"):
        entry.close()


def one(path: Path, name: str) -> None:
    with Recorder(path) as into:
        entry = into.rollout(name)
        entry.turn([1], [2])
        entry.close()


def test_a_file_is_continued(tmp_path) -> None:
    path = tmp_path / "x.jsonl"
    one(path, "a")
    one(path, "b")
    with pytest.raises(RecordError, match=r"'a' is already in"):
        one(path, "a")
    assert [rollout.id for rollout in read(path).rollouts] == ["a", "b"]


@pytest.mark.filterwarnings("ignore:the last line")
@pytest.mark.parametrize("kept", [1, 17, -2])
@pytest.mark.parametrize("block", [1 << 20, 7])
def test_a_line_cut_by_a_crash_is_set_aside(tmp_path, monkeypatch, kept: int, block: int) -> None:
    monkeypatch.setattr(journal, "BLOCK_BYTES", block)
    path = tmp_path / "x.jsonl"
    one(path, "a")
    whole = path.read_bytes()
    torn = whole.replace(b'"a"', b'"b"')[:kept]
    path.write_bytes(whole + torn)
    assert read(path).refused[0].reason.startswith("the line ends early")
    with Recorder(path) as into:
        assert into.torn == (
            f"the last line of {path} was cut short ({len(torn)} bytes, from byte {len(whole)}); "
            f"it is now in {path}.torn"
        )
    one(path, "b")
    assert [rollout.id for rollout in read(path).rollouts] == ["a", "b"] and read(path).refused == []
    path.write_bytes(path.read_bytes() + b'{"again')
    one(path, "c")
    assert Path(f"{path}.torn").read_bytes() == torn + b"\n" + b'{"again\n'


def test_a_journal_follows_its_file(tmp_path) -> None:
    path = tmp_path / "folder" / "x.jsonl"
    path.parent.mkdir()
    written = journal.Journal(path)
    written.append(b"1\n")
    path.rename(tmp_path / "moved")
    written.append(b"2\n")
    assert (tmp_path / "moved").read_bytes() == b"1\n" and path.read_bytes() == b"2\n"
    path.unlink()
    written.append(b"3\n")
    assert path.read_bytes() == b"3\n"
    os.truncate(path, 0)  # as a program does that copies a log and empties it
    written.append(b"4\n")
    with path.open("ab") as other:
        other.write(b"5\n6")
    written.append_soon(b"7\n")
    assert path.read_bytes() == b"4\n5\n6\n7\n"
    path.unlink()
    path.parent.rmdir()
    written.append(b"8\n")
    assert path.read_bytes() == b"8\n"
    path.unlink()
    theirs = journal.Journal(path)
    with pytest.raises(RolloutFileError, match="another recorder"):
        written.append(b"9\n")
    theirs.close()
    written.append(b"9\n")
    written.close()
    assert path.read_bytes() == b"9\n"


def test_a_torn_line_is_reported_as_a_warning(tmp_path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"id": ')
    with pytest.warns(UserWarning, match=r"was cut short"):
        Recorder(path).close()
    assert path.read_bytes() == b""


def test_a_whole_line_without_its_newline_is_kept(tmp_path) -> None:
    path = tmp_path / "x.jsonl"
    one(path, "a")
    path.write_bytes(path.read_bytes().rstrip())
    one(path, "b")
    assert [rollout.id for rollout in read(path).rollouts] == ["a", "b"]


def test_a_killed_process_leaves_its_closed_rollouts(tmp_path) -> None:
    path = tmp_path / "x.jsonl"
    code = f"""
        import os, signal
        from mwjax.rollouts import Recorder
        into = Recorder({str(path)!r})
        for name in "ab":
            entry = into.rollout(name)
            entry.turn([1], [2])
            entry.close() if name == "a" else os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], timeout=60)
    assert done.returncode == -signal.SIGKILL
    one(path, "c")
    assert [rollout.id for rollout in read(path).rollouts] == ["a", "c"]


def test_a_full_disk_costs_nothing_but_the_call(tmp_path, monkeypatch) -> None:
    path = tmp_path / "x.jsonl"
    one(path, "a")
    before = path.read_bytes()
    with Recorder(path) as into:
        entry = into.rollout("b")
        entry.turn([1], [2])
        real = os.pwrite
        calls = []

        def filling(descriptor: int, data: Any, at: int) -> int:
            calls.append(at)
            if len(calls) > 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(descriptor, bytes(data)[:5], at)

        monkeypatch.setattr(journal.os, "pwrite", filling)
        message = (
            r"^cannot write .*: the disk is full; free some space and run again; what was to be added is not in it$"
        )
        with pytest.raises(RolloutFileError, match=message):
            entry.close()
        assert path.read_bytes() == before
        monkeypatch.undo()
        entry.close()
    assert [rollout.id for rollout in read(path).rollouts] == ["a", "b"]


def test_one_file_has_one_recorder(tmp_path) -> None:
    path = tmp_path / "x.jsonl"
    with (
        Recorder(path),
        pytest.raises(RolloutFileError, match=r"another recorder has it open; give each its own file$"),
    ):
        Recorder(path)
    one(path, "a")


def test_where_a_recorder_cannot_write(tmp_path) -> None:
    with pytest.raises(
        RolloutFileError, match=r"an object store has no append; record to a local file and copy it with"
    ):
        Recorder("gs://bucket/x.jsonl")
    with pytest.raises(RolloutFileError, match=r"record to a .jsonl file and compress it with rollouts.write$"):
        Recorder(tmp_path / "x.jsonl.gz")
    with pytest.raises(RolloutFileError, match=r"^cannot write .*none/x.jsonl: its folder does not exist$"):
        Recorder(tmp_path / "none" / "x.jsonl")


def test_many_threads(tmp_path) -> None:
    path = tmp_path / "x.jsonl"
    with Recorder(path) as into:
        shared = into.rollout("shared")
        failures: list[BaseException] = []

        def work(thread: int) -> None:
            try:
                for k in range(10):
                    entry = into.rollout(f"{thread}-{k}")
                    context = [thread + 1]
                    for step in range(5):
                        entry.turn(context, [step])
                        shared.turn([thread, k], [step], chain=f"agent-{thread}")
                        context = [*context, step, 9]
                    entry.close(reward=k)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert failures == []
        shared.close()
    result = read(path)
    assert result.refused == []
    assert {rollout.id for rollout in result.rollouts} == {f"{t}-{k}" for t in range(4) for k in range(10)} | {"shared"}
    assert len(result.rollouts[-1].turns) == 200
