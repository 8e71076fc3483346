"""Files that appear complete or not at all."""

from __future__ import annotations

import contextlib
import gzip
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import zstandard
from etils import epath

from mwjax.rollouts.errors import RolloutFileError, file_error


def is_local(path: epath.PathLike) -> bool:
    return "://" not in str(path)


@contextlib.contextmanager
def replacing(path: epath.PathLike) -> Iterator[IO[Any]]:
    """A binary handle onto a temporary file beside ``path`` that takes its place when the block ends without an error.

    Written through to the disk before it is renamed. ``.gz`` and ``.zst`` are compressed. On any error the temporary
    file is removed and ``path`` stays as it was. Raises RolloutFileError.
    """
    target = epath.Path(path).expanduser()
    if is_local(path):  # a link stays a link: what it points at is replaced
        target = epath.Path(os.path.realpath(target))
    temporary = target.parent / f".{target.name}.{secrets.token_hex(6)}.tmp"
    try:
        with temporary.open("wb") as raw:
            with _compressing(raw, target.suffix.lower()) as out:
                yield out
            raw.flush()
            if is_local(path):
                os.fsync(raw.fileno())
        temporary.replace(target)
        if is_local(path):
            sync_folder(os.fspath(target.parent))
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and not isinstance(error, RolloutFileError):
            kept = "; the file that was there is unchanged" if target.exists() else ""
            raise file_error("write", path, error, kept) from error
        raise


@contextlib.contextmanager
def replacing_folder(folder: epath.PathLike) -> Iterator[Path]:
    """An empty local folder beside ``folder`` that takes its place when the block ends without an error.

    A folder that was there is kept until the new one stands. On any error the temporary folder is removed and
    ``folder`` stays as it was. Raises RolloutFileError.
    """
    target = Path(os.path.realpath(os.path.expanduser(folder)))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    except OSError as error:
        raise file_error("write", folder, error) from error
    try:
        fresh, old = beside / "new", beside / "old"
        fresh.mkdir()
        yield fresh
        sync_folder(os.fspath(fresh))
        if target.exists():
            target.rename(old)
        try:
            fresh.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise
        sync_folder(os.fspath(target.parent))
    except OSError as error:
        if isinstance(error, RolloutFileError):
            raise
        raise file_error("write", folder, error) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def sync_folder(folder: str) -> None:
    """Makes a rename or a new name in a local folder durable, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _compressing(raw: IO[Any], suffix: str) -> Iterator[IO[Any]]:
    if suffix == ".gz":
        # No name and no time inside: equal rollouts give equal files.
        with gzip.GzipFile(filename="", mode="wb", fileobj=raw, compresslevel=6, mtime=0) as out:
            yield out  # type: ignore[misc]
    elif suffix == ".zst":
        with zstandard.ZstdCompressor(write_checksum=True).stream_writer(raw, closefd=False) as out:
            yield out
    else:
        yield raw
