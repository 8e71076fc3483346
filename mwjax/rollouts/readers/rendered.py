"""Logs without token ids as rollouts: their calls, in messages, rendered by a model's chat template.

Such a rollout has ``meta.rendered``: its ids are what the model's template and tokenizer make of the messages today,
not what an engine saw, and it has no log-probs. ``meta.context_incomplete`` lists what of the context the log lacks.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import zlib
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from mwjax.rollouts.errors import RecordError, Refusal
from mwjax.rollouts.readers.engine_call import Call
from mwjax.rollouts.readers.junctions import junction_detail
from mwjax.rollouts.readers.reader import Found, Item, Options, Remark
from mwjax.rollouts.readers.said import answered, asked
from mwjax.rollouts.readers.seen import Seen
from mwjax.rollouts.readers.sessions import BROKE_OFF, TRUNCATED, time_in
from mwjax.rollouts.readers.supplied import GIVEN_BY, completed
from mwjax.rollouts.readers.system_prompts import steady_system, told_of
from mwjax.rollouts.record import MAIN_CHAIN, Rollout, Turn
from mwjax.rollouts.rendering import Rendering, RenderingError, load

UNTHOUGHT = "thinking_left_out"


def rendering_for(name: str, options: Options) -> Rendering:
    """The rendering that the user asked for. Raises ValueError: none given, or it cannot be loaded."""
    if options.tokenizer is None:
        raise ValueError(
            f"{name} logs hold messages, not token ids: give the model that they are to be rendered for, "
            "--tokenizer FOLDER (with tokenizer.json and a chat template) or --tokenizer tokenizer.json --template FILE"
        )
    return dataclasses.replace(_loaded(options.tokenizer, options.template), options=options.template_options)


def template_options(words: Sequence[str]) -> dict[str, Any]:
    """``Options.template_options`` from words such as "enable_thinking=false". Raises ValueError."""
    found: dict[str, Any] = {}
    for word in words:
        name, sign, value = word.partition("=")
        try:
            found[name] = json.loads(value)
        except ValueError:
            raise ValueError(f"--template-option {word}: {value!r} is not JSON, as in enable_thinking=false") from None
        if not sign or not name.isidentifier():
            raise ValueError(f"--template-option {word}: must be NAME=JSON, as in enable_thinking=false")
    return found


@lru_cache(maxsize=2)
def _loaded(tokenizer: str, template: str | None) -> Rendering:
    return load(tokenizer, template)


def rendered_call(seen: Seen, rendering: Rendering, record: int) -> tuple[Call, str | None]:
    """The call with token ids, and the rendering's note. Raises RecordError where the template refuses it."""
    try:
        turn = rendering.turn(
            seen.messages,
            seen.answer,
            seen.tools,
            truncated=seen.cut_off or seen.finish_reason in TRUNCATED,
            options=seen.options,
            now=seen.time,
        )
    except RenderingError as error:
        raise RecordError("messages", str(error)) from None
    call = Call(
        record=record,
        line=seen.line,
        prompt_ids=turn.prompt_ids,
        completion_ids=turn.completion_ids,
        sampling=seen.sampling,
        finish_reason=seen.finish_reason,
        time=seen.time or 0.0,
        identity=seen.identity,
        asked=asked("chat.completions", {"messages": list(seen.messages), "tools": list(seen.tools)}),
        answer=answered("chat.completions", {"choices": [{"message": seen.answer}]}),
        cut_off=seen.cut_off,
        trainable=seen.trainable,
    )
    thought = str(seen.answer.get("reasoning_content") or "").strip()
    return call, UNTHOUGHT if thought and thought not in turn.text else turn.note


def rollout_items(
    path: str,
    name: str,
    calls: Sequence[Seen],
    options: Options,
    rendering: Rendering,
    *,
    missing: Sequence[str] = (),
    always_before: bool = False,
    records: int | None = None,
    group: str | None = None,
    reward: float | None = None,
    meta: Mapping[str, Any] | None = None,
) -> Iterator[Item]:
    """The rollout of calls whose chains are known, and the refusals of those that cannot be rendered.

    missing: what the log lacks of the contexts, which the user may have given; ``always_before`` as in ``completed``.
    records: how many records of the file it was made of, without those of refused calls; there may be no call in them.
    """
    turns: list[Turn] = []
    responses: list[Hashable] = []
    details: dict[str, str] = {}
    notes: Counter[str] = Counter()
    latest: dict[str, Call] = {}
    place: dict[int, int] = {}
    cut_off: dict[int, int] = {}  # turn -> line
    refused = 0
    calls, missing, given = completed(calls, missing, options, always_before=always_before)
    given = [*(meta or {}).get("supplied", ()), *given]
    calls, changing = _steady(calls, options)
    if changing:
        yield Remark("warning", path, calls[0].line, told_of(changing, normalise=options.normalise_system))
    for number, seen in enumerate(calls):
        try:
            call, note = rendered_call(seen, rendering, number + 1)
        except RecordError as error:
            refused += 1
            yield Refusal(path, seen.line, error.field, error.reason)
            continue
        notes.update([note] if note else [])
        turn = place[number] = len(turns)
        cause = place.get(seen.cause) if seen.cause is not None else None
        before = latest.get(seen.chain)
        if before is not None and not continues(before, call):
            detail = seen.detail or junction_detail(
                before, call, summarised=cause is not None, decode=_decode(rendering)
            )
            if detail is not None:
                details[str(turn)] = detail
        latest[seen.chain] = call
        if seen.cut_off:
            cut_off[turn] = seen.line
        responses.append(seen.identity)
        turns.append(
            Turn(
                prompt_ids=call.prompt_ids,
                completion_ids=call.completion_ids,
                chain=seen.chain,
                purpose="cut_off" if seen.cut_off else seen.purpose,
                trainable=seen.trainable and not seen.cut_off,
                finish_reason=seen.finish_reason,
                sampling=seen.sampling,
                cause_turn=cause,
            )
        )
    if not turns:
        reason = "its session has no answer of a model that can be used"
        yield from [Remark("empty", path, 1, reason)] * ((records or len(calls)) - refused)
        return
    whole = {
        **(meta or {}),
        **rendered_meta(rendering, notes, missing),
        **({"supplied": given} if given else {}),
        **({"junction_details": details} if details else {}),
        **({"cut_off_turns": list(cut_off)} if cut_off else {}),
        **({"system_normalised": len(changing)} if changing and options.normalise_system else {}),
    }
    used = max(len(turns), (records or len(calls)) - refused)
    yield Found(Rollout(name, tuple(turns), (), group, reward, whole), calls[0].line, used, tuple(responses))
    yield from rendered_remarks(path, calls[0].line, notes, missing)
    yield from (Remark("warning", path, line, BROKE_OFF) for line in cut_off.values())
    if given and any(turn.chain != MAIN_CHAIN for turn in turns):
        reason = f"the {' and the '.join(given)} given are the main conversation's: sub-agents are context only"
        yield Remark("warning", path, calls[0].line, reason)
    line = next((seen.line for seen in calls if seen.detail == "compaction" and seen.cause is None), None)
    if line is not None:
        reason = "a summary was sampled in a call that the log does not hold: its text is context only"
        yield Remark("warning", path, line, reason)


