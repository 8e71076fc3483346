"""The calls of a log, session by session, as rollouts and what there is to say about them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from mwjax.rollouts.errors import RecordError, Refusal
from mwjax.rollouts.fields import number
from mwjax.rollouts.http_calls import REDACTED
from mwjax.rollouts.readers.chains import Conversation, conversations, without_copies
from mwjax.rollouts.readers.engine_call import Call
from mwjax.rollouts.readers.reader import Found, Item, Options, Remark
from mwjax.rollouts.readers.records import Record
from mwjax.rollouts.readers.settings import ratio_warning
from mwjax.rollouts.record import Rollout

LATEST_TIME = 1e11
BROKE_OFF = "the answer broke off, so the harness did not act on it; kept as context only"
SEVERAL = (
    "a session without a name of its own held several conversations, or parts of one; each is a rollout, unless "
    "--session-by names a field that says which belong together"
)
TRUNCATED = ("length", "max_tokens", "MAX_TOKENS", "max_output_tokens")  # why a completion ended at its token limit


@dataclass
class Session:
    """What is known of one session while its log is read. ``one``: it is one rollout; otherwise it may hold several.
    ``lost``: lines whose call was refused."""

    name: str
    one: bool
    calls: list[Call] = field(default_factory=list)
    group: str | None = None
    reward: float | None = None
    lost: list[int] = field(default_factory=list)

    def note(self, record: Record, options: Options) -> None:
        """Takes group and reward from a record, the last one that has them. Raises RecordError."""
        group, reward = group_and_reward(record.value, options)
        self.group = self.group if group is None else group
        self.reward = self.reward if reward is None else reward


def at(value: Any, path: str) -> Any:
    """The value at a dotted path such as ``choices.0.text``; None where there is none."""
    for part in path.split("."):
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, list) and part.lstrip("-").isdecimal() and -len(value) <= int(part) < len(value):
            value = value[int(part)]
        else:
            return None
    return value


def group_and_reward(record: Any, options: Options) -> tuple[str | None, float | None]:
    """From the fields of a record that the user named; None where there is none. Raises RecordError."""
    group = None if options.group_by is None else at(record, options.group_by)
    reward = None if options.reward is None else at(record, options.reward)
    return (
        None if group is None else str(group),
        None if reward is None or options.reward is None else number(reward, options.reward),
    )


def time_in(record: Any, *names: str) -> float | None:
    """Seconds since 1970 from the first of these fields that holds a time in ISO 8601, or a number: of seconds, or of
    milli-, micro- or nanoseconds where that would be thousands of years from now."""
    for name in names:
        value = at(record, name)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                return datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp()
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e30:
            moment = float(value)
            while abs(moment) > LATEST_TIME:
                moment /= 1000
            return moment
    return None


def name_in(record: Any, *names: str) -> str | None:
    """The first of these fields that holds a name: text or a whole number, and not what stands for a redacted one."""
    found = (at(record, name) for name in names)
    return next((str(each) for each in found if isinstance(each, (str, int)) and each not in ("", REDACTED)), None)


def members(value: Any) -> dict[str, Any]:
    """A value that should be an object; an empty one in its place where it is none."""
    return value if isinstance(value, dict) else {}


def check_usage(usage: Any, prompt: int, completion: int) -> None:
    """Compares numbers of ids with the token counts that the engine reported. Raises RecordError with both."""
    if not isinstance(usage, Mapping):
        return
    for names, found, what in (
        (("prompt_tokens", "input_tokens"), prompt, "prompt"),
        (("completion_tokens", "output_tokens"), completion, "completion"),
    ):
        for name in names:
            said = usage.get(name)
            if isinstance(said, int) and said != found:
                raise RecordError(
                    f"usage.{name}", f"says {said}, but there are {found} {what} ids: they are not what the engine saw"
                )


def decoder(tokenizer: str | None) -> Callable[[np.ndarray], str] | None:
    """Ids as text, by a tokenizer.json or a folder that has one. Raises ValueError."""
    if tokenizer is None:
        return None
    place = os.path.expanduser(tokenizer)
    path = os.path.join(place, "tokenizer.json") if os.path.isdir(place) else place
    try:
        loaded = Tokenizer.from_file(path)
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"cannot read the tokenizer {path}: {error}") from None
    return lambda ids: loaded.decode(ids.tolist(), skip_special_tokens=False)


def rollouts_of(path: str, sessions: Mapping[str, Session], options: Options) -> Iterator[Item]:
    """The rollouts of all sessions, with a remark for every copy and for what biases training."""
    decode = decoder(options.tokenizer)
    for session in sessions.values():
        kept, copies = without_copies(session.calls)
        yield from merged(path, kept, copies)
        if not kept:
            continue
        found = conversations(kept, one=session.one, decode=decode)
        for number_, conversation in enumerate(found):
            name = session.name if len(found) == 1 else f"{session.name}/{number_ + 1}"
            yield from _remarks(path, conversation)
            records = {call.record for call in conversation.calls}
            meta = conversation_meta(session.name, conversation, session.lost)
            rollout = Rollout(name, conversation.turns, (), session.group, session.reward, meta)
            responses = tuple(call.identity for call in conversation.calls)
            yield Found(rollout, conversation.calls[0].line, len(records), responses)
        if len(found) > 1:
            yield Remark("warning", path, found[0].calls[0].line, SEVERAL)


def merged(path: str, kept: Sequence[Call], copies: Sequence[Call]) -> Iterator[Remark]:
    """A remark for every record that holds nothing but copies: see `without_copies`."""
    used = {call.record for call in kept}
    for call in {call.record: call for call in copies if call.record not in used}.values():
        yield Remark("merged", path, call.line, "a second record of a response that is there already")


def conversation_meta(session: str, conversation: Conversation, lost: Sequence[int]) -> dict[str, Any]:
    """``lost``: lines of the session whose call was refused."""
    meta: dict[str, Any] = {"session": session}
    truncated = [k for k, turn in enumerate(conversation.turns) if turn.finish_reason in TRUNCATED]
    cut_off = [k for k, call in enumerate(conversation.calls) if call.cut_off]
    for key, value in (
        ("junction_details", {str(turn): detail for turn, detail in conversation.details.items()}),
        ("truncated_turns", truncated),
        ("cut_off_turns", cut_off),
        ("refused_lines", list(lost)),
    ):
        if value:
            meta[key] = value
    return meta


def _remarks(path: str, conversation: Conversation) -> Iterator[Remark]:
    changed = [place for place, detail in conversation.details.items() if detail == "system_prompt"]
    if changed:
        reason = "the system prompt changes from call to call: each begins a branch of its own"
        yield Remark("warning", path, conversation.calls[changed[0]].line, reason)
    for turn, call in zip(conversation.turns, conversation.calls):
        if turn.logprobs is not None and turn.trainable and (warning := ratio_warning(turn.sampling)):
            yield Remark("warning", path, call.line, warning)
    yield from ended_early(path, conversation)


def ended_early(path: str, conversation: Conversation) -> Iterator[Remark]:
    """A remark for every answer that was truncated or broke off."""
    for turn, call in zip(conversation.turns, conversation.calls):
        if turn.finish_reason in TRUNCATED:
            yield Remark("warning", path, call.line, "the completion was truncated at the token limit; kept")
        if call.cut_off:
            yield Remark("warning", path, call.line, BROKE_OFF)


def refused(path: str, session: Session, record: Record, error: RecordError) -> Refusal:
    """The refusal of one call, which its rollout then lacks."""
    session.lost.append(record.line)
    return record.refusal(path, error.field, error.reason)
