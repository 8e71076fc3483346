"""The quickstart's figures: a rollout's tree, logdiff per method, the loss of the two runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mwjax.audit.junctions import deed
from mwjax.audit.logdiff import LogDiff
from mwjax.audit.report import BLUE, GREEN, INK, MUTED, ORANGE, RED, new_figure
from mwjax.rollouts.record import MAIN_CHAIN
from mwjax.tree import Junction, Tree, View

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 8.6
CONTEXT, OBSERVED, SAMPLED, WRITTEN = range(4)
KINDS = (
    ("#d3d9df", "context carried over"),
    ("#a9b4bf", "new: prompt, tool result"),
    (BLUE, "sampled here"),
    (ORANGE, "put in by the edit"),
)
SMALLEST, LARGEST = 1e-7, 100.0
CURVES: dict[str, dict[str, Any]] = {
    "packed": {"color": BLUE},
    "logittree": {"color": INK, "ls": (0, (2, 2))},
    "naive_compressed": {"color": RED},
    "naive_full": {"color": ORANGE},
    "union": {"color": GREEN},
}
# What decoding token by token and scoring whole rows may differ by in float32; measured: below 5e-5.
ROUNDING = 1e-4


def rollout_tree(tree: Tree) -> Figure:
    """The branch views of ``main`` as bars, one below the other: what was sampled in each, where the next one forks
    off, and what an edit then took away."""
    from matplotlib.patches import Patch

    views = [view for view in tree.views if view.chain == MAIN_CHAIN]
    forks = [junction for junction in tree.junctions if junction.chain == MAIN_CHAIN]
    longest = max(len(view.ids) for view in views)
    fig, (axes,) = new_figure(WIDTH, 0.7 * len(views) + 0.9)
    for row, view in enumerate(views):
        before = views[row - 1] if row else None
        _draw_view(axes, _kinds(tree, view, before), -row)
        if row + 1 < len(views):
            _draw_evicted(axes, ~np.isin(view.union, views[row + 1].union), -row)
        words = f"{len(view.ids)} tokens"
        axes.annotate(
            words, (len(view.ids), -row), (6, 0), textcoords="offset points", va="center", color=MUTED, fontsize=8
        )
    for row, fork in enumerate(forks):
        _draw_fork(axes, fork, (deed(tree, fork) or fork.reason).replace("_", " "), -row, longest)
    axes.set_yticks([-row for row in range(len(views))], [_turns(view) for view in views])
    axes.set_xlim(0, longest * 1.1)
    axes.set_ylim(-len(views) + 0.6, 0.4)
    axes.set_xlabel("position in the context the model saw, tokens")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    handles = [Patch(fc=color, label=name) for color, name in KINDS]
    handles.append(Patch(fc="white", ec=RED, hatch="/////", label="evicted by the next edit"))
    fig.legend(handles=handles, loc="outside upper left", ncols=len(handles), frameon=False, fontsize=8.5)
    return fig


def _kinds(tree: Tree, view: View, before: View | None) -> np.ndarray:
    """What every token of a view is, as an index into ``KINDS``: int64 [N]."""
    sampled, number = tree.sampled, next(k for k, other in enumerate(tree.views) if other is view)
    kinds = np.full(len(view.ids), OBSERVED)
    if before is not None:
        carried = np.isin(view.union, before.union)
        kinds[carried] = CONTEXT
        # What stands between carried tokens was put there by the edit; what follows the last one came with the turn.
        last = int(np.flatnonzero(carried)[-1]) if carried.any() else 0
        kinds[:last][~carried[:last]] = WRITTEN
    kinds[sampled.prefix[sampled.view == number]] = SAMPLED
    return kinds


def _draw_view(axes: Any, kinds: np.ndarray, y: float) -> None:
    for lo, hi in runs(kinds):
        axes.barh(y, hi - lo, 0.4, lo, color=KINDS[kinds[lo]][0])


def _draw_evicted(axes: Any, gone: np.ndarray, y: float) -> None:
    for lo, hi in runs(gone):
        if gone[lo]:
            axes.barh(y, hi - lo, 0.46, lo, color="none", edgecolor=RED, hatch="/////", linewidth=0.9)


def _draw_fork(axes: Any, fork: Junction, what: str, y: float, longest: int) -> None:
    axes.plot([fork.at, fork.at], [y - 0.25, y - 0.78], color=INK, lw=1.3, solid_capstyle="butt")
    words = f"turn {fork.turn}, {what}: {fork.evicted} tokens out, {fork.inserted} in"
    right = fork.at > 0.6 * longest
    axes.annotate(
        words,
        (fork.at, y - 0.5),
        (-5 if right else 5, 0),
        textcoords="offset points",
        ha="right" if right else "left",
        va="center",
        fontsize=8,
        color=INK,
    )


def runs(values: np.ndarray) -> list[tuple[int, int]]:
    """Half-open ranges of equal neighbours."""
    if not len(values):
        return []
    cuts = (np.flatnonzero(values[1:] != values[:-1]) + 1).tolist()
    return list(zip([0, *cuts], [*cuts, len(values)]))


def _turns(view: View) -> str:
    first, last = view.turns[0], view.turns[-1]
    return f"turn {first}" if first == last else f"turns {first} to {last}"


def logdiff_curves(results: Sequence[LogDiff]) -> Figure:
    """Per method, the share of loss tokens whose |log p_train - log p_rollout| is above x, on a logarithmic axis."""
    fig, (axes,) = new_figure(WIDTH, 3.2)
    x = np.geomspace(SMALLEST, LARGEST, 400)
    axes.axvspan(SMALLEST, ROUNDING, color="#f1f3f5", lw=0)
    axes.text(SMALLEST * 1.3, 97, "float32 rounding", va="top", fontsize=8, color=MUTED)
    for result in results:
        if result.mean is None:
            continue
        size = np.sort(np.abs(result.signed))
        share = 100 * (1 - np.searchsorted(size, x, side="right") / len(size))
        label = f"{result.method}: mean {result.mean:.2g}, max {result.max_token:.2g}"
        axes.plot(x, share, lw=1.8, label=label, **CURVES.get(result.method, {"color": INK}))
    axes.set_xscale("log")
    axes.set_xlim(SMALLEST, LARGEST)
    axes.set_ylim(-1.5, 100)
    decades = 10.0 ** np.arange(-7, 3)
    axes.set_xticks(decades, [f"{decade:.4g}" for decade in decades])
    axes.minorticks_off()
    axes.set_xlabel("x = |log p in the training row - log p recorded by the engine|, nats")
    axes.set_ylabel("loss tokens above x, %")
    axes.grid(axis="y")
    axes.legend(frameon=False, fontsize=8.5, loc="upper right")
    return fig


def loss_curves(curves: Mapping[str, Sequence[tuple[int, float]]]) -> Figure:
    """Loss over steps, one line per method."""
    fig, (axes,) = new_figure(WIDTH, 2.6)
    for method, points in curves.items():
        if points:
            axes.plot(*_columns(points), lw=1.8, label=method, **CURVES.get(method, {"color": INK}))
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token")
    axes.grid(axis="y")
    axes.legend(frameon=False)
    return fig


def _columns(points: Iterable[tuple[int, float]]) -> tuple[list[int], list[float]]:
    steps, losses = zip(*points)
    return list(steps), list(losses)
