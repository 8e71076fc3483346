"""logdiff per method: what the weights that sampled say of their own tokens, read from each method's own rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mwjax.losses import edge_logprobs
from mwjax.model import ModelConfig, forward, unembedding
from mwjax.tree import Batch, Fragment, RowShape, Tree, collate, fragments, pack

ROW_STEP, EDGE_STEP = 128, 64
# Longer than anything: to measure fragments before their row is chosen.
_UNBOUNDED = RowShape(1 << 40, 1 << 40)


@dataclass(frozen=True, eq=False)
class LogDiff:
    """Every loss token of some rollouts under one method, with the log-prob the engine recorded and the one its
    training row gives it.

    rollout: int64 [N], index into the trees; turn, index: int64 [N], which sampled token; recorded, trained: float64
    [N], natural log, ``recorded`` NaN where the engine gave none. rows, row_tokens: what was computed.
    """

    method: str
    rollout: np.ndarray
    turn: np.ndarray
    index: np.ndarray
    recorded: np.ndarray
    trained: np.ndarray
    rows: int
    row_tokens: int

    @property
    def signed(self) -> np.ndarray:
        """log p_train - log p_rollout of the tokens with a recorded log-prob: float64 [K]."""
        known = ~np.isnan(self.recorded)
        return self.trained[known] - self.recorded[known]

    @property
    def tokens(self) -> int:
        """Loss tokens that could be compared."""
        return len(self.signed)

    @property
    def mean(self) -> float | None:
        """Mean of |log p_train - log p_rollout|: the paper's logdiff."""
        return float(np.abs(self.signed).mean()) if self.tokens else None

    @property
    def max_token(self) -> float | None:
        """The largest |log p_train - log p_rollout| of a token (the paper's maximum is of step means)."""
        return float(np.abs(self.signed).max()) if self.tokens else None

    @property
    def signed_mean(self) -> float | None:
        return float(self.signed.mean()) if self.tokens else None


