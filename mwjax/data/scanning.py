"""One pass over the rollouts before training: measures what planning needs, and nothing else stays in memory."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mwjax.data import measured
from mwjax.data.index import Index, Layout, LeftOut, Source
from mwjax.rollouts import Rollout, open_rollouts
from mwjax.tree import Fragment, RowTooShort, TreeError, build, build_trie, fragments


def scan(
    paths: Sequence[str],
    layout: Layout,
    *,
    vocab_size: int | None = None,
    progress: Callable[[Iterable[int], int], Iterable[int]] | None = None,
) -> Index:
    """Read every rollout once, build its tree and measure its fragments; of packed sets, only the first time.

    A rollout that cannot be read, whose edits contradict its turns, that does not fit a row, or that is not what a
    model saw and sampled (see ``_barred``) is refused and listed; the others are kept. ``progress`` wraps an iterable
    of known length to show how far the scan is.

    Raises:
        ValueError: no usable rollout.
    """
    sources = tuple(open_rollouts(path, vocab_size=vocab_size) for path in paths)
    if (known := measured.load(sources, layout)) is not None:
        return known
    left_out: list[LeftOut] = []
    found: list[_Measured] = []
    names: dict[str, str] = {}
    places = [(file, place) for file, source in enumerate(sources) for place in range(len(source))]
    numbers: Iterable[int] = range(len(places))
    for number in progress(numbers, len(places)) if progress else numbers:
        file, place = places[number]
        source = sources[file]
        try:
            record = source[place]
            if (barred := _barred(record, layout)) is not None:
                left_out.append((file, place, *barred))
                continue
            rollout = _measure(record, places[number], layout)
        except (TreeError, RowTooShort) as error:
            field = error.field if isinstance(error, TreeError) else "turns"
            left_out.append((file, place, field, str(error)))
            continue
        if rollout.id in names:
            left_out.append((file, place, "id", f"{rollout.id!r} stands in {names[rollout.id]} already"))
            continue
        names[rollout.id] = f"{paths[file]}, line {source.line(place)}"
        found.append(rollout)
    index = _index(sources, layout, found, tuple(left_out))
    if not found:
        refused = index.refused
        first = f"; the first reason: {refused[0]}" if refused else ""
        raise ValueError(f"no usable rollout in {', '.join(paths)}: {len(refused)} refused{first}")
    measured.store(index)
    return index


@dataclass(frozen=True, eq=False)
class _Measured:
    id: str
    line: tuple[int, int]
    group: str | None
    reward: float
    needs: np.ndarray
    edges: int
    sampled: int
    content: int
    view_tokens: int
    trie_tokens: int


def _barred(rollout: Rollout, layout: Layout) -> tuple[str, str] | None:
    """Field and reason where a rollout may be looked at, but not trained on: its contexts or ids are not the real ones
    (see :mod:`mwjax.rollouts.readers.rendered`)."""
    missing = rollout.meta.get("context_incomplete")
    if missing:
        parts = ", the ".join(map(str, missing)) if isinstance(missing, list) else str(missing)
        return (
            "meta.context_incomplete",
            f"the log it was imported from does not hold the {parts}: what the model really saw is not known, so it "
            "can be inspected and audited, not trained on; record calls with mwjax record",
        )
    if layout.ratios and rollout.meta.get("rendered"):
        return (
            "meta.rendered",
            "its token ids were rendered from messages, not sampled, and have no log-probs: a policy gradient needs "
            "the sampled ones; take loss.task=sft, or record calls with mwjax record",
        )
    unknown = [number for number, turn in enumerate(rollout.turns) if turn.trainable and turn.logprobs is None]
    if layout.recorded and unknown:
        return (
            f"turns[{unknown[0]}].logprobs",
            f"the ratio's denominator is what the engine recorded, and {len(unknown)} trainable turns have no "
            "log-probs; record them, or set loss.old_logprobs=recompute if the model's initial weights sampled them",
        )
    return None


def _measure(rollout: Rollout, line: tuple[int, int], layout: Layout) -> _Measured:
    tree = build(rollout)
    made = fragments([tree], layout.method, layout.shape)
    merged = fragments([tree], layout.method, layout.shape, merge=True) if layout.merge else made
    return _Measured(
        id=rollout.id,
        line=line,
        group=rollout.group,
        reward=np.nan if rollout.reward is None else rollout.reward,
        needs=_needs(merged),
        edges=sum(fragment.needs[1] for fragment in made),
        sampled=int(tree.sampled.trainable.sum()),
        content=_content(rollout),
        view_tokens=sum(len(view.ids) for view in tree.views),
        trie_tokens=len(build_trie([view.ids for view in tree.views]).tokens),
    )


def _content(rollout: Rollout) -> int:
    """CRC-32 of everything in turns and edits that a number of a run can depend on."""
    edits = [(e.before_turn, e.evicted, e.inserted_at, e.replacement_from, e.restored) for e in rollout.edits]
    crc = zlib.crc32(repr(edits).encode())
    for turn in rollout.turns:
        crc = zlib.crc32(repr((turn.chain, turn.trainable, turn.sampling, turn.logprobs is None)).encode(), crc)
        for part in (turn.prompt_ids, turn.completion_ids, turn.logprobs):
            if part is not None:
                crc = zlib.crc32(np.ascontiguousarray(part).tobytes(), crc)
    return crc


def _needs(made: Sequence[Fragment]) -> np.ndarray:
    return np.array([fragment.needs for fragment in made], np.int64).reshape(len(made), 4)


def _index(sources: tuple[Source, ...], layout: Layout, found: list[_Measured], left_out: tuple[LeftOut, ...]) -> Index:
    codes: dict[str, int] = {}
    groups = np.array(
        [codes.setdefault(f"group {m.group}" if m.group is not None else f"rollout {m.id}", len(codes)) for m in found]
    )
    shared = layout.group_tries and layout.method == "packed"
    units = [np.array([number]) for number in range(len(found))]
    if shared:
        units = [
            members[start : start + layout.rollouts_per_step]
            for members in (np.flatnonzero(groups == code) for code in range(len(codes)))
            for start in range(0, len(members), layout.rollouts_per_step)
        ]
    index = Index(
        sources=sources,
        layout=layout,
        lines=tuple(m.line for m in found),
        ids=tuple(m.id for m in found),
        rewards=np.array([m.reward for m in found]),
        groups=groups,
        units=tuple(units),
        needs=(),
        edges=np.array([m.edges for m in found]),
        sampled=np.array([m.sampled for m in found]),
        contents=np.array([m.content for m in found], np.int64),
        view_tokens=np.array([sum(found[n].view_tokens for n in unit) for unit in units]),
        trie_tokens=np.zeros(len(units), np.int64),
        left_out=left_out,
    )
    needs, trie_tokens = [], []
    for number, unit in enumerate(units):
        if len(unit) == 1:
            needs.append(found[unit[0]].needs)
            trie_tokens.append(found[unit[0]].trie_tokens)
        else:
            needs.append(_needs(index.unit_fragments(number)))
            views = [view.ids for tree in index.trees(unit) for view in tree.views]
            trie_tokens.append(len(build_trie(views).tokens))
    fields = {name: getattr(index, name) for name in Index.__dataclass_fields__}
    return Index(**{**fields, "needs": tuple(needs), "trie_tokens": np.array(trie_tokens)})
