"""``--debug``: what is printed of a rollout against its tree, how it looks, and NaNs that are named."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from mwjax import cli, data, rollouts, tree
from mwjax.commands import statuses
from mwjax.train import debug, load, loop, metrics_log, setup
from mwjax.train.step import Step
from mwjax.tree import Batch, Rows, RowShape, collate, fragments, pack
from tests.training_runs import compile_once, configure, microbatches, recorded, write  # noqa: F401


def by_edge(rows: Rows) -> np.ndarray:
    """Stands for log-probs: different for every edge [B, E]."""
    return -(rows.edges.turn + rows.edges.index / 64.0) - 0.25


def as_tree(built: tree.Tree, method: str) -> dict[tuple[int, int], tuple[Any, ...]]:
    """(turn, index) -> (view, token, prefix length, last prefix ids) of every token a method trains, from the tree."""
    sampled, found = built.sampled, {}
    for n in np.flatnonzero(sampled.trainable):
        view = built.views[sampled.view[n]]
        prefix = view.ids[: sampled.prefix[n]]
        if method == "naive_compressed":
            if sampled.compressed[n] <= 0 or built.compressed is None:
                continue
            prefix = built.compressed.ids[: sampled.compressed[n]]
        key = int(sampled.turn[n]), int(sampled.index[n])
        found[key] = (int(sampled.view[n]), int(sampled.token[n]), len(prefix), tuple(prefix[-debug.TAIL :].tolist()))
    return found


@pytest.mark.parametrize("method", ["packed", "logittree", "naive_compressed"])
@pytest.mark.parametrize("length", [96, 64])  # the shorter one splits tries over rows
def test_what_is_listed_is_what_the_tree_says(tmp_path: Path, method: str, length: int) -> None:
    path = write(tmp_path)
    batches, _ = microbatches(path, method, length=length)
    forks = contexts = 0
    for number, rollout in enumerate(rollouts.read(path).rollouts):
        built = tree.build(rollout)
        items = list(debug.listing(batches, number, by_edge))
        tokens = [item for item in items if isinstance(item, debug.Sampled)]
        expected = as_tree(built, method)
        assert {(t.turn, t.index): (t.view, t.token, t.prefix, t.tail) for t in tokens} == expected
        assert len(tokens) == len(expected)
        for t in tokens:
            turn = rollout.turns[t.turn]
            assert t.recorded == (pytest.approx(turn.logprobs[t.index]) if turn.logprobs is not None else np.nan)
            assert t.now == pytest.approx(-(t.turn + t.index / 64) - 0.25)
            assert t.ratio == pytest.approx(np.exp(t.now - t.recorded))
            assert t.weight == 1.0
        forks += sum(isinstance(item, debug.Fork) and item.kept > 0 for item in items)
        contexts += sum(len(item.ids) for item in items if isinstance(item, debug.Context))
    assert contexts > 40
    assert forks > 10 if method == "packed" else forks == 0
    first = debug.first_rollout(batches)
    assert first == int(batches[0].rows.edges.rollout[0, 0])


def forked() -> rollouts.Rollout:
    """Two turns; the second one's prompt drops [12, 13] of the first one's."""
    first = rollouts.Turn(np.array([10, 11, 12, 13]), np.array([20, 21]), logprobs=np.array([-0.5, -1.0]))
    second = rollouts.Turn(np.array([10, 11, 20, 21, 14]), np.array([22, 23]), logprobs=np.array([-2.0, -0.1]))
    return rollouts.Rollout("forked", (first, second), reward=1.0)


def batch_of(rollout: rollouts.Rollout) -> Batch:
    shape = RowShape(16, 8)
    made = fragments([tree.build(rollout)], "packed", shape)
    batch = collate(made, pack([fragment.needs for fragment in made], shape), shape, 1)
    batch.rows.edges.advantage[:] = 0.5 * batch.rows.edges.weight
    return batch


def printed(width: int, *, limit: int = 100, text_of: Any = None) -> list[str]:
    items = debug.listing([batch_of(forked())], 0, by_edge)
    out = io.StringIO()
    console = Console(file=out, width=width)
    for line in debug.lines(items, "title", width, text_of, limit):
        console.print(line, soft_wrap=True)
    return out.getvalue().splitlines()


def test_a_forked_rollout_as_it_is_printed() -> None:
    lines = printed(80)
    assert all(len(line) <= 80 for line in lines)
    assert [line.rstrip() for line in lines[3:]] == [
        "view  turn[i] prefix                    weight  advan. recorded      now   ratio",
        "micro-batch 0, row 0",
        "     + 4 context: 10 11 12 13",
        "   0     0[0]      4 10 11 12 13 > 20        1  +0.500  -0.5000  -0.2500  1.2840",
        "   0     0[1]      5 .. 12 13 20 > 21        1  +0.500  -1.0000  -0.2656  2.0842",
        "     < fork: 3 tokens hidden from here on, 2 stay",
        "     + 3 context: 20 21 14",
        "   1     1[0]      5 .. 20 21 14 > 22        1  +0.500  -2.0000  -1.2500  2.1170",
        "   1     1[1]      6 .. 21 14 22 > 23        1  +0.500  -0.1000  -1.2656  0.3117",
    ]


def test_long_listings_are_cut_and_texts_shown_harmlessly() -> None:
    assert printed(80, limit=3)[-1] == "... 1 more loss tokens"
    assert printed(80, limit=4)[-1] != "... 0 more loss tokens"
    lines = printed(100, text_of=lambda token: ascii(f"<{token}>\n\x1b"))
    assert any("> 20 '<20>\\n\\x1b'" in line for line in lines)
    assert any(line.startswith("     + 3 context: '<20>\\n\\x1b' '<21>") for line in lines)
    assert all(len(line) <= 100 for line in lines[3:])


def test_old_log_probs_of_another_kind_and_unknown_ones() -> None:
    batch = batch_of(forked())
    batch.rows.edges.rollout_logprob[:] = np.nan
    items = [item for item in debug.listing([batch], 0, by_edge) if isinstance(item, debug.Sampled)]
    assert np.isnan([item.ratio for item in items]).all()
    assert " - " in str(list(debug.lines(iter(items), "", 80))[-1])
    items = [item for item in debug.listing([batch], 0, by_edge, by_edge) if isinstance(item, debug.Sampled)]
    assert [item.ratio for item in items] == [1.0] * 4


def test_the_tokenizer_is_the_models_unless_another_is_named(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    for name, word in (("tokenizer.json", "model"), ("other.json", "other")):
        Tokenizer(models.WordLevel({f"{word}{n}": n for n in range(3)})).save(str(tmp_path / name))
    small = configure(tmp_path, "model.small.vocab_size=null", f"model.small.tokenizer={tmp_path / 'tokenizer.json'}")
    text_of = debug.text_of(small)
    assert text_of is not None and text_of(2) == "'model2'"
    folder = configure(tmp_path, "model.small=null", f"model.path={tmp_path}")
    text_of = debug.text_of(folder)
    assert text_of is not None and text_of(1) == "'model1'"
    named = debug.text_of(folder.model_copy(update={"tokenizer": str(tmp_path / "other.json")}))
    assert named is not None and named(1) == "'other1'"
    assert debug.text_of(configure(tmp_path)) is None
    with pytest.raises(ValueError, match=r"tokenizer: .*absent\.json: cannot be read as a tokenizer\.json"):
        debug.text_of(configure(tmp_path, f"tokenizer={tmp_path / 'absent.json'}"))


def fake_step(bad: int) -> Step:
    """Step functions that take the logarithm of a negative number in micro-batch ``bad``."""
    calls: list[int] = []

    def accumulate(params: Any, total: Any, batch: Batch, *rest: Any) -> Any:
        calls.append(0)
        return total + jnp.log(jnp.float32(-1.0 if len(calls) == bad + 1 else 1.0))

    def score(params: Any, rows: Rows) -> Any:
        return jnp.zeros(()) / params

    unused: Any = None
    return Step(lambda: jnp.zeros(()), accumulate, unused, unused, unused, score, score)


def test_a_nan_is_found_and_named() -> None:
    with jax.disable_jit():
        step = debug.checked(fake_step(bad=1), ["first", "second"])
        batch = batch_of(forked())
        total = step.accumulate(None, step.zero(), batch)
        with pytest.raises(debug.NotANumber) as caught, debug.naming(7):
            step.accumulate(None, total, batch)
        assert str(caught.value).startswith("step 7, micro-batch 1 (rollouts first): invalid value (nan)")
        assert "log" in str(caught.value)
        with pytest.raises(debug.NotANumber, match=r"^score \(rollouts first\): invalid value"):
            step.score(jnp.zeros(()), batch.rows)
        assert not jax.config.jax_debug_nans
        assert bool(jnp.isnan(jnp.log(jnp.float32(-1.0))))  # outside, a NaN is only a NaN


TINY = (
    "data.row_length=32", "data.edges_per_row=16", "data.rows_per_microbatch=1", "model.attention=oracle",
    "tracking.plots=false", "model.small.layers=1", "data.group_tries=false",
)  # fmt: skip


def without_logprobs(made: Sequence[rollouts.Rollout]) -> list[rollouts.Rollout]:
    return [
        dataclasses.replace(r, turns=tuple(dataclasses.replace(turn, logprobs=None) for turn in r.turns)) for r in made
    ]


@pytest.mark.slow
def test_debug_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = recorded(2, turns=3)
    write(tmp_path, made)
    config = configure(tmp_path, *TINY, "data.steps=3")
    (tmp_path / "config.yaml").write_text(load.dump(config))
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", str(tmp_path / "config.yaml"), "--debug"])
    assert caught.value.code == statuses.DONE
    shown = capsys.readouterr().err
    index = data.scan(config.data.paths, setup.layout(config))
    first = setup.step_source(config, index)[0].microbatches
    number = debug.first_rollout(first)
    assert number is not None
    assert f"step 1: rollout {index.ids[number]!r} as rows of packed train it" in shown
    edges = sum(int(((b.rows.edges.weight != 0) & (b.rows.edges.rollout == number)).sum()) for b in first)
    assert shown.count("> ") - 1 == edges > 2  # one line a loss token; one > in the legend
    assert not jax.config.jax_disable_jit and not jax.config.jax_debug_nans
    *_, before, last = (row["seconds"] for row in metrics_log.read(config.run_dir))
    assert last > before / 50  # each step's time is its own


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "known"),
    [
        (("data.method=sdcc", "loss.sdcc.ramp=0.0"), False),
        (("data.method=union",), False),
        (("loss.task=gspo",), True),
        (("loss.task=memorywalker", "data.method=naive_full", "loss.old_logprobs=recompute"), False),
        (("loss.task=memorywalker", "loss.old_logprobs=recompute_own_rows"), False),
    ],
)
def test_no_false_alarm_where_log_probs_are_unknown_or_masked(
    tmp_path: Path, options: tuple[str, ...], known: bool
) -> None:
    made = recorded(2, turns=2)
    write(tmp_path, made if known else without_logprobs(made))
    result = loop.run(configure(tmp_path, *TINY, *options, "data.steps=1", "debug=true"))
    assert result.last is not None and np.isfinite(result.last["loss"])


@pytest.mark.slow
def test_weights_that_overflow_are_found_where_it_shows_first(tmp_path: Path) -> None:
    write(tmp_path, recorded(2, turns=2))
    config = configure(
        tmp_path, *TINY, "data.steps=3", "debug=true", "optimizer.learning_rate=1e38", "optimizer.clip_norm=null"
    )
    with pytest.raises(
        debug.NotANumber, match=r"^step 2, micro-batch 0 \(rollouts r\d.*invalid value.* in \w+ \(mwjax/"
    ):
        loop.run(config)
