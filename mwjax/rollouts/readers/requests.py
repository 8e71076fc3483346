"""Requests and responses of the three APIs without token ids: read as messages, rendered, told apart, made rollouts.

What a server keeps or changes by itself cannot be rendered: ``conversation``, an encrypted compaction, and context
editing that was applied (``context_management``) refuse the call. ``previous_response_id`` is followed where the log
holds that response.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mwjax.rollouts.engine_ids import Endpoint
from mwjax.rollouts.errors import RecordError, Refusal
from mwjax.rollouts.readers import chat
from mwjax.rollouts.readers.chains import conversations, without_copies
from mwjax.rollouts.readers.engine_call import Call
from mwjax.rollouts.readers.exchange import unfinished
from mwjax.rollouts.readers.reader import Found, Item, Options, Remark
from mwjax.rollouts.readers.rendered import rendered_call, rendered_meta, rendered_remarks
from mwjax.rollouts.readers.seen import Seen
from mwjax.rollouts.readers.sessions import (
    SEVERAL,
    at,
    conversation_meta,
    ended_early,
    group_and_reward,
    merged,
    name_in,
)
from mwjax.rollouts.readers.settings import sampling_settings
from mwjax.rollouts.readers.system_prompts import steady_system, told_of
from mwjax.rollouts.record import Rollout
from mwjax.rollouts.rendering import Rendering

HIDDEN = "thinking (encrypted, summed up or left out)"


class Exchange(NamedTuple):
    """One request and its response. ``place``: its number in the log, from 1. ``record``: all that the log says of it,
    for group and reward. ``session``: None where nothing names one; ``one``: it is one rollout. ``cut_off`` as in
    ``Call``."""

    place: int
    line: int
    request: Mapping[str, Any]
    response: Mapping[str, Any]
    record: Any
    session: str | None
    time: float | None
    one: bool = True
    cut_off: bool = False


@dataclass
class _Session:
    name: str
    one: bool
    seen: list[Seen] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    group: str | None = None
    reward: float | None = None
    lost: list[int] = field(default_factory=list)


def endpoint_of(request: Mapping[str, Any], response: Mapping[str, Any]) -> Endpoint | None:
    """The API of an exchange, by what it holds; None where it is none of the three."""
    if response.get("object") == "response" or (
        "input" in request and "messages" not in request and "model" in request
    ):
        return "responses"
    if not isinstance(request.get("messages"), list):
        return None
    return "messages" if response.get("type") == "message" else "chat.completions"


def rollouts_of(
    path: str, name: str, exchanges: Iterator[Exchange | Item], rendering: Rendering, options: Options
) -> Iterator[Item]:
    """The rollouts of a log's exchanges. ``name``: of the log, for calls of no session; items are passed on."""
    sessions: dict[str, _Session] = {}
    stored: dict[str, list[chat.Message]] = {}
    for exchange in exchanges:
        if not isinstance(exchange, Exchange):
            yield exchange
            continue
        key = exchange.session if exchange.session is not None else name
        session = sessions.setdefault(key, _Session(key, exchange.session is not None and exchange.one))
        if exchange.response.get("error") and not (exchange.response.keys() & {"choices", "output", "content"}):
            yield Remark("empty", path, exchange.line, "the call failed (the response reports an error)")
            continue
        try:
            calls = list(_seen(exchange, stored, options))
            group, reward = group_and_reward(exchange.record, options)
            session.group = session.group if group is None else group
            session.reward = session.reward if reward is None else reward
        except RecordError as error:
            session.lost.append(exchange.line)
            yield Refusal(path, exchange.line, error.field, error.reason)
            continue
        if not calls:
            yield Remark("empty", path, exchange.line, "the answer is empty")
        if exchange.request.get("truncation") == "auto" or exchange.request.get("truncate_prompt_tokens"):
            reason = "the request lets the server cut a prompt that is too long: what the model saw may be less"
            yield Remark("warning", path, exchange.line, reason)
        session.seen += calls
        session.places += [exchange.place] * len(calls)
    for session in sessions.values():
        yield from _rollouts(path, session, rendering, options)


