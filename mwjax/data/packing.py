"""From rollout files to a packed set (see :mod:`mwjax.rollouts.packed`)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from array_record.python.array_record_module import ArrayRecordWriter
from etils import epath

from mwjax.data.measured import MEASURED
from mwjax.rollouts import Refusal, Rollout, RolloutFileError
from mwjax.rollouts.packed import FORMAT, SUFFIX, TABLE
from mwjax.rollouts.packed_record import encode, largest_id
from mwjax.rollouts.read import entries
from mwjax.rollouts.storage import is_local, replacing, replacing_folder
from mwjax.tree import TreeError, build

# One record a compressed chunk: reading a rollout decompresses that rollout alone.
OPTIONS = "group_size:1"


@dataclass(frozen=True)
class PackedSet:
    """What was written. bytes: of all files together."""

    folder: str
    rollouts: int
    files: int
    bytes: int
    refused: tuple[Refusal, ...]

    def summary(self) -> str:
        """For people, on stdout."""
        files = f"{self.files} file{'' if self.files == 1 else 's'}"
        return f"{self.folder}: {self.rollouts:,} rollouts in {files}, {self.bytes / 1e6:,.1f} MB"


def pack_rollouts(
    paths: Sequence[epath.PathLike],
    folder: epath.PathLike,
    *,
    file_bytes: int = 256_000_000,
    overwrite: bool = False,
    progress: Callable[[str, int], None] | None = None,
) -> PackedSet:
    """Writes the rollouts of some files, in order, as a packed set; packed sets can be packed again.

    Rollouts that cannot be read, contradict their edits, or have an id that was there before are refused and listed.
    The folder appears when it is complete, or not at all. file_bytes: a file of the set is closed when its records
    reach this, before compression. overwrite: replace a packed set. progress: called with a path and
    how many of its bytes are read.

    Raises RolloutFileError for files that cannot be read or written, ValueError where no rollout is usable.
    """
    _check_free(folder, overwrite)
    refused: list[Refusal] = []
    with replacing_folder(folder) as temporary:
        table = _Table(sources=[str(path) for path in paths])
        writer = _Writer(temporary, file_bytes)
        for number, line, rollout in _usable(paths, refused, progress):
            writer.write(encode(rollout))
            table.ids.append(rollout.id)
            table.largest_ids.append(largest_id(rollout))
            table.source.append(number)
            table.line.append(line)
        files = writer.close()
        if not table.ids:
            first = f"; the first reason: {refused[0]}" if refused else ""
            names = ", ".join(table.sources)
            raise ValueError(f"no usable rollout in {names}: {len(refused)} refused{first}; nothing was written")
        value = {"format": FORMAT, "digest": writer.digest.hexdigest(), "files": files, **vars(table)}
        with replacing(temporary / TABLE) as out:
            out.write(json.dumps(value, separators=(",", ":")).encode("ascii"))
        size = sum(path.stat().st_size for path in temporary.iterdir())
    return PackedSet(str(folder), len(table.ids), len(files), size, tuple(refused))


@dataclass
class _Table:
    """What stands beside the records: of every rollout, its id, largest token id, source file and line there."""

    sources: list[str]
    ids: list[str] = field(default_factory=list)
    largest_ids: list[int] = field(default_factory=list)
    source: list[int] = field(default_factory=list)
    line: list[int] = field(default_factory=list)


def _usable(
    paths: Sequence[epath.PathLike], refused: list[Refusal], progress: Callable[[str, int], None] | None
) -> Iterator[tuple[int, int, Rollout]]:
    """(file number, line, rollout); fills ``refused``."""
    places: dict[str, str] = {}
    for number, path in enumerate(paths):
        for (line, offset, data), item in entries(path):
            if progress is not None:
                progress(str(path), offset + len(data) + 1)
            if isinstance(item, Refusal):
                refused.append(item)
                continue
            try:
                build(item)
            except TreeError as error:
                refused.append(Refusal(str(path), line, error.field, str(error)))
                continue
            if item.id in places:
                refused.append(Refusal(str(path), line, "id", f"{item.id!r} stands in {places[item.id]} already"))
                continue
            places[item.id] = f"{path}, line {line}"
            yield number, line, item


class _Writer:
    """Records into numbered files of about ``file_bytes`` each."""

    def __init__(self, folder: Path, file_bytes: int) -> None:
        self.folder, self.file_bytes = folder, file_bytes
        self.digest = hashlib.sha256()
        self._files: list[dict[str, Any]] = []
        self._open: ArrayRecordWriter | None = None
        self._held = 0

    def write(self, record: bytes) -> None:
        if self._open is None:
            self._files.append({"name": f"{len(self._files):05d}{SUFFIX}", "rollouts": 0})
            with self._named_errors():
                self._open = ArrayRecordWriter(str(self._path()), OPTIONS)
        with self._named_errors():
            self._open.write(record)
        self.digest.update(len(record).to_bytes(8, "little") + record)
        self._files[-1]["rollouts"] += 1
        self._held += len(record)
        if self._held >= self.file_bytes:
            self._finish()

    def close(self) -> list[dict[str, Any]]:
        """Closes the last file; name, rollouts and bytes of every file."""
        self._finish()
        return self._files

    def _finish(self) -> None:
        if self._open is None:
            return
        path = self._path()
        with self._named_errors():
            self._open.close()
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._files[-1]["bytes"] = path.stat().st_size
        self._open, self._held = None, 0

    def _path(self) -> Path:
        return self.folder / self._files[-1]["name"]

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # the one type ArrayRecord raises
            raise RolloutFileError(f"cannot write {self._path()}: {error}; nothing was kept") from error


def _check_free(folder: epath.PathLike, overwrite: bool) -> None:
    if not is_local(folder):
        raise RolloutFileError(
            f"cannot write {folder}: ArrayRecord writes and reads local files only; pack into a local folder, and copy "
            "that where it is needed"
        )
    target = Path(folder).expanduser()
    if target.is_dir() and not (target / TABLE).exists() and any(target.iterdir()):
        raise RolloutFileError(f"cannot write {folder}: the folder holds something else; give another one")
    if target.is_dir() and (target / TABLE).exists() and not overwrite:
        raise RolloutFileError(f"cannot write {folder}: it is a packed set already; --overwrite replaces it")
    if foreign := _foreign(target) if target.is_dir() else []:
        raise RolloutFileError(
            f"cannot replace {folder}: it holds {foreign[0]} too, which is no part of a packed set; move that away, or "
            "give another folder"
        )
    if target.exists() and not target.is_dir():
        raise RolloutFileError(f"cannot write {folder}: it is a file; give a folder")


def _foreign(folder: Path) -> list[str]:
    """What lies in a folder beside the files of a packed set."""
    own = (TABLE, f"*{SUFFIX}", MEASURED, ".*")
    return sorted(p.name for p in folder.iterdir() if p.is_dir() or not any(fnmatch(p.name, name) for name in own))
