"""The frame of mwjax import: detection, several files, names, rewards, what is written and what is not."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys

import pytest
import zstandard
from typer.testing import CliRunner

from mwjax import rollouts
from mwjax.cli import app
from mwjax.rollouts import RolloutFileError
from mwjax.rollouts.readers import READERS, Options, detect, import_files, sampling_of
from mwjax.rollouts.readers.records import json_records
from mwjax.rollouts.record import Sampling


def row(prompt, completion, **more):
    """A row of TRL: the simplest format there is."""
    return {"prompt_ids": prompt, "completion_ids": completion, **more}


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_every_format_says_what_it_is():
    listed = CliRunner().invoke(app, ["import", "--formats"])
    assert listed.exit_code == 0
    assert [line.split()[0] for line in listed.stdout.splitlines()] == list(READERS)
    assert all(reader.DESCRIPTION and name == reader.NAME for name, reader in READERS.items())


@pytest.mark.parametrize("pack", [lambda text: text, gzip.compress, zstandard.compress], ids=["plain", "gzip", "zstd"])
@pytest.mark.parametrize("indent", [None, 2], ids=["one line", "indented"])
@pytest.mark.parametrize("form", ["lines", "array"])
def test_lines_arrays_and_documents_plain_or_compressed(pack, indent, form, tmp_path):
    records = [row([1, 2], [3]), row([1, 2], [4])]
    if form == "array":
        text = json.dumps(records, indent=indent)
    elif indent is None:
        text = "\n".join(map(json.dumps, records))
    else:
        records, text = records[:1], json.dumps(records[0], indent=2)
    path = tmp_path / "log"
    path.write_bytes(pack(text.encode()))
    assert detect(str(path)).NAME == "trl"
    assert [record.value for record in json_records(str(path))] == records


def test_a_damaged_first_line_does_not_hide_the_rest(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"prompt_ids": [1, 2], "comple\n' + json.dumps(row([1, 2], [3])) + "\n")
    assert detect(str(path)).NAME == "trl"
    result = import_files([str(path)], tmp_path / "out.jsonl")
    assert (result.records, result.used, result.refused[0].line) == (2, 1, 1)


def test_a_log_that_breaks_off_is_kept_as_far_as_it_goes(tmp_path):
    path = tmp_path / "log.jsonl.gz"
    whole = gzip.compress(b"".join(json.dumps(row([1, 2], [k])).encode() + b"\n" for k in range(3000)))
    path.write_bytes(whole[:-40])
    result = import_files([str(path)], tmp_path / "out.jsonl")
    assert 0 < result.used < 3000 and len(result.refused) == 1
    assert "damaged or cut off" in result.refused[0].reason


def test_several_files_are_one_set_and_names_stay_apart(tmp_path):
    first = write(tmp_path / "a.jsonl", row([1, 2], [3], rollout_id="r"), row([5, 6], [7], rollout_id="s"))
    again = write(tmp_path / "b.jsonl", row([1, 2], [3], rollout_id="r"), row([8, 9], [7], rollout_id="s"))
    out = tmp_path / "out.jsonl"
    result = import_files([first, again], out)
    found = rollouts.read(out).rollouts
    assert [rollout.id for rollout in found] == ["r", "s", "s~2"]
    assert (result.records, result.used, result.merged) == (4, 3, 1)
    assert "another rollout has the same id" in result.account()
    assert found[2].meta["imported"] == {"format": "trl", "file": again, "line": 2}


def test_rewards_and_groups_from_fields_and_from_a_file(tmp_path):
    log = write(
        tmp_path / "a.jsonl",
        row([1, 2], [3], rollout_id="r", info={"score": [0.5], "task": 7}),
        row([1, 2], [4], rollout_id="s", info={"score": [1], "task": 8}),
    )
    out = tmp_path / "out.jsonl"
    import_files([log], out, options=Options(reward="info.score.0", group_by="info.task"))
    assert [(each.id, each.group, each.reward) for each in rollouts.read(out).rollouts] == [
        ("r", "7", 0.5),
        ("s", "8", 1.0),
    ]
    rewards = write(tmp_path / "rewards.jsonl", {"id": "s", "reward": -1, "group": "g"}, {"id": "nobody", "reward": 1})
    result = import_files([log], out, rewards=rewards, overwrite=True)
    assert [(each.group, each.reward) for each in rollouts.read(out).rollouts] == [(None, None), ("g", -1.0)]
    assert "no rollout has the id 'nobody'" in result.account()
    write(tmp_path / "rewards.jsonl", {"id": "s", "reward": "high"})
    with pytest.raises(ValueError, match=r"rewards\.jsonl, line 1: reward: is the string 'high', must be a number"):
        import_files([log], out, rewards=rewards, overwrite=True)


def test_rows_with_a_field_in_common_are_one_rollout(tmp_path):
    records = [row([1, 2], [3], info={"run": 5}), row([1, 2, 3, 4], [6], info={"run": 5}), row([1], [2], info={})]
    log, out = write(tmp_path / "a.jsonl", *records), tmp_path / "out.jsonl"
    import_files([log], out, options=Options(session_by="info.run"))
    assert [(each.id, len(each.turns)) for each in rollouts.read(out).rollouts] == [("5", 2), ("a:3", 1)]


def test_a_folder_that_is_not_there_is_made(tmp_path):
    log = write(tmp_path / "a.jsonl", row([1, 2], [3]))
    import_files([log], tmp_path / "new" / "folder" / "out.jsonl")
    assert len(rollouts.read(tmp_path / "new" / "folder" / "out.jsonl").rollouts) == 1
    with pytest.raises(RolloutFileError, match="cannot write"):
        import_files([log], tmp_path / "a.jsonl" / "out.jsonl")


def test_options_that_find_nothing_are_said(tmp_path):
    log, out = write(tmp_path / "a.jsonl", row([1, 2], [3], info={"score": 1, "task": 7})), tmp_path / "out.jsonl"
    told = import_files([log], out, options=Options(reward="info.scor", group_by="task")).account()
    assert "--reward info.scor had no effect" in told and "--group-by task had no effect" in told
    right = Options(reward="info.score", group_by="info.task")
    assert "no effect" not in import_files([log], out, options=right, overwrite=True).account()
    for option in (("--template", "t.jinja"), ("--template-option", "a=1")):
        left = CliRunner().invoke(app, ["import", log, "--out", str(out), "--overwrite", *option])
        assert left.exit_code == 2 and "needs --tokenizer" in left.stderr


def test_an_old_file_stays_where_nothing_could_be_imported(tmp_path):
    log, out = write(tmp_path / "a.jsonl", row([1, 2], [-3])), tmp_path / "out.jsonl"
    out.write_text("before")
    with pytest.raises(RolloutFileError, match="exists already"):
        import_files([log], out)
    result = import_files([log], out, overwrite=True)
    assert (result.rollouts, len(result.refused)) == (0, 1)
    assert "not written" in result.summary() and out.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "out.jsonl"]


def test_killed_in_the_middle_it_leaves_the_old_file_and_the_next_run_goes_through(tmp_path):
    log = write(tmp_path / "a.jsonl", *(row([1, 2, k], [3]) for k in range(4000)))
    out = tmp_path / "out.jsonl"
    out.write_text("before")
    code = (
        "import os, signal, sys\n"
        "from mwjax.rollouts.readers import Options, import_files\n"
        "def kill(path, count):\n"
        "    if count > 60_000: os.kill(os.getpid(), signal.SIGKILL)\n"
        "import_files([sys.argv[1]], sys.argv[2], options=Options(progress=kill), overwrite=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, log, str(out)], check=False)
    assert done.returncode == -signal.SIGKILL and out.read_text() == "before"
    result = import_files([log], out, overwrite=True)
    assert result.used == 4000 and len(rollouts.read(out).rollouts) == result.rollouts


def test_ids_beyond_the_vocabulary_are_refused(tmp_path):
    log = write(tmp_path / "a.jsonl", row([1, 2], [3]), row([1, 200], [3]))
    result = import_files([log], tmp_path / "out.jsonl", options=Options(vocab_size=100))
    assert result.rollouts == 1 and "200" in result.refused[0].reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "it is empty"),
        (b"\n \n", "it is empty"),
        (gzip.compress(b"", mtime=0), "it is empty"),
        (b'{"a": 1}\n', r"no known format \(its first record has a\)"),
        (b"words\n", r"no known format \(line 1 is not JSON: "),
        ('{"a": 1}\n'.encode("utf-16"), "no known format .*save it as UTF-8"),
        (b'{"log": {"entries": [{"request": ', r"no known format \(line 1 the line ends early .* it was cut off"),
        (gzip.compress(b'{"a": 1}', mtime=0)[:12], r"no known format \(the compressed data is damaged"),
    ],
)
def test_a_file_of_no_known_format_is_refused_whole(text, reason, tmp_path):
    (tmp_path / "log").write_bytes(text)
    with pytest.raises(RolloutFileError, match=reason):
        import_files([str(tmp_path / "log")], tmp_path / "out.jsonl")


def test_rollouts_need_no_import(tmp_path):
    log, out = write(tmp_path / "a.jsonl", row([1, 2], [3])), tmp_path / "out.jsonl"
    import_files([log], out)
    with pytest.raises(RolloutFileError, match="holds rollouts already"):
        detect(str(out))


def test_mistakes_are_told_in_words(tmp_path):
    log = write(tmp_path / "a.jsonl", row([1, 2], [3]))
    with pytest.raises(ValueError, match="given twice"):
        import_files([log, log], tmp_path / "out.jsonl")
    with pytest.raises(RolloutFileError, match="also a file to import"):
        import_files([log], log, overwrite=True)
    with pytest.raises(ValueError, match="there is no format 'tlr'; the formats are mwjax"):
        import_files([log], tmp_path / "out.jsonl", format="tlr")
    with pytest.raises(ValueError, match="temperature: is 'hot', must be a number"):
        sampling_of(["temperature=hot"])
    with pytest.raises(ValueError, match=r"sampling\.heat: unknown key"):
        sampling_of(["heat=1"])
    assert sampling_of(["temperature=0.6", "top_k=20"]) == Sampling(0.6, 1.0, 20)
