"""What the engine records is what a full forward pass says, and it samples from the distribution it claims."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mwjax import model
from mwjax.engine import DecoderEngine, EngineError, SamplingParams, generate
from mwjax.engine.generate import _decode, bucket
from mwjax.engine.sampling import process_logits

VOCABULARY = 37
CONFIG = model.small_config(VOCABULARY, layers=2, width=32, tied=False)


def sharpened(config: model.ModelConfig) -> dict:
    """Random weights with next-token distributions that are neither uniform nor points, and depend on the context."""
    params = jax.tree.map(lambda leaf: leaf * 3, model.init(config, jax.random.key(3)))
    return {**params, "unembedding": jax.random.normal(jax.random.key(4), params["unembedding"].shape) * 0.4}


PARAMS = sharpened(CONFIG)


@jax.jit
def causal_log_softmax(params: dict, tokens: jax.Array) -> jax.Array:
    length = tokens.shape[1]
    ends = jnp.full((1, length), length)
    hidden = model.forward(params, CONFIG, tokens, jnp.arange(length)[None], ends, attention="oracle")[0]
    return jax.nn.log_softmax(hidden @ model.unembedding(params, CONFIG).T, axis=-1)


def full_log_softmax(ids: np.ndarray) -> np.ndarray:
    """Independent of the cache: one pass over the whole sequence; row i is the distribution of token i + 1."""
    padded = np.zeros((1, 96), np.int32)
    padded[0, : len(ids)] = ids
    return np.asarray(causal_log_softmax(PARAMS, jnp.asarray(padded)))[: len(ids)]


def prompts(seed: int, lengths: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, n) for n in lengths]


def test_raw_logprobs_equal_a_full_forward() -> None:
    batch = prompts(0, (5, 65, 64, 1))
    for temperature in (1.0, 0.5):
        sampling = SamplingParams(temperature=temperature, max_tokens=16, seed=4)
        for prompt, completion in zip(batch, generate(PARAMS, CONFIG, batch, sampling)):
            assert len(completion.ids) == len(completion.logprobs) == 16
            assert completion.finish_reason == "length"
            scores = full_log_softmax(np.concatenate([prompt, completion.ids]))[len(prompt) - 1 : -1]
            expected = scores[np.arange(16), completion.ids]
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
            assert (completion.logprobs <= 0).all()


def test_processed_logprobs_equal_the_tempered_truncated_distribution() -> None:
    (prompt,) = prompts(1, (9,))
    sampling = SamplingParams(temperature=0.7, top_k=6, top_p=0.8, logprobs="processed", max_tokens=16)
    (completion,) = generate(PARAMS, CONFIG, [prompt], sampling)
    scores = full_log_softmax(np.concatenate([prompt, completion.ids]))[len(prompt) - 1 : -1]
    for row, token, logprob in zip(scores, completion.ids, completion.logprobs):
        assert logprob == pytest.approx(np.log(reference_distribution(row, 0.7, 0.8, 6)[token]), abs=1e-4)


def reference_distribution(logits: np.ndarray, temperature: float, top_p: float, top_k: int) -> np.ndarray:
    order = np.argsort(-logits, kind="stable")
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    kept = order[: top_k or len(order)]
    share = weights[kept] / weights[kept].sum()
    nucleus = kept[: int(np.searchsorted(np.cumsum(share), top_p)) + 1]
    result = np.zeros(len(logits))
    result[nucleus] = weights[nucleus] / weights[nucleus].sum()
    return result


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.6, 0.5, 0), (1.5, 1.0, 3), (1.0, 0.9, 5)]
)
def test_process_logits(temperature: float, top_p: float, top_k: int) -> None:
    logits = np.random.default_rng(7).normal(size=(4, 11)).astype(np.float32) * 2
    settings = (jnp.full(4, temperature), jnp.full(4, top_p), jnp.full(4, top_k))
    processed = jax.nn.softmax(process_logits(jnp.asarray(logits), *settings, truncate=True), axis=-1)
    expected = [reference_distribution(row, temperature, top_p, top_k) for row in logits]
    np.testing.assert_allclose(processed, expected, atol=1e-6)


def test_greedy_is_the_argmax_of_a_full_forward() -> None:
    batch = prompts(2, (12, 30))
    for sampling in (
        SamplingParams(temperature=0, max_tokens=12),
        SamplingParams(temperature=0, top_k=3, max_tokens=12),
    ):
        for prompt, completion in zip(batch, generate(PARAMS, CONFIG, batch, sampling)):
            scores = full_log_softmax(np.concatenate([prompt, completion.ids]))[len(prompt) - 1 : -1]
            np.testing.assert_array_equal(completion.ids, scores.argmax(-1))


def test_sampled_frequencies_match_the_probabilities() -> None:
    config = model.small_config(6, layers=1, width=16, tied=False)
    params = sharpened(config)
    prompt = np.array([1, 4, 2])
    draws = 2048
    completions = generate(params, config, [prompt] * draws, SamplingParams(max_tokens=2, seed=11))
    first = np.array([c.ids[0] for c in completions])
    second = np.array([c.ids[1] for c in completions])
    probability = np.exp([next(c.logprobs[0] for c in completions if c.ids[0] == t) for t in np.unique(first)])
    frequency = np.array([(first == t).mean() for t in np.unique(first)])
    assert probability.sum() == pytest.approx(1, abs=0.02)
    assert len(probability) > 1
    # Four standard deviations of a binomial frequency.
    assert (np.abs(frequency - probability) <= 4 * np.sqrt(probability * (1 - probability) / draws)).all()
    # Later tokens are drawn with fresh randomness: given the first, the second one still varies.
    common = np.bincount(first).argmax()
    assert len(np.unique(second[first == common])) > 1


def test_stop_ids_end_a_completion_and_stay_in_it() -> None:
    (prompt,) = prompts(5, (8,))
    free = generate(PARAMS, CONFIG, [prompt], SamplingParams(max_tokens=16, seed=9))[0]
    stop = int(free.ids[6])
    first = int(np.flatnonzero(free.ids == stop)[0])
    sampling = SamplingParams(max_tokens=16, seed=9, stop_ids=(stop,))
    (stopped,) = generate(PARAMS, CONFIG, [prompt], sampling)
    assert stopped.finish_reason == "stop"
    np.testing.assert_array_equal(stopped.ids, free.ids[: first + 1])
    np.testing.assert_allclose(stopped.logprobs, free.logprobs[: first + 1], atol=1e-6)


def test_a_completion_does_not_depend_on_its_batch() -> None:
    batch = prompts(6, (5, 40, 64))
    each = [SamplingParams(max_tokens=4 + 6 * i, seed=100 + i, temperature=0.5 + i / 4) for i in range(3)]
    together = generate(PARAMS, CONFIG, batch, each)
    assert [len(c.ids) for c in together] == [4, 10, 16]
    for prompt, sampling, completion in zip(batch, each, together):
        (alone,) = generate(PARAMS, CONFIG, [prompt], [sampling])
        np.testing.assert_array_equal(alone.ids, completion.ids)
        np.testing.assert_allclose(alone.logprobs, completion.logprobs, atol=1e-4)


def test_one_sampling_for_all_gives_each_prompt_its_own_seed() -> None:
    (prompt,) = prompts(7, (6,))
    completions = generate(PARAMS, CONFIG, [prompt] * 4, SamplingParams(max_tokens=16, temperature=2.0))
    assert len({tuple(c.ids) for c in completions}) == 4


def test_shapes_in_one_bucket_share_one_program() -> None:
    assert [bucket(n, 64) for n in (1, 64, 65, 129, 193, 257, 400)] == [64, 64, 128, 192, 256, 384, 512]
    program: Any = _decode
    program.clear_cache()
    for lengths, max_tokens in (((3, 9), 5), ((64, 1), 16), ((30, 30), 7)):
        generate(PARAMS, CONFIG, prompts(8, lengths), SamplingParams(max_tokens=max_tokens, temperature=0.9))
    assert program._cache_size() == 1


def test_engine_stamps_its_policy_version() -> None:
    engine = DecoderEngine(PARAMS, CONFIG, policy_version=3)
    assert [c.policy_version for c in engine.generate([[1, 2]], SamplingParams(max_tokens=2))] == [3]
    assert engine.generate([], SamplingParams()) == []


@pytest.mark.parametrize(
    ("batch", "sampling", "message"),
    [
        ([[]], {}, "prompt 0 is empty"),
        ([[1], [VOCABULARY]], {}, "prompt 1 has ids outside the vocabulary of 37"),
        ([[1] * 40000], {}, "more than the model's context of 32768"),
    ],
)
def test_bad_requests(batch: list[list[int]], sampling: dict, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        generate(PARAMS, CONFIG, batch, SamplingParams(**sampling))


def test_bad_sampling() -> None:
    with pytest.raises(EngineError, match="top_p is 0, it must be above 0 and at most 1"):
        SamplingParams(top_p=0)
    with pytest.raises(EngineError, match="2 prompts but 1 sampling parameters"):
        generate(PARAMS, CONFIG, [[1], [2]], [SamplingParams()])
