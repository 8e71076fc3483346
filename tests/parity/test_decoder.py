"""Hidden states layer by layer, logits and gradients against transformers: within 1e-4 in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from mwjax import model
from mwjax.losses import load_balance
from mwjax.losses.logprobs import edge_logprobs
from tests.parity.both import CONFIGS, Row, causal_row, load_theirs, run_ours, run_theirs, tree_row, write_folder

pytestmark = pytest.mark.parity
TOLERANCE = 1e-4


def far(row: Row, offset: int) -> Row:
    """The same row further along, where scaled rotary frequencies differ most."""
    return Row(row.tokens, row.positions + np.int32(offset), row.visible_until, row.visible)


ROWS = {"causal": causal_row(), "tree": tree_row(), "another tree": tree_row(seed=3), "far": far(tree_row(), 1000)}


@pytest.mark.parametrize("name", CONFIGS)
def test_layer_by_layer(name, tmp_path):
    folder = write_folder(tmp_path / "model", CONFIGS[name])
    theirs = load_theirs(folder)
    for kind, row in ROWS.items():
        our_states, our_logits = run_ours(folder, row)
        their_states, their_logits = run_theirs(theirs, row)
        assert len(our_states) == len(their_states) == CONFIGS[name]["num_hidden_layers"] + 1
        for number, (ours, other) in enumerate(zip(our_states, their_states)):
            np.testing.assert_allclose(ours, other, rtol=0, atol=TOLERANCE, err_msg=f"{kind}, after layer {number}")
        assert np.abs(their_logits).max() > 1
        np.testing.assert_allclose(our_logits, their_logits, rtol=0, atol=TOLERANCE, err_msg=kind)


def test_the_tree_mask_matters(tmp_path):
    """The comparison would notice a mask that is causal only, and one that is boolean."""
    folder = write_folder(tmp_path / "model", CONFIGS["qwen3 tied"])
    theirs, row = load_theirs(folder), tree_row()
    ours = run_ours(folder, row)[1]
    causal = Row(row.tokens, row.positions, row.visible_until, np.tril(np.ones_like(row.visible)))
    assert np.abs(run_theirs(theirs, causal)[1] - ours).max() > 0.1
    inputs = row.theirs()
    with torch.no_grad():
        boolean = theirs(**{**inputs, "attention_mask": inputs["attention_mask"] == 0}, use_cache=False).logits[0]
    assert np.abs(boolean.numpy() - ours).max() > 0.1


@pytest.mark.parametrize("name", ["qwen3 tied", "qwen2", "llama llama3", "qwen3_moe"])
def test_gradients_under_a_tree_mask(name, tmp_path):
    """Of a weighted sum of edge log-probs, with respect to every parameter."""
    folder = write_folder(tmp_path / "model", CONFIGS[name])
    row, rng = tree_row(), np.random.default_rng(7)
    edges = 30
    parent, target = rng.integers(0, len(row.tokens), edges), rng.integers(0, CONFIGS[name]["vocab_size"], edges)
    weight = rng.standard_normal(edges).astype(np.float32)

    theirs = load_theirs(folder)
    logits = theirs(**row.theirs(), use_cache=False).logits[0]
    logprobs = torch.log_softmax(logits[torch.tensor(parent)], -1)[torch.arange(edges), torch.tensor(target)]
    their_loss = (torch.tensor(weight) * logprobs).sum()
    their_loss.backward()
    gradients = {name: parameter.grad.numpy() for name, parameter in theirs.named_parameters()}
    (tmp_path / "gradients").mkdir()
    (tmp_path / "gradients" / "config.json").write_text((folder / "config.json").read_text())
    save_file(gradients, tmp_path / "gradients" / "model.safetensors")
    expected = model.load(tmp_path / "gradients")[1]  # in our layout

    config, params = model.load(folder)

    def loss(params):
        hidden = model.forward(params, config, *row.ours(), remat="attention")
        parents, targets = jnp.asarray(parent)[None], jnp.asarray(target)[None]
        scores = edge_logprobs(
            hidden, model.unembedding(params, config), parents, targets, jnp.ones((1, edges)), vocab_chunk=16
        )
        return jnp.sum(jnp.asarray(weight)[None] * scores.logprob)

    our_loss, ours = jax.jit(jax.value_and_grad(loss))(params)
    np.testing.assert_allclose(our_loss, their_loss.item(), rtol=1e-5)

    def compare(path, gradient, other):
        scale = np.abs(other).max()
        assert scale > 0, path
        np.testing.assert_allclose(gradient, other, rtol=0, atol=TOLERANCE * scale, err_msg=jax.tree_util.keystr(path))

    jax.tree_util.tree_map_with_path(compare, ours, expected)


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe tied, not normalised"])
def test_load_balancing_loss_and_its_gradient(name, tmp_path):
    """With padding, which neither counts; theirs sees the same row under the same tree mask."""
    folder = write_folder(tmp_path / "model", CONFIGS[name])
    theirs, row = load_theirs(folder), tree_row()
    counted = np.ones(len(row.tokens), np.float32)
    counted[-9:] = 0
    logits = theirs.model(**row.theirs(), use_cache=False, output_router_logits=True).router_logits
    sizes = CONFIGS[name]["num_experts"], CONFIGS[name]["num_experts_per_tok"]
    expected = load_balancing_loss_func(logits, *sizes, torch.tensor(counted[None]))
    expected.backward()
    config, params = model.load(folder)

    def loss(params):
        return load_balance(model.forward_routed(params, config, *row.ours(), jnp.asarray(counted[None]))[1])

    ours, gradients = jax.jit(jax.value_and_grad(loss))(params)
    np.testing.assert_allclose(ours, expected.item(), rtol=1e-5)
    for number, layer in enumerate(theirs.model.layers):
        router = layer.mlp.gate.weight.grad.numpy().T
        assert np.abs(router).max() > 1e-4
        np.testing.assert_allclose(gradients["layers"]["feed_forward"]["router"][number], router, rtol=0, atol=1e-6)
        down = layer.mlp.experts.down_proj.grad  # the last layer's experts are seen by no router
        if number < config.layers - 1:
            ours_down = gradients["layers"]["feed_forward"]["down"][number].swapaxes(1, 2)
            np.testing.assert_allclose(ours_down, down.numpy(), rtol=0, atol=1e-6)
