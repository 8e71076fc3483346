from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mwjax.train import checkpoint, metrics_log, state
from mwjax.train.config import OptimizerConfig
from mwjax.train.optimizer import optimizer
from mwjax.train.recompiles import CompileCounter

FINGERPRINT = {"model": "abc", "data.seed": 1, "data.paths": ["a", "b"], "optimizer.clip_norm": None}


PARAMS = {"norm": jnp.ones(5), "inner": {"weight": jax.random.normal(jax.random.key(0), (300, 200))}}
OPTIMIZER, DEVICE = optimizer(OptimizerConfig(), total=10), jax.sharding.SingleDeviceSharding(jax.devices()[0])
TEMPLATE = state.abstract(PARAMS, OPTIMIZER, DEVICE)


def make_state() -> state.TrainState:
    return state.create(PARAMS, OPTIMIZER, DEVICE)


def assert_equal(left: object, right: object) -> None:
    jax.tree.map(np.testing.assert_array_equal, left, right)


def test_saved_states_come_back_bit_for_bit_though_training_goes_on(tmp_path: Path) -> None:
    update = jax.jit(
        lambda s: s._replace(params=jax.tree.map(lambda x: x * 1.5, s.params), step=s.step + 1), donate_argnums=0
    )
    current, kept = make_state(), {}
    with checkpoint.Checkpoints(tmp_path, FINGERPRINT, keep=2) as checkpoints:
        assert checkpoints.latest() is None
        for step in (1, 2, 3):
            current = update(current)
            kept[step] = jax.device_get(jax.tree.map(jnp.copy, current))
            checkpoints.save(step, current)
            current = update(current)  # the donated buffers are reused while the save runs
    with checkpoint.Checkpoints(tmp_path, FINGERPRINT, keep=2) as checkpoints:
        assert checkpoints.latest() == 3
        for step in (2, 3):
            restored = checkpoints.restore(TEMPLATE, step)
            assert isinstance(restored, state.TrainState)
            assert_equal(restored, kept[step])
        assert not (checkpoints.folder / "1").exists()
    assert_equal(checkpoint.load_params(tmp_path), kept[3].params)
    assert_equal(checkpoint.load_params(tmp_path, 2), kept[2].params)


def test_a_save_that_fails_before_it_is_under_way_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    raised: list[BaseException] = []

    def run() -> None:
        try:
            with checkpoint.Checkpoints(tmp_path, FINGERPRINT, keep=2) as checkpoints:
                checkpoints.save(3, make_state())
                monkeypatch.setattr(checkpoints._manager._checkpointer, "save", full)
                checkpoints.save(4, make_state())
        except checkpoint.CheckpointNotSaved as error:
            raised.append(error)

    running = threading.Thread(target=run, daemon=True)
    running.start()
    running.join(60)
    (error,) = raised
    assert "No space left on device" in str(error) and "newest: 3" in str(error)


def test_a_checkpoint_of_another_run_is_refused_with_the_differences(tmp_path: Path) -> None:
    current = make_state()
    with checkpoint.Checkpoints(tmp_path, FINGERPRINT, keep=2) as checkpoints:
        checkpoints.save(1, current)
    other = {"model": "abc", "data.seed": 2, "data.paths": ["a", "b"], "loss.kl": 0.0, "optimizer.clip_norm": None}
    with (
        checkpoint.Checkpoints(tmp_path, other, keep=2) as checkpoints,
        pytest.raises(checkpoint.CheckpointMismatch) as caught,
    ):
        checkpoints.restore(TEMPLATE, 1)
    message = str(caught.value)
    assert "data.seed: 1 in the checkpoint, 2 in this run" in message
    assert "loss.kl: 'not set' in the checkpoint, 0.0 in this run" in message
    assert "model" not in message.replace("model of", "") and "paths" not in message


