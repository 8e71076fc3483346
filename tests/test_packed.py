"""Packed sets: the same rollouts, batches and runs as from JSON Lines, and clear words for what is wrong with one."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mwjax import rollouts
from mwjax.cli import main
from mwjax.data import Layout, StepSource, iterate_steps, measured, pack_rollouts, scan
from mwjax.rollouts import PackedRollouts, RolloutFileError, Sampling, Turn, rollouts_equal
from mwjax.rollouts.packed_record import decode, encode, largest_id
from mwjax.train import loop
from mwjax.tree import RowShape
from tests import training_runs
from tests.random_rollouts import simulate


def command(*arguments):
    with pytest.raises(SystemExit) as leaving:
        main([str(argument) for argument in arguments])
    return leaving.value.code


def made(count=12):
    simulated = [simulate(seed, name=f"r{seed}").rollout for seed in range(count)]
    return [dataclasses.replace(r, group=f"g{k // 3}", reward=float(k % 2)) for k, r in enumerate(simulated)]


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    rollouts.write(path, made())
    return path


@given(st.integers(0, 10**6), st.booleans(), st.booleans())
def test_a_record_gives_back_the_rollout(seed, edits, rounded):
    rollout = simulate(seed, edits=edits).rollout
    if rounded:  # as engines give them: float32
        turns = [dataclasses.replace(t, logprobs=t.logprobs.astype(np.float32).astype(float)) for t in rollout.turns]
        rollout = dataclasses.replace(rollout, turns=tuple(turns))
    assert rollouts_equal(decode(encode(rollout)), rollout)


def test_a_record_keeps_everything_else_too_and_costs_four_bytes_a_number():
    turn = Turn(
        np.arange(1000, dtype=np.int32),
        np.array([2**31 - 1, 5], np.int32),
        np.array([-0.0, -1 / 3], np.float32).astype(float),
        chain="é\ud800",
        purpose="title",
        trainable=False,
        finish_reason="length",
        sampling=Sampling(0.7, 0.9, 20, "processed"),
        policy_version=3,
    )
    later = Turn(np.concatenate([turn.prompt_ids, turn.completion_ids, [7]]).astype(np.int32), np.zeros(0, np.int32))
    later = dataclasses.replace(later, cause_turn=0)
    rollout = rollouts.Rollout("a", (turn, later), group="g", reward=0.1, meta={"n": 10**30, "logprobs": [1.5, None]})
    record = encode(rollout)
    back = decode(record)
    assert rollouts_equal(back, rollout)
    assert np.signbit(back.turns[0].logprobs[0])
    header = 4 + int.from_bytes(record[:4], "little")
    assert len(record) - header == 4 * (1000 + 2 + 1) + 4 * 2  # the second prompt costs its one new id
    assert largest_id(rollout) == 2**31 - 1


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_set_holds_the_rollouts_of_its_files_in_order(tmp_path, suffix):
    originals = made()
    paths = [tmp_path / f"{name}.jsonl{suffix}" for name in "ab"]
    rollouts.write(paths[0], originals[:5])
    rollouts.write(paths[1], originals[5:])
    found = pack_rollouts(paths, tmp_path / "set", file_bytes=2000)
    packed = PackedRollouts(tmp_path / "set")
    assert found.rollouts == len(packed) == 12
    assert found.files == len(list((tmp_path / "set").glob("*.array_record"))) > 2
    assert found.bytes == sum(path.stat().st_size for path in (tmp_path / "set").iterdir())
    assert packed.ids == [rollout.id for rollout in originals]
    assert all(map(rollouts_equal, packed, originals))
    assert rollouts_equal(packed[-1], originals[-1])
    assert [packed.line(k) for k in range(12)] == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 6, 7]
    assert all(map(rollouts_equal, pickle.loads(pickle.dumps(packed)), originals))
    assert all(map(rollouts_equal, rollouts.read(tmp_path / "set").rollouts, originals))
    with pytest.raises(IndexError, match="rollout 12 of 12"):
        packed[12]
    pack_rollouts([tmp_path / "set"], tmp_path / "again")
    assert PackedRollouts(tmp_path / "again").digest == packed.digest


def test_reading_one_rollout_reads_one_record(written, tmp_path, monkeypatch):
    pack_rollouts([written], tmp_path / "set")
    packed = PackedRollouts(tmp_path / "set")
    asked = []
    records = packed._records
    monkeypatch.setattr(packed, "_records", type("", (), {"__getitem__": lambda _, k: asked.append(k) or records[k]})())
    assert packed[7].id == "r7"
    assert asked == [7]


def leaves(steps):
    return [
        leaf
        for step in steps
        for batch in step.microbatches
        for leaf in (batch.rows.tokens, batch.rows.visible_until, *batch.rows.edges)
    ]


@pytest.mark.parametrize("method", ["packed", "naive_compressed"])
def test_batches_are_those_of_the_json_lines_also_from_kept_measurements(written, tmp_path, monkeypatch, method):
    pack_rollouts([written], tmp_path / "set", file_bytes=3000)
    # Rows that some rollouts do not fit in: the refusals must come back too.
    layout = Layout(method, RowShape(26, 26), rollouts_per_step=5, rows_per_microbatch=2)
    plain = scan([str(written)], layout)
    first = scan([str(tmp_path / "set")], layout)
    monkeypatch.setattr("mwjax.data.scanning._measure", None)  # from here on nothing may be measured
    second = scan([str(tmp_path / "set")], layout)
    assert 0 < len(plain.refused) < 12
    for index, workers in ((first, 0), (second, 1 if method == "packed" else 0)):
        assert (index.ids, index.lines, index.left_out) == (plain.ids, plain.lines, plain.left_out)
        for name in (*measured.PLAIN, "units", "needs"):
            one, other = getattr(plain, name), getattr(index, name)
            assert len(one) == len(other)
            for a, b in zip(one, other):
                np.testing.assert_array_equal(a, b)
        assert str(index.refused[0]).startswith(f"{tmp_path / 'set'} (packed from {written}), line ")
        assert [refusal.line for refusal in index.refused] == [refusal.line for refusal in plain.refused]
        for one, other in zip(
            leaves(map(StepSource(plain, seed=3).__getitem__, range(3))),
            leaves(iterate_steps(StepSource(index, seed=3), 0, 3, workers=workers)),
            strict=True,
        ):
            np.testing.assert_array_equal(one, other)


def test_measurements_are_kept_by_records_layout_vocabulary_and_code(written, tmp_path, monkeypatch):
    folder, layout = tmp_path / "set", Layout("packed", RowShape(160, 160))
    pack_rollouts([written], folder)

    def kept():
        return len(list(folder.glob("measured-*.npz")))

    scan([str(folder)], layout)
    scan([str(folder)], layout)
    assert kept() == 1
    scan([str(folder)], dataclasses.replace(layout, rollouts_per_step=3))
    scan([str(folder)], layout, vocab_size=40)
    assert kept() == 3
    monkeypatch.setattr(measured, "_code", lambda: "another")
    scan([str(folder)], layout)
    assert kept() == 4
    (damaged,) = [measured._file((PackedRollouts(folder),), layout)]
    damaged.write_bytes(damaged.read_bytes()[:100])
    assert scan([str(folder)], layout).ids == scan([str(written)], layout).ids
    scan([str(folder), str(written)], layout)  # the second is no packed set: nothing is kept
    assert kept() == 4


def test_a_folder_that_cannot_be_written_to_is_measured_every_time(written, tmp_path, monkeypatch):
    pack_rollouts([written], tmp_path / "set")

    def full(path):
        raise RolloutFileError("read-only")

    monkeypatch.setattr(measured, "replacing", full)
    layout = Layout("packed", RowShape(160, 160))
    assert scan([str(tmp_path / "set")], layout).ids == scan([str(written)], layout).ids
    assert not list((tmp_path / "set").glob("measured*"))


def test_a_run_is_the_same_from_both_and_may_change_from_one_to_the_other(tmp_path):
    path = training_runs.write(tmp_path)
    pack_rollouts([path], tmp_path / "set", file_bytes=5000)
    packed = f"data.paths={tmp_path / 'set'}"
    loop.run(training_runs.configure(tmp_path, run_dir="plain"))
    loop.run(training_runs.configure(tmp_path, "data.steps=1", run_dir="both"))
    loop.run(training_runs.configure(tmp_path, packed, run_dir="both"))
    timed = {"seconds", "tokens_per_second"}

    def rows(run):
        lines = [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        return [{key: value for key, value in line.items() if key not in timed} for line in lines]

    assert len(rows("plain")) == 4
    assert rows("both") == rows("plain")
    assert f"{tmp_path / 'set'}: 10 rollouts used, 0 refused" in (tmp_path / "both" / "card.md").read_text()


def test_the_command_packs_reports_and_refuses(written, tmp_path, capsys):
    lines = written.read_text().splitlines()
    broken = json.loads(lines[3])
    broken["turns"][0]["completion_ids"] = ["x"]
    lost = {"before_turn": 1, "evicted": [[0, 1]], "inserted_at": 0, "replacement_ids": [39] * 60}
    contradicting = {**json.loads(lines[4]), "edits": [lost]}
    lines[3:5] = [json.dumps(broken), json.dumps(contradicting)]
    written.write_text("\n".join([*lines, lines[0].replace('"r0"', '"r12"'), lines[1]]) + "\n")
    assert command("pack-data", written, "--out", tmp_path / "set", "--shard-mb", 0.002) == 1
    out, err = capsys.readouterr()
    assert err.startswith("11 rollouts read, 3 refused\n")
    assert f"{written}, line 4: turns[0].completion_ids[0]: is the string 'x', must be an integer" in err
    assert f"{written}, line 5: edits[0]" in err
    assert f"{written}, line 14: id: 'r1' was already used in line 2" in err
    assert f"{tmp_path / 'set'}: 11 rollouts in " in out
    for verb in (["inspect", "--json"], ["audit"]):
        assert command(*verb, tmp_path / "set") == 0
    # A second file with an id of the first.
    other = tmp_path / "other.jsonl"
    other.write_text(lines[0] + "\n")
    assert command("pack-data", written, other, "--out", tmp_path / "set", "--overwrite") == 1
    assert f"{other}, line 1: id: 'r0' stands in {written}, line 1 already" in capsys.readouterr().err


def test_audit_and_inspect_say_the_same_of_a_set(written, tmp_path, capsys):
    pack_rollouts([written], tmp_path / "set")
    said = []
    for source in (written, tmp_path / "set"):
        assert command("inspect", source, "--json", "--tokens") == 0
        inspected = capsys.readouterr().out
        assert command("audit", source, "--json", "-") == 0
        audit = json.loads(capsys.readouterr().out)
        said.append((inspected, {key: value for key, value in audit.items() if key != "files"}))
    assert said[0] == said[1]


def test_what_is_there_is_kept(written, tmp_path, capsys):
    folder = tmp_path / "set"
    pack_rollouts([written], folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    set_and_more = tmp_path / "more"
    pack_rollouts([written], set_and_more)
    (set_and_more / "notes.txt").write_text("keep")
    for arguments, said in (
        ([written, "--out", folder], "it is a packed set already; --overwrite replaces it"),
        ([bad, "--out", folder, "--overwrite"], "no usable rollout in .*bad.jsonl: 1 refused; .*turns: missing"),
        ([tmp_path / "none", "--out", folder, "--overwrite"], "there is no such file or folder"),
        ([written, "--out", tmp_path / "mine", "--overwrite"], "the folder holds something else"),
        ([written, "--out", set_and_more, "--overwrite"], "it holds notes.txt too, which is no part of a packed set"),
        ([written, "--out", bad], "it is a file; give a folder"),
        ([written, "--out", "gs://bucket/set"], "ArrayRecord writes and reads local files only"),
    ):  # fmt: skip
        assert command("pack-data", *arguments) == 2
        assert re.search(said, capsys.readouterr().err)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert (tmp_path / "mine" / "notes.txt").read_text() == (set_and_more / "notes.txt").read_text() == "keep"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl", "mine", "more", "rollouts.jsonl", "set"]


def test_a_file_given_twice_is_taken_once(written, tmp_path):
    layout = Layout("packed", RowShape(4096, 4096))
    index = scan([str(written), str(written)], layout)
    assert (len(index.ids), len(index.refused)) == (12, 12)
    assert "id: 'r0' stands in" in str(index.refused[0])
    twice = pack_rollouts([written, written], tmp_path / "set")
    assert (twice.rollouts, len(twice.refused)) == (12, 12)
    assert len(scan([str(tmp_path / "set")] * 2, layout).ids) == 12


def test_killed_half_way_nothing_is_taken_for_a_set(written, tmp_path):
    script = (
        "import sys, time\n"
        "from mwjax.data import pack_rollouts\n"
        "def slow(path, offset):\n"
        "    print(offset, flush=True); time.sleep(0.2)\n"
        "pack_rollouts([sys.argv[1]], sys.argv[2], file_bytes=1000, progress=slow)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(written), str(tmp_path / "set")], stdout=subprocess.PIPE, text=True
    )
    for _ in range(4):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not (tmp_path / "set").exists()
    pack_rollouts([written], tmp_path / "set")
    assert len(PackedRollouts(tmp_path / "set")) == 12


def test_a_damaged_set_is_named(written, tmp_path):
    folder = tmp_path / "set"
    pack_rollouts([written], folder)
    (part,) = folder.glob("*.array_record")
    whole = part.read_bytes()
    part.write_bytes(whole[:3000] + bytes([whole[3000] ^ 255]) + whole[3001:])  # within the records
    with pytest.raises(RolloutFileError, match=r"rollout 'r\d+' cannot be read: the set is damaged \(.*line \d+ of"):
        list(PackedRollouts(folder))
    part.write_bytes(whole[:1000])
    with pytest.raises(RolloutFileError, match=r"00000.array_record: it has 1,000 bytes, the set was packed with"):
        PackedRollouts(folder)
    part.unlink()
    with pytest.raises(RolloutFileError, match="no such file or folder; the packed set is incomplete"):
        PackedRollouts(folder)
    part.write_bytes(whole)
    table = json.loads((folder / "rollouts.json").read_text())
    (folder / "rollouts.json").write_text(json.dumps({**table, "ids": table["ids"][::-1]}))
    with pytest.raises(RolloutFileError, match=r"rollout 'r11' cannot be read: .*it holds 'r0'"):
        PackedRollouts(folder)[0]
    (folder / "rollouts.json").write_text(json.dumps({**table, "format": "mwjax packed rollouts, 9"}))
    with pytest.raises(RolloutFileError, match="has the format 'mwjax packed rollouts, 9', this mwjax reads"):
        PackedRollouts(folder)
    (folder / "rollouts.json").write_text(json.dumps({key: table[key] for key in table if key != "ids"}))
    with pytest.raises(RolloutFileError, match=r"is damaged \(ids: missing\); copy or pack the set again"):
        PackedRollouts(folder)
    (folder / "rollouts.json").write_text(json.dumps(table)[:-20])
    with pytest.raises(RolloutFileError, match=r"is damaged .*; copy or pack the set again"):
        PackedRollouts(folder)
    with pytest.raises(RolloutFileError, match="it is a part of a packed set; give the folder it is in"):
        rollouts.read(part)
    with pytest.raises(RolloutFileError, match="ArrayRecord reads local files only; copy the folder"):
        PackedRollouts("gs://bucket/set")


def test_ids_outside_the_vocabulary_are_refused_as_from_the_file(written, tmp_path):
    pack_rollouts([written], tmp_path / "set")
    plain, packed = (rollouts.open_rollouts(path, vocab_size=39) for path in (written, tmp_path / "set"))
    assert 0 < len(packed) < 12
    assert packed.ids == plain.ids
    assert [(r.line, r.field, r.reason) for r in packed.refused] == [(r.line, r.field, r.reason) for r in plain.refused]
    assert all(map(rollouts_equal, packed, plain))


def test_a_disk_that_is_full_leaves_nothing(written, tmp_path):
    resource = pytest.importorskip("resource")
    script = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))\n"
        "from mwjax.cli import main\n"
        "main(['pack-data', sys.argv[1], '--out', sys.argv[2]])\n"
    )
    assert resource
    done = subprocess.run([sys.executable, "-c", script, written, tmp_path / "set"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("mwjax: cannot write ")
    assert "00000.array_record: " in done.stderr
    assert os.listdir(tmp_path) == ["rollouts.jsonl"]