def _rollouts(path: str, session: _Session, rendering: Rendering, options: Options) -> Iterator[Item]:
    seen, changing = steady_system(session.seen, one=session.one, normalise=options.normalise_system)
    if changing:
        yield Remark("warning", path, seen[0].line, told_of(changing, normalise=options.normalise_system))
    calls: list[Call] = []
    notes: dict[int, str] = {}  # by id of the call
    hidden: set[int] = set()
    for place, each in zip(session.places, seen):
        try:
            call, note = rendered_call(each, rendering, place)
        except RecordError as error:
            session.lost.append(each.line)
            yield Refusal(path, each.line, error.field, error.reason)
            continue
        calls.append(call)
        hidden |= {id(call)} if each.hidden else set()
        notes |= {id(call): note} if note is not None else {}
    kept, copies = without_copies(calls)
    yield from merged(path, kept, copies)
    if not kept:
        return
    found = conversations(kept, one=session.one, decode=lambda ids: rendering.decode(ids.tolist()))
    for number, conversation in enumerate(found, start=1):
        missing = [HIDDEN] if any(id(call) in hidden for call in conversation.calls) else []
        noted = Counter(notes[id(call)] for call in conversation.calls if id(call) in notes)
        meta = {
            **conversation_meta(session.name, conversation, session.lost),
            **rendered_meta(rendering, noted, missing),
            **({"system_normalised": len(changing)} if changing and options.normalise_system else {}),
        }
        name = session.name if len(found) == 1 else f"{session.name}/{number}"
        first = conversation.calls[0].line
        records = len({call.record for call in conversation.calls})
        responses = tuple(call.identity for call in conversation.calls)
        rollout = Rollout(name, conversation.turns, (), session.group, session.reward, meta)
        yield Found(rollout, first, records, responses)
        yield from rendered_remarks(path, first, noted, missing)
        yield from ended_early(path, conversation)
    if len(found) > 1:
        yield Remark("warning", path, found[0].calls[0].line, SEVERAL)


def _seen(exchange: Exchange, stored: dict[str, list[chat.Message]], options: Options) -> Iterator[Seen]:
    """The call of an exchange, one for each choice. Raises RecordError."""
    request, response = exchange.request, exchange.response
    if at(exchange.record, "ids_withheld"):
        raise RecordError("ids_withheld", "is true: text was redacted, so what the model saw cannot be rendered")
    endpoint = endpoint_of(request, response)
    if endpoint is None:
        raise RecordError("request", "has neither messages nor input: it is no call of the three APIs")
    messages = asked_messages(endpoint, request, stored)
    applied = at(response, "context_management.applied_edits")
    if applied:
        kinds = ", ".join(sorted({str(each.get("type")) for each in applied if isinstance(each, dict)}))
        raise RecordError(
            "response.context_management.applied_edits",
            f"the server edited the context of this call ({kinds}): what the model saw is not what was sent",
        )
    name = name_in(response, "id")
    for index, answer, reason in answers(endpoint, response):
        if isinstance(response.get("id"), str) and endpoint == "responses":
            stored[response["id"]] = [*_items(request, stored), answer]
        variables = request.get("chat_template_kwargs")
        yield Seen(
            tuple(messages),
            answer,
            chat.tools_of(request),
            line=exchange.line,
            finish_reason=reason,
            sampling=sampling_settings(request, options, logprobs="raw"),
            identity=None if name is None else (name, index),
            options=variables if isinstance(variables, dict) else {},
            hidden=_hides(response, answer),
            cut_off=unfinished(endpoint, response, index, cut=exchange.cut_off),
            time=exchange.time,
        )


