"""Hugging Face folders: loading is strict and complete in its complaints, saving atomic and byte-equal."""

from __future__ import annotations

import json
import shutil
from functools import cache

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from mwjax import model
from mwjax.model import writing


def tree_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@cache
def make(family="qwen3", tied=True, dtype=jnp.float32):
    config = model.small_config(40, 2, 16, family=family, tied=tied, head_dim=6, rope_theta=5e5)
    params = model.init(config, jax.random.key(0))
    # biases and norms start at 0 and 1: move them, so that mixing them up shows
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    leaves = [(x + 0.1 * jax.random.normal(k, x.shape)).astype(dtype) for x, k in zip(leaves, keys)]
    return config, jax.tree.unflatten(structure, leaves)


@pytest.mark.parametrize(
    ("family", "tied", "dtype", "max_shard_bytes"),
    [
        ("qwen3", True, jnp.float32, 10**9),
        ("qwen3", True, jnp.bfloat16, 4000),
        ("qwen2", False, jnp.float32, 4000),
        ("qwen2", True, jnp.float16, 10**9),
        ("llama", False, jnp.bfloat16, 10**9),
        ("qwen3_moe", False, jnp.bfloat16, 4000),
    ],
)
def test_round_trip_is_equal_to_the_byte(tmp_path, family, tied, dtype, max_shard_bytes):
    config, params = make(family, tied, dtype)
    model.save(tmp_path / "a", config, params, max_shard_bytes=max_shard_bytes)
    again_config, again = model.load(tmp_path / "a", dtype=None)
    assert again_config == config
    tree_equal(again, params)
    assert jax.tree.leaves(again)[0].dtype == dtype
    model.save(tmp_path / "b", again_config, again, source=tmp_path / "a", max_shard_bytes=max_shard_bytes)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert ("model.safetensors.index.json" in contents(tmp_path / "a")) == (max_shard_bytes == 4000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]  # no temporary folder left
    wide = model.load(tmp_path / "a")[1]
    tree_equal(wide, jax.tree.map(lambda x: x.astype(jnp.float32), params))
    assert {x.dtype for x in jax.tree.leaves(wide)} == {jnp.dtype(jnp.float32)}


def test_names_and_layout_are_those_of_hugging_face(tmp_path):
    config, params = make("qwen2", tied=False)
    model.save(tmp_path / "m", config, params)
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    attention = params["layers"]["attention"]
    np.testing.assert_array_equal(
        tensors["model.layers.1.self_attn.q_proj.weight"], np.asarray(attention["query"][1]).reshape(16, 24).T
    )
    np.testing.assert_array_equal(
        tensors["model.layers.0.self_attn.o_proj.weight"], np.asarray(attention["output"][0]).reshape(24, 16).T
    )
    np.testing.assert_array_equal(
        tensors["model.layers.1.self_attn.v_proj.bias"], np.asarray(attention["value_bias"][1]).reshape(-1)
    )
    np.testing.assert_array_equal(tensors["lm_head.weight"], params["unembedding"])
    assert len(tensors) == 2 * 12 + 3
    with safe_open(tmp_path / "m" / "model.safetensors", framework="np") as opened:
        assert opened.metadata() == {"format": "pt"}  # transformers refuses a file without
    values = json.loads((tmp_path / "m" / "config.json").read_text())
    assert values["architectures"] == ["Qwen2ForCausalLM"] and values["dtype"] == values["torch_dtype"] == "float32"


