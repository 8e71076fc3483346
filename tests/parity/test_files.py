"""Folders travel both ways: what mwjax writes, transformers loads, and the other way round."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from mwjax import model
from mwjax.engine import SamplingParams, generate
from mwjax.train import export, loop
from tests import training_runs
from tests.parity.both import CONFIGS, load_theirs, run_ours, run_theirs, tree_row, write_folder

pytestmark = pytest.mark.parity
TOLERANCE = 1e-4


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def theirs_from(values: dict, seed: int = 0):
    """A transformers model made by transformers, with random weights."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(**values)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.ndim == 1:  # norms start at 1 and biases at 0
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    return theirs.eval()


@pytest.mark.parametrize("name", CONFIGS)
def test_what_mwjax_saves_transformers_loads(name, tmp_path):
    config, params = model.load(write_folder(tmp_path / "source", CONFIGS[name]))
    model.save(tmp_path / "ours", config, params, max_shard_bytes=40_000)
    assert (tmp_path / "ours" / "model.safetensors.index.json").exists()
    theirs, row = load_theirs(tmp_path / "ours"), tree_row()
    np.testing.assert_allclose(
        run_theirs(theirs, row)[1], run_ours(tmp_path / "source", row)[1], atol=TOLERANCE, rtol=0
    )
    read = transformers.AutoConfig.from_pretrained(tmp_path / "ours")
    assert model.ModelConfig.from_hf({**read.to_dict(), "architectures": read.architectures}) == config
    assert bool(read.tie_word_embeddings) == config.tied


@pytest.mark.parametrize("name", CONFIGS)
def test_what_transformers_saves_mwjax_loads_and_gives_back_equal_to_the_byte(name, tmp_path):
    theirs = theirs_from(CONFIGS[name])
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="60KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    row = tree_row()
    np.testing.assert_allclose(
        run_ours(tmp_path / "theirs", row)[1], run_theirs(theirs, row)[1], atol=TOLERANCE, rtol=0
    )
    config, params = model.load(tmp_path / "theirs", dtype=None)
    model.save(tmp_path / "again", config, params, source=tmp_path / "theirs")
    assert contents(tmp_path / "again") == contents(tmp_path / "theirs")


@pytest.mark.parametrize("name", ["qwen3 tied", "qwen2"])
def test_half_the_bits_and_one_file(name, tmp_path):
    theirs = theirs_from(CONFIGS[name]).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "theirs")
    config, params = model.load(tmp_path / "theirs", dtype=None)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    model.save(tmp_path / "again", config, params, source=tmp_path / "theirs")
    assert contents(tmp_path / "again") == contents(tmp_path / "theirs")
    model.save(tmp_path / "alone", config, params)  # without the folder it came from
    assert contents(tmp_path / "alone")["model.safetensors"] == contents(tmp_path / "theirs")["model.safetensors"]
    back = load_theirs(tmp_path / "alone", dtype="auto")
    assert back.dtype == torch.bfloat16
    for (name, ours), (_, other) in zip(back.named_parameters(), theirs.named_parameters()):
        assert torch.equal(ours, other), name


def test_an_exported_run_speaks_in_transformers(tmp_path):
    """From a run that began from a folder with a tokenizer: the same tokens, and the same greedy completion."""
    folder = write_folder(tmp_path / "model", {**CONFIGS["qwen3 tied"], "vocab_size": training_runs.VOCABULARY})
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=training_runs.VOCABULARY, special_tokens=["<unk>", "<end>"])
    tokenizer.train_from_iterator(["train agents on the contexts they actually saw"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    training_runs.write(tmp_path, training_runs.recorded(5))
    changes = ["model.small=null", f"model.path={folder}", "data.epochs=1"]
    loop.run(training_runs.configure(tmp_path, *changes))
    export.export(tmp_path / "run", tmp_path / "out", max_shard_bytes=30_000)

    text = "agents train on contexts"
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = read(text)["input_ids"]
    assert ids == tokenizer.encode(text).ids and len(ids) > 4
    theirs = load_theirs(tmp_path / "out")
    config, params = model.load(tmp_path / "out")
    [ours] = generate(params, config, [ids], SamplingParams(temperature=0.0, max_tokens=12))
    prompt = torch.tensor([ids])
    spoken = theirs.generate(prompt, max_new_tokens=12, min_new_tokens=12, do_sample=False, eos_token_id=None)
    assert spoken[0, len(ids) :].tolist() == ours.ids.tolist()