def asked_messages(
    endpoint: Endpoint, request: Mapping[str, Any], stored: Mapping[str, list[chat.Message]]
) -> list[chat.Message]:
    if request.get("conversation"):
        raise RecordError("request.conversation", "the conversation is kept on the server and is not in the log")
    if endpoint == "responses":
        messages = _items(request, stored)
        if request.get("instructions"):
            messages.insert(0, chat.message("system", chat.text_of(request["instructions"], "request.instructions")))
        return chat.merged_system(messages)
    found: list[chat.Message] = []
    for place, each in enumerate(request.get("messages") or ()):
        field = f"request.messages[{place}]"
        found += [chat.from_openai(each, field)] if endpoint == "chat.completions" else chat.from_anthropic(each, field)
    if endpoint == "messages" and request.get("system"):
        found.insert(0, chat.message("system", chat.text_of(request["system"], "request.system")))
    if not found:
        raise RecordError("request.messages", "is empty")
    if found[-1]["role"] == "assistant" and (endpoint == "messages" or request.get("continue_final_message")):
        reason = "ends with the beginning of the answer, which a template writes as a whole one"
        raise RecordError("request.messages", reason)
    return found


def _items(request: Mapping[str, Any], stored: Mapping[str, list[chat.Message]]) -> list[chat.Message]:
    """What a call of the responses API was given, without its instructions, which hold for it alone."""
    messages = chat.from_responses(request.get("input"), "request.input")
    before = request.get("previous_response_id")
    if not before:
        return messages
    if not isinstance(before, str) or before not in stored:
        raise RecordError(
            "request.previous_response_id",
            f"{before!r} is not in the log: what the model saw before this input is kept on the server",
        )
    return [*stored[before], *messages]


def answers(endpoint: Endpoint, response: Mapping[str, Any]) -> Iterator[tuple[int, chat.Message, str | None]]:
    """(index, message, finish reason) of every choice that says anything. Raises RecordError."""
    if endpoint == "chat.completions":
        choices = response.get("choices")
        for place, choice in enumerate(choices if isinstance(choices, list) else ()):
            field = f"response.choices[{place}]"
            if not isinstance(choice, dict) or not isinstance(choice.get("message"), dict):
                raise RecordError(f"{field}.message", "missing: there is no answer")
            answer = chat.from_openai({"role": "assistant", **choice["message"]}, f"{field}.message")
            if _says(answer):
                index = choice.get("index")
                yield index if isinstance(index, int) else place, answer, _text(choice.get("finish_reason"))
        return
    if endpoint == "messages":
        content = {"role": "assistant", "content": response.get("content")}
        answer = chat.from_anthropic(content, "response")[-1]
        reason = _text(response.get("stop_reason"))
    else:
        found = [each for each in chat.from_responses(response.get("output"), "response.output") if _says(each)]
        if not found:
            return
        answer = found[-1] if len(found) == 1 else chat.joined(found)
        reason = _text(at(response, "incomplete_details.reason")) or _text(response.get("status"))
    if _says(answer):
        yield 0, answer, reason


def _says(answer: chat.Message) -> bool:
    return bool(answer["content"] or answer.get("tool_calls") or answer.get("reasoning_content"))


def _hides(response: Mapping[str, Any], answer: chat.Message) -> bool:
    """Whether the model thought something that the response does not show, or only in summary."""
    for place in ("content", "output"):
        for block in chat.listed(response.get(place)):
            kind = block.get("type") if isinstance(block, dict) else None
            if kind == "redacted_thinking" or (kind == "thinking" and not block.get("thinking")):
                return True
            if kind == "reasoning" and not block.get("content"):
                return True
    for choice in chat.listed(response.get("choices")):
        kinds = {at(each, "type") for each in chat.listed(at(choice, "message.reasoning_details"))}
        if kinds - {"reasoning.text"}:
            return True
    details = (at(response, f"usage.{name}_tokens_details.reasoning_tokens") for name in ("completion", "output"))
    thought = any(type(count) is int and count > 0 for count in details)
    return thought and not answer.get("reasoning_content") and "<think>" not in answer["content"]


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
