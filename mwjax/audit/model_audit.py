"""What a model says of rollouts: logdiff per method, delta_comp and delta_full, conditioning KL. Forward only."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath

from mwjax import model as models
from mwjax.audit.conditioning import conditioning_kl
from mwjax.audit.leaves import leaves_of
from mwjax.audit.logdiff import LogDiff, changes, logdiff, row_shape, rows_of
from mwjax.audit.model_result import Delta, KLGroup, LeafColumns, MethodScore, ModelAudit, published_signs
from mwjax.rollouts.record import Sampling
from mwjax.tree import METHODS, Tree

# Multiplications a default audit may take, forward: one to two minutes of two idle CPU cores.
BUDGET = 4e12
# Above what float32 differs by between decoding token by token and scoring whole rows: the weights are others.
ROUNDING = 1e-3
DISTANCES = (0, 2, 8, 32)
MISSING = (0, 1, 16, 64, 256)
HARNESS = "harness"

Progress = Callable[[str, int, int], None]


class Model(NamedTuple):
    """A decoder to score with, and what to call it."""

    name: str
    config: models.ModelConfig
    params: Any

    @property
    def parameters(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))


class Size(NamedTuple):
    """What choosing needs to know of a rollout. work: about how many row tokens all of its scoring takes."""

    id: str
    group: str | None
    work: int


def load_model(source: Model | epath.PathLike) -> Model:
    """A model by its folder or hub id (see :func:`mwjax.model.load`), named after it.

    Raises:
        ModelFilesError, UnsupportedModelError: as :func:`mwjax.model.load`.
    """
    if isinstance(source, Model):
        return source
    name = os.fspath(source)
    config, params = models.load(name)
    path = epath.Path(name).expanduser()
    return Model(path.name if path.is_dir() else name, config, params)


def size_of(tree: Tree) -> Size:
    """The size of a rollout."""
    views = sum(len(view.ids) for view in tree.views)
    union = sum(len(union.ids) for union in tree.unions.values())
    walk = 0 if tree.compressed is None else len(tree.compressed.ids)
    return Size(tree.rollout.id, tree.rollout.group, views + 3 * union + 2 * walk)


def choose(sizes: Sequence[Size], parameters: int, rollouts: int | None = None) -> set[str]:
    """The ids to score: ``rollouts`` of them, or as many as ``BUDGET`` allows a model of that many parameters, at least
    one. Every group gives its first before any gives its second; of what does not fit, evenly spaced ones are taken.
    The same rollouts and model size always give the same choice."""
    seen: Counter[str] = Counter()
    rounds: dict[int, list[Size]] = {}
    for size in sizes:
        group = f"rollout {size.id}" if size.group is None else f"group {size.group}"
        rounds.setdefault(seen[group], []).append(size)
        seen[group] += 1
    if rollouts is None:
        mean = sum(size.work for size in sizes) / max(len(sizes), 1)
        rollouts = max(1, int(BUDGET / max(mean * parameters, 1)))
    chosen: set[str] = set()
    for number in sorted(rounds):
        members, room = rounds[number], rollouts - len(chosen)
        if room < len(members):
            members = [members[(2 * k + 1) * len(members) // (2 * room)] for k in range(room)]
        chosen.update(size.id for size in members)
    return chosen


def score(
    model: Model, trees: Sequence[Tree], *, of: int | None = None, progress: Progress | None = None
) -> ModelAudit:
    """Score ``trees``, chosen from ``of`` rollouts, with ``model``.

    progress: called with (what, rows done, rows in all) after every row.

    Raises:
        ValueError: ids beyond the model's vocabulary.
    """
    started = time.perf_counter()
    trees = tuple(trees)
    shape = row_shape(trees, METHODS)
    results: dict[str, LogDiff] = {}
    for method in METHODS:
        if rows_of(method) == method:
            moved = None if progress is None else _named(progress, f"log-probs, {method}")
            found = logdiff(model.config, model.params, trees, method, shape=shape, progress=moved)
            results[method] = _comparable(found, trees)
    leaves = [leaves_of(tree) for tree in trees]
    moved = None if progress is None else _named(progress, "conditioning KL")
    kl = conditioning_kl(model.config, model.params, trees, leaves, shape, moved)
    comp_tokens, comp = changes(results["packed"], results["naive_compressed"], trees)
    full_tokens, full = changes(results["packed"], results["naive_full"], trees)
    walk_tokens, walk = _against_the_walk(results, full_tokens)
    columns = _leaf_columns(trees, leaves, kl, dict(zip(comp_tokens, comp.tolist())))
    without, unmatched = _uncompared(trees)
    reason = _reason(without, unmatched)
    methods = tuple(_method_score(method, results[rows_of(method)], reason) for method in METHODS)
    mean = methods[0].mean
    return ModelAudit(
        model=model.name,
        parameters=model.parameters,
        rollouts=len(trees) if of is None else of,
        scored=tuple(tree.rollout.id for tree in trees),
        without_logprobs=without,
        unmatched=unmatched,
        exact=None if mean is None else mean < ROUNDING,
        methods=methods,
        deltas=(
            *_deltas("delta_comp", "negative", trees, comp_tokens, comp),
            *_deltas("delta_full", "positive", trees, full_tokens, full),
            *_deltas("delta_full_walk", "positive", trees, walk_tokens, walk),
        ),
        kl=_group("all", columns, np.ones(len(columns.kl), bool)),
        kl_by_distance=_binned(columns, columns.distance, DISTANCES),
        kl_by_junction=tuple(
            _group(cause, columns, np.array(columns.cause) == cause)
            for cause, _ in Counter(columns.cause).most_common()
        ),
        kl_by_missing=_binned(columns, columns.missing, MISSING),
        leaves=columns,
        delta_full=tuple(full.tolist()),
        published=published_signs(),
        seconds=time.perf_counter() - started,
    )


def _named(progress: Progress, what: str) -> Callable[[int, int], None]:
    return lambda done, total: progress(what, done, total)


def _matched(sampling: Sampling) -> bool:
    """Whether a training row can say the same log-prob: raw, or with nothing but the temperature applied."""
    truncated = sampling.top_p < 1 or sampling.top_k > 0 or sampling.temperature <= 0
    return sampling.logprobs == "raw" or not truncated


def _comparable(found: LogDiff, trees: Sequence[Tree]) -> LogDiff:
    """Without the recorded log-probs that no training row can reproduce."""
    usable = [np.array([_matched(turn.sampling) for turn in tree.rollout.turns], bool) for tree in trees]
    keep = np.array([usable[r][t] for r, t in zip(found.rollout.tolist(), found.turn.tolist())], bool)
    return dataclasses.replace(found, recorded=np.where(keep, found.recorded, np.nan))


def _uncompared(trees: Sequence[Tree]) -> tuple[int, int]:
    """Loss tokens without a recorded log-prob, and with one that cannot be matched."""
    turns = [turn for tree in trees for turn in tree.rollout.turns if turn.trainable]
    without = unmatched = 0
    for turn in turns:
        known = 0 if turn.logprobs is None else int((~np.isnan(turn.logprobs)).sum())
        without += len(turn.completion_ids) - known
        unmatched += 0 if _matched(turn.sampling) else known
    return without, unmatched


def _reason(without: int, unmatched: int) -> str:
    said = [f"{without:,} loss tokens have no recorded log-prob"] if without else []
    if unmatched:
        said.append(
            f"{unmatched:,} have one processed by top-p, top-k or temperature 0, which no training row can match"
        )
    return "; ".join(said) or "no loss tokens"


def _method_score(method: str, found: LogDiff, reason: str) -> MethodScore:
    why = "" if found.tokens else reason if len(found.trained) else "no loss tokens"
    return MethodScore(method, found.tokens, found.mean, found.max_token, found.signed_mean, why)


def _against_the_walk(
    results: dict[str, LogDiff], tokens: Sequence[tuple[int, int, int]]
) -> tuple[list[tuple[int, int, int]], np.ndarray]:
    """log p under all that was ever live - log p in the compressed walk, of those ``tokens`` that are in both."""
    full, walk = (
        dict(
            zip(zip(*(getattr(found, name).tolist() for name in ("rollout", "turn", "index"))), found.trained.tolist())
        )
        for found in (results["naive_full"], results["naive_compressed"])
    )
    both = [token for token in tokens if token in walk]
    return both, np.array([full[token] - walk[token] for token in both], np.float64)


def _deltas(
    name: str, expected: str, trees: Sequence[Tree], tokens: list[tuple[int, int, int]], values: np.ndarray
) -> list[Delta]:
    named = [tree.rollout.meta.get(HARNESS) for tree in trees]
    harness = np.array([str(named[rollout]) for rollout, _, _ in tokens], object)
    parts = [("all", np.ones(len(values), bool))]
    if any(isinstance(one, str) for one in named):
        parts += [(one, harness == one) for one in dict.fromkeys(harness.tolist())]
    made = []
    for of, select in parts:
        some = values[select]
        right = (some < 0) if expected == "negative" else (some > 0)
        mean, share = (float(some.mean()), float(right.mean())) if len(some) else (None, None)
        made.append(Delta(name, of, expected, len(some), mean, share))
    return made


def _leaf_columns(
    trees: Sequence[Tree], leaves: Sequence[Any], kl: Sequence[np.ndarray], delta: dict[tuple[int, int, int], float]
) -> LeafColumns:
    rows: list[tuple[Any, ...]] = []
    for number, (tree, here, values) in enumerate(zip(trees, leaves, kl)):
        sampled, chosen = tree.sampled, here.sampled
        turn, index = sampled.turn[chosen].tolist(), sampled.index[chosen].tolist()
        changed = [delta[number, t, i] for t, i in zip(turn, index)]
        sizes = (here.distance.tolist(), sampled.missing[chosen].tolist(), sampled.extra[chosen].tolist())
        rows += zip([tree.rollout.id] * len(chosen), turn, index, values.tolist(), changed, *sizes, here.cause)
    return LeafColumns(*zip(*rows)) if rows else LeafColumns(*[()] * len(dataclasses.fields(LeafColumns)))


def _binned(columns: LeafColumns, values: Sequence[int], edges: Sequence[int]) -> tuple[KLGroup, ...]:
    """Groups of the leaves by ``values``: from each edge up to the next, the last without end."""
    of = np.searchsorted(edges, np.array(values, np.int64), side="right") - 1
    labels = [*(str(lo) if hi == lo + 1 else f"{lo}-{hi - 1}" for lo, hi in itertools.pairwise(edges)), f"{edges[-1]}+"]
    return tuple(_group(label, columns, of == number) for number, label in enumerate(labels))


def _group(label: str, columns: LeafColumns, select: np.ndarray) -> KLGroup:
    kl, delta = np.array(columns.kl)[select], np.abs(np.array(columns.delta_comp)[select])
    if not len(kl):
        return KLGroup(label, 0, None, None, None)
    return KLGroup(label, len(kl), float(kl.mean()), float(kl.max()), float(delta.mean()))
