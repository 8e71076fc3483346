"""A file that only grows, by whole lines."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from typing import Any

from mwjax.rollouts.errors import RolloutFileError, file_error
from mwjax.rollouts.storage import is_local, sync_folder

try:
    import fcntl
except ImportError:  # not a POSIX system: no lock against a second writer
    fcntl = None  # type: ignore[assignment]

BLOCK_BYTES = 1 << 20


class Journal:
    """Appends whole lines to a local file.

    A line cut short by a crash is moved to ``PATH.torn`` when the file is opened again; ``torn`` then says so. One
    process at a time may hold the file. If somebody moves or removes it, the next lines begin a new one; if somebody
    empties it or adds to it, they follow what is there.
    """

    def __init__(self, path: Any) -> None:
        """Raises RolloutFileError if the file cannot be opened or another journal holds it."""
        self.path = os.path.expanduser(str(path))
        self.torn: str | None = None
        self._swapping = threading.Lock()  # held while the descriptor becomes another one
        if not is_local(path):
            raise RolloutFileError(
                f"cannot append to {path}: an object store has no append; record to a local file and copy it with "
                "rollouts.write"
            )
        if self.path.endswith((".gz", ".zst")):
            raise RolloutFileError(
                f"cannot append to {path}: a compressed file cannot be repaired after a crash; record to a .jsonl file "
                "and compress it with rollouts.write"
            )
        self._descriptor, self._size = self._open()

    def append(self, line: bytes) -> None:
        """Writes one line (newline included) to the disk, or, on an error, leaves the file as it was."""
        self._write(line, sync=True)

    def append_soon(self, lines: bytes) -> None:
        """Hands whole lines to the operating system, or, on an error, leaves the file as it was. They outlast this
        process; the machine, after ``sync``."""
        self._write(lines, sync=False)

    def sync(self) -> None:
        """Puts on the disk what ``append_soon`` wrote; may be called beside it, from another thread."""
        try:
            with self._swapping:
                descriptor = os.dup(self._descriptor)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise file_error("write", self.path, error) from error

    def _write(self, lines: bytes, sync: bool) -> None:
        try:
            self._follow()
            _write_all(self._descriptor, lines, self._size)
            if sync:
                os.fsync(self._descriptor)
        except RolloutFileError:
            raise
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            raise file_error("write", self.path, error, "; what was to be added is not in it") from error
        self._size += len(lines)

    def close(self) -> None:
        os.close(self._descriptor)

    def _open(self) -> tuple[int, int]:
        """The descriptor of the file at the path, locked, and the size of its whole lines."""
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise file_error("write", self.path, error) from error
        try:
            self._lock(descriptor)
            size = self._recover(descriptor)
            sync_folder(os.path.dirname(os.path.abspath(self.path)))
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, RolloutFileError):
                raise
            raise file_error("write", self.path, error) from error
        return descriptor, size

    def _follow(self) -> None:
        """Makes the descriptor that of the file at the path, and the size its own."""
        ours = os.fstat(self._descriptor)
        try:
            same = os.path.samestat(os.stat(self.path), ours)
        except OSError:
            same = False
        if not same:
            with contextlib.suppress(OSError):  # opening it says what is wrong
                os.makedirs(os.path.dirname(os.path.abspath(self.path)), exist_ok=True)
            moved, opened = self._descriptor, self._open()
            with self._swapping:
                self._descriptor, self._size = opened
                os.close(moved)
        elif ours.st_size != self._size:
            self._size = self._recover(self._descriptor)

    def _lock(self, descriptor: int) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RolloutFileError(
                f"cannot write {self.path}: another recorder has it open; give each its own file"
            ) from None

    def _recover(self, descriptor: int) -> int:
        """Cuts off what follows the last newline, unless it is a whole line; the size after that."""
        size = os.fstat(descriptor).st_size
        end = _last_newline(descriptor, size) + 1
        if end == size:
            return size
        tail = os.pread(descriptor, size - end, end)
        try:
            json.loads(tail)
        except ValueError:
            aside = f"{self.path}.torn"
            with open(aside, "ab") as out:
                out.write(tail + b"\n")
                out.flush()
                os.fsync(out.fileno())
            os.ftruncate(descriptor, end)
            os.fsync(descriptor)
            self.torn = (
                f"the last line of {self.path} was cut short ({len(tail)} bytes, from byte {end}); it is now in {aside}"
            )
            return end
        _write_all(descriptor, b"\n", size)
        os.fsync(descriptor)
        return size + 1


def _last_newline(descriptor: int, size: int) -> int:
    step = BLOCK_BYTES
    for start in range((size - 1) // step * step, -1, -step):
        block = os.pread(descriptor, min(step, size - start), start)
        if b"\n" in block:
            return start + block.rindex(b"\n")
    return -1


def _write_all(descriptor: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, at)
        view, at = view[written:], at + written
