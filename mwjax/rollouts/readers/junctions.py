"""What happened at a junction, from the messages of the two calls around it, and from their text where it is known."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from mwjax.rollouts.readers.engine_call import Call
from mwjax.rollouts.readers.said import Said
from mwjax.rollouts.readers.segments import shared

_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)


def junction_detail(
    before: Call, call: Call, *, summarised: bool, decode: Callable[[np.ndarray], str] | None = None
) -> str | None:
    """The ``detail`` of the junction that ``call`` opens after ``before``, one of those in the design; None where the
    log does not tell. summarised: the prompt carries an answer sampled elsewhere, in place of what it sums up."""
    if decode is not None:
        old = decode(np.concatenate([before.prompt_ids, before.completion_ids]))
        new = decode(call.prompt_ids)
        if old and new.startswith(old):
            return "retokenised"
        if _THOUGHT.search(old) and _unthought(new).startswith(_unthought(old)):
            return "template"  # thinking, or an empty block of it, that the template writes only at the end
    if before.asked is None or call.asked is None:
        return "fold" if summarised else None
    if before.answer is not None and before.asked.system == call.asked.system:
        said = [*before.asked.messages, before.answer]
        if len(call.asked.messages) >= len(said) and all(map(Said.same, said, call.asked.messages)):
            return _unedited(before, call, said)
    if summarised:
        return "fold"
    if before.asked.system != call.asked.system and _alike(before.asked.messages, call.asked.messages):
        return "system_prompt"
    return _edited(before.asked.messages, call.asked.messages)


def _unthought(text: str) -> str:
    """Without thinking, and without white space, which templates put around it."""
    return "".join(_THOUGHT.sub("", text).split())


def _unedited(before: Call, call: Call, said: Sequence[Said]) -> str:
    """The harness sent back what it had: what differs was made by it spelling arguments, or by the template."""
    assert call.asked is not None
    pairs = list(zip(said, call.asked.messages))
    if any(old.calls != new.calls for old, new in pairs):
        return "tool_json"
    at = shared(before, call)
    # What the prompt before held came from the same template, so there it can only be the template that differs.
    if at < len(before.prompt_ids) or said[-1].thinking:
        return "template"
    if said[-1].calls:
        return "tool_json"
    return "retokenised"


def _alike(old: Sequence[Said], new: Sequence[Said]) -> bool:
    return len(new) >= len(old) and all(map(Said.same, old, new))


def _edited(old: Sequence[Said], new: Sequence[Said]) -> str | None:
    pairs = list(zip(old, new))
    if len(new) >= len(old) and all(left.same(right) or _pruned(left, right) for left, right in pairs):
        return "pruned_tool_result" if any(not left.same(right) for left, right in pairs) else None
    if len(new) >= len(old) and all(left.same(right) or _put_before(left, right) for left, right in pairs):
        return "injected_turn"
    kept = [each for each in new if any(each.same(other) for other in old)]
    fresh = [each for each in new[: len(old) + 1] if not any(each.same(other) for other in old)]
    if len(kept) >= len(old) and fresh and fresh[0].role == "user":
        return "injected_turn"
    return None


def _pruned(old: Said, new: Said) -> bool:
    return _is_result(old) and _is_result(new) and old.answers == new.answers


def _is_result(said: Said) -> bool:
    """A tool's result; where tools are called in text, as with Hermes and Qwen, it is in a user message."""
    return said.role == "tool" or (said.role == "user" and said.text.lstrip().startswith("<tool_response>"))


def _put_before(old: Said, new: Said) -> bool:
    """A user message before whose text something was put: a reminder, for instance."""
    return old.role == new.role == "user" and bool(old.text.strip()) and new.text.rstrip().endswith(old.text.rstrip())
