"""A real pretrained model has the perplexity it should have."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from mwjax import model
from mwjax.engine import load_smollm2
from mwjax.losses.logprobs import edge_logprobs
from tests.pretrained import token_ids


@pytest.mark.slow
def test_the_perplexity_of_smollm2():
    """SmolLM2-135M-Instruct, from its Q4_1 file, in float32. transformers gives the same figures for the same folder:
    tests/parity/test_pretrained.py."""
    folder = load_smollm2()
    config, params = model.load(folder)

    def perplexity(ids: np.ndarray) -> float:
        steps = jnp.arange(len(ids) - 1)[None]
        hidden = model.forward(params, config, jnp.asarray(ids[None, :-1]), steps, jnp.full_like(steps, len(ids) - 1))
        targets, temperature = jnp.asarray(ids[None, 1:]), jnp.ones_like(steps, jnp.float32)
        scores = edge_logprobs(hidden, model.unembedding(params, config), steps, targets, temperature)
        return float(np.exp(-np.mean(scores.logprob)))

    sun = token_ids(folder, "sun")
    assert len(sun) == 220
    assert perplexity(sun) == pytest.approx(7.005, rel=0.02)
    assert perplexity(token_ids(folder, "species")) == pytest.approx(22.97, rel=0.02)
    assert perplexity(np.random.default_rng(0).permutation(sun)) > 1000
