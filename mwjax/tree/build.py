"""Rollout -> tree: branch views, junctions, and where every sampled token was, is and would be trained."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mwjax.rollouts.record import MAIN_CHAIN, Edit, Rollout
from mwjax.tree.alignment import align, common_prefix
from mwjax.tree.history import History, TreeError, apply_edit

DETAILS = (
    "compaction",
    "fold",
    "pruned_tool_result",
    "template",
    "tool_json",
    "retokenised",
    "injected_turn",
    "system_prompt",
)


@dataclass(frozen=True, eq=False)
class View:
    """A branch view: the ids of one unbroken stretch of context, from the first token to the last one sampled.

    ids: int32 [N]. union: int64 [N], each token's position in its chain's ``H_T``. turns: the turns sampled here.
    """

    chain: str
    ids: np.ndarray
    union: np.ndarray
    turns: tuple[int, ...]


@dataclass(frozen=True)
class Junction:
    """Where a turn's prompt is not a continuation of the latest view of its chain.

    at: common prefix length of the old view and the new prompt. evicted: old tokens that are gone. inserted: prompt
    tokens that were not in the old view. reason: ``resample``, ``restart``, ``deletion``, ``insertion`` or
    ``replacement``. detail: one of ``DETAILS``, where the harness's edits or the log tell.
    """

    chain: str
    turn: int
    at: int
    evicted: int
    inserted: int
    reason: str
    detail: str | None


@dataclass(frozen=True, eq=False)
class Union:
    """``H_T`` of one chain. ids: int32 [L]. origin_turn, origin_index: int64 [L] or -1.

    entry_position, entry_depth, entry_until: int64 [R], the union row (see :class:`mwjax.tree.history.History`).
    """

    ids: np.ndarray
    origin_turn: np.ndarray
    origin_index: np.ndarray
    entry_position: np.ndarray
    entry_depth: np.ndarray
    entry_until: np.ndarray


@dataclass(frozen=True, eq=False)
class SampledTokens:
    """All sampled tokens of a rollout, one entry each, in order of turn and index. Arrays [S]; -1 means "nowhere".

    prefix: length of the generation prefix; the token stands at ``prefix`` in view ``view``. compressed: position in
    ``H_comp``. full: position in the main chain's ``H_T``. union_parent, union_entry: rows of the union method.
    diverging: it survives in ``H_comp`` under other prefix ids than it was sampled under. missing, extra: for every
    survivor, tokens only in the generation prefix, and only in the prefix it has in ``H_comp``.
    """

    turn: np.ndarray
    index: np.ndarray
    token: np.ndarray
    trainable: np.ndarray
    view: np.ndarray
    prefix: np.ndarray
    compressed: np.ndarray
    full: np.ndarray
    union_parent: np.ndarray
    diverging: np.ndarray
    missing: np.ndarray
    extra: np.ndarray

    @property
    def surviving(self) -> np.ndarray:
        """Trainable tokens that have a position in ``H_comp``: bool [S]."""
        return self.trainable & (self.compressed >= 0)


@dataclass(frozen=True, eq=False)
class Tree:
    """One rollout as a tree of branch views, chain by chain, chains in order of their first turn."""

    rollout: Rollout
    views: tuple[View, ...]
    junctions: tuple[Junction, ...]
    unions: dict[str, Union]
    sampled: SampledTokens

    @property
    def compressed(self) -> View | None:
        """``H_comp``: the last view of the main chain, None where no turn is on it."""
        main = [view for view in self.views if view.chain == MAIN_CHAIN]
        return main[-1] if main else None


@dataclass
class _OpenView:
    """The latest view of a chain while it grows. completion_ends: where sampled completions end in it."""

    ids: np.ndarray
    union: np.ndarray
    turns: list[int]
    prompts: list[int]


@dataclass
class _Chain:
    history: History
    views: list[_OpenView]
    junctions: list[Junction]
    union_parent: dict[int, int]


def build(rollout: Rollout) -> Tree:
    """Replay a rollout into its tree (design: Views, Owner, Origin, Junction facts, Diverging leaf).

    Raises:
        TreeError: the edits contradict the turns.
    """
    edits: dict[int, list[tuple[str, Edit]]] = {}
    for number, edit in enumerate(rollout.edits):
        edits.setdefault(edit.before_turn, []).append((f"edits[{number}]", edit))
    chains: dict[str, _Chain] = {}
    for turn, record in enumerate(rollout.turns):
        chain = chains.get(record.chain)
        if chain is None:
            if turn in edits:
                name = edits[turn][0][0]
                raise TreeError(rollout.id, f"{name}.before_turn", f"turn {turn} opens its chain: nothing to edit")
            chain = chains[record.chain] = _Chain(History(), [], [], {})
            positions = chain.history.append(record.prompt_ids)
            chain.history.place_last(positions)
            chain.views.append(_OpenView(record.prompt_ids, positions, [], []))
        else:
            _continue_chain(rollout, chain, turn, edits.get(turn, []))
        view, history = chain.views[-1], chain.history
        if not len(record.prompt_ids):
            raise TreeError(rollout.id, f"turns[{turn}].prompt_ids", "is empty: the first sampled token has no context")
        chain.union_parent[turn] = history.last_live_entry()
        positions = history.append(record.completion_ids, turn)
        history.place_last(positions)
        view.turns.append(turn)
        view.prompts.append(len(record.prompt_ids))
        view.ids = np.concatenate([record.prompt_ids, record.completion_ids])
        view.union = np.concatenate([view.union, positions])
        history.settle(view.union)
    views = tuple(
        View(name, view.ids, view.union, tuple(view.turns)) for name, chain in chains.items() for view in chain.views
    )
    unions = {name: _close(chain.history) for name, chain in chains.items()}
    junctions = sorted((j for chain in chains.values() for j in chain.junctions), key=lambda j: j.turn)
    parents = {turn: parent for chain in chains.values() for turn, parent in chain.union_parent.items()}
    return Tree(rollout, views, tuple(junctions), unions, _sampled_tokens(rollout, views, unions, parents))


def _close(history: History) -> Union:
    until = np.full(history.entries, history.entries, np.int64)
    for entries, end in history.entry_ends:
        until[entries] = np.maximum(entries + 1, end)
    return Union(
        ids=_join(history.ids, np.int32),
        origin_turn=_join(history.origin_turn, np.int64),
        origin_index=_join(history.origin_index, np.int64),
        entry_position=_join(history.entry_position, np.int64),
        entry_depth=_join(history.entry_depth, np.int64),
        entry_until=until,
    )


def _join(pieces: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *pieces]).astype(dtype, copy=False)


def _continue_chain(rollout: Rollout, chain: _Chain, turn: int, edits: list[tuple[str, Edit]]) -> None:
    """Carry the latest view over to the prompt of ``turn``: extend it, or open a new view and note the junction."""
    history, old = chain.history, chain.views[-1]
    prompt = rollout.turns[turn].prompt_ids
    extends = len(prompt) >= len(old.ids) and np.array_equal(prompt[: len(old.ids)], old.ids)
    if edits:
        for name, edit in edits:
            apply_edit(history, edit, rollout.id, name)
        kept = history.live_view()
        _check_edited(rollout, history, kept, turn, edits[-1][0])
        fresh = history.append(prompt[len(kept) :])
        history.place_last(fresh)
        union = np.concatenate([kept, fresh])
        at = common_prefix(old.ids, prompt)
    elif extends:
        fresh = history.append(prompt[len(old.ids) :])
        history.place_last(fresh)
        union, at = np.concatenate([old.union, fresh]), len(old.ids)
    else:
        ends = _completion_ends(rollout, history, old)
        alignment = align(old.ids, prompt, ends)
        union, at = _carry_over(history, old, prompt, alignment.origin), alignment.prefix
    if extends:
        old.union = union
        return
    before, after = old.union, union
    evicted = len(before) - int(np.isin(before, after, assume_unique=True).sum())
    inserted = len(after) - (len(before) - evicted)
    resampled = any(length == len(prompt) and np.array_equal(old.ids[:length], prompt) for length in old.prompts)
    if resampled:
        reason = "resample"
    elif evicted == len(before):
        reason = "restart"
    elif not inserted:
        reason = "deletion"
    else:
        reason = "replacement" if evicted else "insertion"
    detail = _detail(history, [edit for _, edit in edits]) or _recorded_detail(rollout, turn)
    chain.junctions.append(Junction(rollout.turns[turn].chain, turn, at, evicted, inserted, reason, detail))
    chain.views.append(_OpenView(prompt, union, [], []))


def _carry_over(history: History, old: _OpenView, prompt: np.ndarray, origin: np.ndarray) -> np.ndarray:
    """Black box: matched prompt tokens keep their ``H_T`` position, the others are new tokens."""
    matched = origin >= 0
    kept = np.zeros(len(old.union), bool)
    kept[origin[matched]] = True
    if not kept.all():
        history.evict(old.union[~kept])
    union = np.empty(len(prompt), np.int64)
    union[matched] = old.union[origin[matched]]
    fresh = history.append(prompt[~matched])
    union[~matched] = fresh
    history.document = union  # evicted text never comes back without an edit that says so
    return union


def _check_edited(rollout: Rollout, history: History, kept: np.ndarray, turn: int, name: str) -> None:
    prompt = rollout.turns[turn].prompt_ids
    ids = _join(history.ids, np.int32)[kept]
    shared = common_prefix(ids, prompt)
    if shared == len(ids):
        return
    if shared == len(prompt):
        reason = f"the edited context has {len(ids)} tokens, but the prompt of turn {turn} ends after {shared}"
    else:
        reason = (
            f"contradicts turn {turn}: token {shared} of its prompt is {prompt[shared]}, "
            f"but the edited context has {ids[shared]} there"
        )
    advice = "; log every edit that shaped this prompt, or none (origins are then aligned)"
    raise TreeError(rollout.id, name, reason + advice)


def _completion_ends(rollout: Rollout, history: History, view: _OpenView) -> np.ndarray:
    """Half-open ends, in ``view``, of what was sampled: the place after a completion's last token."""
    turn = _join(history.origin_turn, np.int64)[view.union]
    index = _join(history.origin_index, np.int64)[view.union]
    lengths = np.array([len(t.completion_ids) for t in rollout.turns])
    return np.flatnonzero((turn >= 0) & (index == lengths[turn] - 1)) + 1


