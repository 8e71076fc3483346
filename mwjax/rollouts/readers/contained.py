"""Which of many texts occur in another one, without comparing each with each."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

_BASE = 0x9E3779B97F4A7C15
_LONGEST_WINDOW = 1 << 12


class Contained:
    """Finds those of ``texts`` that another text contains, in time linear in the length of that one.

    A text of n characters is known by the hashes of its first and its last 2^k characters, 2^k the largest power of two
    up to n (and up to 4,096): together they cover it, or nearly so. The hashes of all windows of a length follow from
    those of half that length (Karp and Rabin, 1987; modulo 2^64). What hashes find is compared in full.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        # window -> hash of the first window -> length -> hash of the last window -> texts
        self._known: dict[int, dict[int, dict[int, dict[int, list[str]]]]] = {}
        self._found: dict[str, frozenset[str]] = {}
        for text in dict.fromkeys(texts):
            if not text:
                continue
            window = min(1 << (len(text).bit_length() - 1), _LONGEST_WINDOW)
            first, last = (_hashes(part, window)[0] for part in (text[:window], text[-window:]))
            by_length = self._known.setdefault(window, {}).setdefault(int(first), {})
            by_length.setdefault(len(text), {}).setdefault(int(last), []).append(text)
        self._first = {w: np.sort(np.array(list(known), np.uint64)) for w, known in sorted(self._known.items())}

    def inside(self, text: str) -> frozenset[str]:
        """The texts that occur in this one."""
        found = self._found.get(text)
        if found is None:
            found = self._found[text] = frozenset(self._search(text)) if self._known else frozenset()
        return found

    def _search(self, text: str) -> set[str]:
        found: set[str] = set()
        hashes, width = _codes(text), 1
        for window, first in self._first.items():
            if len(text) < window:
                break
            while width < window:
                hashes, width = _doubled(hashes, width), 2 * width
            known = self._known[window]
            nearest = first[np.searchsorted(first[:-1], hashes)]
            starts = np.flatnonzero(nearest == hashes)
            for start in starts.tolist():
                for length, by_last in known[int(hashes[start])].items():
                    last = start + length - window
                    if last < len(hashes):
                        for candidate in by_last.get(int(hashes[last]), ()):
                            if candidate not in found and text.startswith(candidate, start):
                                found.add(candidate)
        return found


def _codes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64) + np.uint64(1)


def _hashes(text: str, window: int) -> np.ndarray:
    """uint64, one for each window of the text; ``window`` is a power of two."""
    hashes, width = _codes(text), 1
    while width < window:
        hashes, width = _doubled(hashes, width), 2 * width
    return hashes


def _doubled(hashes: np.ndarray, width: int) -> np.ndarray:
    """The hashes of windows of twice the width."""
    return hashes[:-width] * np.uint64(pow(_BASE, width, 1 << 64)) + hashes[width:]
