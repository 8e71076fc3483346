"""Which reader a file is for."""

from __future__ import annotations

from types import ModuleType
from typing import cast

from mwjax.rollouts.errors import RolloutFileError
from mwjax.rollouts.lines import is_pipe
from mwjax.rollouts.readers import (
    agent_lightning,
    areal,
    atif,
    calls_log,
    chat_log,
    claude_code,
    codex,
    conversation,
    engine_log,
    har,
    opencode,
    qwen_code,
    slime,
    trl,
    verifiers,
    verifiers_steps,
    verl,
)
from mwjax.rollouts.readers.reader import Reader
from mwjax.rollouts.readers.records import head

# One module per format. A file is claimed by at most one of them.
_MODULES: tuple[ModuleType, ...] = (
    calls_log,
    engine_log,
    verifiers,
    verifiers_steps,
    agent_lightning,
    areal,
    slime,
    trl,
    verl,
    chat_log,
    conversation,
    har,
    atif,
    claude_code,
    opencode,
    codex,
    qwen_code,
)
# What trainers also write, and no reader takes.
BINARY = {
    b"PAR1": "a Parquet file; write it as JSON Lines, as with "
    "pandas.read_parquet(FILE).to_json(OUT, orient='records', lines=True)",
    b"ARROW1": "an Arrow file; write it as JSON Lines, as with datasets.Dataset.from_file(FILE).to_json(OUT)",
    b"\x80": "a pickle, such as verl's DataProto, and reading one runs whatever is in it; where it was made, write "
    "JSON Lines of its rows, tensors as .tolist()",
    b"\x93NUMPY": "an array of numpy; write JSON Lines of rows, arrays as .tolist()",
    b"PK\x03\x04": "an archive of torch or numpy and no dump of slime; write JSON Lines of rows, tensors as .tolist()",
}
READERS: dict[str, Reader] = {module.NAME: cast(Reader, module) for module in _MODULES}


def by_name(name: str) -> Reader:
    """The reader of a format. Raises ValueError."""
    if name not in READERS:
        raise ValueError(f"there is no format {name!r}; the formats are {', '.join(READERS)}")
    return READERS[name]


def detect(path: str) -> Reader:
    """The reader that a file is for. Raises RolloutFileError if no reader knows it or it cannot be read."""
    if is_pipe(path):
        raise RolloutFileError(f"cannot import {path}: it is a pipe, which can be read only once; save it to a file")
    beginning = head(path)
    claims = [reader for reader in READERS.values() if reader.looks_like(beginning)]
    if len(claims) == 1:
        return claims[0]
    if not beginning.data.strip() and not beginning.damage:
        raise RolloutFileError(f"cannot import {path}: it is empty")
    if claims:
        names = " and ".join(reader.NAME for reader in claims)
        raise RolloutFileError(f"cannot import {path}: it could be {names}; say which with --format")
    for magic, what in BINARY.items():
        if beginning.data.startswith(magic):
            raise RolloutFileError(f"cannot import {path}: it is {what}")
    if beginning.records and isinstance(beginning.records[0], dict) and {"id", "turns"} <= beginning.records[0].keys():
        raise RolloutFileError(f"{path} holds rollouts already: inspect, audit and train take it as it is")
    seen = ""
    if beginning.records and isinstance(beginning.records[0], dict):
        seen = f" (its first record has {', '.join(list(beginning.records[0])[:12])})"
    elif not beginning.records and beginning.damage:
        seen = f" ({beginning.damage})"
    raise RolloutFileError(
        f"cannot import {path}: no known format{seen}; the formats are listed by mwjax import --formats, and --format "
        "forces one"
    )
