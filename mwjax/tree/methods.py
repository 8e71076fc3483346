"""The training methods as input builders: trees in, row fragments with their edges out. Nothing downstream branches.

===================  =================================================  =============================================
method               input                                              prefix of a sampled token
===================  =================================================  =============================================
``packed``           prefix trie of the branch views                    the generation prefix
``logittree``        one sequence per branch view                       the generation prefix
``naive_compressed`` ``H_comp``                                         what is left of it, plus later replacements
``naive_full``       ``H_T``                                            everything that was ever live before it
``union``            ``H_T``, keys end where they are evicted           the live view, but its keys saw evicted text
``sdcc``             ``H_comp``, and the trie of the views as teacher   as ``naive_compressed``
===================  =================================================  =============================================
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mwjax.tree.build import Tree
from mwjax.tree.rows import Edges
from mwjax.tree.trie import Trie, build_trie, split_paths

METHODS = ("packed", "logittree", "naive_compressed", "naive_full", "union", "sdcc")
EXACT_METHODS = ("packed", "logittree")
EDGE_DTYPES = tuple(
    np.int32 if name in ("parent", "target", "rollout", "turn", "index", "view") else np.float32
    for name in Edges._fields
)


class RowTooShort(ValueError):
    """Something that cannot be split does not fit a row. ``needed`` is the capacity that would do."""

    def __init__(self, message: str, needed: int):
        super().__init__(message)
        self.needed = needed


@dataclass(frozen=True)
class RowShape:
    """Capacities of one row: tokens, edges, and for SDCC the teacher row's tokens and the pairs."""

    length: int
    edges: int
    teacher_length: int = 0
    pairs: int = 0


@dataclass(frozen=True, eq=False)
class Teacher:
    """SDCC's piece of a teacher row: int32 [N] as in :class:`Fragment`. ``student_pairs`` and ``teacher_pairs``, int32
    [P], are the positions to compare, counted from the first token of either piece."""

    tokens: np.ndarray
    positions: np.ndarray
    visible_until: np.ndarray
    student_pairs: np.ndarray
    teacher_pairs: np.ndarray


@dataclass(frozen=True, eq=False)
class Fragment:
    """A piece of a row that must stay together. Positions in ``edges`` count from its first token.

    tokens, positions, visible_until: int32 [N]; edges: arrays [E]; teacher: for SDCC, where there are leaves to teach.
    copies: int64 [N], in how many fragments of the same call every token (the same ids from the start on) stands; None:
    in this one only.
    """

    tokens: np.ndarray
    positions: np.ndarray
    visible_until: np.ndarray
    edges: Edges
    teacher: Teacher | None = None
    copies: np.ndarray | None = None

    @property
    def needs(self) -> tuple[int, int, int, int]:
        """What it takes of a row's capacities, in the order of :class:`RowShape`."""
        teacher = self.teacher
        taught = (0, 0) if teacher is None else (len(teacher.tokens), len(teacher.student_pairs))
        return len(self.tokens), len(self.edges.parent), *taught


def fragments(
    trees: Sequence[Tree],
    method: str,
    shape: RowShape,
    *,
    numbers: Sequence[int] | None = None,
    merge: bool = False,
) -> list[Fragment]:
    """Build the row fragments of some rollouts under one method.

    Args:
        trees: rollouts; ``packed`` merges all of them into one trie, so pass a group to share its prompt.
        method: one of :data:`METHODS`.
        shape: capacities of a row; what is larger is split at forks.
        numbers: the rollouts' numbers in the mini-batch, written into ``edges.rollout`` (default 0, 1, ...).
        merge: join edges of one parent and target into one of weight 2 (for SFT, where nothing else tells them apart).

    Weights are 1, advantages 0, ``old_logprob`` and ``ref_logprob`` NaN: the data pipeline fills them in.

    Raises:
        RowTooShort: a single sequence is longer than a row, with the length that would do.
        ValueError: unknown method.
    """
    numbers = range(len(trees)) if numbers is None else numbers
    if method == "packed":
        made = _split_trie(trees, numbers, shape)
    elif method in ("logittree", "naive_compressed", "naive_full", "union", "sdcc"):
        builder = {"logittree": _views, "sdcc": _distillation, "union": _union}.get(method, _linear)
        made = [f for tree, number in zip(trees, numbers) for f in builder(tree, number, method, shape)]
    else:
        raise ValueError(f"unknown method {method!r}: choose one of {', '.join(METHODS)}")
    made = [_merged(fragment) for fragment in made] if merge else made
    for fragment in made:
        _check_capacity(fragment, shape, trees, numbers)
    return made