def row_shape(trees: Sequence[Tree], methods: Sequence[str]) -> RowShape:
    """The smallest row that holds every unsplittable piece of the methods, with room for one loss token in two tokens,
    rounded up so that close sizes agree: one shape for all methods, hence one compilation."""
    length = edges = 1
    for method in dict.fromkeys(map(rows_of, methods)):
        # packed splits at forks, down to single views, which are logittree's pieces.
        pieces = fragments(trees, "logittree" if method == "packed" else method, _UNBOUNDED)
        for piece in pieces:
            length, edges = max(length, len(piece.tokens)), max(edges, len(piece.edges.parent))
    length = -(-length // ROW_STEP) * ROW_STEP
    return RowShape(length, -(-max(edges, length // 2) // EDGE_STEP) * EDGE_STEP)


def rows_of(method: str) -> str:
    """The method whose rows the task loss of ``method`` is read from: sdcc's student is ``naive_compressed``."""
    return "naive_compressed" if method == "sdcc" else method


def logdiff(
    config: ModelConfig,
    params: Any,
    trees: Sequence[Tree],
    method: str,
    *,
    shape: RowShape | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LogDiff:
    """Score the loss tokens of ``trees`` in the rows of ``method``, forward only, one row at a time.

    Args:
        config, params: the decoder; the figures mean something only for the weights that sampled the rollouts.
        method: one of :data:`mwjax.tree.METHODS`.
        shape: of a row (default: :func:`row_shape` of this method); pass one shape for all methods, so that the
            forward pass is compiled once.
        progress: called with (rows done, rows in all) after every row.

    Raises:
        RowTooShort: something that cannot be split does not fit a row of ``shape``.
        ValueError: unknown method, or ids beyond the model's vocabulary.
    """
    largest = max((int(view.ids.max(initial=0)) for tree in trees for view in tree.views), default=0)
    if largest >= config.vocab_size:
        raise ValueError(f"token id {largest} is outside the model's vocabulary of {config.vocab_size}: another model?")
    shape = row_shape(trees, [method]) if shape is None else shape
    # Tree by tree, so that a packed row never depends on which rollouts are looked at together.
    made = [f for number, tree in enumerate(trees) for f in fragments([tree], rows_of(method), shape, numbers=[number])]
    rows = pack([fragment.needs for fragment in made], shape)
    found = []
    for number, batch in enumerate(_batches(made, rows, shape)):
        trained = np.asarray(_scores(params, config, batch), np.float64)
        edges, real = batch.rows.edges, batch.rows.edges.weight > 0
        columns = (edges.rollout, edges.turn, edges.index, edges.rollout_logprob, trained)
        found.append([column[real] for column in columns])
        if progress is not None:
            progress(number + 1, len(rows))
    joined = [np.concatenate(column) for column in zip(*found)] if found else [np.zeros(0)] * 5
    order = np.lexsort(joined[2::-1])
    rollout, turn, index, recorded, scored = (column[order] for column in joined)
    return LogDiff(
        method=method,
        rollout=rollout.astype(np.int64),
        turn=turn.astype(np.int64),
        index=index.astype(np.int64),
        recorded=recorded.astype(np.float64),
        trained=scored.astype(np.float64),
        rows=len(rows),
        row_tokens=sum(len(fragment.tokens) for fragment in made),
    )


def _batches(made: Sequence[Fragment], rows: Sequence[Sequence[int]], shape: RowShape) -> Iterator[Batch]:
    for row in rows:
        yield collate([made[fragment] for fragment in row], [range(len(row))], shape, 1)


@partial(jax.jit, static_argnums=1)
def _scores(params: Any, config: ModelConfig, batch: Batch) -> jax.Array:
    """Log-probs of a batch's edges: float32 [B, E]."""
    rows, edges = batch.rows, batch.rows.edges
    layout = (jnp.asarray(array) for array in (rows.tokens, rows.positions, rows.visible_until))
    asked = (jnp.asarray(array) for array in (edges.parent, edges.target, edges.temperature))
    return edge_logprobs(forward(params, config, *layout), unembedding(params, config), *asked).logprob


@dataclass(frozen=True)
class Shift:
    """How much the wrong prefix changed the log-probs of the tokens it applies to, in nats.

    tokens: how many. mean: of log p(y | training prefix) - log p(y | generation prefix); None without tokens.
    """

    tokens: int
    mean: float | None


def shift(exact: LogDiff, other: LogDiff, trees: Sequence[Tree]) -> Shift:
    """MemoryWalker's delta_comp (``other`` of naive_compressed, over the diverging leaves: expected negative) and
    delta_full (``other`` of naive_full, over the tokens sampled after something had been evicted: expected positive).

    exact: of an exact method (packed or logittree), over the same trees.
    """
    found = changes(exact, other, trees)[1]
    return Shift(len(found), float(found.mean()) if len(found) else None)


def changes(exact: LogDiff, other: LogDiff, trees: Sequence[Tree]) -> tuple[list[tuple[int, int, int]], np.ndarray]:
    """The tokens that :func:`shift` averages over, as (rollout, turn, index), and the change of each: float64 [N]."""
    at = dict(zip(_tokens(exact), exact.trained.tolist()))
    reached = _diverging if rows_of(other.method) == "naive_compressed" else _after_eviction
    wanted = {token for number, tree in enumerate(trees) for token in reached(number, tree)}
    found = {
        token: value - at[token] for token, value in zip(_tokens(other), other.trained.tolist()) if token in wanted
    }
    return list(found), np.array(list(found.values()), np.float64)


def _tokens(found: LogDiff) -> Iterator[tuple[int, int, int]]:
    return zip(found.rollout.tolist(), found.turn.tolist(), found.index.tolist())


def _diverging(number: int, tree: Tree) -> list[tuple[int, int, int]]:
    sampled = tree.sampled
    return _named(number, tree, sampled.diverging)


def _after_eviction(number: int, tree: Tree) -> list[tuple[int, int, int]]:
    """Tokens whose generation prefix lacks something that was live before them."""
    sampled = tree.sampled
    return _named(number, tree, (sampled.full >= 0) & (sampled.full != sampled.prefix))


def _named(number: int, tree: Tree, select: np.ndarray) -> list[tuple[int, int, int]]:
    sampled = tree.sampled
    return [(number, int(turn), int(index)) for turn, index in zip(sampled.turn[select], sampled.index[select])]
