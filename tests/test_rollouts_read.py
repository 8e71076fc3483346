"""Files in: plain and compressed, whole and damaged, streamed and at random."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zstandard

from mwjax.rollouts import Refusal, Rollout, RolloutFile, RolloutFileError, iterate, read, rollouts_equal

SUFFIXES = [".jsonl", ".jsonl.gz", ".jsonl.zst"]


def line(name: str, ids: list[int] | None = None) -> bytes:
    turn = {"prompt_ids": ids or [1, 2], "completion_ids": [3], "logprobs": [-0.1]}
    return json.dumps({"id": name, "turns": [turn]}).encode() + b"\n"


def save(path: Path, data: bytes) -> Path:
    pack = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}
    path.write_bytes(pack.get(path.suffix, bytes)(data))
    return path


def names(path: Path) -> list[str]:
    return [rollout.id for rollout in read(path).rollouts]


def test_rollouts_need_no_jax() -> None:
    code = "import sys, mwjax.rollouts; sys.exit(any(m.split('.')[0] in ('jax', 'flax', 'orbax') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_good_and_bad_lines_in_order(tmp_path, suffix: str) -> None:
    data = line("a") + b"{}\n" + line("b") + b"\n" + line("a") + line("c")
    path = save(tmp_path / f"x{suffix}", data)
    items = list(iterate(path))
    assert [number for number, _ in items] == [1, 2, 3, 5, 6]
    assert [item.id if isinstance(item, Rollout) else item.reason for _, item in items] == [
        "a",
        "missing: this is no rollout; mwjax import makes rollouts of logs of other formats",
        "b",
        "'a' was already used in line 1",
        "c",
    ]
    result = read(path)
    assert [rollout.id for rollout in result.rollouts] == ["a", "b", "c"]
    assert result.refused == [
        Refusal(str(path), 2, "turns", items[1][1].reason),
        Refusal(str(path), 5, "id", "'a' was already used in line 1"),
    ]
    assert result.summary() == (
        f"3 rollouts read, 2 refused\n  {path}, line 2: turns: {items[1][1].reason}\n"
        f"  {path}, line 5: id: 'a' was already used in line 1"
    )
    assert result.summary(shown=0) == "3 rollouts read, 2 refused\n  and 2 more: 1 at turns, 1 at id"


def test_an_id_first_seen_on_a_bad_line_is_free(tmp_path) -> None:
    path = save(tmp_path / "x.jsonl", b'{"id": "a", "turns": []}\n' + line("a"))
    assert names(path) == ["a"]


def test_the_vocabulary_is_checked_when_given(tmp_path) -> None:
    path = save(tmp_path / "x.jsonl", line("a", [50]))
    assert names(path) == ["a"]
    assert str(read(path, vocab_size=50).refused[0]).startswith(
        f"{path}, line 1: turns[0].prompt_ids[0]: is 50, outside the vocabulary of 50 ids"
    )


@pytest.mark.parametrize("data", [b"", b"\n", b" \r\n\n"])
def test_an_empty_file_holds_nothing(tmp_path, data: bytes) -> None:
    result = read(save(tmp_path / "x.jsonl", data))
    assert (result.rollouts, result.refused) == ([], [])
    assert len(RolloutFile(tmp_path / "x.jsonl")) == 0


def test_windows_files_and_a_missing_last_newline(tmp_path) -> None:
    data = b"\xef\xbb\xbf" + line("a").replace(b"\n", b"\r\n") + line("b").rstrip()
    path = save(tmp_path / "x.jsonl", data)
    assert names(path) == ["a", "b"]
    assert [rollout.id for rollout in RolloutFile(path)] == ["a", "b"]


def test_lines_longer_than_a_chunk(tmp_path) -> None:
    path = save(tmp_path / "x.jsonl.zst", line("a", [123456] * 200_000) + line("b"))
    assert names(path) == ["a", "b"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_several_members_one_after_another(tmp_path, suffix: str) -> None:
    parts = [save(tmp_path / f"part{suffix}", line(name)).read_bytes() for name in "abc"]
    whole = tmp_path / f"whole{suffix}"
    whole.write_bytes(parts[0] + parts[1] + (b"\0" * 512 if suffix == ".gz" else b"") + parts[2])
    assert names(whole) == ["a", "b", "c"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_data_that_is_cut_off_keeps_what_came_before(tmp_path, suffix: str) -> None:
    one = save(tmp_path / f"one{suffix}", line("a")).read_bytes()
    two = save(tmp_path / f"two{suffix}", line("b")).read_bytes()
    path = tmp_path / f"x{suffix}"
    path.write_bytes(one + two[:-3])
    result = read(path)
    assert result.rollouts[0].id == "a"
    refusal = result.refused[-1]
    assert (
        "the compressed data is damaged or cut off here (the end is missing); whatever followed line" in refusal.reason
    )
    source = RolloutFile(path)
    assert pickle.loads(pickle.dumps(source))[0].id == "a"


def test_compressed_data_that_is_damaged(tmp_path) -> None:
    data = bytearray(save(tmp_path / "x.gz", line("a")).read_bytes())
    data[-6] ^= 255  # in the checksum
    (tmp_path / "x.gz").write_bytes(data)
    assert "incorrect data check" in read(tmp_path / "x.gz").refused[-1].reason


def test_a_file_that_cannot_be_read(tmp_path) -> None:
    for attempt in (read, RolloutFile, lambda path: next(iterate(path))):
        with pytest.raises(RolloutFileError, match=r"^cannot read .*none.jsonl: there is no such file or folder$"):
            attempt(tmp_path / "none.jsonl")
        with pytest.raises(
            ValueError, match=r"^cannot read .*: it is a folder, (not a file$|and without rollouts.json)"
        ):
            attempt(tmp_path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_random_access(tmp_path, suffix: str) -> None:
    data = line("a") + b"junk\n" + line("é", [7] * 9) + b"\n" + line("c", [8])
    path = save(tmp_path / f"x{suffix}", data)
    source = RolloutFile(path, vocab_size=100)
    expected = read(path).rollouts
    assert len(source) == 3 and source.ids == ["a", "é", "c"] and [r.line for r in source.refused] == [2]
    assert source.summary().startswith("3 rollouts read, 1 refused")
    copy = pickle.loads(pickle.dumps(source))
    assert len(pickle.dumps(source)) < 2000
    for each in (source, copy):
        assert all(rollouts_equal(each[k], expected[k]) for k in (2, 0, 1, -1, -3))
        assert [each.line(k) for k in range(3)] == [1, 3, 5]
        assert repr(each) == f"RolloutFile({str(path)!r}, 3 rollouts)"
        for outside in (3, -4):
            with pytest.raises(IndexError, match=f"rollout {outside} of 3 in "):
                each[outside]


def test_random_access_from_threads(tmp_path) -> None:
    path = save(tmp_path / "x.jsonl", b"".join(line(str(k), [k + 1] * (k + 1)) for k in range(40)))
    source = RolloutFile(path)
    with ThreadPoolExecutor(4) as pool:
        for k, rollout in enumerate(pool.map(source.__getitem__, range(40))):
            assert rollout.turns[0].prompt_ids.tolist() == [k + 1] * (k + 1)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_random_access_notices_a_changed_file(tmp_path, suffix: str) -> None:
    path = save(tmp_path / f"x{suffix}", line("a") + line("b"))
    source = pickle.loads(pickle.dumps(RolloutFile(path)))
    save(path, line("b") + line("a"))
    with pytest.raises(
        RolloutFileError, match=r"line 1 changed since the file was opened \(it held rollout 'a', now 'b'\)"
    ):
        source[0]
    source = pickle.loads(pickle.dumps(RolloutFile(path)))
    save(path, b"")
    with pytest.raises(RolloutFileError, match="changed since the file was opened"):
        source[1]
    path.unlink()
    with pytest.raises(RolloutFileError, match="there is no such file"):
        source[1]


def test_a_pipe_gives_its_rollouts_once() -> None:
    reader, writer = os.pipe()
    try:
        os.write(writer, line("a") + line("b"))
        os.close(writer)
        with pytest.raises(RolloutFileError, match=r"^cannot read /dev/fd/\d+ more than once: it is a pipe; save"):
            RolloutFile(f"/dev/fd/{reader}")
        assert [rollout.id for rollout in read(f"/dev/fd/{reader}").rollouts] == ["a", "b"]
    finally:
        os.close(reader)


def test_storage_that_needs_a_package_names_it(monkeypatch) -> None:
    def missing(self, mode):
        raise ImportError("Please install gcsfs to access Google Storage")

    monkeypatch.setattr("etils.epath.gpath._GPath.open", missing)
    with pytest.raises(RolloutFileError, match=r"^cannot read gs://bucket/a.jsonl: Please install gcsfs"):
        read("gs://bucket/a.jsonl")