def test_a_checkpoint_that_cannot_be_written_is_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise ValueError("RESOURCE_EXHAUSTED: No space left on device")

    with checkpoint.Checkpoints(tmp_path, FINGERPRINT, keep=2) as checkpoints:
        checkpoints.save(3, make_state())
        monkeypatch.setattr(checkpoints._manager, "save", full)
        with pytest.raises(checkpoint.CheckpointNotSaved, match="No space left") as caught:
            checkpoints.save(4, make_state())
        monkeypatch.setattr(checkpoints._manager, "close", full)
        with pytest.raises(checkpoint.CheckpointNotSaved):  # an asynchronous save that fails when all is over
            checkpoints.__exit__(None, None, None)
        checkpoints.__exit__(ValueError, ValueError(), None)  # does not hide what went wrong before
        monkeypatch.undo()
    assert "newest: 3" in str(caught.value)
    assert checkpoint.load(tmp_path)["step"] == 0


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A run with the steps 1, 2 and 3; `step_of` tells them apart."""
    current = make_state()
    with checkpoint.Checkpoints(tmp_path, FINGERPRINT, keep=3) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, current._replace(step=jnp.asarray(step, jnp.int32)))
    return tmp_path


def largest_file(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped byte of the arrays": (
        lambda step: flip(largest_file(step), 50_000),
        r"(params|opt_state)\.\S+( and \d+ more)?: the content is not what was saved",
    ),
    "a torn file of arrays": (lambda step: half(largest_file(step)), "Encountered error while reading array"),
    "a missing file of arrays": (lambda step: largest_file(step).unlink(), "Encountered error while reading array"),
    "a flipped byte of the manifest": (lambda step: flip(step / "state/manifest.ocdbt", 70), "DATA_LOSS"),
    "no state": (lambda step: shutil.rmtree(step / "state"), "state"),
    "torn JSON": (lambda step: half(step / "position/metadata"), "Expecting|Unterminated"),
    "a digit changed in JSON": (
        lambda step: (step / "position/metadata").write_text(
            (step / "position/metadata").read_text().replace('"data.seed": 1', '"data.seed": 7')
        ),
        "the data position is not what was saved",
    ),
    "no position": (lambda step: (step / "position/metadata").unlink(), "position"),
    "an empty folder": (lambda step: [shutil.rmtree(step), step.mkdir()], "position"),
}


@pytest.mark.parametrize("kind", list(DAMAGES))
def test_a_damaged_checkpoint_is_named_set_aside_and_the_one_before_is_used(saved: Path, kind: str) -> None:
    damage, reason = DAMAGES[kind]
    damage(saved / "checkpoints" / "3")
    with pytest.raises(checkpoint.CheckpointUnreadable, match="checkpoints/3: this checkpoint is damaged"):
        checkpoint.load_params(saved)
    with checkpoint.Checkpoints(saved, FINGERPRINT, keep=3) as checkpoints:
        restored = checkpoints.restore_newest(TEMPLATE)
        assert restored is not None
        assert (restored.step, int(restored.state.step)) == (2, 2)
        assert_equal(restored.state.params, PARAMS)
        (message,) = restored.damaged
        assert re.search(rf"checkpoints/3: this checkpoint is damaged and cannot be read: .*({reason})", message)
        assert message.count("this checkpoint is damaged") == 1 and message.endswith("; set aside as 3.damaged")
        assert checkpoints.latest() == 2
        checkpoints.save(3, restored.state._replace(step=jnp.asarray(3, jnp.int32)))
    assert checkpoint.load(saved)["step"] == 3
    assert checkpoint.locate(saved)[1] == 3
    with checkpoint.Checkpoints(saved, FINGERPRINT, keep=3) as checkpoints:
        again = checkpoints.restore_newest(TEMPLATE)
        assert again is not None and (again.step, again.damaged) == (3, [])
    assert (saved / "checkpoints" / "3.damaged").is_dir()


def test_every_flipped_byte_is_noticed_or_harmless(saved: Path) -> None:
    step, rng = saved / "checkpoints" / "3", np.random.default_rng(0)
    files = sorted(path for path in step.rglob("*") if path.is_file())
    noticed = 0
    with checkpoint.Checkpoints(saved, FINGERPRINT, keep=3) as checkpoints:
        for path in files:
            whole = path.read_bytes()
            for at in rng.integers(0, len(whole), 3):
                flip(path, int(at))
                try:
                    state_read = checkpoints.restore(TEMPLATE, 3)
                except checkpoint.CheckpointUnreadable:
                    noticed += 1
                else:
                    assert_equal(state_read, make_state()._replace(step=np.int32(3)))
                path.write_bytes(whole)
    assert noticed >= 9


def test_where_all_checkpoints_are_damaged_nothing_is_renamed_and_the_run_is_refused(saved: Path) -> None:
    for step in (1, 2, 3):
        half(largest_file(saved / "checkpoints" / str(step)))
    for _ in range(2):
        with (
            checkpoint.Checkpoints(saved, FINGERPRINT, keep=3) as checkpoints,
            pytest.raises(checkpoint.CheckpointUnreadable) as caught,
        ):
            checkpoints.restore_newest(TEMPLATE)
        message = str(caught.value)
        assert all(f"checkpoints/{step}: this checkpoint is damaged" in message for step in (1, 2, 3))
        assert "or choose another run_dir, to start afresh" in message
    assert sorted(path.name for path in (saved / "checkpoints").iterdir()) == ["1", "2", "3"]


def test_a_mismatch_is_no_damage(saved: Path) -> None:
    half(largest_file(saved / "checkpoints" / "3"))
    other = {**FINGERPRINT, "data.seed": 2}
    with (
        checkpoint.Checkpoints(saved, other, keep=3) as checkpoints,
        pytest.raises(checkpoint.CheckpointMismatch, match=r"data\.seed"),
    ):
        checkpoints.restore_newest(TEMPLATE)
    assert (saved / "checkpoints" / "3").is_dir()


def test_memory_that_does_not_suffice_is_no_damage(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise MemoryError

    with checkpoint.Checkpoints(saved, FINGERPRINT, keep=3) as checkpoints:
        monkeypatch.setattr(checkpoint.ocp.StandardCheckpointHandler, "restore", full)
        with pytest.raises(MemoryError):
            checkpoints.restore_newest(TEMPLATE)
    assert (saved / "checkpoints" / "3").is_dir()


def test_what_a_killed_save_leaves_is_removed_and_no_checkpoint(saved: Path) -> None:
    folder = saved / "checkpoints"
    shutil.copytree(folder / "3", folder / "4.orbax-checkpoint-tmp")
    (folder / "4.orbax-checkpoint-tmp" / "commit_success.txt").unlink(missing_ok=True)
    assert checkpoint.locate(saved)[1] == 3
    with checkpoint.Checkpoints(saved, FINGERPRINT, keep=3) as checkpoints:
        restored = checkpoints.restore_newest(TEMPLATE)
        assert restored is not None and (restored.step, restored.damaged) == (3, [])
        checkpoints.save(4, restored.state)
    assert sorted(path.name for path in folder.iterdir()) == ["2", "3", "4"]


@pytest.mark.parametrize("refused", [False, True])
def test_leaving_without_a_save_waits_for_that_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    """Its thread cannot go on, and says so with a traceback, once the process has begun to end."""
    left, removed = threading.Event(), threading.Event()

    async def remove(*_: object, **__: object) -> None:
        await asyncio.to_thread(left.wait, 0.5)
        removed.set()

    monkeypatch.setattr("orbax.checkpoint._src.path.temporary_paths.cleanup_temporary_paths", remove)
    with (
        pytest.raises(checkpoint.CheckpointMismatch) if refused else contextlib.nullcontext(),
        checkpoint.Checkpoints(tmp_path, FINGERPRINT, keep=2),
    ):
        if refused:
            raise checkpoint.CheckpointMismatch
    done = removed.is_set()
    left.set()
    assert done


def test_the_best_checkpoints_are_kept_besides_the_newest(tmp_path: Path) -> None:
    losses = {1: 0.9, 2: 0.2, 3: 0.5, 5: 0.4, 6: 0.2, 7: 0.8, 8: 0.1, 9: 0.7}  # 4 was not evaluated

    def kept_after(steps: Sequence[int]) -> list[int]:
        with checkpoint.Checkpoints(tmp_path, FINGERPRINT, keep=1, best=2) as checkpoints:
            for step in steps:
                scores = {number: loss for number, loss in losses.items() if number <= step}
                checkpoints.save(step, make_state(), scores)
        return sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir())

    assert kept_after([1, 2, 3, 4]) == [2, 3, 4]
    assert kept_after([5]) == [2, 5]  # after a restart
    assert kept_after([6]) == [2, 6]
    assert kept_after([7]) == [2, 6, 7]
    assert kept_after([8, 9]) == [6, 8, 9]  # of equal ones the newer
    assert checkpoint.best(tmp_path, losses) == 8
    with pytest.raises(FileNotFoundError, match="no checkpoint there has a score"):
        checkpoint.best(tmp_path, {1: 0.5})


def test_a_missing_checkpoint_says_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="it holds none"):
        checkpoint.load_params(tmp_path)
    with checkpoint.Checkpoints(tmp_path, FINGERPRINT, keep=2) as checkpoints:
        checkpoints.save(4, make_state())
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 3; it holds the steps 4"):
        checkpoint.load_params(tmp_path, 3)


def test_the_digest_tells_weights_apart() -> None:
    weights = {"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.zeros(3)}
    digest = state.weights_digest(weights)
    assert state.weights_digest(jax.tree.map(jnp.copy, weights)) == digest
    others = [
        {"a": weights["a"][::-1], "b": weights["b"]},
        {"a": weights["a"].reshape(3, 2), "b": weights["b"]},
        {"b": weights["a"], "a": weights["b"]},
        {"a": weights["a"].at[0, 0].set(1e-7), "b": weights["b"]},
    ]
    assert digest not in [state.weights_digest(other) for other in others]


def test_checksums_see_every_type_and_every_element() -> None:
    tree = {"half": jnp.ones((2, 3), jnp.bfloat16), "count": jnp.asarray(4), "whole": jnp.arange(6.0).reshape(1, 2, 3)}
    made = state.checksums(tree)
    assert list(made) == ["count", "half", "whole"]
    bits = np.arange(6, dtype=np.float32).view(np.uint32).astype(np.uint64)
    assert int(made["whole"], 16) == (bits * (2 * np.arange(6, dtype=np.uint64) + 1)).sum() % 2**32
    for name, leaf in tree.items():
        for place in np.ndindex(leaf.shape):
            changed = state.checksums({**tree, name: leaf.at[place].set(9)})
            assert {key for key in made if made[key] != changed[key]} == {name}


def test_metrics_beyond_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    assert metrics_log.read(tmp_path) == []
    for step in (1, 2, 3):
        metrics_log.append(tmp_path, {"step": step, "loss": float("nan") if step == 2 else 0.5})
    with (tmp_path / metrics_log.FILE).open("a") as file:
        file.write('{"step": 4, "lo')
    metrics_log.truncate(tmp_path, 2)
    metrics_log.append(tmp_path, {"step": 3, "loss": 0.25})
    assert metrics_log.read(tmp_path) == [
        {"step": 1, "loss": 0.5},
        {"step": 2, "loss": None},
        {"step": 3, "loss": 0.25},
    ]


def test_the_counter_counts_second_compilations_of_the_named_functions() -> None:
    def watched(x: jax.Array) -> jax.Array:
        return x + 1

    def ignored(x: jax.Array) -> jax.Array:
        return x + 2

    watched_jit, ignored_jit = jax.jit(watched), jax.jit(ignored)
    with CompileCounter(["watched"]) as counter:
        for size in (3, 3, 3):
            watched_jit(jnp.ones(size))
        assert counter.recompiles == 0
        assert counter.seconds > 0
        for size in (4, 5):
            watched_jit(jnp.ones(size))
            ignored_jit(jnp.ones(size))
        assert counter.recompiles == 2
    watched_jit(jnp.ones(6))
    assert counter.recompiles == 2
