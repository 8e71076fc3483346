"""Train-serve skew: does rendering the recorded messages give the token ids that the engine recorded?

If not, whoever trains on rendered messages trains on another text than the model saw, or on the same in other tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from mwjax.rollouts.engine_ids import Endpoint, prompt_ids, sampled
from mwjax.rollouts.errors import RecordError, Refusal
from mwjax.rollouts.http_calls import FORMAT
from mwjax.rollouts.readers import chat
from mwjax.rollouts.readers.chat_log import TIMES
from mwjax.rollouts.readers.engine_log import exchange_in
from mwjax.rollouts.readers.reader import Options
from mwjax.rollouts.readers.records import json_records
from mwjax.rollouts.readers.requests import answers, asked_messages, endpoint_of
from mwjax.rollouts.readers.sessions import TRUNCATED, time_in
from mwjax.rollouts.rendering import Rendering, RenderingError

SHOWN = 24  # characters on either side of a difference

Kind = Literal["text", "tokens", "unrenderable"]


class Difference(NamedTuple):
    """Where a call's recorded and rendered ids part. ``kind``: other ``text``, the same text in other ``tokens``, or
    messages that cannot be rendered. ``at``: index of the first id that differs. ``recorded``, ``rendered``: the text
    from there; or the reason."""

    line: int
    part: Literal["prompt", "completion"]
    kind: Kind
    at: int
    recorded: str
    rendered: str

    def __str__(self) -> str:
        if self.kind == "unrenderable":
            return f"line {self.line}, {self.part}: cannot be rendered: {self.rendered}"
        what = "the same text in other tokens" if self.kind == "tokens" else "other text"
        texts = f"recorded {self.recorded!r}, rendered {self.rendered!r}"
        return f"line {self.line}, {self.part}: {what} from id {self.at}: {texts}"


@dataclass
class Skew:
    """``calls``: compared; ``skipped``: without messages or ids. Of the others, how many prompts and completions are
    the same ids."""

    calls: int = 0
    skipped: int = 0
    same_prompts: int = 0
    same_completions: int = 0
    differences: list[Difference] = field(default_factory=list)

    def report(self, shown: int = 10) -> str:
        """Counts and the first differences, as lines of text."""
        if not self.calls:
            return f"rendering: nothing to compare, {self.skipped} records without both messages and token ids"
        parts = [
            f"rendering: {self.same_prompts} of {self.calls} prompts and {self.same_completions} of {self.calls} "
            "completions are the recorded ids" + (f"; {self.skipped} records skipped" if self.skipped else "")
        ]
        counts = Counter((each.part, each.kind) for each in self.differences)
        parts += [f"  {part}s, {kind}: {count}" for (part, kind), count in sorted(counts.items())]
        parts += [f"  {each}" for each in self.differences[:shown]]
        return "\n".join(parts)


class _Recorded(NamedTuple):
    line: int
    endpoint: Endpoint
    request: Mapping[str, Any]
    response: Mapping[str, Any]
    prompt: Sequence[int]
    completions: Mapping[int, Sequence[int]]
    time: float | None


def check_rendering(path: str, rendering: Rendering) -> Skew:
    """Renders the messages of every call of a log that has both (``mwjax record``, vLLM or SGLang JSON Lines), and
    compares with its ids. Raises RolloutFileError if the file cannot be read."""
    skew = Skew()
    for record in json_records(path, Options()):
        found = None if isinstance(record, Refusal) else _recorded(record.line, record.value)
        if found is None:
            skew.skipped += 1
            continue
        try:
            _compare(found, rendering, skew)
        except (RecordError, RenderingError) as error:
            skew.calls += 1
            skew.differences.append(Difference(found.line, "prompt", "unrenderable", 0, "", str(error)))
    return skew


def _compare(found: _Recorded, rendering: Rendering, skew: Skew) -> None:
    messages = asked_messages(found.endpoint, found.request, {})
    tools = chat.tools_of(found.request)
    given = found.request.get("chat_template_kwargs")
    options = given if isinstance(given, dict) else {}
    for index, answer, reason in answers(found.endpoint, found.response):
        ids = found.completions.get(index)
        if ids is None:
            continue
        truncated = reason in TRUNCATED
        turn = rendering.turn(messages, answer, tools, truncated=truncated, options=options, now=found.time)
        skew.calls += 1
        skew.same_prompts += _same(found.line, "prompt", found.prompt, turn.prompt_ids, rendering, skew)
        skew.same_completions += _same(found.line, "completion", ids, turn.completion_ids, rendering, skew)


def _same(
    line: int,
    part: Literal["prompt", "completion"],
    recorded: Sequence[int],
    rendered: np.ndarray,
    rendering: Rendering,
    skew: Skew,
) -> bool:
    old, new = list(recorded), rendered.tolist()
    if old == new:
        return True
    at = next((k for k, (a, b) in enumerate(zip(old, new)) if a != b), min(len(old), len(new)))
    kind: Kind = "tokens" if rendering.decode(old) == rendering.decode(new) else "text"
    texts = (rendering.decode(ids[at : at + SHOWN])[:SHOWN] for ids in (old, new))
    skew.differences.append(Difference(line, part, kind, at, *texts))
    return False


def _recorded(line: int, value: Any) -> _Recorded | None:
    if not isinstance(value, dict):
        return None
    if value.get("format") == FORMAT:
        request, response = value.get("request"), value.get("response")
        completions = {
            each.get("index", place): each["completion_ids"]
            for place, each in enumerate(value.get("completions") or ())
            if isinstance(each, dict) and each.get("completion_ids")
        }
        prompt, endpoint = value.get("prompt_ids"), value.get("endpoint")
    else:
        request, response = exchange_in(value)
        endpoint = endpoint_of(request, response)
        if endpoint is None:
            return None
        prompt = prompt_ids(endpoint, response)
        completions = {each.choice: each.completion_ids for each in sampled(endpoint, response) if each.completion_ids}
    if not isinstance(request, Mapping) or not isinstance(response, Mapping) or not prompt or not completions:
        return None
    time = time_in(value, *TIMES)
    return _Recorded(line, cast(Endpoint, endpoint), request, response, prompt, completions, time)
