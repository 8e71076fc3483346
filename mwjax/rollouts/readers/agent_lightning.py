"""Agent Lightning: events and triplets of its server, spans and triplets of its older tracer.

- Events, as agentlightning 1.0.2 has them (agentlightning/schemas.py: Event, ModelRequestData; server/proxy.py): lines,
  or the array that ``GET /rollouts/ID/events`` gives, of ``event_type``, ``rollout_id``, ``attempt_id``,
  ``timestamp`` and ``data``. Of a ``model_request``: ``request``, ``response`` with vLLM's token ids, ``usage``,
  ``server.version``; with ``format=triplet`` (server/routes/events.py) ``prompt_token_ids``, ``response_token_ids`` and
  ``response_log_probs`` instead. Of a ``reward``: ``value``; the last one is the rollout's. That query keeps one
  response for each prompt, so a retry is not in it.
- Spans, as agentlightning 0.3.0 has them (types/tracer.py: Span; adapter/triplet.py for the attributes):
  ``rollout_id``, ``attempt_id``, ``sequence_id``, ``attributes`` with the ids. Spans without ids are not calls of the
  policy.
- Triplets (types/core.py: Triplet, RolloutLegacy): ``rollout_id``, ``triplets`` of ``prompt.token_ids``,
  ``response.token_ids``, ``reward``, and ``final_reward``; where that is null, the last reward is the rollout's.

Every attempt at a rollout is a rollout of its own. The server's gateway writes down the request as it went to the
engine, with the temperature of the gateway's configuration; a response of earlier versions is a list of chunks.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from mwjax.rollouts.engine_ids import prompt_ids, sampled
from mwjax.rollouts.errors import RecordError, Refusal
from mwjax.rollouts.fields import described, number
from mwjax.rollouts.readers.engine_call import Call
from mwjax.rollouts.readers.engine_log import exchange_in
from mwjax.rollouts.readers.exchange import Completion, calls_of
from mwjax.rollouts.readers.reader import Head, Item, Options, Remark
from mwjax.rollouts.readers.records import Record, json_records
from mwjax.rollouts.readers.sessions import Session, at, members, name_in, refused, rollouts_of, time_in

NAME = "agent-lightning"
DESCRIPTION = "events, spans and triplets of Agent Lightning"

PROMPT_IDS = (
    "prompt_token_ids",
    "llm.hosted_vllm.prompt_token_ids",
    "agentlightning.operation.output.prompt_token_ids",
)
RESPONSE_IDS = (
    "response_token_ids",
    "llm.hosted_vllm.response_token_ids",
    "agentlightning.operation.output.response_token_ids.0",
    "agentlightning.operation.output.choices.0.token_ids",
    "agentlightning.operation.output.choices.0.provider_specific_fields.token_ids",
)
RESPONSE_NAMES = ("gen_ai.response.id", "llm.hosted_vllm.id", "agentlightning.operation.output.id")
REWARD = "agentlightning.reward.0.value"


class _Nothing(Exception):
    """There is nothing sampled in this record; the message says what it is."""


def looks_like(head: Head) -> bool:
    return any(_is_event(each) or _is_span(each) or _is_triplets(each) for each in head.records)


def _is_event(value: Any) -> bool:
    return isinstance(value, dict) and {"event_type", "rollout_id", "attempt_id", "data"} <= value.keys()


def _is_span(value: Any) -> bool:
    return isinstance(value, dict) and {"rollout_id", "attempt_id", "sequence_id", "attributes"} <= value.keys()


def _is_triplets(value: Any) -> bool:
    return isinstance(value, dict) and "rollout_id" in value and isinstance(value.get("triplets"), list)


def read(path: str, options: Options) -> Iterator[Item]:
    attempts: dict[tuple[str, str], Session] = {}
    for number_, record in enumerate(json_records(path, options), start=1):
        if isinstance(record, Refusal):
            yield record
            continue
        value = record.value
        if not (_is_event(value) or _is_span(value) or _is_triplets(value)):
            yield record.refusal(path, "", f"is {described(value)}, must be an event, a span or triplets")
            continue
        rollout, attempt = str(value["rollout_id"]), str(value.get("attempt_id") or "")
        session = attempts.setdefault((rollout, attempt), Session(rollout, one=True))
        try:
            calls = _calls(record, number_, session, options)
            session.note(record, options)
        except _Nothing as what:
            yield Remark("empty", path, record.line, str(what))
        except RecordError as error:
            yield refused(path, session, record, error)
        else:
            session.calls += calls
    counts = Counter(rollout for rollout, _ in attempts)
    for (rollout, attempt), session in attempts.items():
        session.name = f"{rollout}/{attempt}" if counts[rollout] > 1 else rollout
    yield from rollouts_of(path, {session.name: session for session in attempts.values()}, options)


def _calls(record: Record, number_: int, session: Session, options: Options) -> list[Call]:
    """The calls of a record; a reward goes to the session. Raises RecordError, or _Nothing."""
    value = record.value
    if _is_triplets(value):
        return _of_triplets(record, number_, session, options)
    data = value["data"] if _is_event(value) else value["attributes"]
    if not isinstance(data, dict):
        raise RecordError("data" if _is_event(value) else "attributes", f"is {described(data)}, must be an object")
    if not _is_event(value):
        return _of_span(record, number_, data, session, options)
    if value["event_type"] == "reward":
        session.reward = number(data.get("value"), "data.value")
        raise _Nothing("a reward, taken for its rollout")
    if value["event_type"] != "model_request":
        raise _Nothing(f"an event of kind {value['event_type']}")
    if data.get("status") == "error" or (isinstance(data.get("http_status"), int) and data["http_status"] >= 400):
        raise _Nothing(f"the call failed (status {data.get('http_status')})")
    return _of_request(record, number_, data, options)


def _of_request(record: Record, number_: int, data: Mapping[str, Any], options: Options) -> list[Call]:
    request, response = exchange_in(data)
    prompt = data.get("prompt_token_ids") or prompt_ids("chat.completions", response)
    if data.get("response_token_ids"):
        logprobs = data.get("response_log_probs")
        found = [Completion("data.response_token_ids", 0, data["response_token_ids"], logprobs)]
    else:
        found = []
        for each in sampled("chat.completions", response):
            field = f"data.response.choices[{each.choice}].token_ids"
            found.append(Completion(field, each.choice, each.completion_ids, each.logprobs))
    if not prompt or not found:
        raise RecordError("data.response", "has no token ids: the engine gave none")
    version = at(data, "server.version")
    version = data.get("model_version") if version is None else version
    return calls_of(
        number_,
        record.line,
        prompt,
        [each._replace(policy_version=version if type(version) is int else None) for each in found],
        endpoint="chat.completions",
        request=request,
        response=response,
        engine="vllm",
        options=options,
        settings={**request, **members(data.get("adjusted_params"))},
        usage=data.get("usage"),
        time=time_in(record.value, "timestamp") or 0.0,
        name=name_in(response, "id"),
        prompt_field="data.prompt_token_ids",
    )


def _of_span(
    record: Record, number_: int, attributes: Mapping[str, Any], session: Session, options: Options
) -> list[Call]:
    reward = attributes.get(REWARD)
    if reward is None:
        output = _parsed(attributes.get("agentops.task.output") or attributes.get("agentops.entity.output"))
        reward = output.get("value") if isinstance(output, dict) and output.get("type") == "reward" else None
    if reward is not None:
        session.reward = number(reward, f"attributes.{REWARD}")
        raise _Nothing("a reward, taken for its rollout")
    prompt = next((ids for name in PROMPT_IDS if (ids := _parsed(attributes.get(name)))), None)
    ids = next((found for name in RESPONSE_IDS if (found := _parsed(attributes.get(name)))), None)
    ids = ids[0] if isinstance(ids, list) and ids and isinstance(ids[0], list) else ids
    choices = _parsed(attributes.get("llm.hosted_vllm.choices"))
    ids = at(choices, "0.token_ids") if ids is None else ids
    if prompt is None and ids is None:
        raise _Nothing(f"a span without token ids ({record.value.get('name')})")
    if prompt is None or ids is None:
        raise RecordError("attributes", "has ids of the prompt or of the response, but not of both")
    content = _parsed(attributes.get("logprobs.content"))
    logprobs = [at(each, "logprob") for each in content] if isinstance(content, list) else None
    settings = {name: attributes.get(f"gen_ai.request.{name}") for name in ("temperature", "top_p", "top_k")}
    return calls_of(
        number_,
        record.line,
        prompt,
        [Completion("attributes.response_token_ids", 0, ids, logprobs, at(choices, "0.finish_reason"))],
        endpoint="chat.completions",
        request={},
        response={},
        engine="vllm",
        options=options,
        settings=settings,
        time=time_in(record.value, "sequence_id") or 0.0,
        name=next((str(attributes[name]) for name in RESPONSE_NAMES if attributes.get(name)), None),
        prompt_field="attributes.prompt_token_ids",
    )


def _of_triplets(record: Record, number_: int, session: Session, options: Options) -> list[Call]:
    calls: list[Call] = []
    final = record.value.get("final_reward")
    if final is not None:
        session.reward = number(final, "final_reward")
    for place, triplet in enumerate(record.value["triplets"]):
        field = f"triplets[{place}]"
        content = at(triplet, "response.logprobs")
        logprobs = [each.get("logprob") if isinstance(each, dict) else each for each in content or ()] or None
        if at(triplet, "prompt.token_ids") is None:
            raise RecordError(f"{field}.prompt.token_ids", "missing: this triplet was recorded without token ids")
        if final is None and at(triplet, "reward") is not None:
            session.reward = number(triplet["reward"], f"{field}.reward")
        calls += calls_of(
            number_,
            record.line,
            triplet["prompt"]["token_ids"],
            [Completion(f"{field}.response.token_ids", 0, at(triplet, "response.token_ids"), logprobs)],
            endpoint="chat.completions",
            request={},
            response={},
            engine="vllm",
            options=options,
            settings=members(at(triplet, "metadata.request")),
            time=float(place),
            prompt_field=f"{field}.prompt.token_ids",
        )
    if not calls:
        raise _Nothing("a rollout without triplets")
    return calls


def _parsed(value: Any) -> Any:
    """A value that a span may hold as text, in JSON or as Python writes it."""
    if not isinstance(value, str):
        return list(value) if isinstance(value, tuple) else value
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return None
