"""Side by side: the same numbers as audits apart, in every output."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from matplotlib.patches import Rectangle

from mwjax import audit, cli, model, rollouts
from mwjax.audit.comparison import compare_audits, compare_models, short_names
from mwjax.audit.comparison_page import files_figure, models_figure
from mwjax.audit.comparison_tables import comparison_rows
from mwjax.audit.model_audit import Model
from mwjax.audit.model_result import ModelAudit
from mwjax.rollouts import Rollout
from tests.random_rollouts import simulate
from tests.test_audit_logdiff import CONFIG, params, sampled_by_the_model


@cache
def edited() -> tuple[Rollout, ...]:
    return tuple(
        dataclasses.replace(sampled_by_the_model(simulate(k, turns=7, name=f"r{k}").rollout), group=f"g{k % 2}")
        for k in range(3)
    )


@cache
def others() -> model.Params:
    return jax.tree.map(lambda leaf: leaf * 1.2, params())


@cache
def both() -> tuple[ModelAudit, ModelAudit]:
    one, two = audit.run(edited(), models=[Model("tiny", CONFIG, params()), Model("other", CONFIG, others())]).models
    return one, two


def plain() -> list[Rollout]:
    """One turn each: nothing was edited."""
    return [dataclasses.replace(one, id=f"plain {one.id}", turns=one.turns[:1], edits=()) for one in edited()]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    for name, made in (("a", edited()), ("b", plain())):
        (tmp_path / name).mkdir()
        rollouts.write(tmp_path / name / "r.jsonl", made)
    return [str(tmp_path / name / "r.jsonl") for name in "ab"]


def test_file_figures_are_those_of_separate_audits(files: list[str]) -> None:
    apart = [audit.run(file) for file in files]
    compared = audit.compare(files)
    assert compared.results == tuple(apart)
    assert compared.names == ("a/r.jsonl", "b/r.jsonl")
    value = compared.figures.value
    assert value("recorded", "rollouts") == (3, 3)
    assert value("recorded", "views") == tuple(one.views for one in apart)
    assert value("contexts", "trie ratio") == tuple(one.trie_ratio for one in apart)
    assert value("contexts", "diverging leaves (D)") == (apart[0].diverging_leaves, 0)
    assert apart[0].diverging_leaves > 0
    for name in ("packed", "naive_compressed", "naive_full", "union", "sdcc", "logittree"):
        methods = [one.method(name) for one in apart]
        assert value("wrong_prefix", name) == tuple(found.wrong_share for found in methods)
        assert value("lost", name) == tuple(found.lost / (found.lost + found.loss_tokens) for found in methods)
    for found in compared.figures.figures:
        before, after = found.values
        assert found.difference == (None if before is None or after is None else after - before)


def test_model_figures_are_those_of_separate_audits() -> None:
    (other,) = audit.run(edited(), models=[Model("other", CONFIG, others())]).models
    one, two = both()
    assert dataclasses.replace(two, seconds=0) == dataclasses.replace(other, seconds=0)
    compared = compare_models([one, two])
    assert compared.columns == ("tiny", "other")
    for name in ("packed", "naive_compressed", "naive_full"):
        assert compared.value("logdiff_mean", name) == (one.method(name).mean, two.method(name).mean)
        assert compared.value("logdiff_max", name) == (one.method(name).max_token, two.method(name).max_token)
    assert compared.value("delta_mean", "delta_comp") == (one.delta("delta_comp").mean, two.delta("delta_comp").mean)
    shares = tuple(found.delta("delta_full").share_expected for found in (one, two))
    assert compared.value("delta_expected_sign", "delta_full (+)") == shares
    assert compared.value("kl_mean", "all diverging leaves") == (one.kl.mean_kl, two.kl.mean_kl)
    for prefix, kind in (("distance ", "kl_by_distance"), ("", "kl_by_junction"), ("missing ", "kl_by_missing")):
        for mine, theirs in zip(getattr(one, kind), getattr(two, kind), strict=True):
            assert compared.value("kl_mean", prefix + mine.label) == (mine.mean_kl, theirs.mean_kl)
    logdiff = next(found for found in compared.section("logdiff_mean") if found.name == "packed")
    assert logdiff.values[0] < 1e-5 < 0.01 < logdiff.values[1]
    assert logdiff.difference == logdiff.values[1] - logdiff.values[0]


def test_what_only_one_has_is_not_available_in_the_other() -> None:
    one, two = both()
    assert one.kl_by_junction
    without = dataclasses.replace(two, kl_by_junction=())
    for columns in ([one, without], [without, one]):
        found = compare_models(columns).value("kl_mean", one.kl_by_junction[0].label)
        assert sorted(found, key=str) == sorted([one.kl_by_junction[0].mean_kl, None], key=str)
    three = compare_models([one, two, without], ["x", "y", "z"])
    assert three.columns == ("x", "y", "z")
    assert {found.difference for found in three.figures} == {None}
    assert all(len(row) in (1, 4) for row in comparison_rows(three))


def test_cells() -> None:
    first = audit.run(edited())
    second = dataclasses.replace(
        first,
        rollouts=1003,
        depth=None,
        trie_ratio=(first.trie_ratio or 0) + 0.25,
        frequency=(first.frequency or 0) - 0.1,
    )
    cells = {row[0]: row[1:] for row in comparison_rows(compare_audits([first, second], ["x", "y"]))}
    assert cells["rollouts"] == ("3", "1,003", "+1,000")
    assert cells["compression depth"][1:] == ("N/A", "N/A")
    assert cells["trie ratio"][2] == "+0.25"
    assert cells["rollouts with compression"][2] == "-10.0 pp"
    assert cells["packed"][2] == "0"


def test_short_names() -> None:
    assert short_names(["runs/a/model", "runs/b/model"]) == ["a/model", "b/model"]
    assert short_names(["x/a.jsonl", "b.jsonl"]) == ["a.jsonl", "b.jsonl"]
    assert short_names(["m/", "m"]) == ["m (1)", "m (2)"]
    assert short_names(["b/r", "a/b/r"]) == ["b/r", "a/b/r"]


def test_command_line_files(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, figures = tmp_path / "a.html", tmp_path / "a.json"

    def command(*arguments: str) -> object:
        with pytest.raises(SystemExit) as left:
            cli.main(["audit", *arguments])
        return left.value.code

    assert command(*files, "--compare", "--html", str(page), "--json", str(figures)) == 0
    printed = capsys.readouterr()
    assert "a/r.jsonl  b/r.jsonl  difference" in printed.out
    assert "a/r.jsonl: 3 rollouts read, 0 refused" in printed.err
    value = json.loads(figures.read_text())
    compared = audit.compare(files)
    assert value["comparison"]["columns"] == ["a/r.jsonl", "b/r.jsonl"]
    assert [tuple(found["values"]) for found in value["comparison"]["figures"]] == [
        found.values for found in compared.figures.figures
    ]
    assert value["model_comparison"] is None
    assert command(files[0], "--json", "-") == 0
    assert json.loads(capsys.readouterr().out) == value["audits"][0]
    html = page.read_text()
    assert "Side by side" in html and html.count("<svg") == 1 and "difference" in html
    assert command(*files, "--json", "-") == 0  # without --compare they are one set
    assert json.loads(capsys.readouterr().out)["rollouts"] == 6
    assert command(*files, "--compare", "--strict") == 1
    assert command(files[0], "--compare") == 2
    assert "takes two or more files" in capsys.readouterr().err
    assert command(*files, "--compare", "--rows", files[0]) == 2
    assert "not with --compare" in capsys.readouterr().err
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{}\n")
    assert command(files[0], str(broken), "--compare") == 2
    assert "broken.jsonl: 0 rollouts read, 1 refused" in capsys.readouterr().err


def test_command_line_models(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, figures = tmp_path / "a.html", tmp_path / "a.json"
    folders = [str(tmp_path / name / "model") for name in ("one", "two")]
    for folder, weights in zip(folders, (params(), others())):
        model.save(folder, CONFIG, weights)
    chosen = [part for folder in folders for part in ("--model", folder)]
    with pytest.raises(SystemExit) as left:
        cli.main(["audit", files[0], *chosen, "--html", str(page), "--json", str(figures)])
    assert left.value.code == 0
    printed = capsys.readouterr().out
    assert "one/model   two/model  difference" in printed or "one/model  two/model  difference" in printed
    assert "Warning: two/model: packed does not reproduce" in " ".join(printed.split())
    value = json.loads(figures.read_text())
    one, two = both()
    assert value["model_comparison"]["columns"] == ["one/model", "two/model"]
    wanted = compare_models([one, two])
    for found, expected in zip(value["model_comparison"]["figures"], wanted.figures, strict=True):
        assert (found["section"], found["name"]) == (expected.section, expected.name)
        np.testing.assert_allclose(
            np.array(found["values"], float), np.array(expected.values, float), rtol=1e-4, atol=1e-6
        )
    html = page.read_text()
    assert "What the models say, side by side" in html and "one/model: conditioning KL" in html
    compared = audit.compare(files, models=[Model("x", CONFIG, params()), Model("y", CONFIG, others())])
    assert compared.models is not None
    assert compared.models.columns == ("a/r.jsonl: x", "a/r.jsonl: y", "b/r.jsonl: x", "b/r.jsonl: y")
    assert compared.models.value("logdiff_mean", "naive_full")[:2] == wanted.value("logdiff_mean", "naive_full")


def test_figures_draw_the_numbers(files: list[str]) -> None:
    compared = audit.compare(files)
    left, right = files_figure(compared.figures).axes
    for axes, section in ((left, "wrong_prefix"), (right, "lost")):
        bars = [patch.get_width() for patch in axes.patches if isinstance(patch, Rectangle)]
        shares = [found.values for found in compared.figures.section(section)]
        np.testing.assert_allclose(bars, 100 * np.array(shares).T.ravel())
    models = compare_models(both())
    drawn = models_figure(models)
    assert drawn is not None
    bars = [patch.get_width() for patch in drawn.axes[0].patches if isinstance(patch, Rectangle)]
    np.testing.assert_allclose(bars, np.array([found.values for found in models.section("logdiff_mean")]).T.ravel())
    lines = [line.get_ydata() for line in drawn.axes[1].lines]
    distances = [found.values for found in models.section("kl_mean") if found.name.startswith("distance ")]
    np.testing.assert_allclose(lines, np.array(distances, float).T)
    empty = dataclasses.replace(
        both()[0],
        methods=tuple(dataclasses.replace(found, mean=None) for found in both()[0].methods),
        kl_by_distance=(),
    )
    assert models_figure(compare_models([empty, empty])) is None
