"""Checks of single values of a record: each returns the value in its own type or raises RecordError with its path."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from mwjax.rollouts.errors import RecordError

INT32_MAX = 2**31 - 1
# Engines that sum in low precision report log-probs such as 1e-7 for a certain token; that is rounding, not an error.
LOGPROB_ROUNDING = 1e-6
DEEPEST_META = 100


def described(value: Any) -> str:
    """A short phrase for a value of the wrong type, for messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else repr(value).replace("inf", "Infinity")
    if isinstance(value, int):
        return repr(value)
    if isinstance(value, str):
        return f"the string {value if len(value) <= 40 else value[:40] + '...'!r}"
    if isinstance(value, dict):
        return "an object"
    return "a list" if isinstance(value, (list, tuple)) else f"of type {type(value).__name__}"


def known_keys(value: Any, known: Sequence[str], field: str) -> dict[str, Any]:
    """The object without its null entries (null means not given), refused if it has a key outside ``known``."""
    if not isinstance(value, dict):
        raise RecordError(field, f"is {described(value)}, must be an object")
    for key in value:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            advice = f"did you mean {near[0]!r}?" if near else "data of your own belongs in the rollout's meta"
            raise RecordError(f"{field}.{key}" if field else str(key), f"unknown key; {advice}")
    return {key: entry for key, entry in value.items() if entry is not None}


def integer(value: Any, field: str) -> int:
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, bool) or not isinstance(value, int):
        raise RecordError(field, f"is {described(value)}, must be an integer")
    return int(value)


def number(value: Any, field: str) -> float:
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RecordError(field, f"is {described(value)}, must be a number")
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise RecordError(field, f"is {described(result)}, must be a finite number")
    return result


def flag(value: Any, field: str) -> bool:
    value = value.item() if isinstance(value, np.generic) else value
    if not isinstance(value, bool):
        raise RecordError(field, f"is {described(value)}, must be true or false")
    return value


def text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        advice = f'; write "{value}"' if isinstance(value, int) and not isinstance(value, bool) else ""
        raise RecordError(field, f"is {described(value)}, must be a string{advice}")
    return value


def name(value: Any, field: str) -> str:
    """A string that is not empty."""
    if not text(value, field):
        raise RecordError(field, "is empty")
    return value


def token_ids(value: Any, field: str, vocab_size: int | None = None) -> np.ndarray:
    """A list (or any one-dimensional integer array) of token ids as int32 [N].

    Ids must be integers in [0, 2^31), below ``vocab_size`` if given.
    """
    if hasattr(value, "__array__"):
        array = np.asarray(value)
        if array.ndim != 1:
            raise RecordError(field, f"has shape {array.shape}, must be a flat list of token ids")
        if array.dtype.kind not in "iu":
            if array.size:
                raise RecordError(field, f"has dtype {array.dtype}, token ids must be integers")
            return np.zeros(0, np.int32)
    elif isinstance(value, (list, tuple)):
        array = _integers(value, field)
    else:
        raise RecordError(field, f"is {described(value)}, must be a list of token ids")
    limit = INT32_MAX if vocab_size is None else min(INT32_MAX, vocab_size - 1)
    if array.size and (array.min() < 0 or array.max() > limit):
        at = int(np.argmax((array < 0) | (array > limit)))
        raise RecordError(f"{field}[{at}]", _out_of_range(int(array[at]), vocab_size))
    return array.astype(np.int32, copy=False)


def log_probabilities(value: Any, field: str, count: int) -> np.ndarray:
    """A list (or array) of ``count`` natural log-probabilities as float64 [count]: finite and not positive."""
    if hasattr(value, "__array__"):
        array = np.asarray(value)
        if array.dtype.kind not in "iuf":
            if array.size:
                raise RecordError(field, f"has dtype {array.dtype}, must be float32 or float64")
            array = np.zeros(0)
    elif isinstance(value, (list, tuple)):
        array = _floats(value, field)
    else:
        raise RecordError(field, f"is {described(value)}, must be a list of numbers")
    if array.shape != (count,):
        length = f"has {array.size}" if array.ndim == 1 else f"has shape {array.shape}"
        raise RecordError(field, f"{length}, must have one per completion id ({count})")
    array = array.astype(np.float64, copy=False)
    if count and not (array.max() <= LOGPROB_ROUNDING and array.min() > -np.inf):
        at = int(np.argmin((array <= LOGPROB_ROUNDING) & np.isfinite(array)))
        found = float(array[at])
        rule = "a log-prob must not be positive" if math.isfinite(found) else "must be a finite number"
        raise RecordError(f"{field}[{at}]", f"is {described(found)}, {rule}")
    return array


