"""Calls that continue one another exactly, id by id."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from mwjax.rollouts.extends import Shortener
from mwjax.rollouts.readers.engine_call import Call


def segments(calls: Sequence[Call], one: bool) -> tuple[list[list[int]], list[int | None]]:
    """Runs of calls, each of which continues the one before exactly; and for each the call it goes back to, if any. Of
    calls with equal ids, which several episodes of one question may have, the latest is continued that has not been."""
    shortener = Shortener()
    runs: list[list[int]] = []
    parents: list[int | None] = []
    home: dict[int, int] = {}
    keys: list[tuple[bytes, bytes]] = []
    equal: dict[tuple[bytes, bytes], list[int]] = {}
    for index, call in enumerate(calls):
        parent = shortener.add(call.prompt_ids, call.completion_ids).extends
        if parent is not None and not one:
            alike = reversed(equal[keys[parent]])
            parent = next((each for each in alike if runs[home[each]][-1] == each), parent)
        keys.append((digest(call.prompt_ids), digest(call.completion_ids)))
        equal.setdefault(keys[index], []).append(index)
        if parent is not None and runs[home[parent]][-1] == parent:
            home[index] = home[parent]
            runs[home[parent]].append(index)
        else:
            home[index] = len(runs)
            runs.append([index])
            parents.append(parent)
    return runs, parents


def digest(ids: np.ndarray) -> bytes:
    """Equal for equal ids."""
    return hashlib.blake2b(np.ascontiguousarray(ids), digest_size=16).digest()


def shared(before: Call, call: Call) -> int:
    """How many ids of a call's prompt are those of an earlier call, from the beginning."""
    old = np.concatenate([before.prompt_ids, before.completion_ids])
    length = min(len(old), len(call.prompt_ids))
    different = old[:length] != call.prompt_ids[:length]
    return int(different.argmax()) if different.any() else length
