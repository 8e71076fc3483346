from __future__ import annotations

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