def ranges(value: Any, field: str) -> tuple[tuple[int, int], ...]:
    """Half-open ranges ``[[lo, hi], ...]``, 0 <= lo < hi, disjoint, in any order."""
    value = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(value, (list, tuple)):
        raise RecordError(field, f"is {described(value)}, must be a list of [lo, hi] ranges")
    found = []
    for k, entry in enumerate(value):
        where = f"{field}[{k}]"
        if not isinstance(entry, (list, tuple)) or len(entry) != 2:
            raise RecordError(where, "must be a half-open range [lo, hi]")
        lo, hi = integer(entry[0], f"{where}[0]"), integer(entry[1], f"{where}[1]")
        if not 0 <= lo < hi:
            raise RecordError(where, f"is [{lo}, {hi}], must be a half-open range [lo, hi] with 0 <= lo < hi")
        found.append((lo, hi))
    ordered = sorted(range(len(found)), key=found.__getitem__)
    for before, after in pairwise(ordered):
        if found[after][0] < found[before][1]:
            raise RecordError(f"{field}[{max(before, after)}]", f"overlaps {field}[{min(before, after)}]")
    return tuple(found)


def json_value(value: Any, field: str, depth: int = 0) -> None:
    """Refuses what JSON cannot hold and give back."""
    if depth > DEEPEST_META:
        raise RecordError(field[:80], f"is nested more than {DEEPEST_META} levels deep")
    if isinstance(value, dict):
        for key, entry in value.items():
            if not isinstance(key, str):
                raise RecordError(field, f"has the key {key!r}; keys must be strings")
            json_value(entry, f"{field}.{key}", depth + 1)
    elif isinstance(value, (list, tuple)):
        for k, entry in enumerate(value):
            json_value(entry, f"{field}[{k}]", depth + 1)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise RecordError(field, f"is {described(value)}, which JSON does not have; use null")
    elif value is not None and not isinstance(value, (str, int)):
        raise RecordError(field, f"is {described(value)}; use plain numbers, strings, lists and objects")


def _out_of_range(value: int, vocab_size: int | None) -> str:
    if value < 0:
        return f"is {value}, a token id must not be negative"
    if value > INT32_MAX:
        return f"is {value}, beyond int32 ({INT32_MAX})"
    return f"is {value}, outside the vocabulary of {vocab_size} ids; is this the tokenizer that was used?"


def _integers(values: Sequence[Any], field: str) -> np.ndarray:
    if not values:
        return np.zeros(0, np.int32)
    if set(map(type, values)) != {int}:
        values = [integer(value, f"{field}[{k}]") for k, value in enumerate(values)]
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        at = _first(abs(value) > INT32_MAX for value in values)
        raise RecordError(f"{field}[{at}]", _out_of_range(values[at], None)) from None


def _floats(values: Sequence[Any], field: str) -> np.ndarray:
    if not set(map(type, values)) <= {float, int}:
        values = [_loose_number(value, f"{field}[{k}]") for k, value in enumerate(values)]
    try:
        return np.array(values, dtype=np.float64)
    except OverflowError:
        return np.array([number(value, f"{field}[{k}]") for k, value in enumerate(values)])


def _loose_number(value: Any, field: str) -> float:
    """A number that may still be infinite or NaN; the array check that follows names those."""
    value = value.item() if isinstance(value, np.generic) else value
    return value if isinstance(value, float) else number(value, field)


def _first(hits: Iterable[bool]) -> int:
    return next(k for k, hit in enumerate(hits) if hit)
