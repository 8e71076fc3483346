"""What can be wrong with rollouts and the files that hold them."""

from __future__ import annotations

import errno
from dataclasses import dataclass


class RecordError(ValueError):
    """A rollout breaks a rule of the record. ``field`` is a path such as ``turns[2].logprobs[5]``."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(field, reason)
        self.field = field
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.field}: {self.reason}" if self.field else self.reason


@dataclass(frozen=True)
class Refusal:
    """A line that was not taken. ``field`` is a path such as ``turns[2].logprobs[5]``, or "" for the whole line."""

    file: str
    line: int
    field: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.field + ': ' if self.field else ''}{self.reason}"


class RolloutFileError(OSError, ValueError):
    """A rollout file cannot be opened, read or written. ``errno`` is set where the operating system gave one."""


def file_error(action: str, path: object, error: BaseException, consequence: str = "") -> RolloutFileError:
    """The error to raise when ``action`` ("read", "write") failed on ``path``, in plain words."""
    code = getattr(error, "errno", None)
    plain = {
        errno.ENOENT: "its folder does not exist" if action == "write" else "there is no such file or folder",
        errno.ENOSPC: "the disk is full; free some space and run again",
        errno.EDQUOT: "your disk quota is used up; free some space and run again",
        errno.EISDIR: "it is a folder, not a file",
        errno.EACCES: "permission denied",
        errno.EROFS: "the file system is read-only",
    }
    reason = plain.get(code) if isinstance(code, int) else None
    reason = reason or getattr(error, "strerror", None) or str(error) or type(error).__name__
    problem = RolloutFileError(f"cannot {action} {path}: {reason}{consequence}")
    problem.errno = code
    return problem
