"""Fixed-shape training rows, as plain numpy pytrees (NamedTuples need no jax)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Edges(NamedTuple):
    """Sampled tokens to be scored: the log-prob of ``target`` is read at row position ``parent``.

    Arrays of one shape, [E] in a fragment, [B, E] in a batch. Padding edges have weight 0. Unknown log-probs are NaN
    (``rollout_logprob``, ``old_logprob``, ``ref_logprob``). ``temperature`` divides the logits before the log-softmax
    (1 where the recorded log-probs are raw). ``rollout`` numbers the rollout in the mini-batch, ``turn`` and ``index``
    the sampled token in it, ``view`` the branch view it was sampled in.
    """

    parent: np.ndarray  # int32, position in the row
    target: np.ndarray  # int32, token id
    weight: np.ndarray  # float32
    advantage: np.ndarray  # float32
    rollout_logprob: np.ndarray  # float32, what the engine recorded at decode time
    old_logprob: np.ndarray  # float32, the policy before the update, under the generation prefix
    ref_logprob: np.ndarray  # float32, the reference policy, same row and parent as the numerator
    temperature: np.ndarray  # float32
    rollout: np.ndarray  # int32
    turn: np.ndarray  # int32
    index: np.ndarray  # type: ignore[assignment]  # int32 (hides tuple.index, which nobody needs here)
    view: np.ndarray  # int32


class Rows(NamedTuple):
    """Packed rows. Row position i sees key j exactly when ``j <= i < visible_until[j]``.

    tokens, positions (RoPE position = depth in the tree), visible_until: int32 [B, T]. Padding sees only itself:
    ``visible_until[j] = j + 1``.

    index: None, or int32 [B, T] where the rows are reordered for context parallelism (`mwjax.tree.context`): what
    stands at place r of ``tokens`` and ``positions``, and what a parent r means, is row position ``index[r]``;
    ``visible_until`` is in row order.

    token_weight: None, or float32 [B, T], laid out as ``tokens``: what a position counts for where tokens are counted
    (the load of experts), so that a token of the trie of what is laid out together (a rollout, or with ``packed`` a
    group) counts once however many rows repeat it: 1 over the number of its places; padding, and teacher rows, 0.
    """

    tokens: np.ndarray
    positions: np.ndarray
    visible_until: np.ndarray
    edges: Edges
    index: np.ndarray | None = None  # type: ignore[assignment]  # hides tuple.index
    token_weight: np.ndarray | None = None


class Pairs(NamedTuple):
    """SDCC: KL(teacher || student) between two positions of batch row b: ``student`` in its row, ``teacher`` in its
    teacher row. int32 [B, P], int32 [B, P], float32 [B, P]; padding pairs have weight 0."""

    student: np.ndarray
    teacher: np.ndarray
    weight: np.ndarray


class Batch(NamedTuple):
    """One micro-batch of fixed shape. ``teacher`` (without edges: E = 0) and ``pairs`` are None except for SDCC."""

    rows: Rows
    teacher: Rows | None = None
    pairs: Pairs | None = None
