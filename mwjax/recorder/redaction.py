"""Named fields that never reach the disk."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from mwjax.rollouts.http_calls import REDACTED

# Token ids and log-probs spell the text: they go when the text goes.
SPELLS_TEXT = tuple(
    ("**", name)
    for name in (
        "input_messages",
        "logprobs",
        "meta_info",
        "output_messages",
        "prompt_token_ids",
        "response_token_ids",
        "sglext",
        "token_ids",
    )
)
TEXT_FIELDS = frozenset(
    (
        "arguments",
        "chat_template",
        "chat_template_kwargs",
        "choices",
        "content",
        "content_block",
        "delta",
        "documents",
        "functions",
        "input",
        "instructions",
        "item",
        "message",
        "messages",
        "output",
        "part",
        "prediction",
        "prompt",
        "reasoning",
        "response",
        "response_format",
        "system",
        "text",
        "tool_choice",
        "tools",
    )
)

Pattern = tuple[str, ...]


def pattern(field: str) -> Pattern:
    """``messages.*.content`` as its steps. A step may hold ``*``, ``?`` and ``[...]``; ``**`` is any number of steps; a
    name without dots is meant at any depth. Raises ValueError if there is an empty step."""
    steps = tuple(re.sub(r"\[(\d+|\*)\]", r".\1", field).split("."))
    if not all(steps):
        raise ValueError(f"--redact {field!r}: give a field as in user, metadata.user_id or messages.*.content")
    if steps[-1] == "**":  # all below: what is right below takes the rest with it
        steps = (*steps[:-1], "*")
    return steps if len(steps) > 1 else ("**", *steps)


def redacted(value: Any, patterns: Sequence[Pattern]) -> tuple[Any, set[str]]:
    """A copy with the fields replaced by ``[redacted]``, and the dotted paths that were."""
    hits: set[str] = set()
    return (_walk(value, tuple(patterns), (), hits) if patterns else value), hits


def names(steps: Pattern, path: str) -> bool:
    """Whether a pattern names one of the paths that ``redacted`` gives."""
    left = [steps]
    for step in path.split("."):
        left = [rest for each in left for rest in _after(each, step)]
        if () in left:
            return True
    return False


def hides_text(hits: set[str]) -> bool:
    """Whether one of these paths holds text of the prompt or the completion."""
    # An event of a stream may hold the whole response or message as a member.
    inner = [path.removeprefix("response.").removeprefix("message.") for path in hits]
    return any(path.split(".", 1)[0] in TEXT_FIELDS for path in inner)


def _walk(value: Any, patterns: tuple[Pattern, ...], path: tuple[str, ...], hits: set[str]) -> Any:
    if not isinstance(value, (dict, list)):
        return value
    items = value.items() if isinstance(value, dict) else enumerate(value)
    result = []
    for key, item in items:
        step = str(key)
        left = tuple(rest for each in patterns for rest in _after(each, step))
        if () in left:
            hits.add(".".join((*path, step)))
            result.append((key, REDACTED))
        else:
            result.append((key, _walk(item, left, (*path, step), hits) if left else item))
    return dict(result) if isinstance(value, dict) else [item for _, item in result]


def _after(steps: Pattern, step: str) -> list[Pattern]:
    """What is left of a pattern below ``step``; an empty rest is a hit."""
    if not steps:
        return []
    if steps[0] == "**":
        return [steps, *_after(steps[1:], step)]
    return [steps[1:]] if fnmatchcase(step, steps[0]) else []
