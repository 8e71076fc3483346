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

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mwjax.rollouts.extends import Shortener
from mwjax.rollouts.readers.engine_call import Call
from mwjax.rollouts.readers.junctions import junction_detail
from mwjax.rollouts.readers.said import Asked, Said
from mwjax.rollouts.record import MAIN_CHAIN, Turn

ROOT_IDS = 16
SHORTEST_CARRIED = 16  # characters; shorter texts occur by chance
TASK_WORDS = 4


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
    seen: set[tuple[object, bytes, bytes]] = set()
    for call in sorted(calls, key=lambda call: (call.time, call.record)):
        key = (call.identity, call.prompt_ids.tobytes(), call.completion_ids.tobytes())
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
    chains = _chains(calls, one)
    for chain in chains:
        chain.causes = _causes(chain, chains, calls)
    groups = [list(range(len(chains)))] if one else _connected(chains, calls)
    result = []
    for group in groups:
        members = [chains[k] for k in group]
        _name(members, calls)
        result.append(_conversation(members, calls, decode))
    return sorted(result, key=lambda each: (each.calls[0].time, each.calls[0].record))


def _segments(calls: Sequence[Call]) -> tuple[list[list[int]], list[int | None]]:
    """Runs of calls, each of which continues the one before exactly; and for each the call it goes back to, if any."""
    shortener = Shortener()
    segments: list[list[int]] = []
    parents: list[int | None] = []
    home: dict[int, int] = {}
    for index, call in enumerate(calls):
        parent = shortener.add(call.prompt_ids, call.completion_ids).extends
        if parent is not None and segments[home[parent]][-1] == parent:
            home[index] = home[parent]
            segments[home[parent]].append(index)
        else:
            home[index] = len(segments)
            segments.append([index])
            parents.append(parent)
    return segments, parents


def _chains(calls: Sequence[Call], one: bool) -> list[_Chain]:
    chains: list[_Chain] = []
    segments, parents = _segments(calls)
    for segment, parent in zip(segments, parents):
        first = calls[segment[0]]
        handed_over = _handed_over_by(calls, segment[0])
        free: list[_Chain] = []
        repeats = False
        for chain in chains:
            # Without a session's name, a prompt that is there again later opens another episode of the same task.
            latest = chain.calls if one else [k for k in chain.calls if k < segment[0]][-1:]
            repeated = any(np.array_equal(calls[k].prompt_ids, first.prompt_ids) for k in latest)
            related = (parent is not None and parent in chain.calls) or repeated
            if chain.calls[-1] > segment[0]:
                repeats = repeats or related
            elif related or (handed_over is None and _same_root(calls[chain.calls[-1]], first, one)):
                free.append(chain)
        if free:
            chain = max(free, key=lambda chain: (_shared(calls[chain.calls[-1]], first), chain.calls[-1]))
            chain.segment_starts.append(segment[0])
            chain.calls += segment
        else:
            chains.append(_Chain(list(segment), [segment[0]], repeats=repeats, handed_over=handed_over))
    return chains


def _shared(before: Call, call: Call) -> int:
    old = np.concatenate([before.prompt_ids, before.completion_ids])
    length = min(len(old), len(call.prompt_ids))
    different = old[:length] != call.prompt_ids[:length]
    return int(different.argmax()) if different.any() else length


def _same_root(before: Call, call: Call, one: bool) -> bool:
    if before.asked is None or call.asked is None:
        # The ids of a system prompt are those of all episodes of a harness.
        return one and _shared(before, call) >= min(ROOT_IDS, len(before.prompt_ids), len(call.prompt_ids))
    if before.asked.tools != call.asked.tools or not _mostly_equal(before.asked.system, call.asked.system):
        return False
    if one or _carries(call.asked, before):
        return True
    # In a log of many episodes, those of one harness all have its root, and those of one task its opening.
    opening = not any(each.role in ("assistant", "tool") for each in call.asked.messages)
    return not opening and before.asked.first_user == call.asked.first_user


def _mostly_equal(left: str, right: str) -> bool:
    """Half of the lines are enough: a system text may hold the date, or what was read so far."""
    if left == right:
        return True
    lines, others = set(left.splitlines()), set(right.splitlines())
    return 2 * len(lines & others) >= max(len(lines), len(others))


def _carries(asked: Asked, source: Call) -> bool:
    text = "" if source.answer is None else source.answer.text.strip()
    return len(text) >= SHORTEST_CARRIED and any(text in each.text for each in asked.messages)


