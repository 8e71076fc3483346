"""Adapters, frozen parameters and the averaged teacher: values, memory, resuming, exporting, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from mwjax import cli, model
from mwjax.train import checkpoint, frozen, load, loop, prepared, setup, state, trainable
from mwjax.train.config import ModelSection, OptimizerConfig
from mwjax.train.mesh import replicated
from mwjax.train.optimizer import optimizer
from mwjax.train.step import build
from mwjax.train.update import Comparison, update
from tests.test_train_loop import assert_same_state, compile_once, rows, stop_in_step  # noqa: F401 (a fixture)
from tests.test_train_step import MESH, SFT, TRANSFORM, assert_close, configured, rollouts_file, summed, sums  # noqa: F401
from tests.training_runs import VOCABULARY, configure, microbatches, write

SMALL = {"vocab_size": VOCABULARY, "layers": 2, "width": 16}
LORA = ("model.lora.rank=3", "model.lora.alpha=6", "model.lora.targets=[query,value,output,down]")


def flat(params: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in flatten_dict(params, sep=".").items()}


def with_adapters(params: Any, config: Any) -> tuple[Any, Any]:
    """A step's configuration and parameters with adapters whose halves are both random, in float64."""
    shape = dataclasses.replace(config.model, lora=model.LoRA(3, 6.0))
    adapters = model.init_adapters(shape, jax.random.key(2), jnp.float64)
    key = jax.random.key(3)
    noise = jax.tree.map(lambda leaf: leaf + 0.1 * jax.random.normal(key, leaf.shape, leaf.dtype), adapters)
    return dataclasses.replace(config, model=shape), model.join_params(params, noise)


def test_gradients_of_what_is_trained_are_those_of_training_everything(rollouts_file: str) -> None:  # noqa: F811
    with jax.enable_x64(True):
        config, params = with_adapters(configured(SFT)[1], configured(SFT)[0])
        (batch, *_), _ = microbatches(rollouts_file, rows=2)
        full = sums(params, batch, config)
        section = ModelSection(small=SMALL, frozen=["embedding", "*norm*", "layers.feed_forward.*"])
        names = trainable.trained_names(section, dataclasses.replace(config.model, lora=None))
        assert names == [f"layers.attention.{name}" for name in ("key", "output", "query", "value")]
        trained, others = model.split_params(params, names)
        part = sums(trained, batch, config, frozen=others)
        assert_close(part.numerator, full.numerator, 1e-12)
        assert jax.tree.structure(part.gradients) == jax.tree.structure(trained)
        assert_close(part.gradients, model.split_params(full.gradients, names)[0], 1e-10)


def test_packed_is_logittree_under_adapters(rollouts_file: str) -> None:  # noqa: F811
    with jax.enable_x64(True):
        config, params = with_adapters(configured(SFT)[1], configured(SFT)[0])
        trained, others = model.split_params(params, model.adapter_names(config.model))
        found = []
        for method in ("packed", "logittree"):
            batches, denominator = microbatches(rollouts_file, method, rows=4)
            parts = [sums(trained, batch, config, frozen=others) for batch in batches]
            gradients = jax.tree.map(lambda *leaves: sum(leaves), *[part.gradients for part in parts])
            found.append((gradients, sum(part.numerator for part in parts), denominator))
        assert_close(found[0], found[1], 1e-10)


