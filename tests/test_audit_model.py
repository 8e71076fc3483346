"""``mwjax audit --model``: every figure against dense attention, one prefix at a time."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from matplotlib.patches import Rectangle

from mwjax import audit, cli, model, rollouts
from mwjax.audit import report
from mwjax.audit.leaves import OTHER_CHAIN, UNKNOWN, leaves_of
from mwjax.audit.model_audit import Model, Size, choose, score
from mwjax.audit.model_page import deltas_figure, distance_figure
from mwjax.audit.model_result import ModelAudit
from mwjax.audit.model_tables import delta_rows, kl_rows, logdiff_rows, model_notes
from mwjax.quickstart import load_quickstart_rollouts_path
from mwjax.rollouts import Rollout, Sampling
from mwjax.tree import Tree, build
from tests.random_rollouts import simulate
from tests.test_audit_logdiff import CONFIG, all_logprobs, params, sampled_by_the_model, trees


def scored_by_hand(ids: np.ndarray) -> np.ndarray:
    """log p(. | ids): [V], each prefix in a forward pass of its own."""
    return all_logprobs(tuple(ids.tolist()))[len(ids) - 1].astype(np.float64)


@cache
def found() -> ModelAudit:
    return score(Model("tiny", CONFIG, params()), trees())


@cache
def leaves_by_hand() -> dict[tuple[str, int, int], tuple[float, float, int]]:
    """(rollout, turn, index) -> (KL, delta_comp, distance), from the ids alone."""
    by_hand = {}
    for tree in trees():
        sampled, walk = tree.sampled, tree.compressed
        assert walk is not None
        for k in np.flatnonzero(sampled.diverging & (sampled.compressed > 0)):
            turn = tree.rollout.turns[sampled.turn[k]]
            right = np.concatenate([turn.prompt_ids, turn.completion_ids[: sampled.index[k]]])
            wrong = walk.ids[: sampled.compressed[k]]
            p, q = (scored_by_hand(ids) for ids in (right, wrong))
            distance = 0
            while distance < min(len(right), len(wrong)) and right[-1 - distance] == wrong[-1 - distance]:
                distance += 1
            name = (tree.rollout.id, int(sampled.turn[k]), int(sampled.index[k]))
            by_hand[name] = (float((np.exp(p) * (p - q)).sum()), q[sampled.token[k]] - p[sampled.token[k]], distance)
    return by_hand


def test_every_leaf_against_dense_attention() -> None:
    leaves = found().leaves
    expected = leaves_by_hand()
    names = list(zip(leaves.rollout, leaves.turn, leaves.index))
    assert len(names) == len(set(names)) > 10 and set(names) == set(expected)
    np.testing.assert_allclose(leaves.kl, [expected[name][0] for name in names], atol=2e-5)
    np.testing.assert_allclose(leaves.delta_comp, [expected[name][1] for name in names], atol=2e-5)
    assert list(leaves.distance) == [expected[name][2] for name in names]


def test_groups_are_means_over_their_leaves() -> None:
    one, expected = found(), leaves_by_hand()
    kl, delta, distance = (np.array(column) for column in zip(*expected.values()))
    assert one.kl.leaves == len(kl) and one.kl.mean_kl == pytest.approx(kl.mean(), abs=1e-5)
    assert one.kl.max_kl == pytest.approx(kl.max(), abs=1e-4)
    for group, (lo, hi) in zip(one.kl_by_distance, [(0, 1), (2, 7), (8, 31), (32, 10**9)]):
        here = (distance >= lo) & (distance <= hi)
        assert group.leaves == here.sum()
        if here.any():
            assert group.mean_kl == pytest.approx(kl[here].mean(), abs=1e-5)
            assert group.mean_abs_delta == pytest.approx(np.abs(delta[here]).mean(), abs=1e-5)
    assert [group.label for group in one.kl_by_distance] == ["0-1", "2-7", "8-31", "32+"]
    for groups in (one.kl_by_distance, one.kl_by_junction, one.kl_by_missing):
        assert sum(group.leaves for group in groups) == one.kl.leaves
    comp = one.delta("delta_comp")
    assert (comp.tokens, comp.expected) == (len(delta), "negative")
    assert comp.mean == pytest.approx(delta.mean(), abs=1e-5)
    assert comp.share_expected == pytest.approx((delta < 0).mean(), abs=1e-9)


def test_delta_full_against_dense_attention() -> None:
    against_right, against_walk = [], []
    for tree in trees():
        sampled, union, walk = tree.sampled, tree.unions["main"], tree.compressed
        assert walk is not None
        for k in np.flatnonzero(sampled.trainable & (sampled.full > 0) & (sampled.full != sampled.prefix)):
            token, view = sampled.token[k], tree.views[sampled.view[k]]
            full = scored_by_hand(union.ids[: sampled.full[k]])[token]
            against_right.append(full - scored_by_hand(view.ids[: sampled.prefix[k]])[token])
            if sampled.compressed[k] > 0:
                against_walk.append(full - scored_by_hand(walk.ids[: sampled.compressed[k]])[token])
    for name, values in (("delta_full", against_right), ("delta_full_walk", against_walk)):
        delta = found().delta(name)
        assert delta.tokens == len(values) > 10
        assert delta.mean == pytest.approx(np.mean(values), abs=1e-5)
        assert delta.share_expected == pytest.approx(np.mean(np.array(values) > 0), abs=1e-9)
    np.testing.assert_allclose(sorted(found().delta_full), sorted(against_right), atol=2e-5)


def test_each_leaf_has_the_first_junction_that_moved_it() -> None:
    """Replayed view by view with plain lists: the first later view that holds the token behind other ids."""
    for tree in trees():
        here, sampled, union = leaves_of(tree), tree.sampled, tree.unions["main"]
        for k, cause in zip(here.sampled, here.cause):
            own = tree.views[sampled.view[k]]
            if own.chain != "main":
                assert cause == OTHER_CHAIN
                continue
            right = own.ids[: sampled.prefix[k]].tolist()
            for view in tree.views[sampled.view[k] + 1 :]:
                if view.chain != "main":
                    continue
                origin = list(zip(union.origin_turn[view.union], union.origin_index[view.union]))
                me = (sampled.turn[k], sampled.index[k])
                if me in origin and view.ids[: origin.index(me)].tolist() != right:
                    junction = next(j for j in tree.junctions if j.chain == "main" and j.turn == view.turns[0])
                    assert cause.startswith(junction.reason) and cause != UNKNOWN
                    break
            else:
                raise AssertionError("no view moved it")


def resampled(sampling: Sampling) -> list[Tree]:
    changed = []
    for tree in trees()[:3]:
        turns = tuple(dataclasses.replace(turn, sampling=sampling) for turn in tree.rollout.turns)
        changed.append(build(dataclasses.replace(tree.rollout, turns=turns)))
    return changed


def test_log_probs_that_cannot_be_matched_are_not_compared() -> None:
    tiny = Model("tiny", CONFIG, params())
    for sampling in (Sampling(top_p=0.9), Sampling(top_k=5), Sampling(temperature=0.0)):
        one = score(tiny, resampled(dataclasses.replace(sampling, logprobs="processed")))
        assert one.method("packed").mean is None and one.exact is None
        assert "top-p, top-k or temperature 0" in one.method("packed").reason
        assert one.unmatched == sum(int(tree.sampled.trainable.sum()) for tree in trees()[:3])
        assert not one.without_logprobs
        assert one.delta("delta_comp").tokens > 0
        assert logdiff_rows(one)[0][2] == "N/A" and any("N/A" in note for note in model_notes(one))
    bare = []
    for tree in trees()[:3]:
        turns = tuple(dataclasses.replace(turn, logprobs=None) for turn in tree.rollout.turns)
        bare.append(build(dataclasses.replace(tree.rollout, turns=turns)))
    assert "no recorded log-prob" in score(tiny, bare).method("union").reason
    raw = score(tiny, resampled(Sampling(top_p=0.9)))
    assert raw.exact and raw.method("packed").tokens > 0 and raw.method("packed").reason == ""


def test_processed_log_probs_are_compared_at_their_temperature() -> None:
    changed = []
    for tree in resampled(Sampling(temperature=0.5, logprobs="processed")):
        turns = []
        for turn in tree.rollout.turns:
            prompt, completion = turn.prompt_ids.tolist(), turn.completion_ids.tolist()
            logits = 2 * all_logprobs((*prompt, *completion)).astype(np.float64)
            rows = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            values = np.array([rows[len(prompt) + k - 1, token] for k, token in enumerate(completion)])
            turns.append(dataclasses.replace(turn, logprobs=values))
        changed.append(build(dataclasses.replace(tree.rollout, turns=tuple(turns))))
    one = score(Model("tiny", CONFIG, params()), changed)
    most = one.method("packed").max_token
    assert one.exact and most is not None and most < 1e-4


def test_other_weights_are_noticed() -> None:
    shifted = []
    for tree in trees()[:3]:
        turns = tuple(
            dataclasses.replace(turn, logprobs=np.asarray(turn.logprobs) - 0.01) for turn in tree.rollout.turns
        )
        shifted.append(build(dataclasses.replace(tree.rollout, turns=turns)))
    one = score(Model("tiny", CONFIG, params()), shifted)
    assert one.exact is False and one.method("logittree").signed_mean == pytest.approx(0.01, abs=1e-5)
    assert any(note.startswith(f"Warning: {one.model}: packed does not reproduce") for note in model_notes(one))


def test_choice_is_spread_over_groups() -> None:
    sizes = [Size(f"{group}{k}", group, 100) for group in "abcd" for k in range(3)]
    assert choose(sizes, 10, 4) == {"a0", "b0", "c0", "d0"}
    assert choose(sizes, 10, 2) == {"b0", "d0"}
    assert choose(sizes, 10, 6) == {"a0", "b0", "c0", "d0", "b1", "d1"}
    assert len(choose(sizes, 10)) == 12 and len(choose(sizes, 10**13)) == 1
    assert choose([Size("x", None, 1), Size("y", None, 1)], 1, 5) == {"x", "y"}


@cache
def rollouts_of_the_model() -> tuple[Rollout, ...]:
    made = []
    for k in range(4):
        rollout = sampled_by_the_model(simulate(k, turns=7, name=f"r{k}").rollout)
        made.append(dataclasses.replace(rollout, group=f"g{k % 2}", meta={"harness": "ab"[k % 2]}))
    return tuple(made)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, file, page, figures = tmp_path / "tiny", tmp_path / "r.jsonl", tmp_path / "a.html", tmp_path / "a.json"
    model.save(folder, CONFIG, params())
    rollouts.write(file, rollouts_of_the_model())
    arguments = ["audit", str(file), "--model", str(folder), "--rollouts", "3"]
    with pytest.raises(SystemExit) as left:
        cli.main([*arguments, "--html", str(page), "--json", str(figures)])
    assert left.value.code == 0
    printed = capsys.readouterr()
    assert "What tiny says  3 of 4 rollouts scored" in printed.out
    assert "paper: delta_comp" in printed.out and "conditioning KL" in printed.err
    value = json.loads(figures.read_text())
    (first,) = value["models"]
    assert first["exact"] and "model_comparison" not in value
    assert first["scored"] == ["r0", "r1", "r3"]
    assert first["methods"][0]["mean"] < 1e-5
    assert {delta["of"] for delta in first["deltas"]} == {"all", "a", "b"}
    assert first["published"][1]["mean_delta_comp"] == -3.96
    html = page.read_text()
    assert "tiny: conditioning KL" in html and "tokens behind the cut" in html and "MemoryWalker&#x27;s Table 7" in html


def test_mistakes_are_messages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, folder = tmp_path / "r.jsonl", tmp_path / "small"
    rollouts.write(file, rollouts_of_the_model()[:1])
    small = model.small_config(4, layers=1, width=8, heads=1, key_value_heads=1)
    model.save(folder, small, model.init(small, jax.random.key(0)))
    for arguments, said in (
        (["--rollouts", "3"], "goes with --model"),
        (["--tokenizer", "tokenizer.json"], "goes with --rows"),
        (["--model", str(tmp_path / "none")], "none"),
        (["--model", str(folder)], "outside the model's vocabulary of 4"),
    ):
        with pytest.raises(SystemExit) as left:
            cli.main(["audit", str(file), *arguments])
        assert left.value.code == 2
        assert said in capsys.readouterr().err


def test_no_model_no_jax(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    rollouts.write(file, rollouts_of_the_model()[:1])
    code = (
        "import sys, mwjax.cli\ntry: mwjax.cli.main(['audit', sys.argv[1], '--html', sys.argv[1] + '.html'])\n"
        "except SystemExit as left: print(left.code, 'jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "0 False"


def test_nothing_edited_nothing_to_compare() -> None:
    rollout = next(one for one in rollouts_of_the_model() if one.turns[0].trainable)
    plain = dataclasses.replace(rollout, turns=rollout.turns[:1], edits=())
    one = audit.run([plain], models=[Model("tiny", CONFIG, params())]).models[0]
    assert one.kl.leaves == 0 and one.delta("delta_full").mean is None and one.exact
    assert delta_rows(one)[0][3] == "N/A"


def test_figures() -> None:
    one = found()
    dots = distance_figure(one).axes[0].collections[0].get_offsets()
    np.testing.assert_array_equal(np.asarray(dots)[:, 0], np.array(one.leaves.distance) + 1)
    bars = [patch for patch in deltas_figure(one).axes[1].patches if isinstance(patch, Rectangle)][1:]
    assert sum(bar.get_height() for bar in bars) == len(one.delta_full)
    assert report.figure_svg(distance_figure(one)).startswith("<svg")
    report.figure_svg(deltas_figure(dataclasses.replace(one, delta_full=())))


@pytest.mark.slow
def test_signs_on_the_shipped_rollouts() -> None:
    """SmolLM2 on what it sampled itself: delta_comp has the published sign under every editor. delta_full cannot, on
    average: tokens drawn from p lose log-prob under any other distribution; against the compressed walk it has it."""
    from mwjax.engine import load_smollm2

    one = audit.run(load_quickstart_rollouts_path(), models=[load_smollm2()], rollouts_scored=12).models[0]
    for row in (*logdiff_rows(one), *delta_rows(one), *kl_rows(one)):
        print("  ".join(row))
    assert one.exact and len(one.scored) == 12
    for of in ("all", "pop", "fold", "offload"):
        comp = one.delta("delta_comp", of)
        assert comp.mean is not None and comp.mean < 0
    comp, walk = one.delta("delta_comp"), one.delta("delta_full_walk")
    assert comp.share_expected is not None and comp.share_expected > 0.55
    assert walk.mean is not None and walk.mean > 0
    assert one.kl.mean_kl is not None and comp.mean is not None
    assert one.kl.mean_kl == pytest.approx(-comp.mean, rel=0.4)
