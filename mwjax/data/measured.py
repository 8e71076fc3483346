"""Measurements of packed sets, kept beside the first of them: another run of the same layout starts without a scan.

They are found by everything they depend on: the records of all sets, the layout, the size of the vocabulary, and the
code that lays out trees.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import mwjax.tree
from mwjax.data.index import Index, Layout, Source
from mwjax.rollouts import PackedRollouts, RolloutFileError
from mwjax.rollouts.storage import replacing

MEASURED = "measured-*.npz"  # the files, by key
PLAIN = ("rewards", "groups", "edges", "sampled", "contents", "view_tokens", "trie_tokens")
RAGGED = ("units", "needs")


def load(sources: tuple[Source, ...], layout: Layout) -> Index | None:
    """The index of an earlier scan of these packed sets; None where there is none, or one is no packed set."""
    path = _file(sources, layout)
    if path is None or not path.exists():
        return None
    try:
        with np.load(path) as kept:
            text = json.loads(kept["text"].tobytes())
            units, needs = (tuple(np.split(kept[name], kept[f"{name} ends"][:-1])) for name in RAGGED)
            return Index(
                sources=sources,
                layout=layout,
                lines=tuple((file, place) for file, place in kept["lines"].tolist()),
                ids=tuple(text["ids"]),
                left_out=tuple(tuple(entry) for entry in text["left_out"]),
                **{name: kept[name] for name in PLAIN},
                units=units,
                needs=needs,
            )
    except (OSError, ValueError, LookupError, zipfile.BadZipFile):  # damaged: measure again
        return None


def store(index: Index) -> None:
    """Keeps an index of packed sets for :func:`load`, where their folder can be written to."""
    path = _file(index.sources, index.layout)
    if path is None:
        return
    text = {"ids": index.ids, "left_out": index.left_out}
    arrays = {name: getattr(index, name) for name in PLAIN}
    arrays |= {name: np.concatenate(getattr(index, name)) for name in RAGGED}
    arrays |= {f"{name} ends": np.cumsum([len(part) for part in getattr(index, name)]) for name in RAGGED}
    arrays |= {"lines": np.array(index.lines), "text": np.frombuffer(json.dumps(text).encode(), np.uint8)}
    with contextlib.suppress(RolloutFileError), replacing(path) as out:
        np.savez_compressed(out, **arrays)


def _file(sources: Sequence[Source], layout: Layout) -> Path | None:
    sets = [source for source in sources if isinstance(source, PackedRollouts)]
    if not sets or len(sets) < len(sources):
        return None
    known = [[one.digest for one in sets], sets[0].vocab_size, dataclasses.asdict(layout), _code()]
    key = hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]
    return Path(sets[0].path).expanduser() / MEASURED.replace("*", key)


@functools.cache
def _code() -> str:
    """Digest of the source of everything that a measurement comes from."""
    (tree,) = mwjax.tree.__path__
    files = [*sorted(Path(tree).glob("*.py")), *sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
