"""White-box context editors in the spirit of MemoryWalker section 4: pop, fold, offload, and none as the control.

Each is a pure function ``edit(live, state) -> Edit | None`` of the live view and the harness's log.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np

from mwjax.harness import chat
from mwjax.harness.state import EditorState, Harness, Span
from mwjax.rollouts.record import Edit


def none() -> Harness:
    """Never edits: the control (Search-R1 in the paper)."""
    return Harness("none", lambda live, state: None)


def pop(most_results: int = 1) -> Harness:
    """Removes the oldest tool result outright when more than ``most_results`` are live; notes stay (TC-RAG)."""
    return Harness("pop", partial(_pop, most_results))


def fold(budget: int = 300, keep_last: int = 1) -> Harness:
    """When the live view is longer than ``budget`` tokens, the policy writes a summary, which replaces all lookups but
    the last ``keep_last`` (AgentFold)."""
    return Harness("fold", partial(_fold, keep_last), partial(_wants_summary, budget, keep_last))


def offload(most_results: int = 0) -> Harness:
    """Moves the oldest tool result to a store, leaving a stub, when more than ``most_results`` are live; puts it back
    at its old place when the policy names it, and all of them before the answer (MemexRL)."""
    return Harness("offload", partial(_offload, most_results))


HARNESSES = {"none": none, "pop": pop, "fold": fold, "offload": offload}


def _pop(most_results: int, live: np.ndarray, state: EditorState) -> Edit | None:
    results = _live_spans(live, state, "result")
    if len(results) <= most_results:
        return None
    oldest = results[0]
    return Edit(state.turn, evicted=((oldest.start, oldest.stop),), author="harness", trigger="count")


def _wants_summary(budget: int, keep_last: int, live: np.ndarray, state: EditorState) -> bool:
    foldable = _live_spans(live, state, "result")
    return len(live) > budget and len(foldable) > keep_last


def _fold(keep_last: int, live: np.ndarray, state: EditorState) -> Edit | None:
    if state.summary is None:
        return None
    turn, summary = state.summary
    request = max(span.start for span in state.spans if span.kind == "ask")
    last_folded = max(span.step for span in state.spans) - keep_last
    # The first lookup's cue and message end stay, around the summary.
    kept = {"cue", "close"}
    going = [
        span
        for span in state.spans
        if span.start >= request
        or span.kind == "inserted"
        or (1 <= span.step <= last_folded and (span.step > 1 or span.kind not in kept))
    ]
    gone = np.intersect1d(live, _positions((span.start, span.stop) for span in going))
    if not len(summary):
        return Edit(state.turn, evicted=_ranges(gone), author="policy", trigger="length")
    left = live[~np.isin(live, gone)]
    cue = next(span for span in state.spans if span.kind == "cue" and span.step == 1)
    return Edit(
        state.turn,
        evicted=_ranges(gone),
        inserted_at=int(np.flatnonzero(left == cue.stop - 1)[0]) + 1,
        replacement_ids=summary,
        replacement_from=(turn, 0, len(summary)),
        author="policy",
        trigger="length",
    )


def _offload(most_results: int, live: np.ndarray, state: EditorState) -> Edit | None:
    stubs = {span.name: span for span in _live_spans(live, state, "inserted")}
    stored = [span for span in state.spans if span.kind == "result" and span.name in stubs]
    if not state.final:
        stored = [span for span in stored if span.name and span.name.lower() in state.last_text.lower()]
    if stored:
        return Edit(
            state.turn,
            evicted=tuple((stubs[span.name].start, stubs[span.name].stop) for span in stored),
            restored=tuple((span.start, span.stop) for span in stored),
            author="harness" if state.final else "policy",
            trigger="terminal" if state.final else "model",
        )
    results = _live_spans(live, state, "result")
    if state.final or len(results) <= most_results:
        return None
    oldest = results[0]
    return Edit(
        state.turn,
        evicted=((oldest.start, oldest.stop),),
        inserted_at=int(np.flatnonzero(live == oldest.start)[0]),
        replacement_ids=state.encode(chat.stub(oldest.name or "")),
        author="harness",
        trigger="count",
        stored_as=oldest.name,
    )


def _live_spans(live: np.ndarray, state: EditorState, kind: str) -> list[Span]:
    return [span for span in state.spans if span.kind == kind and span.start in live]


def _positions(ranges: Iterable[tuple[int, int]]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(lo, hi) for lo, hi in ranges)])


def _ranges(positions: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Sorted positions as half-open ranges."""
    if not len(positions):
        return ()
    runs = np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1)
    return tuple((int(run[0]), int(run[-1]) + 1) for run in runs)
