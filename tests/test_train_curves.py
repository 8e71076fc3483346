"""The picture of a run: which panels it has, what they show, and that it is never half written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from mwjax.train import curves


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {"step": n + 1, "loss": 4.0 / (n + 1), "gradient_norm": None if n == 1 else 1.0 + n % 3, "learning_rate": 1e-6,
         "logdiff_mean": None, "tokens_per_second": 1000.0 + n}
        for n in range(count)
    ]  # fmt: skip


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures as they are when they are written."""
    made: list[Figure] = []
    subplots = Figure.subplots

    def keep(self: Figure, *args: Any, **options: Any) -> Any:
        made.append(self)
        return subplots(self, *args, **options)

    monkeypatch.setattr(Figure, "subplots", keep)
    return made


def shown(figure: Figure) -> dict[str, list[tuple[list[float], list[float]]]]:
    visible = [axes for axes in figure.axes if axes.get_visible()]
    assert all(axes.get_ylabel() for axes in visible)
    return {
        axes.get_title(loc="left"): [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines]
        for axes in visible
    }


def test_every_measured_figure_has_a_panel_with_its_values(tmp_path: Path, drawn: list[Figure]) -> None:
    evaluations = [{"step": 0, "loss": 5.0, "logdiff_mean": None}, {"step": 5, "loss": 2.0, "logdiff_mean": None}]
    curves.draw(tmp_path, rows(5), evaluations)
    panels = shown(drawn[0])
    assert list(panels) == ["Training loss", "Held-out loss", "Gradient norm", "Learning rate", "Speed"]
    assert panels["Training loss"] == [([1, 2, 3, 4, 5], [4 / n for n in range(1, 6)])]
    assert panels["Held-out loss"] == [([0, 5], [5.0, 2.0])]
    assert panels["Gradient norm"] == [([1, 3, 4, 5], [1.0, 3.0, 1.0, 2.0])]
    picture = imread(tmp_path / "plots" / "training.png")
    assert picture.shape[0] > 400 and picture.shape[1] > 800 and picture.std() > 0


def test_long_runs_get_a_running_mean_where_figures_are_noisy(tmp_path: Path, drawn: list[Figure]) -> None:
    curves.draw(tmp_path, rows(100), [])
    panels = shown(drawn[0])
    (_, plain), (_, mean) = panels["Training loss"]
    assert mean == pytest.approx([np.mean(plain[max(n - 4, 0) : n + 1]) for n in range(100)])
    assert len(panels["Learning rate"]) == 1


def test_without_a_figure_there_is_no_picture_and_a_failure_keeps_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    curves.draw(tmp_path, [], [])
    assert not (tmp_path / "plots").exists()
    curves.draw(tmp_path, rows(2), [])
    before = (tmp_path / "plots" / "training.png").read_bytes()

    def torn(self: Any, out: Any) -> None:
        out.write(b"half")
        raise OSError(28, "no space")

    monkeypatch.setattr("matplotlib.backends.backend_agg.FigureCanvasAgg.print_png", torn)
    with pytest.raises(OSError, match="disk is full"):
        curves.draw(tmp_path, rows(3), [])
    assert (tmp_path / "plots" / "training.png").read_bytes() == before
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["training.png"]