def test_the_teacher_is_the_average_over_the_updates(rollouts_file: str) -> None:  # noqa: F811
    """teacher_k = decay * teacher_(k-1) + (1 - decay) * params_k, from the initial weights, of trained leaves only."""
    config, params = configured(SFT, "float32", sdcc=True, ema_decay=0.75)
    trained, others = model.split_params(params, [name for name in flat(params) if name != "embedding"])
    batches, denominator = microbatches(rollouts_file, "sdcc", rows=4)
    step = build(config, TRANSFORM, MESH, trained, batches[0], others)
    current = state.create(trained, TRANSFORM, replicated(MESH), averaged=True)
    expected = flat(trained)
    for number in range(3):
        before = jax.device_get(current)
        current, outcome = update(step, current, batches[:1], denominator, SFT, Comparison(), MESH, 0.5)
        after = flat(current.params)
        expected = {name: 0.75 * leaf + 0.25 * after[name] for name, leaf in expected.items()}
        got = flat(current.teacher)
        assert got.keys() == expected.keys() and "embedding" not in got
        for name, leaf in got.items():
            np.testing.assert_allclose(leaf, expected[name], rtol=1e-5, atol=1e-7)
            assert np.abs(leaf - after[name]).max() > 1e-4
        assert outcome.scalars is not None
        teacher = before.teacher
        direct = sums(before.params, batches[0], config, sdcc_lambda=0.5, frozen=others, teacher=teacher)
        np.testing.assert_allclose(outcome.scalars["loss"], direct.numerator / denominator, rtol=1e-5)
        if number:
            same = sums(before.params, batches[0], config, sdcc_lambda=0.5, frozen=others, teacher=before.params)
            assert abs(float(same.numerator - direct.numerator)) > 1e-5
    kept = flat(step.skip(current).teacher)
    for name, leaf in expected.items():
        np.testing.assert_allclose(kept[name], leaf, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_a_decay_of_0_trains_as_the_same_weights_do(tmp_path: Path) -> None:
    write(tmp_path)
    settings = ("data.method=sdcc", "loss.sdcc.ramp=0", "data.steps=3")
    same = configure(tmp_path, *settings, run_dir="same")
    average = configure(tmp_path, *settings, "loss.sdcc.teacher=ema", "loss.sdcc.ema_decay=0", run_dir="average")
    slow = configure(tmp_path, *settings, "loss.sdcc.teacher=ema", "loss.sdcc.ema_decay=0.9", run_dir="slow")
    for config in (same, average, slow):
        loop.run(config)
    losses = {config.run_dir: [row["loss"] for row in rows(config)] for config in (same, average, slow)}
    np.testing.assert_allclose(losses[average.run_dir], losses[same.run_dir], rtol=1e-6)
    assert losses[slow.run_dir][0] == losses[average.run_dir][0]  # at first both teach what was there at the beginning
    assert abs(losses[slow.run_dir][2] - losses[average.run_dir][2]) > 1e-5
    saved = checkpoint.load(average.run_dir)
    jax.tree.map(np.testing.assert_array_equal, saved["teacher"], saved["params"])
    assert checkpoint.load(same.run_dir)["teacher"] is None


def test_adapters_and_an_averaged_teacher_resume_bit_for_bit_and_are_exported_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path)
    settings = ("data.method=sdcc", "loss.task=memorywalker", "loss.sdcc.teacher=ema", *LORA)
    whole = configure(tmp_path, *settings, run_dir="whole")
    assert loop.run(whole).step == 4
    config = configure(tmp_path, *settings, "checkpoint.every=0", run_dir="stopped")
    with monkeypatch.context() as patch:
        stop_in_step(patch, 3)
        assert loop.run(config).step == 3
    assert loop.run(config).step == 4
    assert_same_state(config, whole)
    assert [row["recompiles"] for row in rows(whole)] == [0] * 4
    assert rows(whole)[0]["reference_k3"] == pytest.approx(0.0, abs=1e-6) != rows(whole)[3]["reference_k3"]

    shape, initial = setup.decoder(whole.model)
    names = set(model.adapter_names(shape))
    assert len(names) == 8
    saved = checkpoint.load(whole.run_dir)
    for part in (saved["params"], saved["teacher"], saved["opt_state"][1][0]["mu"]):
        assert set(flatten_dict(part, sep=".")) == names
    size = sum(leaf.size for name, leaf in flat(initial).items() if name in names)
    card = (tmp_path / "whole" / "card.md").read_text()
    assert f"LoRA rank 3, alpha 6 on query, value, output, down: {size:,} of" in card

    read_shape, trained = frozen.load_decoder(whole.run_dir)
    assert read_shape == shape
    for name, leaf in flat(trained).items():
        assert np.array_equal(leaf, flat(initial)[name]) == (name not in names), name

    with pytest.raises(SystemExit) as caught:
        cli.main(["export", whole.run_dir, "--out", str(tmp_path / "out")])
    assert not caught.value.code and "step 4" in capsys.readouterr().out
    plain_shape, merged = model.load(tmp_path / "out")
    assert plain_shape == dataclasses.replace(shape, lora=None)
    tokens = jnp.arange(VOCABULARY)[None]
    causal = tokens, jnp.arange(VOCABULARY)[None], jnp.full((1, VOCABULARY), VOCABULARY)
    adapted = model.forward(trained, shape, *causal) @ model.unembedding(trained, shape).T
    np.testing.assert_allclose(
        model.forward(merged, plain_shape, *causal) @ model.unembedding(merged, plain_shape).T, adapted, atol=1e-5
    )
    base = model.forward(initial, shape, *causal) @ model.unembedding(initial, shape).T
    assert np.abs(adapted - base).max() > 1e-3

    (tmp_path / "whole" / "frozen").rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match="the weights that were not trained are not there"):
        frozen.load_decoder(whole.run_dir)
    with pytest.raises(checkpoint.CheckpointMismatch) as refused:
        loop.run(configure(tmp_path, *settings, "model.lora.alpha=7", "loss.sdcc.ema_decay=0.5", run_dir="whole"))
    assert "model.lora.alpha" in str(refused.value) and "loss.sdcc.ema_decay" in str(refused.value)


FROZEN = ("data.steps=2", "model.small.family=qwen2", "model.frozen=[embedding, layers.attention.*]")


def is_frozen(name: str) -> bool:
    return name.startswith(("embedding", "layers.attention."))


