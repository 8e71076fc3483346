"""A real pretrained model gives the log-probs that transformers gives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from mwjax import model
from mwjax.engine import load_smollm2
from tests.parity.both import load_theirs
from tests.pretrained import TEXTS, token_ids

pytestmark = [pytest.mark.parity, pytest.mark.slow]


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2(text):
    folder = load_smollm2()
    ids = token_ids(folder, text)
    config, params = model.load(folder)
    steps = jnp.arange(len(ids))[None]
    hidden = model.forward(params, config, jnp.asarray(ids)[None], steps, jnp.full_like(steps, len(ids)))
    ours = np.asarray(jax.nn.log_softmax(hidden[0] @ model.unembedding(params, config).T, axis=-1))
    with torch.no_grad():
        logits = load_theirs(folder)(torch.tensor(ids[None].astype(np.int64)), use_cache=False).logits[0]
    theirs = torch.log_softmax(logits, -1).numpy()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-3)
    sampled = ours[np.arange(len(ids) - 1), ids[1:]], theirs[np.arange(len(ids) - 1), ids[1:]]
    np.testing.assert_allclose(*sampled, rtol=0, atol=5e-4)
    assert np.exp(-sampled[0].mean()) == pytest.approx(np.exp(-sampled[1].mean()), rel=1e-5)