def _check_capacity(fragment: Fragment, shape: RowShape, trees: Sequence[Tree], numbers: Sequence[int]) -> None:
    capacities = (shape.length, shape.edges, shape.teacher_length, shape.pairs)
    names = ("row length", "edges per row", "teacher row length", "pairs per row")
    for need, capacity, name in zip(fragment.needs, capacities, names):
        if need > capacity:
            which = numbers.index(int(fragment.edges.rollout[0])) if len(fragment.edges.rollout) else 0
            raise RowTooShort(
                f"rollout {trees[which].rollout.id!r} needs {need} where the {name} is {capacity}: "
                f"raise the {name} to at least {need}, or leave this rollout out",
                need,
            )


def sampled_edges(tree: Tree, select: np.ndarray, parent: np.ndarray, number: int) -> Edges:
    """Edges of the sampled tokens ``select`` (indices into ``tree.sampled``) read at row positions ``parent``."""
    sampled, turns = tree.sampled, tree.rollout.turns
    which = sampled.turn[select]
    recorded = [np.full(len(t.completion_ids), np.nan) if t.logprobs is None else t.logprobs for t in turns]
    temperature = [
        t.sampling.temperature if t.sampling.logprobs == "processed" and t.sampling.temperature > 0 else 1.0
        for t in turns
    ]
    count = len(select)
    unknown = np.full(count, np.nan, np.float32)
    return Edges(
        parent=parent.astype(np.int32),
        target=sampled.token[select].astype(np.int32),
        weight=np.ones(count, np.float32),
        advantage=np.zeros(count, np.float32),
        rollout_logprob=np.concatenate(recorded)[select].astype(np.float32),
        old_logprob=unknown,
        ref_logprob=unknown.copy(),
        temperature=np.array(temperature, np.float32)[which],
        rollout=np.full(count, number, np.int32),
        turn=which.astype(np.int32),
        index=sampled.index[select].astype(np.int32),
        view=sampled.view[select].astype(np.int32),
    )


def no_edges() -> Edges:
    return Edges(*(np.zeros(0, t) for t in EDGE_DTYPES))


def _sequence(ids: np.ndarray, edges: Edges) -> Fragment:
    """Plain causal attention over ``ids``, cut after the last position that is read."""
    length = int(edges.parent.max()) + 1
    positions = np.arange(length, dtype=np.int32)
    return Fragment(ids[:length].astype(np.int32, copy=False), positions, np.full(length, length, np.int32), edges)


