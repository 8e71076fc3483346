"""Sampling with the project's own decoder: key-value cache, one compiled program per bucket of shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mwjax import model
from mwjax.engine.interface import Completion, EngineError, SamplingParams
from mwjax.engine.sampling import sample_tokens
from mwjax.model.decoder import Params

_SMALLEST_PROMPT, _SMALLEST_COMPLETION, _SMALLEST_STOP = 64, 16, 4


@dataclass(frozen=True, eq=False)
class DecoderEngine:
    """An :class:`mwjax.engine.Engine` over parameters in this process. ``policy_version`` goes into its completions."""

    params: Params
    config: model.ModelConfig
    policy_version: int | None = 0
    dtype: Any = jnp.float32

    def generate(
        self, batch: Sequence[Sequence[int] | np.ndarray], sampling: SamplingParams | Sequence[SamplingParams]
    ) -> list[Completion]:
        return generate(self.params, self.config, batch, sampling, policy_version=self.policy_version, dtype=self.dtype)


def generate(
    params: Params,
    config: model.ModelConfig,
    batch: Sequence[Sequence[int] | np.ndarray],
    sampling: SamplingParams | Sequence[SamplingParams],
    *,
    policy_version: int | None = None,
    dtype: Any = jnp.float32,
) -> list[Completion]:
    """Sample one completion for each prompt.

    batch: prompts as token ids, of any lengths of at least 1. sampling: one for all, in which case prompt i uses seed
    ``seed + i``, or one per prompt, used as they are. Shapes are padded up to buckets (batch: a power of two; prompt
    and completion lengths: see :func:`bucket`), so calls of similar sizes share one compiled program. What a prompt
    gets does not depend on the rest of the batch, up to the rounding of differently shaped matrix products.

    Raises:
        EngineError: an empty prompt, an id outside the vocabulary, or more tokens than the model's context.
    """
    each = _one_each(sampling, len(batch))
    prompts = [np.asarray(prompt, np.int32) for prompt in batch]
    _check(prompts, each, config)
    if not prompts:
        return []
    rows = 1 << (len(prompts) - 1).bit_length()
    width = bucket(max(len(prompt) for prompt in prompts), _SMALLEST_PROMPT)
    new_tokens = bucket(max(params_of.max_tokens for params_of in each), _SMALLEST_COMPLETION)
    tokens, lengths = np.zeros((rows, width), np.int32), np.zeros(rows, np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
    ids, logprobs, counts, stopped = jax.device_get(
        _decode(
            params,
            tokens,
            lengths,
            _request_arrays(each, rows),
            config=config,
            new_tokens=new_tokens,
            truncate=any(s.top_p < 1 or s.top_k for s in each),
            dtype=dtype,
        )
    )
    return [
        Completion(
            ids[row, : counts[row]].copy(),
            logprobs[row, : counts[row]].astype(np.float64),
            "stop" if stopped[row] else "length",
            policy_version,
        )
        for row in range(len(prompts))
    ]


def bucket(length: int, smallest: int) -> int:
    """``length`` rounded up to ``smallest`` times 1, 2, 3, 4, 6, 8, 12, 16, ...: at most half is padding."""
    size = smallest
    while size < length:
        if size > smallest and (between := size + size // 2) >= length:
            return between
        size *= 2
    return size


def _one_each(sampling: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(sampling, SamplingParams):
        fields = {name: getattr(sampling, name) for name in sampling.__dataclass_fields__}
        return [SamplingParams(**{**fields, "seed": sampling.seed + index}) for index in range(count)]
    if len(sampling) != count:
        raise EngineError(f"{count} prompts but {len(sampling)} sampling parameters: give one, or one for each prompt")
    return list(sampling)


def _check(prompts: list[np.ndarray], each: list[SamplingParams], config: model.ModelConfig) -> None:
    for index, (prompt, wanted) in enumerate(zip(prompts, each)):
        if prompt.ndim != 1 or not len(prompt):
            raise EngineError(f"prompt {index} is empty: the first sampled token needs a context")
        if prompt.min() < 0 or prompt.max() >= config.vocab_size:
            raise EngineError(f"prompt {index} has ids outside the vocabulary of {config.vocab_size}")
        if len(prompt) + wanted.max_tokens > config.context_length:
            raise EngineError(
                f"prompt {index} has {len(prompt)} tokens, with max_tokens {wanted.max_tokens} more than the model's "
                f"context of {config.context_length}: shorten the prompt or lower max_tokens"
            )


def _request_arrays(each: list[SamplingParams], rows: int) -> dict[str, np.ndarray]:
    """Per-row sampling settings [rows]; padding rows sample nothing (limit 0)."""
    padding = rows - len(each)
    stop_width = bucket(max(len(s.stop_ids) for s in each), _SMALLEST_STOP)
    stop_ids = np.full((rows, stop_width), -1, np.int32)
    for row, s in enumerate(each):
        stop_ids[row, : len(s.stop_ids)] = s.stop_ids
    return {
        "temperature": np.array([s.temperature for s in each] + [1.0] * padding, np.float32),
        "top_p": np.array([s.top_p for s in each] + [1.0] * padding, np.float32),
        "top_k": np.array([s.top_k for s in each] + [0] * padding, np.int32),
        "processed": np.array([s.logprobs == "processed" for s in each] + [False] * padding),
        "limit": np.array([s.max_tokens for s in each] + [0] * padding, np.int32),
        "seed": np.array([s.seed % 2**32 for s in each] + [0] * padding, np.uint32),
        "stop_ids": stop_ids,
    }


@partial(jax.jit, static_argnames=("config", "new_tokens", "truncate", "dtype"))
def _decode(
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    request: dict[str, jax.Array],
    *,
    config: model.ModelConfig,
    new_tokens: int,
    truncate: bool,
    dtype: Any,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Prefill and the sampling loop: (ids [B, N], logprobs [B, N], counts [B], stopped [B]); -1 and 0 after the end."""
    rows, width = tokens.shape
    matrix = model.unembedding(params, config)
    precise = jnp.promote_types(dtype, jnp.float32)
    keys = jax.vmap(jax.random.key)(request["seed"])

    def logits_of(hidden: jax.Array) -> jax.Array:
        return jnp.einsum("bd,vd->bv", hidden, matrix.astype(hidden.dtype), preferred_element_type=precise)

    positions = jnp.arange(width, dtype=jnp.int32)[None, :]
    positions = jnp.where(positions < lengths[:, None], positions, -1)
    cache = model.init_cache(config, rows, width + new_tokens, dtype)
    hidden, cache = model.decode_step(params, config, tokens, positions, cache, dtype=dtype)
    last = jnp.take_along_axis(hidden, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]

    def unfinished(state: tuple[Any, ...]) -> jax.Array:
        return ~state[-1].all()

    def step(state: tuple[Any, ...]) -> tuple[Any, ...]:
        count, logits, cache, ids, logprobs, counts, stopped, done = state
        step_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, count)
        token, logprob = sample_tokens(
            logits,
            step_keys,
            request["temperature"],
            request["top_p"],
            request["top_k"],
            request["processed"],
            truncate=truncate,
        )
        ids = ids.at[:, count].set(jnp.where(done, -1, token))
        logprobs = logprobs.at[:, count].set(jnp.where(done, 0.0, logprob))
        counts = jnp.where(done, counts, count + 1)
        stopped = stopped | (~done & (token[:, None] == request["stop_ids"]).any(-1))
        done = done | stopped | (counts >= request["limit"])
        position = jnp.where(done, -1, lengths + count)
        hidden, cache = model.decode_step(
            params, config, jnp.where(done, 0, token)[:, None], position[:, None], cache, dtype=dtype
        )
        return count + 1, logits_of(hidden[:, 0]), cache, ids, logprobs, counts, stopped, done

    state = (
        jnp.zeros((), jnp.int32),
        logits_of(last),
        cache,
        jnp.full((rows, new_tokens), -1, jnp.int32),
        jnp.zeros((rows, new_tokens), precise),
        jnp.zeros(rows, jnp.int32),
        jnp.zeros(rows, bool),
        request["limit"] <= 0,
    )
    _, _, _, ids, logprobs, counts, stopped, _ = jax.lax.while_loop(unfinished, step, state)
    return ids, logprobs, counts, stopped
