"""The folder a run writes into: made before any work is done, and by one run at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

from etils import epath

from mwjax.rollouts.storage import is_local
from mwjax.train.mesh import leads


class RunDirectoryError(ValueError):
    """A run directory that cannot be written, or that another run is writing."""


@contextlib.contextmanager
def claimed(path: str) -> Iterator[epath.Path]:
    """The run directory, which exists and, where it is on this machine, is nobody else's until the block ends (or the
    process does, however that happens). Object stores know no locks. Raises RunDirectoryError."""
    try:
        folder = epath.Path(path)
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise RunDirectoryError(f"run_dir: {path} is a file; give a folder") from None
    except KeyError:  # from epath
        raise RunDirectoryError(f"run_dir: {path}: no kind of address that is known; a local path or gs://") from None
    except (OSError, ImportError) as error:  # what is missing for a scheme is imported when it is used
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise RunDirectoryError(f"run_dir: {path}: cannot be made: {reason[0]}") from error
    if not is_local(path) or not leads():
        yield folder
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise RunDirectoryError(
            f"run_dir: {path}: another run is writing there; wait for it, stop it, or choose another run_dir"
        ) from None
    except OSError:  # a file system without locks
        pass
    try:
        yield folder
    finally:
        os.close(handle)
