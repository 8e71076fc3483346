"""The calls of a session as the turns of rollouts: which conversation a call belongs to, and what for.

Calls that continue one another exactly, id by id, are a segment. A segment that begins after another one ended belongs
to the same chain where it goes back into it, repeats one of its prompts, or has the same root (tools, and most of the
system text; without messages: the first ``ROOT_IDS`` ids), unless a tool call handed its task over: then it is a
sub-agent. Segments that overlap in time are different conversations. Of several candidates, the one with the longest
common prefix is continued. The chain that spans the most calls is ``main``; a title call, a summariser in a root of its
own and a sub-agent are others. A call that carries the answer of a side call, as a summary or a tool result does, names
it in ``cause_turn``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mwjax.rollouts.readers.carried import SHORTEST_CARRIED, Texts
from mwjax.rollouts.readers.contained import Contained
from mwjax.rollouts.readers.engine_call import Call
from mwjax.rollouts.readers.junctions import junction_detail
from mwjax.rollouts.readers.said import Said
from mwjax.rollouts.readers.segments import digest, segments, shared
from mwjax.rollouts.record import MAIN_CHAIN, Turn

ROOT_IDS = 16


class Conversation(NamedTuple):
    """The turns of one rollout, the calls they are, and what the log tells about junctions: turn -> detail."""

    turns: tuple[Turn, ...]
    calls: tuple[Call, ...]
    details: dict[int, str]


@dataclass
class _Chain:
    """``calls``: indices, ascending. ``segment_starts``: those that open a segment."""

    calls: list[int]
    segment_starts: list[int]
    name: str = ""
    purpose: str = "act"
    repeats: bool = False
    handed_over: int | None = None
    causes: dict[int, int] = field(default_factory=dict)


def without_copies(calls: Iterable[Call]) -> tuple[list[Call], list[Call]]:
    """The calls in their order, and those that are a second record of a response that is there already."""
    kept: list[Call] = []
    copies: list[Call] = []
    seen: set[tuple[Hashable, bytes, bytes]] = set()
    for call in sorted(calls, key=lambda call: (call.time, call.record)):
        key = (call.identity, digest(call.prompt_ids), digest(call.completion_ids))
        if call.identity is not None and key in seen:
            copies.append(call)
        else:
            seen.add(key)
            kept.append(call)
    return kept, copies


def conversations(
    calls: Sequence[Call], *, one: bool, decode: Callable[[np.ndarray], str] | None = None
) -> list[Conversation]:
    """The rollouts that the calls of a session are, in the order of their first call.

    ``calls`` as ``without_copies`` gives them. one: the session is one rollout; otherwise it may hold several, which
    are told apart by what they share: ids, the first user message, or text that one hands to another. decode: ids as
    text, for telling re-tokenised text.
    """
    texts = Texts(calls)
    chains = _chains(texts, one)
    home = {index: chain for chain in chains for index in chain.calls}
    for chain in chains:
        chain.causes = _causes(chain, home, texts)
    groups = [list(range(len(chains)))] if one else _connected(chains, calls)
    result = []
    for group in groups:
        members = [chains[k] for k in group]
        _name(members, calls)
        result.append(_conversation(members, calls, decode))
    return sorted(result, key=lambda each: (each.calls[0].time, each.calls[0].record))


def _chains(texts: Texts, one: bool) -> list[_Chain]:
    calls = texts.calls
    chains: list[_Chain] = []
    home: dict[int, int] = {}
    prompted: dict[bytes, set[int]] = {}  # chains by the prompts of their calls
    latest: dict[tuple[str, str], set[int]] = {}  # and by what was said at their latest call
    for segment, parent in zip(*segments(calls, one)):
        start, first = segment[0], calls[segment[0]]
        handed_over = texts.handed_over_by(start)
        related = set(() if parent is None else (home[parent],))
        for number in prompted.get(digest(first.prompt_ids), ()):
            # Without a session's name, a prompt that is there again later opens another episode of the same task.
            before = chains[number].calls
            if one or np.array_equal(calls[before[bisect_left(before, start) - 1]].prompt_ids, first.prompt_ids):
                related.add(number)
        alike = () if one else (number for said in texts.hints(start) for number in latest.get(said, ()))
        free: list[int] = []
        for number in range(len(chains)) if one else related.union(alike):
            last = chains[number].calls[-1]
            same_task = handed_over is None or texts.task(chains[number].calls[0]) == texts.task(start)
            same_root = same_task and last < start and _same_root(texts, last, start, one)
            if last < start and (number in related or same_root):
                free.append(number)
        if free:
            lasts = {chains[number].calls[-1]: number for number in free}
            home_number = lasts[max(lasts, key=lambda last: (shared(calls[last], first), last))]
            chain = chains[home_number]
            for said in texts.said(chain.calls[-1]):
                latest[said].discard(home_number)
            chain.segment_starts.append(start)
            chain.calls += segment
        else:
            home_number = len(chains)
            repeats = any(chains[number].calls[-1] > start for number in related)
            chain = _Chain(list(segment), [start], repeats=repeats, handed_over=handed_over)
            chains.append(chain)
        home.update(dict.fromkeys(segment, home_number))
        for index in segment:
            prompted.setdefault(digest(calls[index].prompt_ids), set()).add(home_number)
        for said in texts.said(chain.calls[-1]):
            latest.setdefault(said, set()).add(home_number)
    return chains


def _same_root(texts: Texts, before: int, index: int, one: bool) -> bool:
    old, new = texts.calls[before], texts.calls[index]
    if old.asked is None or new.asked is None:
        # The ids of a system prompt are those of all episodes of a harness.
        return one and shared(old, new) >= min(ROOT_IDS, len(old.prompt_ids), len(new.prompt_ids))
    if not old.asked.same_root(new.asked):
        return False
    # In a log of many episodes, those of one harness all have its root.
    return one or any(hint in texts.said(before) for hint in texts.hints(index))


def _causes(chain: _Chain, home: Mapping[int, _Chain], texts: Texts) -> dict[int, int]:
    """For calls of a chain: the latest other call whose text first appears in their prompt, and is not the chain's own
    answer there. Within the chain itself only at a junction: there the text has come back as a summary."""
    found: dict[int, int] = {}
    mine: set[str] = set()
    known: set[tuple[str, str]] = set()
    junctions = set(chain.segment_starts[1:])
    for place, index in enumerate(chain.calls):
        mine.update(texts.answers(chain.calls[place - 1]) if place else ())
        asked = texts.calls[index].asked
        if asked is None:
            continue
        fresh = [each for each in asked.messages if (each.role, each.text) not in known]
        known = {(each.role, each.text) for each in asked.messages}
        if place == 0 and chain.handed_over is None:
            continue
        own = chain.calls[place - 1] if index in junctions else None
        cause = -1
        for each in fresh:
            back = own if each.role != "assistant" else None
            for answer in texts.carried([each]):
                if each.role == "assistant" and answer in mine:
                    continue
                given = texts.answered[answer]
                before = (given[k] for k in range(bisect_left(given, index) - 1, -1, -1))
                other = next((k for k in before if home[k] is not chain or k == back), -1)
                cause = max(cause, other)
        if cause >= 0:
            found[index] = cause
    if chain.handed_over is not None:
        found.setdefault(chain.calls[0], chain.handed_over)
    return found


def _about(chains: Sequence[_Chain], calls: Sequence[Call]) -> dict[int, int]:
    """For every single call without tools, such as one for a title: the conversation that it is about, the nearest in
    the log that has tools and whose first message it holds. Numbers of chains."""
    opened: dict[str, list[int]] = {}
    for number, chain in enumerate(chains):
        asked = calls[chain.calls[0]].asked
        if asked is not None and asked.tools and len(asked.first_user) >= SHORTEST_CARRIED:
            opened.setdefault(asked.first_user, []).append(number)
    openings = Contained(opened)
    found = {}
    for number, chain in enumerate(chains):
        first = chain.calls[0]
        asked = calls[first].asked
        if asked is None or asked.tools or len(chain.calls) > 1:
            continue
        about = set()
        for text in {text for each in asked.messages for text in openings.inside(each.text)}:
            after = bisect_left(opened[text], number)  # chains are in the order of their first call
            about.update(opened[text][max(0, after - 1) : after + 1])
        if about:
            found[number] = min(about, key=lambda other: (abs(chains[other].calls[0] - first), other))
    return found


def _connected(chains: Sequence[_Chain], calls: Sequence[Call]) -> list[list[int]]:
    home = {index: number for number, chain in enumerate(chains) for index in chain.calls}
    group = list(range(len(chains)))

    def root(k: int) -> int:
        while group[k] != k:
            group[k] = group[group[k]]
            k = group[k]
        return k

    for number, chain in enumerate(chains):
        for cause in chain.causes.values():
            group[root(number)] = root(home[cause])
    for number, other in _about(chains, calls).items():
        if root(number) == number:
            group[number] = root(other)
    found: dict[int, list[int]] = {}
    for number in range(len(chains)):
        found.setdefault(root(number), []).append(number)
    return list(found.values())


def _name(chains: Sequence[_Chain], calls: Sequence[Call]) -> None:
    """``main`` is the chain that spans the most calls; ties go to the one with tools, with more calls, then earlier."""

    def rank(chain: _Chain) -> tuple[bool, int, bool, int, int]:
        asked = calls[chain.calls[0]].asked
        return (
            not chain.repeats and chain.handed_over is None,
            chain.calls[-1] - chain.calls[0],
            bool(asked is not None and asked.tools),
            len(chain.calls),
            -chain.calls[0],
        )

    main = max(chains, key=rank)
    carried = set(main.causes.values())
    counts: dict[str, int] = {}
    for chain in chains:
        if chain is main:
            chain.name, chain.purpose = MAIN_CHAIN, "act"
            continue
        asked = calls[chain.calls[0]].asked
        at_junction = any(
            main.causes.get(index) in chain.calls for index in main.segment_starts if index in main.causes
        )
        acts = any(answer is not None and answer.calls for answer in (calls[k].answer for k in chain.calls))
        if chain.repeats:
            kind = "resample"
        elif chain.handed_over is not None:
            kind = "subagent"
        elif at_junction and not acts:
            kind = "summary"
        elif carried.intersection(chain.calls):
            kind = "subagent"
        elif asked is not None and not asked.tools and "title" in (asked.system + asked.first_user).lower():
            kind = "title"
        else:
            kind = "side"
        counts[kind] = counts.get(kind, 0) + 1
        chain.name = f"{kind}-{counts[kind]}"
        chain.purpose = "act" if kind in ("resample", "subagent") else kind


def _conversation(
    chains: Sequence[_Chain], calls: Sequence[Call], decode: Callable[[np.ndarray], str] | None
) -> Conversation:
    order = sorted(index for chain in chains for index in chain.calls)
    place = {index: turn for turn, index in enumerate(order)}
    chain_of = {index: chain for chain in chains for index in chain.calls}
    causes = {index: cause for chain in chains for index, cause in chain.causes.items()}
    carried = set(causes.values())
    starts = {index for chain in chains for index in chain.segment_starts}
    after = {index: later for chain in chains for index, later in pairwise(chain.calls)}
    previous = {later: index for index, later in after.items()}
    last_carried = {id(chain): max(carried.intersection(chain.calls), default=-1) for chain in chains}
    summaries = {
        cause
        for index, cause in causes.items()
        # What a sub-agent found is carried, but sums nothing up.
        if index in starts
        and index in previous
        and (chain_of.get(cause) is chain_of[index] or not chain_of[cause].name.startswith("subagent"))
    }
    attempts = {(chain_of[k].name, digest(calls[k].prompt_ids)) for k in summaries if k in chain_of}
    turns: list[Turn] = []
    details: dict[int, str] = {}
    for turn, index in enumerate(order):
        call, chain = calls[index], chain_of[index]
        cause = causes.get(index)
        if index in starts and index in previous:
            detail = junction_detail(calls[previous[index]], call, summarised=cause in summaries, decode=decode)
            if detail is not None:
                details[turn] = detail
        summarises = index in summaries and chain.purpose == "act"
        # An attempt that was made again, and of which nothing came, is context only.
        again = chain.purpose == "summary" and last_carried[id(chain)] > index
        attempt = (chain.name, digest(call.prompt_ids)) in attempts
        undone = index not in carried and index in after and _undone(call, calls[after[index]])
        rejected = undone or (index not in carried and (again or attempt))
        turns.append(
            Turn(
                prompt_ids=call.prompt_ids,
                completion_ids=call.completion_ids,
                logprobs=call.logprobs,
                chain=chain.name,
                purpose="cut_off" if call.cut_off else "summary" if summarises or undone else chain.purpose,
                trainable=call.trainable and not call.cut_off and not rejected,
                finish_reason=call.finish_reason,
                sampling=call.sampling,
                policy_version=call.policy_version,
                cause_turn=place.get(cause) if cause is not None else None,
            )
        )
    return Conversation(tuple(turns), tuple(calls[index] for index in order), details)


def _undone(call: Call, following: Call) -> bool:
    """Whether a summary was asked for and the conversation went on from before that, as if it had not been."""
    if call.asked is None or following.asked is None or not call.asked.messages:
        return False
    *before, ask = call.asked.messages
    if ask.role != "user" or "summar" not in ask.text.lower():
        return False
    after = following.asked.messages
    went_back = len(after) >= len(before) and all(map(Said.same, before, after))
    return went_back and not any(ask.same(each) for each in after[len(before) :])
