"""Requests and responses of vLLM or SGLang with token ids, one exchange a line.

A record holds the request and the response under any of the names in ``REQUEST`` and ``RESPONSE``, or is a response
alone. Each may be an object, text (of an event stream too), a list of a stream's chunks, or have one of these as its
``body``. Responses of these kinds have ids:

- chat completions and completions of vLLM, asked with ``return_token_ids``: ``prompt_token_ids``,
  ``choices[].token_ids``, ``choices[].logprobs`` (vllm-project/vllm at d5dba2d7b0ab9b98096560c69db7126b54b14d79:
  vllm/entrypoints/openai/chat_completion/protocol.py), and with ``enable_response_messages`` responses
- chat completions of SGLang: ``choices[].response_token_ids``, ``choices[].meta_info``, ``sglext`` (sgl-project/sglang
  at 9b116dffe828b2dfa7ec0e4d061555b6c354b67a: python/sglang/srt/entrypoints/openai/protocol.py)
- SGLang's ``/generate`` (python/sglang/srt/managers/io_struct.py): the request's ``input_ids`` and
  ``sampling_params``, the response's ``output_ids`` and ``meta_info`` with ``output_token_logprobs`` as [log-prob, id,
  text], ``prompt_tokens``, ``completion_tokens``, ``finish_reason`` and ``weight_version``
- vLLM's ``/inference/v1/generate``: the request's ``token_ids`` and ``sampling_params``, the response's
  ``choices[].token_ids``

The rollout of a call is named by a field of ``SESSION``, or by ``--session-by``; without one, calls belong together as
far as what they share shows it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from mwjax.rollouts.engine_ids import Endpoint, choices_of, prompt_ids, sampled
from mwjax.rollouts.errors import RecordError, Refusal
from mwjax.rollouts.fields import described
from mwjax.rollouts.http_calls import FORMAT
from mwjax.rollouts.readers.engine_call import Call
from mwjax.rollouts.readers.event_text import from_payloads, response_in
from mwjax.rollouts.readers.exchange import Completion, calls_of
from mwjax.rollouts.readers.reader import Head, Item, Options, Remark
from mwjax.rollouts.readers.records import Record, json_records
from mwjax.rollouts.readers.sessions import Session, name_in, refused, rollouts_of, time_in

NAME = "engine"
DESCRIPTION = "requests and responses of vLLM or SGLang with token ids, one exchange a line"

REQUEST = ("request", "req", "request_body", "body", "payload")
RESPONSE = ("response", "resp", "response_body", "output", "result")
SESSION = ("session", "session_id", "rollout_id", "trajectory_id", "episode_id", "conversation_id", "trace_id")


def looks_like(head: Head) -> bool:
    return any(has_ids(record) for record in head.records)


def has_ids(record: Any) -> bool:
    """Whether a record is an exchange whose response has token ids."""
    if not isinstance(record, dict) or record.get("format") == FORMAT:
        return False
    request, response = _exchange(record)
    if "choices" not in response and "output_ids" not in response and "meta_info" not in response:
        return response.get("object") == "response" and bool(response.get("output_messages"))
    try:
        return any(each.ids is not None for each in _completions(_endpoint(response), request, response))
    except RecordError:
        return False


def read(path: str, options: Options) -> Iterator[Item]:
    sessions: dict[str, Session] = {}
    for number, record in enumerate(json_records(path, options), start=1):
        if isinstance(record, Refusal):
            yield record
            continue
        if not isinstance(record.value, dict):
            yield record.refusal(path, "", f"is {described(record.value)}, must be a request with its response")
            continue
        session = _session(path, record.value, sessions, options)
        request, response = _exchange(record.value)
        if response.get("error") and not response.get("choices"):
            yield Remark("empty", path, record.line, "the call failed (the response reports an error)")
            continue
        try:
            calls = _calls(record, number, request, response, options)
            session.note(record, options)
        except RecordError as error:
            yield refused(path, session, record, error)
        else:
            session.calls += calls
    yield from rollouts_of(path, sessions, options)


def exchange_in(record: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Request and response of a record; empty where it has none."""
    request, response = (
        next((found for name in names if (found := _payload(record.get(name))) is not None), {})
        for names in (REQUEST, RESPONSE)
    )
    return request, response