def _owned(tree: Tree) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For every view that owns loss tokens: its ids, and its loss tokens as indices into ``tree.sampled``."""
    sampled = tree.sampled
    for number, view in enumerate(tree.views):
        select = np.flatnonzero((sampled.view == number) & sampled.trainable)
        if len(select):
            yield view.ids, select


def _views(tree: Tree, number: int, _method: str, _shape: RowShape) -> list[Fragment]:
    made = [
        _sequence(ids, sampled_edges(tree, select, tree.sampled.prefix[select] - 1, number))
        for ids, select in _owned(tree)
    ]
    if len(made) < 2:
        return made
    trie = build_trie([view.tokens for view in made])
    return _with_copies(made, [trie.rows_of(path, view.positions) for path, view in enumerate(made)])


def _linear(tree: Tree, number: int, method: str, _shape: RowShape) -> list[Fragment]:
    view, sampled = tree.compressed, tree.sampled
    if view is None:
        return []
    compressed = method != "naive_full"
    place = sampled.compressed if compressed else sampled.full
    ids = view.ids if compressed else tree.unions[view.chain].ids
    select = np.flatnonzero(sampled.trainable & (place > 0))
    return [_sequence(ids, sampled_edges(tree, select, place[select] - 1, number))] if len(select) else []


def _union(tree: Tree, number: int, _method: str, _shape: RowShape) -> list[Fragment]:
    view, sampled = tree.compressed, tree.sampled
    select = np.flatnonzero(sampled.trainable & (sampled.union_parent >= 0))
    if view is None or not len(select):
        return []
    edges = sampled_edges(tree, select, sampled.union_parent[select], number)
    length = int(edges.parent.max()) + 1
    union = tree.unions[view.chain]
    ids = union.ids[union.entry_position[:length]]
    until = np.minimum(union.entry_until[:length], length).astype(np.int32)
    return [Fragment(ids, union.entry_depth[:length].astype(np.int32), until, edges)]


def _split_trie(trees: Sequence[Tree], numbers: Sequence[int], shape: RowShape) -> list[Fragment]:
    paths, parents, edges = [], [], []
    for tree, number in zip(trees, numbers):
        for ids, select in _owned(tree):
            parent = tree.sampled.prefix[select] - 1
            paths.append(ids[: int(parent.max()) + 1])
            parents.append(parent)
            edges.append(sampled_edges(tree, select, parent, number))
    pieces = list(_split(paths, [len(parent) for parent in parents], shape.length, shape.edges))
    made = []
    for members, trie in pieces:
        rows = [
            edges[path]._replace(parent=trie.rows_of(local, parents[path]).astype(np.int32))
            for local, path in enumerate(members)
        ]
        made.append(Fragment(trie.tokens, trie.positions, trie.visible_until, _concatenated(rows)))
    if len(made) < 2:
        return made
    whole = build_trie(paths)
    nodes = []
    for members, trie in pieces:
        node = np.empty(len(trie.tokens), np.int64)
        for local, path in enumerate(members):
            depths = np.arange(len(paths[path]))
            node[trie.rows_of(local, depths)] = whole.rows_of(path, depths)
        nodes.append(node)
    return _with_copies(made, nodes)


def _with_copies(made: Sequence[Fragment], nodes: Sequence[np.ndarray]) -> list[Fragment]:
    """Fragments with ``copies``, from the number that every token of theirs has among all distinct ones."""
    count = np.bincount(np.concatenate(nodes))
    return [replace(fragment, copies=count[node]) for fragment, node in zip(made, nodes)]


def _split(
    paths: list[np.ndarray], counts: list[int], row_length: int, max_edges: int
) -> Iterator[tuple[list[int], Trie]]:
    """Tries of the paths, each within the capacities, with the paths it holds. A path that alone is too large gets a
    trie of its own, which the caller refuses."""
    if not paths:
        return
    trie = build_trie(paths)
    if len(trie.tokens) <= row_length and sum(counts) <= max_edges:
        yield list(range(len(paths))), trie
        return
    lengths = np.array([len(path) for path in paths])
    order = trie.order
    length = max(row_length, int(lengths.max()))
    edges = max(max_edges, max(counts))
    for cut in split_paths(lengths[order], trie.shared, np.array(counts)[order], length, edges):
        members = sorted(order[cut].tolist())
        yield members, build_trie([paths[member] for member in members])


def _distillation(tree: Tree, number: int, method: str, shape: RowShape) -> list[Fragment]:
    """SDCC: the student is ``naive_compressed``; the teacher holds the recorded prefix of every diverging leaf."""
    student = _linear(tree, number, method, shape)
    if not student:
        return []
    sampled = tree.sampled
    paths, leaves = [], []
    for view, _ in enumerate(tree.views):
        select = np.flatnonzero((sampled.view == view) & sampled.diverging & (sampled.compressed > 0))
        if len(select):
            leaves.append(select)
            paths.append(tree.views[view].ids[: int(sampled.prefix[select].max())])
    made: list[Fragment] = []
    pieces = _split(paths, [len(select) for select in leaves], shape.teacher_length, shape.pairs)
    for members, trie in pieces:
        select = np.concatenate([leaves[path] for path in members])
        rows = [trie.rows_of(local, sampled.prefix[leaves[path]] - 1) for local, path in enumerate(members)]
        teacher = Teacher(
            trie.tokens,
            trie.positions,
            trie.visible_until,
            student_pairs=(sampled.compressed[select] - 1).astype(np.int32),
            teacher_pairs=np.concatenate(rows).astype(np.int32),
        )
        # A teacher too large for one row goes into several; the task loss is taken with the first.
        base = student[0] if not made else _without_edges(student[0], int(sampled.compressed[select].max()))
        made.append(replace(base, teacher=teacher))
    return _with_copies(made, [fragment.positions for fragment in made]) if len(made) > 1 else made or student


def _without_edges(fragment: Fragment, length: int) -> Fragment:
    until = np.full(length, length, np.int32)
    return Fragment(fragment.tokens[:length], fragment.positions[:length], until, no_edges())


def _concatenated(parts: Sequence[Edges]) -> Edges:
    return Edges(*(np.concatenate(columns) for columns in zip(*parts)))


def _merged(fragment: Fragment) -> Fragment:
    edges = fragment.edges
    key = edges.parent.astype(np.int64) << 32 | edges.target.astype(np.int64)
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    if len(first) == len(key):
        return fragment
    weight = np.bincount(inverse, edges.weight).astype(np.float32)
    kept = Edges(*(column[first] for column in edges))._replace(weight=weight)
    return replace(fragment, edges=kept)
