"""``plots/training.png``: the curves of a run, one small panel each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from mwjax.rollouts.storage import replacing

FOLDER, FILE = "plots", "training.png"
SMOOTHED_FROM, SPAN = 50, 0.05  # points from which a running mean is drawn, over this share of them

Rows = Sequence[Mapping[str, Any]]
INK, FAINT, HELD_OUT = "#1f4e79", "#a9c1d9", "#c4500b"


class Panel(NamedTuple):
    """One panel: a figure of the rows of every step, and one of the evaluations, either may be None. noisy: whether a
    running mean is drawn."""

    title: str
    unit: str
    training: str | None
    evaluation: str | None = None
    noisy: bool = True


PANELS = (
    Panel("Training loss", "loss", "loss"),
    Panel("Held-out loss", "nats per sampled token", None, "loss"),
    Panel("Gradient norm", "L2 norm before clipping", "gradient_norm"),
    Panel("Learning rate", "rate", "learning_rate", noisy=False),
    Panel("logdiff", "nats per token, mean |difference|", "logdiff_mean", "logdiff_mean"),
    Panel("Speed", "row tokens per second", "tokens_per_second"),
)


def draw(run_dir: epath.PathLike, rows: Rows, evaluations: Rows) -> None:
    """Writes the picture; panels without a single value are left out, and the picture if none is left.

    rows, evaluations: of ``metrics.jsonl`` and ``evaluation.jsonl``. Raises RolloutFileError where it cannot be
    written: an earlier picture is then as it was.
    """
    # Without pyplot: its figures are global and outlive a run. Here, because importing it takes a second.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curves = [(panel, _points(rows, panel.training), _points(evaluations, panel.evaluation)) for panel in PANELS]
    shown = [(panel, training, held_out) for panel, training, held_out in curves if len(training[0]) + len(held_out[0])]
    if not shown:
        return
    columns = min(len(shown), 2 if len(shown) <= 4 else 3)
    lines = -(-len(shown) // columns)
    figure = Figure(figsize=(3.8 * columns, 2.7 * lines + 0.4), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    figure.suptitle(epath.Path(run_dir).name, fontsize=11, fontweight="bold")
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True).ravel()
    for axes, (panel, training, held_out) in zip(grid, shown):
        _panel(axes, panel, training, held_out)
    for axes in grid[len(shown) :]:
        axes.set_visible(False)
    for axes in grid[max(len(shown) - columns, 0) : len(shown)]:
        axes.tick_params(labelbottom=True)
        axes.set_xlabel("optimiser step", fontsize=8)
    folder = epath.Path(run_dir) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / FILE) as out:
        canvas.print_png(out)


def _points(rows: Rows, name: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values where there is one: int64 [N], float64 [N]."""
    found = [(row["step"], row[name]) for row in rows if name is not None and row.get(name) is not None]
    return np.array([step for step, _ in found], np.int64), np.array([value for _, value in found], np.float64)


def _panel(
    axes: Any,
    panel: Panel,
    training: tuple[np.ndarray, np.ndarray],
    held_out: tuple[np.ndarray, np.ndarray],
) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(panel.title, fontsize=9, loc="left")
    axes.set_ylabel(panel.unit, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.ticklabel_format(axis="y", useOffset=False, scilimits=(-3, 5))
    axes.yaxis.get_offset_text().set_fontsize(7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    steps, values = training
    many = len(steps) >= SMOOTHED_FROM
    if many and panel.noisy:
        span = max(int(SPAN * len(values)), 2)
        axes.plot(steps, values, color=FAINT, linewidth=0.8, label="training")
        axes.plot(steps, running_mean(values, span), color=INK, linewidth=1.4, label=f"mean of {span} steps")
    elif len(steps):
        mark = None if many else "o"
        axes.plot(steps, values, color=INK, linewidth=1.4, marker=mark, markersize=2.5, label="training")
    if len(held_out[0]):
        axes.plot(*held_out, color=HELD_OUT, linewidth=1.4, marker="o", markersize=3.5, label="held out")
    if len(axes.lines) > 1:
        axes.legend(fontsize=7, frameon=False)


def running_mean(values: np.ndarray, span: int) -> np.ndarray:
    """Mean of each value and the up to ``span - 1`` before it: float64 [N]."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    last = np.arange(1, len(values) + 1)
    first = np.maximum(last - span, 0)
    return (total[last] - total[first]) / (last - first)
