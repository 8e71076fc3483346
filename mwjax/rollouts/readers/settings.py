"""How a completion was sampled, as requests and engines say it, and what that means for ratios."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from mwjax.rollouts.readers.reader import Options
from mwjax.rollouts.record import Sampling
from mwjax.rollouts.validate import parse_sampling


def engine_logprobs(engine: str) -> Literal["raw", "processed"]:
    """Of which distribution an engine's log-probs are by default: SGLang's are of the logits divided by the temperature
    (python/sglang/srt/layers/sampler.py); vLLM's are raw (``logprobs_mode`` is "raw_logprobs"), as others' are taken
    to be.
    """
    return "processed" if engine == "sglang" else "raw"


def sampling_settings(
    request: Mapping[str, Any],
    options: Options,
    *,
    logprobs: Literal["raw", "processed"],
    field: str = "request",
) -> Sampling:
    """The settings of a request, or of an engine's ``sampling_params``. Raises RecordError.

    logprobs: of which distribution such a log's are, unless the user says otherwise. At temperature 0 nothing is
    divided by it, so they are raw.
    """
    values: dict[str, Any] = {}
    for name in ("temperature", "top_p", "top_k"):
        given = request.get(name)
        values[name] = getattr(options.sampling, name) if given is None else given
    if values["top_k"] == -1:  # both engines' word for "off"
        values["top_k"] = 0
    kind = options.logprobs
    if kind == "auto":
        kind = logprobs if values["temperature"] != 0 else "raw"
    return parse_sampling({**values, "logprobs": kind}, field)


def ratio_warning(sampling: Sampling) -> str | None:
    """Why importance ratios formed on these log-probs are biased; None where they are not."""
    cut = [f"top_p {sampling.top_p:g}"] if sampling.top_p < 1 else []
    cut += [f"top_k {sampling.top_k}"] if sampling.top_k else []
    if cut:
        return (
            f"sampled with {' and '.join(cut)}: ratios are biased, since training scores tokens under the whole "
            "distribution"
        )
    if sampling.logprobs == "raw" and sampling.temperature != 1:
        return (
            f"sampled at temperature {sampling.temperature:g}, log-probs of temperature 1: ratios are of another "
            "distribution than the one sampled from (where the engine gave processed ones: --logprobs processed)"
        )
    return None
