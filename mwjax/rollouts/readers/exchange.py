"""One exchange of a request and a response with token ids as calls, one for each choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mwjax.rollouts.engine_ids import Endpoint
from mwjax.rollouts.errors import RecordError
from mwjax.rollouts.fields import log_probabilities, token_ids
from mwjax.rollouts.readers.engine_call import Call
from mwjax.rollouts.readers.reader import Options
from mwjax.rollouts.readers.said import answered, asked, choices
from mwjax.rollouts.readers.sessions import at, check_usage
from mwjax.rollouts.readers.settings import engine_logprobs, sampling_settings


class Completion(NamedTuple):
    """``field``: where the log has it. ``choice``: its index. ``ids`` and ``logprobs`` are not checked yet."""

    field: str
    choice: int
    ids: Any
    logprobs: Any = None
    finish_reason: str | None = None
    policy_version: int | None = None


def calls_of(
    record: int,
    line: int,
    prompt: Any,
    completions: Sequence[Completion],
    *,
    endpoint: Endpoint,
    request: Mapping[str, Any],
    response: Mapping[str, Any],
    engine: str,
    options: Options,
    settings: Mapping[str, Any] | None = None,
    usage: Any = None,
    time: float = 0.0,
    name: str | None = None,
    cut_off: bool = False,
    prompt_field: str = "prompt_ids",
) -> list[Call]:
    """The calls of one exchange.

    settings: the sampling settings, where they are not in the request itself. name: of the response, to tell copies by.
    cut_off: it broke off, or the harness left before its end.
    Raises RecordError, also where the numbers of ids are not those that ``usage`` says.
    """
    prompt = token_ids(prompt, prompt_field, options.vocab_size)
    sampling = sampling_settings(request if settings is None else settings, options, logprobs=engine_logprobs(engine))
    said = asked(endpoint, request)
    calls = []
    for each in completions:
        if each.ids is None:
            raise RecordError(each.field, "there are no token ids: the engine gave none")
        sampled = token_ids(each.ids, each.field, options.vocab_size)
        logprobs = None
        if each.logprobs is not None:
            place, _, _ = each.field.rpartition(".")
            logprobs = log_probabilities(each.logprobs, f"{place}.logprobs" if place else "logprobs", len(sampled))
        calls.append(
            Call(
                record=record,
                line=line,
                prompt_ids=prompt,
                completion_ids=sampled,
                logprobs=logprobs,
                sampling=sampling,
                finish_reason=each.finish_reason or finish_reason(endpoint, response, each.choice),
                policy_version=each.policy_version,
                time=time,
                identity=None if name is None else (name, each.choice),
                asked=said,
                answer=answered(endpoint, response, each.choice),
                cut_off=unfinished(endpoint, response, each.choice, cut=cut_off),
            )
        )
    check_usage(usage, len(prompt), sum(len(call.completion_ids) for call in calls))
    return calls


def finish_reason(endpoint: Endpoint, response: Mapping[str, Any], choice: int) -> str | None:
    """Why the model stopped, in the API's own word, but ``length`` where the limit was reached."""
    if endpoint == "responses":
        found = at(response, "incomplete_details.reason") or response.get("status")
        found = "length" if found == "max_output_tokens" else found
    elif endpoint == "messages":
        found = response.get("stop_reason")
    else:
        found = next((each.get("finish_reason") for each in choices(response, choice)), None)
    return found if isinstance(found, str) else None


def unfinished(endpoint: Endpoint, response: Mapping[str, Any], choice: int, *, cut: bool) -> bool:
    """Whether the answer is not whole: the response was cut off before it gave the reason why the model stopped, which
    a harness may take for the end of a stream, or it says so itself, by null in place of the reason. A log that leaves
    the reason out does not tell."""
    if endpoint == "responses":
        status = response.get("status")
        return status in ("in_progress", "queued", "failed", "cancelled") or (cut and status is None)
    name = "stop_reason" if endpoint == "messages" else "finish_reason"
    places = [response] if endpoint == "messages" else choices(response, choice)
    if any(each.get(name) is not None for each in places):
        return False
    return cut or any(name in each for each in places)