def test_frozen_parameters_stay_bit_for_bit(tmp_path: Path) -> None:
    write(tmp_path)
    config = configure(tmp_path, *FROZEN)
    loop.run(config)
    _, initial = setup.decoder(config.model)
    assert set(checkpoint.load(config.run_dir)["params"]["layers"]) == {
        "attention_norm",
        "feed_forward",
        "feed_forward_norm",
    }
    _, after = frozen.load_decoder(config.run_dir)
    assert flat(after).keys() == flat(initial).keys()
    for name, leaf in flat(after).items():
        assert np.array_equal(leaf, flat(initial)[name]) == is_frozen(name), name
    card = (tmp_path / "run" / "card.md").read_text()
    count = sum(leaf.size for name, leaf in flat(initial).items() if not is_frozen(name))
    assert f"; {count:,} of {sum(leaf.size for leaf in flat(initial).values()):,} parameters trained" in card


@pytest.mark.slow
def test_what_is_frozen_may_be_stored_in_bfloat16_and_the_first_loss_is_that_of_training_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path)
    config = configure(tmp_path, *FROZEN, run_dir="run")
    plain = configure(tmp_path, *FROZEN, "model.frozen=[]", run_dir="plain")
    low = configure(tmp_path, *FROZEN, "model.frozen_dtype=bfloat16", run_dir="low")
    for each in (config, plain, low):
        loop.run(each)
    assert rows(config)[0]["loss"] == pytest.approx(rows(plain)[0]["loss"], rel=1e-6)
    assert rows(config)[0]["gradient_norm"] < rows(plain)[0]["gradient_norm"]
    assert rows(low)[0]["loss"] == pytest.approx(rows(config)[0]["loss"], rel=5e-3)
    assert "the others kept in bfloat16" in (tmp_path / "low" / "card.md").read_text()
    _, initial = setup.decoder(config.model)
    _, stored = frozen.load_decoder(low.run_dir)
    assert {name for name, leaf in flat(stored).items() if leaf.dtype == jnp.bfloat16} == set(
        filter(is_frozen, flat(stored))
    )
    np.testing.assert_array_equal(stored["embedding"], initial["embedding"].astype(jnp.bfloat16))
    with pytest.raises(SystemExit) as caught:
        cli.main(["export", low.run_dir, "--out", str(tmp_path / "out")])
    assert not caught.value.code and "float32" in capsys.readouterr().out
    exported = model.load(tmp_path / "out", None)[1]
    np.testing.assert_array_equal(exported["embedding"], stored["embedding"].astype(np.float32))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


def test_optimiser_state_is_of_trained_parameters_only() -> None:
    section = ModelSection(small=SMALL, lora={"rank": 2})
    shape, params = setup.decoder(section)
    parts = trainable.split(section, shape, params)
    begun = state.abstract(parts.trained, optimizer(OptimizerConfig(), total=4), replicated(MESH))
    # Rank 2 times inputs plus outputs: query and output 16 and 16, key and value 16 and 8, gate, up and down 16 and 48.
    count = 2 * 2 * (2 * 32 + 2 * 24 + 3 * 64)
    assert sum(leaf.size for leaf in jax.tree.leaves(begun.params)) == count
    assert sum(leaf.size for leaf in jax.tree.leaves(begun.opt_state) if leaf.ndim) == 2 * count
    assert begun.teacher is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("model.frozen=[embedding, layers.atention.*]",), r"'layers\.atention\.\*' match no parameter; .*embedding, "),
        (("model.frozen='*'",), "nothing would be left to train"),
        ((*LORA, "model.frozen=embedding"), "frozen is without effect beside lora"),
        (("model.frozen_dtype=bfloat16",), "frozen_dtype is without effect where everything is trained"),
        (("model.lora.targets=[query,norm]",), "expected .query"),
        (("model.lora.targets=[query,query]",), "every target at most once"),
    ],
)
def test_options_without_a_meaning_are_refused(tmp_path: Path, settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        setup.decoder(configure(tmp_path, *settings).model)


def test_unused_options_do_not_keep_a_run_from_continuing(tmp_path: Path) -> None:
    def print_of(*settings: str) -> set[str]:
        write(tmp_path)
        config = configure(tmp_path, *settings)
        made = prepared.prepare(config)
        return set(setup.fingerprint(config, made.index, made.shape, made.digest, 4, made.frozen_digest))

    plain = print_of("loss.sdcc.teacher=ema", "loss.sdcc.ema_decay=0.5")  # no effect on method packed
    options = ("model.lora", "model.frozen", "loss.sdcc.teacher", "loss.sdcc.ema_decay", "model (frozen")
    assert not [key for key in plain if key.startswith(options)]
    frozen_keys = print_of("model.frozen=embedding", "data.method=sdcc", "loss.sdcc.teacher=ema") - plain
    assert frozen_keys >= {"model.frozen", "model.frozen_dtype", setup.FROZEN_WEIGHTS, "loss.sdcc.ema_decay"}
    assert load.load(None, ["run_dir=a", "data.paths=b", "model.path=c", *LORA]).model.lora is not None