def _detail(history: History, edits: list[Edit]) -> str | None:
    """What white-box edits say a junction was; None where they do not tell."""
    evicting = [edit for edit in edits if edit.evicted]
    if not evicting or any(edit.restored for edit in edits):
        return None
    origin = _join(history.origin_turn, np.int64)
    if not any((origin[lo:hi] >= 0).any() for edit in evicting for lo, hi in edit.evicted):
        return "pruned_tool_result"  # nothing the policy wrote is gone, with or without a stub in its place
    if any(len(edit.replacement_ids) for edit in evicting):
        by_policy = any(edit.replacement_from or edit.author == "policy" for edit in evicting)
        return "fold" if by_policy else "compaction"
    return None


def _recorded_detail(rollout: Rollout, turn: int) -> str | None:
    """What the log that a rollout was imported from says about the junction at a turn: ``meta["junction_details"]``."""
    said = rollout.meta.get("junction_details")
    detail = said.get(str(turn)) if isinstance(said, dict) else None
    return detail if detail in DETAILS else None


def _sampled_tokens(
    rollout: Rollout, views: tuple[View, ...], unions: dict[str, Union], union_parent: dict[int, int]
) -> SampledTokens:
    turns = rollout.turns
    lengths = np.array([len(t.completion_ids) for t in turns], np.int64)
    offset = np.concatenate([[0], np.cumsum(lengths)])
    total = int(offset[-1])
    turn = np.repeat(np.arange(len(turns)), lengths)
    index = np.arange(total) - offset[turn]
    view_of_turn = np.zeros(len(turns), np.int64)
    for number, branch in enumerate(views):
        view_of_turn[list(branch.turns)] = number
    prefix = np.array([len(t.prompt_ids) for t in turns], np.int64)[turn] + index
    token = _join([t.completion_ids for t in turns], np.int32)
    view = view_of_turn[turn]
    nowhere = np.full(total, -1, np.int64)
    compressed, full, parent = nowhere.copy(), nowhere.copy(), nowhere.copy()
    diverging, missing, extra = np.zeros(total, bool), np.zeros(total, np.int64), np.zeros(total, np.int64)
    main = unions.get(MAIN_CHAIN)
    if main is not None:
        last = max(number for number, branch in enumerate(views) if branch.chain == MAIN_CHAIN)
        walk = views[last]
        _first_places(compressed, offset, main.origin_turn[walk.union], main.origin_index[walk.union])
        _first_places(full, offset, main.origin_turn, main.origin_index)
        parent = _union_parents(rollout, main, full, turn, index, union_parent)
        in_walk = np.full(len(main.ids), -1, np.int64)
        in_walk[walk.union] = np.arange(len(walk.union))
        for number, branch in enumerate(views):
            here = np.flatnonzero((view == number) & (compressed >= 0))
            if not len(here):
                continue
            place, generated = compressed[here], prefix[here]
            agree = common_prefix(branch.ids, walk.ids)
            diverging[here] = (place != generated) | (place > agree)
            common = np.zeros(len(here), np.int64)
            if branch.chain == MAIN_CHAIN:
                # Both walks keep the order of the text, so the common tokens before two places are a common prefix.
                position = in_walk[branch.union]
                before_generated = np.concatenate([[0], np.cumsum(position >= 0)])[generated]
                common = np.minimum(before_generated, np.searchsorted(position[position >= 0], place))
            missing[here], extra[here] = generated - common, place - common
    trainable = np.array([t.trainable for t in turns], bool)[turn]
    return SampledTokens(
        turn=turn,
        index=index,
        token=token,
        trainable=trainable,
        view=view,
        prefix=prefix,
        compressed=compressed,
        full=full,
        union_parent=parent,
        diverging=diverging & trainable,
        missing=missing,
        extra=extra,
    )


def _first_places(places: np.ndarray, offset: np.ndarray, turn: np.ndarray, index: np.ndarray) -> None:
    """Write into ``places`` the first position that holds each sampled token."""
    held = np.flatnonzero(turn >= 0)[::-1]
    places[offset[turn[held]] + index[held]] = held


def _union_parents(
    rollout: Rollout,
    main: Union,
    full: np.ndarray,
    turn: np.ndarray,
    index: np.ndarray,
    first_parent: dict[int, int],
) -> np.ndarray:
    """Union row that predicts each sampled token: the entry before it; for a turn's first token, the last live one."""
    first_entry = np.full(len(main.ids), -1, np.int64)
    first_entry[main.entry_position[::-1]] = np.arange(len(main.entry_position))[::-1]
    parent = np.where(full >= 0, first_entry[full] - 1, -1)
    on_main = np.array([t.chain == MAIN_CHAIN for t in rollout.turns], bool)[turn]
    opens = (index == 0) & on_main
    parent[opens] = [first_parent[int(t)] for t in turn[opens]]
    return parent
