"""The recorded rollouts that ship with the package, and the tokenizer that decodes them (see data/DATA_CARD.md)."""

from __future__ import annotations

from pathlib import Path

_DATA = Path(__file__).parent / "data"


def load_quickstart_rollouts_path() -> Path:
    """The shipped rollouts: SmolLM2-135M-Instruct under four context editors, read with ``mwjax.rollouts.read``."""
    return _DATA / "rollouts.jsonl.zst"


def tokenizer_path() -> Path:
    """The tokenizer of the model that sampled them, a Hugging Face ``tokenizer.json``."""
    return _DATA / "tokenizer.json"
