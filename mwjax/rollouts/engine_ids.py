"""The token ids and log-probs that an engine put into a response."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

Endpoint = Literal["chat.completions", "responses", "messages"]


class Sampled(NamedTuple):
    """``choice`` is its index. ``logprobs`` are natural logs as the engine reported them; None where it gave none."""

    choice: int
    completion_ids: list[int] | None
    logprobs: list[float] | None


def choices_of(payload: Any) -> list[dict[str, Any]]:
    """The choices of a chat completion or of a chunk of one, whatever else a server sends in their place."""
    choices = payload.get("choices") if isinstance(payload, dict) else None
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []


def prompt_ids(endpoint: Endpoint, payload: Any) -> list[int] | None:
    """``payload``: the whole response with what was asked for still in it."""
    if not isinstance(payload, dict):
        return None
    if endpoint == "responses":
        pieces = _raw_tokens(payload.get("input_messages"))
        return pieces[0] if pieces is not None and len(pieces) == 1 else None
    extension = payload.get("sglext")
    places = [payload, *choices_of(payload)]
    found = [_ids(place.get("prompt_token_ids")) for place in places]
    found.append(_ids(extension.get("input_ids")) if isinstance(extension, dict) else None)
    return next((ids for ids in found if ids is not None), None)


def sampled(endpoint: Endpoint, payload: Any) -> list[Sampled]:
    """The choices that have ids or log-probs."""
    if not isinstance(payload, dict):
        return []
    if endpoint == "responses":
        pieces = _raw_tokens(payload.get("output_messages"))
        ids = None if pieces is None else [each for piece in pieces for each in piece]
        # A response of several turns also holds the prompts of the later ones: then the counts differ.
        usage = payload.get("usage")
        count = usage.get("output_tokens") if isinstance(usage, dict) else None
        return [Sampled(0, ids, None)] if ids is not None and (count is None or count == len(ids)) else []
    extension = payload.get("sglext")
    output_ids = extension.get("output_ids") if isinstance(extension, dict) else None
    result = []
    for place, choice in enumerate(choices_of(payload)):
        index = choice["index"] if isinstance(choice.get("index"), int) else place
        meta = choice.get("meta_info")
        triples = meta.get("output_token_logprobs") if isinstance(meta, dict) else None
        if not _triples(triples):
            triples = None
        ids = _ids(choice.get("token_ids"))
        if ids is None:
            ids = _ids(choice.get("response_token_ids"))
        if ids is None and isinstance(output_ids, list) and 0 <= index < len(output_ids):
            ids = _ids(output_ids[index])
        if ids is None and triples is not None:
            ids = [triple[1] for triple in triples]
        logprobs = _logprobs(choice.get("logprobs"))
        if logprobs is None and triples is not None:
            logprobs = [triple[0] for triple in triples]
        if ids is not None or logprobs is not None:
            result.append(Sampled(index, ids, logprobs))
    return result


def _ids(value: Any) -> list[int] | None:
    return value if isinstance(value, list) and all(type(each) is int for each in value) else None


def _logprobs(value: Any) -> list[float] | None:
    if not isinstance(value, dict):
        return None
    content, plain = value.get("content"), value.get("token_logprobs")  # the second is of the completions API
    if isinstance(content, list):
        found = [each.get("logprob") if isinstance(each, dict) else None for each in content]
    elif isinstance(plain, list):
        found = plain
    else:
        return None
    return found if all(isinstance(each, (int, float)) for each in found) else None  # type: ignore[return-value]


def _triples(value: Any) -> bool:
    """SGLang's [log-prob, id, text] for every sampled token."""
    return isinstance(value, list) and all(
        isinstance(each, list) and len(each) >= 2 and isinstance(each[0], (int, float)) and type(each[1]) is int
        for each in value
    )


def _raw_tokens(value: Any) -> list[list[int]] | None:
    """The ids of vLLM's raw messages; None where it gave messages without ids (Harmony)."""
    if not isinstance(value, list) or not value:
        return None
    pieces = [_ids(each.get("tokens")) if isinstance(each, dict) else None for each in value]
    return None if any(piece is None for piece in pieces) else pieces  # type: ignore[return-value]