def test_experts_are_tensors_of_their_own_in_the_files_and_may_be_fused(tmp_path):
    config, params = make("qwen3_moe", tied=False, dtype=jnp.bfloat16)
    model.save(tmp_path / "m", config, params)
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    assert len(tensors) == 2 * (8 + 1 + 3 * 8) + 3
    experts = params["layers"]["feed_forward"]
    name = "model.layers.{}.mlp.experts.{}.{}_proj.weight"
    for layer, expert in np.ndindex(2, 8):
        for matrix in ("gate", "up", "down"):
            np.testing.assert_array_equal(
                tensors[name.format(layer, expert, matrix)], np.asarray(experts[matrix][layer, expert]).T
            )
        np.testing.assert_array_equal(tensors[f"model.layers.{layer}.mlp.gate.weight"], experts["router"][layer].T)
    for layer in range(2):
        gate, up, down = (
            np.stack([tensors.pop(name.format(layer, expert, matrix)) for expert in range(8)])
            for matrix in ("gate", "up", "down")
        )
        tensors[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        tensors[f"model.layers.{layer}.mlp.experts.down_proj"] = down
    save_file(tensors, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    tree_equal(model.load(tmp_path / "m", dtype=None)[1], params)
    model.save(tmp_path / "again", config, params, source=tmp_path / "m")
    tree_equal(model.load(tmp_path / "again", dtype=None)[1], params)
    tensors["model.layers.1.mlp.experts.down_proj"] = down[:7]
    save_file(tensors, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(model.ModelFilesError, match=r"missing tensor model.layers.1.mlp.experts.7.down_proj.weight"):
        model.load(tmp_path / "m")


def test_shards_have_an_index_that_lists_every_tensor(tmp_path):
    config, params = make()
    model.save(tmp_path / "m", config, params, max_shard_bytes=4000)
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    stored = {}
    for path in (tmp_path / "m").glob("model-*.safetensors"):
        stored.update({name: (path.name, tensor.nbytes) for name, tensor in load_file(path).items()})
        assert sum(tensor.nbytes for tensor in load_file(path).values()) <= 4000
    assert {name: file for name, (file, _) in stored.items()} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(size for _, size in stored.values())


def broken(tmp_path, change):
    """A saved model whose tensors went through ``change``."""
    config, params = make()
    model.save(tmp_path / "m", config, params)
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "m"


def test_every_problem_is_listed_at_once(tmp_path):
    def change(tensors):
        del tensors["model.norm.weight"]
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.extra.weight"] = np.zeros(3, np.float32)
        tensors["model.layers.2.input_layernorm.weight"] = np.zeros(16, np.float32)
        tensors["model.layers.0.self_attn.q_proj.weight"] = np.zeros((24, 17), np.float32)
        tensors["model.layers.0.mlp.gate_proj.weight"] = np.zeros((48, 16), np.int32)

    with pytest.raises(model.ModelFilesError) as caught:
        model.load(broken(tmp_path, change))
    assert sorted(caught.value.problems) == [
        "missing tensor model.layers.1.mlp.up_proj.weight (48, 16)",
        "missing tensor model.norm.weight (16,)",
        "tensor model.layers.0.mlp.gate_proj.weight has dtype I32; supported: F32, F16, BF16",
        "tensor model.layers.0.self_attn.q_proj.weight has shape (24, 17), config.json asks for (24, 16)",
        "unexpected tensor model.layers.0.extra.weight (3,)",
        "unexpected tensor model.layers.2.input_layernorm.weight (16,)",
    ]
    assert all(problem in str(caught.value) for problem in caught.value.problems)


def test_a_tied_model_may_repeat_its_embedding_but_not_hold_another_head(tmp_path):
    def repeat(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(3, np.float32)

    folder = broken(tmp_path, repeat)
    tree_equal(model.load(folder)[1], make()[1])
    shutil.rmtree(folder)

    def differ(tensors):
        tensors["lm_head.weight"] = 2 * tensors["model.embed_tokens.weight"]

    with pytest.raises(model.ModelFilesError, match=r"tie_word_embeddings, but lm_head.weight differs"):
        model.load(broken(tmp_path, differ))


def test_bfloat16_values_are_exact(tmp_path):
    def narrow(tensors):
        for name in tensors:
            tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)

    params = model.load(broken(tmp_path, narrow))[1]
    expected = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), make()[1])
    tree_equal(params, expected)


def test_unreadable_folders_say_what_is_wrong(tmp_path):
    with pytest.raises(model.ModelFilesError, match=r"config.json is not there: this is no Hugging Face model folder"):
        model.load(tmp_path / "nowhere")
    config, params = make()
    model.save(tmp_path / "m", config, params, max_shard_bytes=6000)
    folder = tmp_path / "m"

    shard = folder / "model-00002-of-00008.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-5])
    with pytest.raises(model.ModelFilesError, match=r"model-00002-of-00008.safetensors cannot be read"):
        model.load(folder)
    shard.unlink()
    with pytest.raises(
        model.ModelFilesError, match=r"(?s)model-00002-of-00008.safetensors is not there.*missing tensor"
    ):
        model.load(folder)
    shard.write_bytes(content)

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = "model-00001-of-00008.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(model.ModelFilesError, match=r"puts tensor model.norm.weight into .* where it is not"):
        model.load(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(model.ModelFilesError, match="no weight_map"):
        model.load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(model.ModelFilesError, match=r"config.json cannot be read"):
        model.load(folder)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(model.ModelFilesError, match="must hold an object"):
        model.load(folder)


def test_source_files_are_copied_and_its_config_kept_while_it_still_holds(tmp_path):
    config, params = make()
    source = tmp_path / "source"
    source.mkdir()
    original = {**config.to_hf(), "bos_token_id": 1, "torch_dtype": "float32"}
    (source / "config.json").write_text(json.dumps(original))
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("x")
    (source / "notes.txt").write_text("mine")
    model.save(tmp_path / "same", config, params, source=source)
    assert sorted(contents(tmp_path / "same")) == [
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (tmp_path / "same" / "config.json").read_text() == (source / "config.json").read_text()
    model.save(tmp_path / "half", config, params, source=source, dtype=jnp.bfloat16)
    values = json.loads((tmp_path / "half" / "config.json").read_text())
    assert values["bos_token_id"] == 1 and values["torch_dtype"] == "bfloat16"
    assert model.load(tmp_path / "half", dtype=None)[1]["embedding"].dtype == jnp.bfloat16


def test_a_folder_appears_complete_or_not_at_all(tmp_path, monkeypatch):
    config, params = make()
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "mine.txt").write_text("mine")
    with pytest.raises(model.ModelFilesError, match="exists already and is not empty"):
        model.save(tmp_path / "kept", config, params)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(writing, "save_file", full)
        for name in ("new", "kept"):
            with pytest.raises(model.ModelFilesError, match=r"nothing was changed: .*No space left on device"):
                model.save(tmp_path / name, config, params, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert contents(tmp_path / "kept") == {"mine.txt": b"mine"}
    model.save(tmp_path / "kept", config, params, overwrite=True)
    assert sorted(contents(tmp_path / "kept")) == ["config.json", "model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    (tmp_path / "empty").mkdir()
    model.save(tmp_path / "empty", config, params)
    tree_equal(model.load(tmp_path / "empty")[1], params)


def test_parameters_that_do_not_fit_are_not_saved(tmp_path):
    config, params = make()
    wrong = {**params, "norm": {"scale": jnp.zeros(3)}, "other": jnp.zeros(2)}
    del wrong["embedding"]
    with pytest.raises(model.ModelFilesError) as caught:
        model.save(tmp_path / "m", config, wrong)
    assert caught.value.problems == [
        "parameter embedding is missing",
        "parameter norm/scale has shape (3,), the configuration asks for (16,)",
        "parameter other is not part of this model",
    ]
    with (
        jax.enable_x64(True),
        pytest.raises(model.ModelFilesError, match="float64 parameters cannot be saved; pass dtype"),
    ):
        model.save(tmp_path / "m", config, jax.tree.map(lambda x: x.astype(jnp.float64), params))
    assert list(tmp_path.iterdir()) == []


def test_the_files_of_the_source_are_kept_where_they_are_small_enough(tmp_path):
    config, params = make()
    model.save(tmp_path / "a", config, params, max_shard_bytes=4000)
    source = tmp_path / "b"
    source.mkdir()
    # as other writers do it: other cuts, a repeated head, more in the index's metadata
    tensors = {}
    for path in sorted((tmp_path / "a").glob("*.safetensors")):
        tensors |= load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    total = sum(tensor.nbytes for tensor in tensors.values())
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, source / file, metadata={"format": "pt"})
    index = {"metadata": {"total_parameters": 1, "total_size": total}}
    index["weight_map"] = {name: file for file, held in files.items() for name in held}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    (source / "config.json").write_text(json.dumps({**config.to_hf(), "dtype": "float32", "bos_token_id": 1}))

    model.save(tmp_path / "same", *model.load(source), source=source)
    assert contents(tmp_path / "same") == contents(source)
    model.save(tmp_path / "half", *model.load(source), source=source, dtype=jnp.bfloat16)
    assert set(contents(tmp_path / "half")) == set(contents(source))
    halved = json.loads((tmp_path / "half" / "model.safetensors.index.json").read_text())
    assert halved["metadata"] == {"total_size": total // 2} and halved["weight_map"] == index["weight_map"]
    model.save(tmp_path / "small", *model.load(source), source=source, max_shard_bytes=4000)
    assert len(contents(tmp_path / "small")) > 4
    tree_equal(model.load(tmp_path / "small")[1], params)


def test_what_is_written_can_be_read_by_others(tmp_path):
    model.save(tmp_path / "m", *make())
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "m").iterdir()}
    assert set(modes.values()) == {0o644} and (tmp_path / "m").stat().st_mode & 0o777 == 0o755


def test_numpy_arrays_are_saved_as_jax_arrays_are(tmp_path):
    config, params = make("llama", tied=False, dtype=jnp.bfloat16)
    model.save(tmp_path / "jax", config, params)
    model.save(tmp_path / "numpy", config, jax.tree.map(np.asarray, params))
    assert contents(tmp_path / "jax") == contents(tmp_path / "numpy")
