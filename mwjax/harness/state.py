"""What an editor sees, and what a harness is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mwjax.rollouts.record import Edit


@dataclass(frozen=True)
class Span:
    """A stretch [start, stop) of ``H_T`` and what it is.

    kind: ``opening``, ``cue`` (start of a policy message), ``sampled`` (by the policy, without the end-of-message id),
    ``close`` (end of a message), ``result`` (what a tool returned, as a whole message), ``question``, ``ask`` (the
    request for a summary) or ``inserted`` (by an edit). step: the lookup it belongs to, 0 before the first. name: of a
    result the document, of an inserted span the edit's ``stored_as``.
    """

    kind: str
    start: int
    stop: int
    step: int
    name: str | None = None


@dataclass(frozen=True, eq=False)
class EditorState:
    """Everything an editor may look at beside the live view.

    turn: the turn before which an edit would fire. spans: of all of ``H_T``, in its order. edits: those made so far.
    last_text: what the policy wrote last. summary: (turn, ids) of the summary the policy just wrote on request, without
    its end-of-message id. final: the next turn is the answer. encode: text to token ids, for text of the harness's own.
    """

    turn: int
    spans: tuple[Span, ...]
    edits: tuple[Edit, ...]
    last_text: str
    summary: tuple[int, np.ndarray] | None
    final: bool
    encode: Callable[[str], np.ndarray]


# live: int64 [N], positions in H_T of the live view, in the order of the text.
Editor = Callable[[np.ndarray, EditorState], Edit | None]


def never(live: np.ndarray, state: EditorState) -> bool:
    return False


@dataclass(frozen=True)
class Harness:
    """A named editor. Where ``wants_summary`` says so, the policy first writes one, in a turn of its own."""

    name: str
    edit: Editor
    wants_summary: Callable[[np.ndarray, EditorState], bool] = never
