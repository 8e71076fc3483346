"""A packed set: the folder that ``mwjax pack-data`` writes, rollouts in ArrayRecord files with a table of them beside.

Opening it reads the table alone. A rollout is one read and one decompression of its own record.
"""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from etils import epath

from mwjax.rollouts.errors import RecordError, Refusal, RolloutFileError, file_error
from mwjax.rollouts.packed_record import decode
from mwjax.rollouts.record import Rollout
from mwjax.rollouts.storage import is_local

TABLE = "rollouts.json"
SUFFIX = ".array_record"
FORMAT = "mwjax packed rollouts, 1"
KEYS = ("digest", "files", "sources", "ids", "largest_ids", "source", "line")  # what the table holds besides


def is_packed(path: epath.PathLike) -> bool:
    """Whether this is to be read as a packed set: a folder. Raises RolloutFileError for a part of one."""
    if str(path).endswith(SUFFIX):
        raise RolloutFileError(f"cannot read {path}: it is a part of a packed set; give the folder it is in")
    if is_local(path):
        return os.path.isdir(os.path.expanduser(path))
    try:
        return not str(path).endswith((".jsonl", ".json", ".gz", ".zst")) and epath.Path(path).is_dir()
    except ImportError as error:
        raise file_error("read", path, error) from None


@dataclass(frozen=True)
class Part:
    """One ArrayRecord file of a set, all of it, as ArrayRecordDataSource takes it."""

    filename: str
    take: int
    skip: int = 0

    @property
    def examples_in_shard(self) -> int:
        return self.take


class PackedRollouts:
    """A sequence of the rollouts of a packed set; ``refused`` holds those with ids outside the vocabulary.

    digest: SHA-256 of all records, in hexadecimal. Threads may share one; a pickled copy opens the files anew.
    """

    def __init__(self, path: epath.PathLike, *, vocab_size: int | None = None) -> None:
        """Raises RolloutFileError if the set is incomplete, damaged, not local, or of another version of mwjax."""
        from array_record.python.array_record_data_source import ArrayRecordDataSource  # not on Windows, and slow

        self.path = str(path)
        self.vocab_size = vocab_size
        table = _table(self.path)
        self.digest: str = table["digest"]
        self._origins: list[str] = table["sources"]
        self._where: list[tuple[int, int]] = list(zip(table["source"], table["line"]))
        self._all_ids: list[str] = table["ids"]
        self._records = ArrayRecordDataSource(self._parts(table["files"]))
        self.refused: list[Refusal] = []
        self._numbers: list[int] = []
        for number, largest in enumerate(table["largest_ids"]):
            if vocab_size is None or largest < vocab_size:
                self._numbers.append(number)
                continue
            try:
                self._read(number)
            except RecordError as error:
                self.refused.append(self._refusal(number, error.field, error.reason))
        self.ids = [self._all_ids[number] for number in self._numbers]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Rollout:
        """Raises IndexError out of range and RolloutFileError if the record is damaged."""
        index = operator.index(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"rollout {index} of {len(self)} in {self.path}")
        return self._read(self._numbers[index])

    def __iter__(self) -> Iterator[Rollout]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"PackedRollouts({self.path!r}, {len(self)} rollouts)"

    def line(self, index: int) -> int:
        """Line number, from 1, of a rollout in the file it was packed from."""
        return self._where[self._numbers[index]][1]

    def refusal(self, index: int, field: str, reason: str) -> Refusal:
        """That a rollout is not taken, and why."""
        return self._refusal(self._numbers[index], field, reason)

    def _refusal(self, number: int, field: str, reason: str) -> Refusal:
        origin, line = self._where[number]
        return Refusal(f"{self.path} (packed from {self._origins[origin]})", line, field, reason)

    def _read(self, number: int) -> Rollout:
        try:
            rollout = decode(self._records[number], vocab_size=self.vocab_size)
        except RecordError:
            raise
        except (RuntimeError, ValueError, LookupError, TypeError) as error:  # what ArrayRecord, json and numpy raise
            raise self._damaged(number, str(error).splitlines()[0]) from error
        if rollout.id != self._all_ids[number]:
            raise self._damaged(number, f"it holds {rollout.id!r}")
        return rollout

    def _damaged(self, number: int, reason: str) -> RolloutFileError:
        origin, line = self._where[number]
        return RolloutFileError(
            f"{self.path}: rollout {self._all_ids[number]!r} cannot be read: the set is damaged ({reason}). Copy the "
            f"set again or pack it again; it was made from line {line} of {self._origins[origin]}"
        )

    def _parts(self, files: list[dict[str, Any]]) -> list[Part]:
        parts = []
        for file in files:
            name = os.path.join(os.path.expanduser(self.path), file["name"])
            try:
                size = os.stat(name).st_size
            except OSError as error:
                raise file_error("read", name, error, "; the packed set is incomplete, copy or pack it again") from None
            if size != file["bytes"]:
                raise RolloutFileError(
                    f"cannot read {name}: it has {size:,} bytes, the set was packed with {file['bytes']:,}; copy or "
                    "pack it again"
                )
            parts.append(Part(name, file["rollouts"]))
        return parts


def _table(path: str) -> dict[str, Any]:
    if not is_local(path):
        raise RolloutFileError(
            f"cannot read {path}: ArrayRecord reads local files only; copy the folder to a local disk first (gcloud "
            "storage cp -r), or train on the JSON Lines file, which may be gs://"
        )
    name = os.path.join(os.path.expanduser(path), TABLE)
    try:
        with open(name, "rb") as handle:
            table = json.load(handle)
    except FileNotFoundError:
        raise RolloutFileError(
            f"cannot read {path}: it is a folder, and without {TABLE} no packed set; make one with: mwjax pack-data "
            "FILE... --out FOLDER"
        ) from None
    except OSError as error:
        raise file_error("read", name, error) from error
    except ValueError as error:
        raise RolloutFileError(f"cannot read {name}: it is damaged ({error}); copy or pack the set again") from None
    found = table.get("format") if isinstance(table, dict) else None
    if found != FORMAT:
        raise RolloutFileError(f"cannot read {path}: {TABLE} has the format {found!r}, this mwjax reads {FORMAT!r}")
    if missing := [key for key in KEYS if key not in table]:
        raise RolloutFileError(
            f"cannot read {name}: it is damaged ({', '.join(missing)}: missing); copy or pack the set again"
        )
    return table
