"""What to ask an engine beyond what the harness asked, and how to take the answer out again.

Only what leaves no trace is asked. The fields, as the engines' sources have them:

vLLM (vllm/entrypoints/openai/chat_completion): ``return_token_ids`` gives ``prompt_token_ids`` (in a stream, in the
first chunk) and ``choices[].token_ids``; ``logprobs`` gives ``choices[].logprobs``. Unasked, all of these are null, so
null takes their place. With either, a stream also has chunks with an empty ``delta`` that would not be sent otherwise:
these are dropped. For Responses (openai/responses), ``enable_response_messages`` gives ``input_messages`` and
``output_messages`` with their ids, null otherwise; log-probs are not asked, because they leave out reasoning and tool
calls. A stored or background response keeps what was asked and would show it later: nothing is asked there. Its
Anthropic endpoint has no such fields.

SGLang (python/sglang/srt/entrypoints/openai/serving_chat.py): unasked fields are absent, ``logprobs`` is null. A whole
response: ``return_prompt_token_ids``, ``return_token_ids`` and ``return_meta_info``, of which a version knows some and
ignores the others. A stream refuses these but heeds the headers ``x-sglext-return-input-ids`` and
``-output-ids``, which other versions ignore: the ids come in an event of their own. Its other endpoints have none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mwjax.recorder.endpoints import Endpoint
from mwjax.recorder.json_text import Plan, applied, loads, rewrite
from mwjax.rollouts.server_events import read, with_data

Engine = Literal["vllm", "sglang", "none"]

SGLANG_ID_HEADERS = ("x-sglext-return-input-ids", "x-sglext-return-output-ids", "x-sglext-ids-framed")
SGLANG_ID_EVENT = "sglext_ids"


@dataclass(frozen=True)
class Additions:
    """``body`` and ``headers`` are set in the request; ``plan`` takes the answer out of a response or event.

    ``drops_empty``: "exact" drops chunks whose delta is ``{}``, "null" those whose delta holds nothing but nulls.
    """

    body: Mapping[str, Any]
    plan: Plan
    headers: Mapping[str, str] = field(default_factory=dict)
    drops_empty: Literal["exact", "null"] | None = None


def additions(endpoint: Endpoint, engine: Engine, payload: Any, headers: Mapping[str, str]) -> Additions | None:
    """What to ask of this call; None for nothing. ``payload`` is the parsed request, ``headers`` have lower-case
    names."""
    if not isinstance(payload, dict) or engine == "none" or endpoint == "messages":
        return None
    if endpoint == "responses":
        return _vllm_responses(payload) if engine == "vllm" else None
    return _vllm_chat(payload) if engine == "vllm" else _sglang_chat(payload, headers)


def stripped_body(text: str, asked: Additions) -> str:
    """A whole response as it would have been. Raises ValueError if it is not JSON."""
    text = rewrite(text, asked.plan)
    return rewrite(text, {"sglext": None}) if _empty_extension(text) else text


def stripped_payload(payload: Any, asked: Additions | None) -> Any:
    """``stripped_body`` of a parsed response."""
    if asked is None:
        return payload
    payload = applied(payload, asked.plan)
    if isinstance(payload, dict) and payload.get("sglext") == {}:
        payload.pop("sglext")
    return payload


def stripped_event(event: bytes, asked: Additions) -> bytes:
    """One event of a stream as it would have been; empty where there would have been none. What is not JSON stays as
    it is."""
    try:
        parsed = read(event)
        if parsed is None or not parsed.data.startswith("{"):
            return event
        if parsed.name == SGLANG_ID_EVENT and "x-sglext-ids-framed" in asked.headers:
            return b""
        data = rewrite(parsed.data, asked.plan)
        if data == parsed.data:
            return event
        if asked.drops_empty and _says_nothing(loads(data), asked.drops_empty):
            return b""
        if _empty_extension(data):
            if loads(data).get("choices") == []:
                return b""
            data = rewrite(data, {"sglext": None})
    except ValueError:
        return event
    return with_data(event, data)


def _vllm_chat(payload: dict[str, Any]) -> Additions | None:
    own_logprobs = _wants_logprobs(payload)
    body: dict[str, Any] = {} if own_logprobs or payload.get("use_beam_search") else {"logprobs": True}
    choice: dict[str, Plan | str | None] = {"logprobs": "null"} if body else {}
    if payload.get("return_token_ids"):
        return Additions(body, {"choices": {"*": choice}}) if body else None
    plan: Plan = {"prompt_token_ids": "null", "choices": {"*": {**choice, "token_ids": "null"}}}
    return Additions({**body, "return_token_ids": True}, plan, drops_empty=None if own_logprobs else "exact")


def _vllm_responses(payload: dict[str, Any]) -> Additions | None:
    if payload.get("store") is not False or payload.get("background") or payload.get("enable_response_messages"):
        return None
    messages: Plan = {"input_messages": "null", "output_messages": "null"}
    return Additions({"enable_response_messages": True}, {**messages, "response": messages})


def _sglang_chat(payload: dict[str, Any], headers: Mapping[str, str]) -> Additions | None:
    body: dict[str, Any] = {}
    choice: dict[str, Plan | str | None] = {}
    plan: dict[str, Plan | str | None] = {}
    if not _wants_logprobs(payload) and not payload.get("return_meta_info"):  # meta_info would hold them too
        body["logprobs"] = True
        choice["logprobs"] = "null"
    asked_headers = {}
    own = [payload.get(f"return_{side}_ids_in_sglext") for side in ("input", "output")]
    if not any(own) and not any(name in headers for name in SGLANG_ID_HEADERS):
        asked_headers = dict.fromkeys(SGLANG_ID_HEADERS, "1")
        plan["sglext"] = {"input_ids": None, "output_ids": None}
    if not payload.get("stream"):
        given = {
            "return_prompt_token_ids": ("prompt_token_ids",),
            "return_token_ids": ("prompt_token_ids", "token_ids", "response_token_ids"),
            "return_meta_info": ("meta_info",),
        }
        if payload.get("return_routed_experts"):  # these move into meta_info when that is returned
            given.pop("return_meta_info")
        if payload.get("return_token_ids"):  # asks for the prompt too, from the versions that know it
            given.pop("return_prompt_token_ids")
        body.update({name: True for name in given if not payload.get(name)})
        own_fields = {each for name, fields in given.items() if payload.get(name) for each in fields}
        choice.update({each: None for fields in given.values() for each in fields if each not in own_fields})
    if choice:
        plan["choices"] = {"*": choice}
    if not body and not asked_headers:
        return None
    drops: Literal["null"] | None = "null" if "logprobs" in body else None
    return Additions(body, plan, headers=asked_headers, drops_empty=drops)


def _wants_logprobs(payload: dict[str, Any]) -> bool:
    # top_logprobs alone is refused by the engine, as it should be: adding logprobs would make it valid.
    return bool(payload.get("logprobs") or payload.get("top_logprobs"))


def _says_nothing(payload: Any, kind: Literal["exact", "null"]) -> bool:
    choices = payload.get("choices")
    if not isinstance(choices, list) or not choices:
        return False
    for choice in choices:
        if not isinstance(choice, dict) or choice.get("finish_reason") is not None:
            return False
        delta = choice.get("delta")
        if not isinstance(delta, dict) or (delta if kind == "exact" else any(v is not None for v in delta.values())):
            return False
    return True


def _empty_extension(text: str) -> bool:
    return '"sglext"' in text and loads(text).get("sglext") == {}


def as_record(asked: Additions) -> dict[str, Any]:
    return json.loads(json.dumps({"body": asked.body, "headers": asked.headers}))