def _handed_over_by(calls: Sequence[Call], index: int) -> int | None:
    """The earlier call whose tool call holds the first user message of this one: a sub-agent's task."""
    asked = calls[index].asked
    task = "" if asked is None else asked.first_user.strip()
    if len(task) < SHORTEST_CARRIED:
        return None
    for k in range(index - 1, -1, -1):
        answer = calls[k].answer
        if answer is not None and any(_hands_over(arguments, task) for _, arguments in answer.calls):
            return k
    return None


def _hands_over(arguments: str, task: str) -> bool:
    """Whether a tool call holds the task, before which a harness may have put words of its own."""
    if task in _unescaped(arguments):
        return True
    try:
        values = json.loads(arguments)
    except ValueError:
        return False
    words = values.values() if isinstance(values, dict) else ()
    # Fewer words could be a path or a command that a prompt happens to end with.
    return any(isinstance(each, str) and len(each.split()) >= TASK_WORDS and task.endswith(each) for each in words)


def _unescaped(arguments: str) -> str:
    return arguments.replace("\\n", "\n").replace('\\"', '"').replace("\\\\", "\\")


def _causes(chain: _Chain, chains: Sequence[_Chain], calls: Sequence[Call]) -> dict[int, int]:
    """For calls of a chain: the latest other call whose text first appears in their prompt. Within the chain itself
    only at a junction: there the text has come back as a summary."""
    found: dict[int, int] = {}
    side = [k for other in chains if other is not chain for k in other.calls]
    known: set[tuple[str, str]] = set()
    for place, index in enumerate(chain.calls):
        asked = calls[index].asked
        if asked is None:
            continue
        fresh = [each for each in asked.messages if (each.role, each.text) not in known]
        known = {(each.role, each.text) for each in asked.messages}
        sources = [k for k in side if k < index]
        junction = place > 0 and index in chain.segment_starts
        if junction:
            sources.append(chain.calls[place - 1])
        if place == 0 and chain.handed_over is None:
            continue
        for k in sorted(sources, reverse=True):
            own = k in chain.calls
            text = [each for each in fresh if not (own and each.role == "assistant")]
            if _carries(asked._replace(messages=tuple(text)), calls[k]):
                found[index] = k
                break
    if chain.handed_over is not None:
        found.setdefault(chain.calls[0], chain.handed_over)
    return found


def _about(chain: _Chain, chains: Sequence[_Chain], calls: Sequence[Call]) -> int | None:
    """The conversation that a single call without tools is about, such as one for its title: the nearest in the log
    that has tools and whose first message it holds."""
    asked = calls[chain.calls[0]].asked
    if asked is None or asked.tools or len(chain.calls) > 1:
        return None
    found: list[tuple[int, int]] = []
    for number, other in enumerate(chains):
        about = calls[other.calls[0]].asked
        if other is chain or about is None or not about.tools or len(about.first_user) < SHORTEST_CARRIED:
            continue
        if any(about.first_user in each.text for each in asked.messages):
            found.append((abs(other.calls[0] - chain.calls[0]), number))
    return min(found)[1] if found else None


def _connected(chains: Sequence[_Chain], calls: Sequence[Call]) -> list[list[int]]:
    home = {index: number for number, chain in enumerate(chains) for index in chain.calls}
    group = list(range(len(chains)))

    def root(k: int) -> int:
        while group[k] != k:
            k = group[k]
        return k

    for number, chain in enumerate(chains):
        for cause in chain.causes.values():
            group[root(number)] = root(home[cause])
    for number, chain in enumerate(chains):
        if root(number) == number and (other := _about(chain, chains, calls)) is not None:
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

    def acts_apart(index: int) -> bool:
        return chain_of[index].name.startswith("subagent")

    summaries = {
        cause
        for index, cause in causes.items()
        # What a sub-agent found is carried, but sums nothing up.
        if index in chain_of[index].segment_starts[1:] and (cause in chain_of[index].calls or not acts_apart(cause))
    }
    attempts = {(chain_of[k].name, calls[k].prompt_ids.tobytes()) for k in summaries if k in chain_of}
    turns: list[Turn] = []
    details: dict[int, str] = {}
    for turn, index in enumerate(order):
        call, chain = calls[index], chain_of[index]
        at = chain.calls.index(index)
        cause = causes.get(index)
        if at and index in chain.segment_starts:
            detail = junction_detail(calls[chain.calls[at - 1]], call, summarised=cause in summaries, decode=decode)
            if detail is not None:
                details[turn] = detail
        summarises = index in summaries and chain.purpose == "act"
        # An attempt that was made again, and of which nothing came, is context only.
        again = chain.purpose == "summary" and any(later > index and later in carried for later in chain.calls)
        attempt = (chain.name, call.prompt_ids.tobytes()) in attempts
        undone = index not in carried and at + 1 < len(chain.calls) and _undone(call, calls[chain.calls[at + 1]])
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
