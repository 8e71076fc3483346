"""Token ids as text to look at: decoded where a tokenizer is given, as numbers otherwise."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mwjax.rollouts.errors import file_error

# Ids -> one printable line.
Decode = Callable[[Sequence[int] | np.ndarray], str]


def decoder(tokenizer: Any | None) -> Decode:
    """The function that shows ids.

    Args:
        tokenizer: None (ids are shown as numbers), the path of a ``tokenizer.json``, or an object with ``decode(ids)``.

    Raises:
        RolloutFileError, ValueError: the file cannot be read or is no tokenizer.
    """
    if tokenizer is None:
        return lambda ids: "[" + " ".join(str(int(token)) for token in ids) + "]"
    if isinstance(tokenizer, (str, os.PathLike)):
        tokenizer = _load(tokenizer)
    keeps_special = hasattr(tokenizer, "id_to_token")

    def decode(ids: Sequence[int] | np.ndarray) -> str:
        listed = [int(token) for token in ids]
        text = tokenizer.decode(listed, skip_special_tokens=False) if keeps_special else tokenizer.decode(listed)
        return _one_line(text)

    return decode


def _load(path: str | os.PathLike[str]) -> Any:
    from tokenizers import Tokenizer

    try:
        with open(path, encoding="utf-8") as handle:
            text = handle.read()
    except OSError as error:
        raise file_error("read", path, error) from None
    except UnicodeDecodeError:
        raise ValueError(f"{os.fspath(path)}: is not text; give the tokenizer.json of the model") from None
    try:
        return Tokenizer.from_str(text)
    except Exception as error:
        raise ValueError(f"{os.fspath(path)}: is not a tokenizer.json ({error})") from None


def _one_line(text: str) -> str:
    shown = text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
    return "'" + "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in shown) + "'"


def harmless(text: str) -> str:
    """The text of a rollout with ``?`` for what a terminal would obey instead of showing; as long as it was."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def head(decode: Decode, ids: np.ndarray, count: int = 12) -> str:
    """The first ``count`` ids; empty where there are none."""
    return "" if not len(ids) else decode(ids[:count]) + (" ..." if len(ids) > count else "")