def _payload(given: Any) -> dict[str, Any] | None:
    if isinstance(given, dict):
        inner = _payload(given.get("body"))
        return given if inner is None else inner
    if isinstance(given, str):
        return response_in(given)
    return from_payloads(given) if isinstance(given, list) else None


def _exchange(record: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Request and response; the response is the record itself where it has no member of that kind."""
    request, response = exchange_in(record)
    return request, response or dict(record)


def _session(path: str, value: Mapping[str, Any], sessions: dict[str, Session], options: Options) -> Session:
    fields = (options.session_by,) if options.session_by is not None else SESSION
    name = name_in(value, *fields)
    if name is None:
        stem = os.path.basename(path).partition(".")[0]
        return sessions.setdefault(stem, Session(stem, one=False))
    return sessions.setdefault(name, Session(name, one=True))


def _endpoint(response: Mapping[str, Any]) -> Endpoint:
    return "responses" if response.get("object") == "response" else "chat.completions"


def _calls(
    record: Record, number: int, request: Mapping[str, Any], response: Mapping[str, Any], options: Options
) -> list[Call]:
    """Raises RecordError."""
    endpoint = _endpoint(response)
    prompt = prompt_ids(endpoint, response)
    for place, choice in enumerate(choices_of(response)):
        if choice.get("prompt_token_ids") not in (None, prompt):
            reason = "is another prompt than the first choice's: a request of several prompts; log one a record"
            raise RecordError(f"choices[{place}].prompt_token_ids", reason)
    if prompt is None:
        given = [request.get(name) for name in ("input_ids", "token_ids", "prompt_token_ids", "prompt")]
        prompt = next((ids for ids in given if isinstance(ids, list)), None)
    if prompt is None:
        raise RecordError("prompt_token_ids", "missing: neither the response nor the request has the ids of the prompt")
    completions = _completions(endpoint, request, response)
    if not completions:
        raise RecordError("choices", "there are no token ids: ask the engine for them (return_token_ids)")
    settings = request.get("sampling_params")
    meta = response.get("meta_info")
    native = isinstance(meta, dict)
    usage = meta if native else response.get("usage")
    return calls_of(
        number,
        record.line,
        prompt,
        completions,
        endpoint=endpoint,
        request=request,
        response=response,
        engine="sglang" if native or _of_sglang(response) else "vllm",
        options=options,
        settings=settings if isinstance(settings, dict) else None,
        usage=usage,
        time=time_in(record.value, "started", "timestamp", "time") or 0.0,
        name=name_in(response, "id", "meta_info.id", "request_id"),
        prompt_field="prompt_token_ids",
    )


def _completions(endpoint: Endpoint, request: Mapping[str, Any], response: Mapping[str, Any]) -> list[Completion]:
    meta = response.get("meta_info")
    if isinstance(meta, dict):
        triples = meta.get("output_token_logprobs")
        ids, logprobs = response.get("output_ids"), None
        if isinstance(triples, list) and all(isinstance(each, list) and len(each) >= 2 for each in triples):
            logprobs = [each[0] for each in triples]
            ids = [each[1] for each in triples] if ids is None else ids
        reason = meta.get("finish_reason")
        reason = reason.get("type") if isinstance(reason, dict) else reason
        return [Completion("output_ids", 0, ids, logprobs, reason, _version(meta))]
    listed = response.get("choices")
    found = []
    for each in sampled(endpoint, response):
        choice = listed[0] if isinstance(listed, list) and listed else {}
        info = choice.get("meta_info") if isinstance(choice, dict) else None
        field = "output_messages" if endpoint == "responses" else f"choices[{each.choice}].token_ids"
        version = _version(info) if isinstance(info, dict) else None
        found.append(Completion(field, each.choice, each.completion_ids, each.logprobs, policy_version=version))
    return found


def _of_sglang(response: Mapping[str, Any]) -> bool:
    listed = response.get("choices")
    inside = any(isinstance(each, dict) and "meta_info" in each for each in listed or ())
    return inside or "sglext" in response


def _version(meta: Mapping[str, Any]) -> int | None:
    given = str(meta.get("weight_version", ""))
    return int(given) if given.isdecimal() else None
