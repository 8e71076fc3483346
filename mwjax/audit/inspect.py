"""``mwjax inspect``: what a rollout's tree looks like, and the prefix every method would train each token under."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from etils import epath

from mwjax.audit.prefixes import Prefix, edge_prefixes, visible_prefixes
from mwjax.rollouts.read import Refusal, iterate
from mwjax.rollouts.record import MAIN_CHAIN
from mwjax.tree import METHODS, Batch, RowShape, Tree, TreeError, build, build_trie, collate, fragments, pack


def trees(path: epath.PathLike, *, ids: Sequence[str] = (), limit: int | None = None) -> Iterator[Tree | Refusal]:
    """The trees of a rollout file in file order, and a refusal for every line that gives none.

    ids: only these rollouts, if any are named. limit: stop after so many trees.

    Raises:
        RolloutFileError: the file cannot be read at all.
    """
    wanted, count = set(ids), 0
    for line, item in iterate(path):
        if count == limit:
            return
        if isinstance(item, Refusal):
            yield item
        elif not wanted or item.id in wanted:
            try:
                yield build(item)
                count += 1
            except TreeError as error:
                yield Refusal(str(path), line, error.field, error.reason)


def trie_tokens(trees: list[Tree]) -> int:
    """Tokens of the prefix trie of all views of some rollouts."""
    return len(build_trie([view.ids for tree in trees for view in tree.views]).tokens)


def summary(tree: Tree) -> dict[str, Any]:
    """The pinned one-object summary of a rollout (design: Pinned interfaces)."""
    sampled, main = tree.sampled, tree.compressed
    return {
        "id": tree.rollout.id,
        "views": len(tree.views),
        "view_tokens": [len(view.ids) for view in tree.views],
        "trie_tokens": trie_tokens([tree]),
        "compressed_tokens": 0 if main is None else len(main.ids),
        "union_tokens": 0 if main is None else len(tree.unions[MAIN_CHAIN].ids),
        "loss_tokens": int(sampled.trainable.sum()),
        "surviving_loss_tokens": int(sampled.surviving.sum()),
        "diverging_leaves": int(sampled.diverging.sum()),
        "junctions": [
            {name: getattr(junction, name) for name in ("turn", "at", "evicted", "inserted", "reason", "detail")}
            for junction in tree.junctions
            if junction.chain == MAIN_CHAIN
        ],
    }


def lines(tree: Tree, *, tokens: bool = False) -> Iterator[dict[str, Any]]:
    """The objects ``mwjax inspect --json`` writes for a rollout, with ``tokens`` one per sampled token too."""
    yield summary(tree)
    if tokens:
        yield from token_lines(tree)


def token_lines(tree: Tree) -> Iterator[dict[str, Any]]:
    """One object per sampled token with its visible prefix under every method, read back from the built rows."""
    methods = {method: _prefixes(tree, method) for method in METHODS if method != "sdcc"}
    methods["sdcc"], methods["sdcc_teacher"] = _distillation_prefixes(tree)
    sampled = tree.sampled
    for turn, index, token, trainable in zip(sampled.turn, sampled.index, sampled.token, sampled.trainable):
        yield {
            "id": tree.rollout.id,
            "turn": int(turn),
            "index": int(index),
            "token": int(token),
            "trainable": bool(trainable),
            "methods": {name: found.get((int(turn), int(index))) for name, found in methods.items()},
        }


def built_rows(trees: list[Tree], method: str) -> Batch:
    """The rows one method would train on, in rows as long as these rollouts need."""
    tokens = sum(len(view.ids) for tree in trees for view in tree.views)
    longest = max(tokens, *(len(union.entry_position) for tree in trees for union in tree.unions.values()))
    edges = sum(len(tree.sampled.turn) for tree in trees)
    paired = method == "sdcc"
    shape = RowShape(longest, max(edges, 1), longest if paired else 0, max(edges, 1) if paired else 0)
    made = fragments(trees, method, shape)
    rows = pack([fragment.needs for fragment in made], shape)
    return collate(made, rows, shape, max(len(rows), 1))


def _entry(length: int, crc32: int) -> dict[str, int]:
    return {"prefix_len": length, "prefix_crc32": crc32}


def _prefixes(tree: Tree, method: str) -> dict[tuple[int, int], dict[str, int]]:
    return _by_token(edge_prefixes(built_rows([tree], method).rows))


def _by_token(prefixes: Iterator[Prefix]) -> dict[tuple[int, int], dict[str, int]]:
    return {(p.turn, p.index): _entry(p.length, p.crc32) for p in prefixes}


Prefixes = dict[tuple[int, int], dict[str, int]]


def _distillation_prefixes(tree: Tree) -> tuple[Prefixes, Prefixes]:
    batch = built_rows([tree], "sdcc")
    student = _by_token(edge_prefixes(batch.rows))
    teacher: Prefixes = {}
    if batch.teacher is None or batch.pairs is None:
        return student, teacher
    for row in range(len(batch.rows.tokens)):
        edges = batch.rows.edges
        real = edges.weight[row] > 0
        token_at = {
            int(parent): (int(turn), int(index))
            for parent, turn, index in zip(edges.parent[row][real], edges.turn[row][real], edges.index[row][real])
        }
        used = batch.pairs.weight[row] > 0
        parents = batch.pairs.teacher[row][used]
        seen = visible_prefixes(batch.teacher.tokens[row], batch.teacher.visible_until[row], np.unique(parents))
        for at, parent in zip(batch.pairs.student[row][used], parents):
            teacher[token_at[int(at)]] = _entry(*seen[int(parent)])
    return student, teacher
