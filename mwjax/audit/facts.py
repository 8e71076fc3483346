"""What one rollout adds to an audit: counts, all additive, from its tree and from the rows every method would build."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mwjax.audit.differences import fragment_differences
from mwjax.audit.junctions import deed
from mwjax.rollouts.record import MAIN_CHAIN
from mwjax.tree import METHODS, RowShape, Tree, build_trie, fragments

# Bin b of a histogram counts sizes of b bits: 0, 1, 2-3, 4-7, ..., the last everything beyond.
BINS = 24


@dataclass(frozen=True, eq=False)
class MethodFacts:
    """One rollout under one method; see :class:`mwjax.audit.result.MethodAudit`. Histograms: int64 [BINS], over the
    loss tokens with a wrong prefix."""

    loss_tokens: int
    wrong: int
    indirect: int
    common_wrong: int
    missing: int
    missing_most: int
    extra: int
    extra_most: int
    row_tokens: int
    teacher_tokens: int
    missing_histogram: np.ndarray
    extra_histogram: np.ndarray


@dataclass(frozen=True, eq=False)
class RolloutFacts:
    """One rollout. junctions, evicted spans, compressed share and diverging leaves are of ``main``."""

    id: str
    turns: int
    chains: int
    side_chains: int
    views: int
    view_tokens: int
    trie_tokens: int
    sampled: int
    untrainable: int
    without_logprobs: int
    truncated_turns: int
    sampling: Counter[str]
    reasons: Counter[str]
    details: Counter[str]
    side_reasons: Counter[str]
    evicted_spans: tuple[int, ...]
    compressed_share: float
    diverging: int
    common_survivors: int
    methods: dict[str, MethodFacts]


def rollout_facts(tree: Tree) -> RolloutFacts:
    """Audit one rollout."""
    rollout, sampled = tree.rollout, tree.sampled
    main = [junction for junction in tree.junctions if junction.chain == MAIN_CHAIN]
    side = [junction for junction in tree.junctions if junction.chain != MAIN_CHAIN]
    lengths = [len(turn.completion_ids) for turn in rollout.turns]
    methods, common = _methods(tree)
    return RolloutFacts(
        id=rollout.id,
        turns=len(rollout.turns),
        chains=len(tree.unions),
        side_chains=len(tree.unions.keys() - {MAIN_CHAIN}),
        views=len(tree.views),
        view_tokens=sum(len(view.ids) for view in tree.views),
        trie_tokens=len(build_trie([view.ids for view in tree.views]).tokens),
        sampled=len(sampled.turn),
        untrainable=int((~sampled.trainable).sum()),
        without_logprobs=sum(n for n, turn in zip(lengths, rollout.turns) if turn.logprobs is None),
        truncated_turns=sum(turn.finish_reason == "length" for turn in rollout.turns),
        sampling=_sampling(tree),
        reasons=Counter(junction.reason for junction in main),
        details=Counter(done for junction in main if (done := deed(tree, junction)) is not None),
        side_reasons=Counter(junction.reason for junction in side),
        evicted_spans=tuple(junction.evicted for junction in main if junction.evicted),
        compressed_share=_compressed_share(tree),
        diverging=int(sampled.diverging.sum()),
        common_survivors=int(common.sum()),
        methods=methods,
    )


def _methods(tree: Tree) -> tuple[dict[str, MethodFacts], np.ndarray]:
    """Facts per method, and which tokens all of them train: bool [S]."""
    walk, union = tree.compressed, tree.unions.get(MAIN_CHAIN)
    places: dict[str, np.ndarray] = {}
    if walk is not None and union is not None:
        places = {
            "naive_compressed": walk.union,
            "sdcc": walk.union,
            "naive_full": np.arange(len(union.ids)),
            "union": union.entry_position,
        }
    count = len(tree.sampled.turn)
    shape = _large_enough(tree)
    common = np.ones(count, bool)
    seen = {}
    for method in METHODS:
        made = fragments([tree], method, shape)
        parts = [fragment_differences(tree, fragment, places.get(method)) for fragment in made]
        trained = np.zeros(count, bool)
        for part in parts:
            trained[part.sampled] = True
        common &= trained
        rows = sum(len(fragment.tokens) for fragment in made)
        teacher = sum(len(fragment.teacher.tokens) for fragment in made if fragment.teacher is not None)
        seen[method] = parts, rows, teacher
    return {method: _method(*found, common) for method, found in seen.items()}, common


def _method(parts: Sequence, rows: int, teacher: int, common: np.ndarray) -> MethodFacts:
    empty = np.zeros(0, np.int64)
    which, wrong, indirect, missing, extra = (
        (np.concatenate(column) for column in zip(*parts)) if parts else (empty, empty > 0, empty > 0, empty, empty)
    )
    missing, extra = missing[wrong], extra[wrong]
    return MethodFacts(
        loss_tokens=len(which),
        wrong=int(wrong.sum()),
        indirect=int(indirect.sum()),
        common_wrong=int((wrong & common[which]).sum()),
        missing=int(missing.sum()),
        missing_most=int(missing.max(initial=0)),
        extra=int(extra.sum()),
        extra_most=int(extra.max(initial=0)),
        row_tokens=rows,
        teacher_tokens=teacher,
        missing_histogram=_histogram(missing),
        extra_histogram=_histogram(extra),
    )


def _histogram(sizes: np.ndarray) -> np.ndarray:
    # The exponent of frexp is the number of bits, exactly, for any int below 2**53.
    return np.bincount(np.minimum(np.frexp(sizes.astype(np.float64))[1], BINS - 1), minlength=BINS)


def _large_enough(tree: Tree) -> RowShape:
    """A row that nothing of this rollout has to be split for."""
    tokens = sum(len(view.ids) for view in tree.views)
    longest = max(tokens, *(len(union.entry_position) for union in tree.unions.values()))
    edges = max(len(tree.sampled.turn), 1)
    return RowShape(longest, edges, longest, edges)


def _compressed_share(tree: Tree) -> float:
    """c_i: of all tokens ever rendered in ``main``, the share that some junction took out (back later or not)."""
    union = tree.unions.get(MAIN_CHAIN)
    if union is None or not len(union.ids):
        return 0.0
    main = [view.union for view in tree.views if view.chain == MAIN_CHAIN]
    gone = np.zeros(len(union.ids), bool)
    for before, after in pairwise(main):
        left = np.zeros(len(union.ids), bool)
        left[before] = True
        left[after] = False
        gone |= left
    return float(gone.mean())


def _sampling(tree: Tree) -> Counter[str]:
    """Sampled tokens under settings that matter for ratios, by kind."""
    kinds: Counter[str] = Counter()
    for turn in tree.rollout.turns:
        count, sampling = len(turn.completion_ids), turn.sampling
        processed = sampling.logprobs == "processed"
        if processed and (sampling.top_p < 1 or sampling.top_k > 0):
            kinds["truncated_processed"] += count
        if processed and sampling.temperature == 0:
            kinds["greedy_processed"] += count
        if not processed and sampling.temperature != 1:
            kinds["raw_other_temperature"] += count
    return +kinds
