"""System prompts of which a few lines differ from call to call: a date, a billing header."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence

from mwjax.rollouts.readers.seen import Seen

VOLATILE_LINES = 3


def steady_system(seen: Sequence[Seen], *, one: bool, normalise: bool) -> tuple[list[Seen], list[str]]:
    """The calls, and the lines by which a system prompt differs from that of the first call of its conversation, where
    those are few. With ``normalise`` these calls get the first one's. one: all calls are of one rollout; otherwise
    conversations are told apart by their first user message, since a line may well name the episode."""
    firsts: dict[str, list[Seen]] = {}
    result: list[Seen] = []
    changing: list[str] = []
    for call in seen:
        alike = firsts.setdefault("" if one else _opening(call), [])
        compared = ((each, _differ(each, call)) for each in alike if each.tools == call.tools)
        first, lines = next(((each, lines) for each, lines in compared if lines is not None), (None, []))
        if first is None:
            alike.append(call)
            result.append(call)
            continue
        changing += lines
        same = [each for each in first.messages if each["role"] == "system"]
        rest = [each for each in call.messages if each["role"] != "system"]
        result.append(dataclasses.replace(call, messages=(*same, *rest)) if lines and normalise else call)
    return result, changing


def _opening(call: Seen) -> str:
    return next((each["content"] for each in call.messages if each["role"] == "user"), "")


def _differ(first: Seen, call: Seen) -> list[str] | None:
    """The lines that only the call's system prompt has; None where the two are not one prompt."""
    old, new = (
        "\n".join(each["content"] for each in one.messages if each["role"] == "system").split("\n")
        for one in (first, call)
    )
    if old == new:
        return []
    pairs = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    changed = [pair for pair in pairs if pair[0] != "equal"]
    sizes = [max(hi - lo, end - start) for _, lo, hi, start, end in changed]
    if sum(sizes) > VOLATILE_LINES or 2 * sum(sizes) > max(len(old), len(new)):
        return None
    return [line for _, _, _, start, end in changed for line in new[start:end]] or [""]


def told_of(changing: Sequence[str], *, normalise: bool) -> str:
    """The warning about lines that change."""
    done = "was given the first call's" if normalise else "each begins a branch of its own"
    advice = "" if normalise else "; --normalise-system gives every call the first one's"
    return f"the system prompt changes from call to call in a line like {changing[0]!r}: {done}{advice}"
