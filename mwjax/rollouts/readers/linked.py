"""Session files whose lines name their parents: the history before a line is its chain of ancestors.

A file can branch (a message was edited and sent again), and a compaction begins a new root; each line still has the
history that was really in front of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


def parent_of(entry: Mapping[str, Any]) -> str | None:
    parent = entry.get("parentUuid")
    return parent if isinstance(parent, str) else None


@dataclass
class Links:
    """Lines by their ``uuid``, in file order. A uuid that comes again is a copy of the first line, which from there on
    hangs where the copy does: so a program writes down what a compaction kept."""

    entries: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    _order: dict[str, int] = field(default_factory=dict)
    _parents: dict[str, list[tuple[int, str | None]]] = field(default_factory=dict)
    _count: int = 0

    def add(self, name: str, parent: str | None, entry: Mapping[str, Any], line: int) -> bool:
        """False for a copy."""
        self._count += 1
        self._parents.setdefault(name, []).append((self._count, parent))
        if name in self.entries:
            return False
        self.entries[name], self.lines[name], self._order[name] = entry, line, self._count
        return True

    def before(self, name: str) -> list[str]:
        """The ancestors of a line when it was written, from the root; a parent that is not in the file begins one."""
        now = self._order[name]
        return self.path(self._parent(name, now), now)

    def begins(self, name: str) -> bool:
        """Whether ``before`` goes back to a line that names no parent; otherwise the file lacks what was before it."""
        root = (self.before(name) or [name])[0]
        return self._parent(root, self._order[name]) is None

    def path(self, name: str | None, now: int | None = None) -> list[str]:
        """From the root to ``name``, both included, as the file stood at its line number ``now``."""
        found: list[str] = []
        seen: set[str] = set()
        while name is not None and name in self.entries and name not in seen:
            found.append(name)
            seen.add(name)
            name = self._parent(name, self._count if now is None else now)
        return found[::-1]

    def _parent(self, name: str, now: int) -> str | None:
        versions = self._parents[name]
        return next((parent for at, parent in reversed(versions) if at <= now), versions[0][1])

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)
