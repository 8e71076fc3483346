"""Files out: exact round trips, the compact form, and all or nothing."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from etils.epath import backend
from hypothesis import given
from hypothesis import strategies as st

from mwjax.rollouts import (
    Edit,
    RecordError,
    Rollout,
    RolloutFile,
    RolloutFileError,
    Sampling,
    Turn,
    from_json,
    read,
    rollouts_equal,
    storage,
    to_json,
    write,
)
from tests.random_rollouts import simulate

CASES = sorted((Path(__file__).parent / "cases").glob("*.json"))
SUFFIXES = [".jsonl", ".jsonl.gz", ".jsonl.zst"]


def turn(prompt: list[int], completion: list[int], **rest: Any) -> Turn:
    return Turn(np.array(prompt, np.int32), np.array(completion, np.int32), **rest)


def size(value: dict[str, Any]) -> int:
    return sum(len(t.get("prompt_ids", ())) + len(t.get("append_ids", ())) for t in value["turns"])


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_cases_round_trip_in_both_forms(path: Path, tmp_path) -> None:
    case = json.loads(path.read_text())
    rollouts = [from_json(value) for value in case["rollouts"]]
    for rollout, value in zip(rollouts, case["rollouts"]):
        assert to_json(rollout, extends=False) == value
        assert rollouts_equal(from_json(to_json(rollout)), rollout)
        if "compact" in case["expect"]:
            second = to_json(rollout)["turns"][1]
            assert {key: second[key] for key in ("extends", "append_ids")} == case["expect"]["compact"]
            assert "prompt_ids" not in second
    for suffix in SUFFIXES:
        for extends in (True, False):
            target = tmp_path / f"x{suffix}"
            assert write(target, rollouts, extends=extends) == len(rollouts)
            result = read(target)
            assert result.refused == [] and len(result.rollouts) == len(rollouts)
            assert all(map(rollouts_equal, result.rollouts, rollouts))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.jsonl", "x.jsonl.gz", "x.jsonl.zst"]


def test_defaults_are_left_out() -> None:
    rollout = Rollout("r", (turn([1], [2]), turn([3], [], sampling=Sampling(top_k=5))), edits=(Edit(1),))
    assert to_json(rollout) == {
        "id": "r",
        "turns": [
            {"prompt_ids": [1], "completion_ids": [2]},
            {"prompt_ids": [3], "completion_ids": [], "sampling": {"top_k": 5}},
        ],
        "edits": [{"before_turn": 1}],
    }


def test_the_longest_earlier_turn_is_extended() -> None:
    turns = [
        turn([1, 2], [3]),
        turn([1, 2, 3, 4], [5, 6]),
        turn([1, 2, 3, 4], [5, 6]),  # said twice: the later one is taken
        turn([1, 2, 3, 4, 5, 6], []),  # nothing appended, nothing sampled
        turn([1, 2, 3, 9], [9], chain="side"),
        turn([1, 2, 3, 4, 5, 6, 7], [8]),
        turn([1, 2], [3]),  # a retry: no prompt + completion fits in so short a prompt
    ]
    written = to_json(Rollout("r", tuple(turns)))["turns"]
    assert [entry.get("extends") for entry in written] == [None, 0, 0, 2, 0, 3, None]
    assert [entry.get("append_ids") for entry in written] == [None, [4], [4], [], [9], [7], None]


def test_plain_growth_is_quadratic_and_the_extends_form_linear() -> None:
    context, turns = [1], []
    for step in range(50):
        turns.append(turn(context, [step]))
        context = [*context, step, step + 1]
    rollout = Rollout("r", tuple(turns))
    assert size(to_json(rollout)) == 50 and size(to_json(rollout, extends=False)) == sum(1 + 2 * k for k in range(50))


finite = st.floats(max_value=0.0, allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
small_ids = st.lists(st.integers(0, 3), max_size=5)  # few ids, so that prompts repeat and extend one another


@st.composite
def rollouts(draw: Any) -> Rollout:
    turns: list[Turn] = []
    for index in range(draw(st.integers(1, 6))):
        prompt = draw(small_ids)
        if turns and draw(st.booleans()):
            base = turns[draw(st.integers(0, index - 1))]
            prompt = [*base.prompt_ids.tolist(), *base.completion_ids.tolist(), *prompt]
        completion = draw(small_ids | st.lists(st.integers(0, 2**31 - 1), max_size=3))
        some = st.none() | st.lists(finite, min_size=len(completion), max_size=len(completion)).map(np.array)
        logprobs = draw(some)
        turns.append(
            turn(
                prompt or [0],
                completion,
                logprobs=None if logprobs is None else logprobs.astype(np.float64),
                chain=draw(st.sampled_from(["main", "side"])),
                purpose=draw(st.text(max_size=3)),
                trainable=draw(st.booleans()),
                finish_reason=draw(st.none() | st.text(max_size=4)),
                sampling=Sampling(
                    draw(st.floats(0, 2)),
                    draw(st.sampled_from([1.0, 0.95])),
                    0,
                    draw(st.sampled_from(["raw", "processed"])),
                ),
                policy_version=draw(st.none() | st.integers(-1, 9)),
                cause_turn=draw(st.none() | st.integers(0, index - 1)) if index else None,
            )
        )
    edits = []
    for before in range(1, len(turns)):
        source = turns[before - 1].completion_ids
        if draw(st.booleans()):
            taken = len(source) > 0 and draw(st.booleans())
            ranges = [(4 * k + draw(st.integers(0, 1)), 4 * k + draw(st.integers(2, 4))) for k in range(3)]
            edits.append(
                Edit(
                    before,
                    evicted=tuple(draw(st.permutations(ranges))),
                    inserted_at=draw(st.integers(0, 9)),
                    replacement_ids=source if taken else np.array(draw(small_ids), np.int32),
                    replacement_from=(before - 1, 0, len(source)) if taken else None,
                    restored=((2, 3),) if draw(st.booleans()) else (),
                    author=draw(st.none() | st.text(max_size=3)),
                )
            )
    name = draw(st.text(min_size=1, max_size=5))
    reward = draw(st.none() | st.floats(allow_nan=False, allow_infinity=False))
    meta = draw(st.dictionaries(st.text(), json_values, max_size=3))
    return Rollout(name, tuple(turns), tuple(edits), draw(st.none() | st.text(min_size=1, max_size=3)), reward, meta)


@given(rollouts())
def test_round_trip_to_the_bit(tmp_path_factory, rollout: Rollout) -> None:
    path = tmp_path_factory.getbasetemp() / "round_trip.jsonl"
    for extends in (True, False):
        write(path, [rollout], extends=extends)
        result = read(path)
        assert result.refused == []
        assert rollouts_equal(result.rollouts[0], rollout)
    assert size(to_json(rollout)) <= size(to_json(rollout, extends=False))


@given(rollouts())
def test_extends_is_the_longest_prefix_by_brute_force(rollout: Rollout) -> None:
    whole = [[*t.prompt_ids.tolist(), *t.completion_ids.tolist()] for t in rollout.turns]
    for index, entry in enumerate(to_json(rollout)["turns"]):
        prompt = rollout.turns[index].prompt_ids.tolist()
        fitting = [k for k in range(index) if prompt[: len(whole[k])] == whole[k]]
        best = max(fitting, key=lambda k: (len(whole[k]), k), default=None)
        assert entry.get("extends") == best


@pytest.mark.parametrize("seed", range(8))
def test_a_simulated_harness_round_trips(seed: int) -> None:
    rollout = simulate(seed).rollout
    assert rollouts_equal(from_json(json.loads(json.dumps(to_json(rollout)))), rollout)


def test_equality_sees_every_difference() -> None:
    base = to_json(simulate(3).rollout)
    assert rollouts_equal(from_json(base), from_json(base))
    for key, value in [("id", "other"), ("group", "h"), ("reward", 0.125), ("meta", {"a": 1}), ("edits", [])]:
        assert (base.get(key) == value) == rollouts_equal(from_json(base), from_json({**base, key: value}))
    a = Rollout("r", (turn([1], [2], logprobs=np.array([0.0])),))
    for other in (
        turn([1], [2], logprobs=np.array([-0.0])),
        turn([1], [2]),
        turn([1], [3], logprobs=np.array([0.0])),
        turn([2], [2], logprobs=np.array([0.0])),
        turn([1], [2], logprobs=np.array([0.0]), trainable=False),
    ):
        assert not rollouts_equal(a, Rollout("r", (other,)))
    assert not rollouts_equal(a, Rollout("r", a.turns * 2))
    assert rollouts_equal(a, Rollout("r", (turn([1], [2], logprobs=np.zeros(1, np.float32)),)))


def test_numpy_values_and_lists_are_taken() -> None:
    loose = Rollout(
        "r",
        (Turn([1, np.int64(2)], [3], logprobs=[np.float32(-0.5)], policy_version=np.int64(4)),),  # type: ignore[arg-type]
        reward=np.float32(0.5),  # type: ignore[arg-type]
    )
    assert to_json(loose) == {
        "id": "r",
        "reward": 0.5,
        "turns": [{"prompt_ids": [1, 2], "completion_ids": [3], "logprobs": [-0.5], "policy_version": 4}],
    }


GOOD = Rollout("good", (turn([1], [2]),))
BAD = [
    (Rollout("bad", ()), "turns: there are no turns"),
    (Rollout("bad", (turn([1], [-2]),)), r"turns\[0\].completion_ids\[0\]: is -2, a token id must not be negative"),
    (
        Rollout("bad", (turn([1], [2], logprobs=np.array([0.5])),)),
        r"turns\[0\].logprobs\[0\]: is 0.5, a log-prob must not",
    ),
    (Rollout("bad", (turn([1], [2], chain=None),)), r"turns\[0\].chain: is None; leave it out to get the default"),
    (Rollout("bad", (turn([1], [2], sampling={}),)), r"turns\[0\].sampling: is an object, must be a Sampling"),
    (Rollout("bad", ({},)), r"turns\[0\]: is an object, must be a Turn"),  # type: ignore[arg-type]
    (Rollout("bad", GOOD.turns, meta={"a": float("nan")}), "meta.a: is NaN, which JSON does not have"),
    (Rollout("good", GOOD.turns), r"id: 'good' is also the id of rollouts\[0\]"),
    (to_json(GOOD), ": is an object, must be a Rollout"),
]


@pytest.mark.parametrize(("rollout", "message"), BAD)
def test_what_cannot_be_read_is_not_written(tmp_path, rollout: Any, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("old")
    with pytest.raises(RecordError, match=rf"^rollouts\[1\]\.?{message}.*; .*x.jsonl is not written\)$"):
        write(path, [GOOD, rollout])
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["x.jsonl"]


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("where", ["write", "sync"])
def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch, suffix: str, where: str) -> None:
    path = tmp_path / f"x{suffix}"
    write(path, [GOOD])
    old = path.read_bytes()
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fail(*_: object) -> None:
        raise full

    if where == "sync":
        monkeypatch.setattr(storage.os, "fsync", fail)
    else:
        real = storage.epath.Path("x").__class__.open

        class Full(io.FileIO):
            def write(self, *_: object) -> int:
                raise full

        opened = lambda path, mode="r", **rest: Full(path, "w") if mode == "wb" else real(path, mode, **rest)  # noqa: E731
        monkeypatch.setattr(storage.epath.Path("x").__class__, "open", opened)
    message = (
        r"^cannot write .*: the disk is full; free some space and run again; the file that was there is unchanged$"
    )
    with pytest.raises(RolloutFileError, match=message) as caught:
        write(path, [GOOD])
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert path.read_bytes() == old and os.listdir(tmp_path) == [path.name]


def test_any_interruption_leaves_the_old_file(tmp_path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("old")

    def interrupted() -> Any:
        yield GOOD
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(path, interrupted())
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["x.jsonl"]


def test_a_missing_folder_is_named(tmp_path) -> None:
    with pytest.raises(RolloutFileError, match=r"^cannot write .*/none/x.jsonl: its folder does not exist$"):
        write(tmp_path / "none" / "x.jsonl", [GOOD])


def test_a_link_stays_a_link(tmp_path) -> None:
    (tmp_path / "real.jsonl").write_text("old")
    (tmp_path / "link.jsonl").symlink_to("real.jsonl")
    write(tmp_path / "link.jsonl", [GOOD])
    assert (tmp_path / "link.jsonl").is_symlink() and read(tmp_path / "real.jsonl").rollouts[0].id == "good"


def test_equal_rollouts_give_equal_files(tmp_path) -> None:
    for suffix in SUFFIXES:
        write(tmp_path / f"a{suffix}", [GOOD])
        write(tmp_path / f"b{suffix}", [GOOD])
        assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_object_stores(monkeypatch, suffix: str) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    monkeypatch.setattr(backend.fsspec_backend, "fs", lambda path: memory)
    monkeypatch.setattr(
        type(memory), "_strip_protocol", classmethod(lambda cls, path: "/" + str(path).split("://")[-1].strip("/"))
    )
    path = f"gs://bucket/run/x{suffix}"
    rollouts = [simulate(seed, name=str(seed)).rollout for seed in range(3)]
    write(path, rollouts)
    assert all(map(rollouts_equal, read(path).rollouts, rollouts))
    assert rollouts_equal(RolloutFile(path)[1], rollouts[1])
    with pytest.raises(RecordError):
        write(path, [GOOD, GOOD])
    assert len(read(path).rollouts) == 3
    assert [name for name in memory.store if name.startswith("/bucket/run/")] == [f"/bucket/run/x{suffix}"]
    memory.store.clear()