def of_one_record(items: Iterable[Item]) -> Iterator[Item]:
    """The items of a rollout that is one record: calls that cannot be rendered are left out of it, and said to be; it
    is refused where none can."""
    made = list(items)
    kept = any(isinstance(item, Found) for item in made)
    refusals = (item for item in made if isinstance(item, Refusal))
    if not kept:
        yield from itertools.islice(refusals, 1)
    for item in made:
        if isinstance(item, Found):
            yield item._replace(records=1)
        elif isinstance(item, Remark):
            yield item
        elif kept:
            yield Remark("warning", item.file, item.line, f"a call is left out: {item.field} {item.reason}")


def _steady(calls: Sequence[Seen], options: Options) -> tuple[list[Seen], list[str]]:
    """``steady_system`` of every chain; the calls stay in their order."""
    result = list(calls)
    changing: list[str] = []
    for chain in dict.fromkeys(call.chain for call in calls):
        own = [place for place, call in enumerate(calls) if call.chain == chain]
        steady, lines = steady_system([calls[k] for k in own], one=True, normalise=options.normalise_system)
        changing += lines
        for place, call in zip(own, steady):
            result[place] = call
    return result, changing


def with_causes(calls: list[Seen]) -> list[Seen]:
    """A sub-agent's first call names the call whose tool call handed its task over."""
    result, opened = list(calls), {MAIN_CHAIN}
    made = [
        json.dumps([each["function"] for each in call.answer.get("tool_calls", ())], ensure_ascii=False)
        for call in calls
    ]
    for at, call in enumerate(calls):
        if call.chain in opened:
            continue
        opened.add(call.chain)
        task = next((each["content"].strip() for each in call.messages if each["role"] == "user"), "")
        quoted = json.dumps(task, ensure_ascii=False)[1:-1]
        before = next((k for k in range(at - 1, -1, -1) if task and quoted in made[k]), None)
        result[at] = dataclasses.replace(call, cause=before)
    return result


def seconds(timestamp: Any) -> float | None:
    """Of a time in ISO 8601, since 1970."""
    return time_in({"time": timestamp}, "time")


def continues(before: Call, call: Call) -> bool:
    """Whether a prompt begins with exactly all ids of an earlier call."""
    old = len(before.prompt_ids) + len(before.completion_ids)
    return bool(
        old <= len(call.prompt_ids)
        and np.array_equal(call.prompt_ids[: len(before.prompt_ids)], before.prompt_ids)
        and np.array_equal(call.prompt_ids[len(before.prompt_ids) : old], before.completion_ids)
    )


def rendered_meta(rendering: Rendering, notes: Mapping[str, int], missing: Sequence[str]) -> dict[str, Any]:
    source = {
        "tokenizer": os.path.basename(rendering.source.rstrip("/")) or rendering.source,
        "template_crc32": zlib.crc32(rendering.template.encode()),
        **({"options": dict(rendering.options)} if rendering.options else {}),
        **({"notes": dict(notes)} if notes else {}),
    }
    return {"rendered": source, **({"context_incomplete": list(missing)} if missing else {})}


def rendered_remarks(path: str, line: int, notes: Mapping[str, int], missing: Sequence[str]) -> Iterator[Remark]:
    if missing:
        reason = f"the log does not hold the {', the '.join(missing)}: context_incomplete, inspect and audit only"
        if GIVEN_BY.keys() >= set(missing):
            reason += f", unless {' and '.join(dict.fromkeys(GIVEN_BY[what] for what in missing))} give it"
        yield Remark("warning", path, line, reason)
    if notes.get(UNTHOUGHT):
        reason = "the template leaves out the thinking that the log has: answers are rendered without it"
        yield Remark("warning", path, line, reason)
    if notes.get("reopened"):
        yield Remark(
            "warning",
            path,
            line,
            "the template writes the beginning of an answer otherwise in a prompt than in a history: completions start "
            "where the two still agree",
        )


def _decode(rendering: Rendering) -> Any:
    return lambda ids: rendering.decode(ids.tolist())
