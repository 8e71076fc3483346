"""Log rollouts from any harness, in the record's own terms, with nothing but numpy.

    from mwjax.rollouts import Recorder

    with Recorder("rollouts.jsonl") as recorder:
        rollout = recorder.rollout("task-7/sample-0", group="task-7")
        for step in range(steps):
            if len(context) > limit:  # white box: say what was cut and what took its place
                rollout.edit(evicted=[(4, 10)], inserted_at=4, replacement_ids=note, author="rule", trigger="length")
                context = context[:4] + note + context[10:]
            completion, logprobs = generate(context)  # token ids in, token ids and their log-probs out
            rollout.turn(context, completion, logprobs=logprobs)
            context = context + completion + tool_result(completion)
        rollout.close(reward=1.0)

Log every call of the engine with the exact ids it was sent. A harness whose edits are unknown logs its turns only.
``evicted`` and ``restored`` count all tokens that were ever live, in order of first appearance (see ``Edit``): up to
the first edit these are simply the places in the context.
"""

from __future__ import annotations

import threading
import warnings
from types import TracebackType
from typing import Any

import numpy as np
from etils import epath

from mwjax.rollouts.errors import RecordError, RolloutFileError
from mwjax.rollouts.extends import Shortener
from mwjax.rollouts.fields import name, token_ids
from mwjax.rollouts.journal import Journal
from mwjax.rollouts.read import Refusal, iterate
from mwjax.rollouts.record import MAIN_CHAIN, Rollout, Sampling
from mwjax.rollouts.validate import from_json, parse_edit, parse_turn
from mwjax.rollouts.write import as_line, as_object, sampling_object


class Recorder:
    """A growing rollout file. Each rollout that is closed becomes one line, on the disk before ``close`` returns.

    Safe to use from several threads; a second recorder on the same file is refused. An existing file is continued: a
    line that a crash cut short is moved to ``PATH.torn`` and reported in ``torn`` and as a warning. Rollouts still open
    at the end, by an exception or forgotten, are not in the file: a warning and ``unfinished`` name them. Edits that no
    turn followed changed no prompt and are left out: a warning and ``left_out`` count them by rollout.
    """

    def __init__(self, path: epath.PathLike, *, vocab_size: int | None = None) -> None:
        """``vocab_size``, if given, bounds the ids. Raises RolloutFileError if the file cannot be opened for appending
        (compressed files and ``gs://`` cannot)."""
        self.path = str(path)
        self.vocab_size = vocab_size
        self.unfinished: list[str] = []
        self.left_out: dict[str, int] = {}
        self._lock = threading.Lock()
        self._open: dict[str, OpenRollout] = {}
        self._written: set[str] = set()
        self._closed = False
        self._journal = Journal(path)
        self.torn = self._journal.torn
        if self.torn:
            warnings.warn(self.torn, stacklevel=2)
        try:
            for _, item in iterate(self._journal.path):
                if not isinstance(item, Refusal):
                    self._written.add(item.id)
        except RolloutFileError:
            self._journal.close()
            raise

    def rollout(self, id: str, *, group: str | None = None, meta: dict[str, Any] | None = None) -> OpenRollout:
        """Begins a rollout. ``group`` names the rollouts of one prompt. Raises RecordError for an id used before."""
        with self._lock:
            self._check_open()
            if name(id, "id") in self._open:
                raise RecordError("id", f"{id!r} is already being recorded")
            if id in self._written:
                raise RecordError("id", f"{id!r} is already in {self.path}")
            rollout = OpenRollout(self, id, group, meta)
            self._open[id] = rollout
            return rollout

    def close(self) -> None:
        """Ends the file. Warns of rollouts that were never closed and of edits that were left out."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self.unfinished = list(self._open)
            self._journal.close()
        if self.unfinished:
            names = ", ".join(map(repr, self.unfinished))
            message = f"not in {self.path}: {len(self.unfinished)} rollout(s) that were never closed: {names}"
            warnings.warn(message, stacklevel=2)
        if self.left_out:
            names = ", ".join(map(repr, self.left_out))
            message = f"not in {self.path}: {sum(self.left_out.values())} edit(s) that no turn followed, of {names}"
            warnings.warn(message, stacklevel=2)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RolloutFileError(f"the recorder of {self.path} is closed")

    def _finish(self, id: str, line: bytes, left_out: int) -> None:
        with self._lock:
            self._check_open()
            self._journal.append(line)
            del self._open[id]
            self._written.add(id)
            if left_out:
                self.left_out[id] = left_out


class OpenRollout:
    """A rollout being recorded; ``Recorder.rollout`` makes it. Every call is checked at once and raises RecordError."""

    def __init__(self, recorder: Recorder, id: str, group: str | None, meta: dict[str, Any] | None) -> None:
        self.id = id
        self._recorder = recorder
        self._head = {"id": id, "group": group}
        self._meta = dict(meta or {})
        self._lock = threading.Lock()
        self._shortener = Shortener()
        self._turns: list[dict[str, Any]] = []
        self._edits: list[dict[str, Any]] = []
        self._closed = False

    def turn(
        self,
        prompt_ids: Any,
        completion_ids: Any,
        *,
        logprobs: Any = None,
        chain: str = MAIN_CHAIN,
        purpose: str = "act",
        trainable: bool = True,
        finish_reason: str | None = None,
        sampling: Sampling | None = None,
        policy_version: int | None = None,
        cause_turn: int | None = None,
    ) -> int:
        """Logs one call of the engine and returns its turn index; the arguments are those of ``Turn``.

        prompt_ids [P], completion_ids [C]: the exact ids sent and sampled, as lists or integer arrays. logprobs [C]:
        natural log, as the engine reported them. The arrays are copied, and only what no earlier turn holds is kept.
        """
        vocab_size = self._recorder.vocab_size
        with self._lock:
            self._check_open()
            index = len(self._turns)
            prompt = np.array(token_ids(prompt_ids, f"turns[{index}].prompt_ids", vocab_size))
            value = {
                "prompt_ids": prompt,
                "completion_ids": completion_ids,
                "logprobs": logprobs,
                "chain": chain,
                "purpose": purpose,
                "trainable": trainable,
                "finish_reason": finish_reason,
                "sampling": None if sampling is None else sampling_object(sampling, f"turns[{index}].sampling"),
                "policy_version": policy_version,
                "cause_turn": cause_turn,
            }
            _, turn = parse_turn(value, index, vocab_size)
            completion = np.array(turn.completion_ids)
            piece = self._shortener.add(prompt, completion)
            if piece.extends is not None:
                value = {"extends": piece.extends, "append_ids": piece.head, **value, "prompt_ids": None}
            self._turns.append({**value, "completion_ids": completion, "logprobs": turn.logprobs})
            return index

    def edit(
        self,
        *,
        evicted: Any = (),
        inserted_at: int | None = None,
        replacement_ids: Any = (),
        replacement_from: tuple[int, int, int] | None = None,
        restored: Any = (),
        author: str | None = None,
        trigger: str | None = None,
        stored_as: str | None = None,
        before_turn: int | None = None,
    ) -> None:
        """Logs one edit of the live context; the arguments are those of ``Edit``. It fires before the next turn to be
        logged unless ``before_turn`` says otherwise."""
        with self._lock:
            self._check_open()
            following = len(self._turns)
            value = {
                "before_turn": following if before_turn is None else before_turn,
                "evicted": evicted,
                "inserted_at": inserted_at,
                "replacement_ids": replacement_ids,
                "replacement_from": replacement_from,
                "restored": restored,
                "author": author,
                "trigger": trigger,
                "stored_as": stored_as,
            }
            completions = [piece.completion for piece in self._shortener.pieces]
            field = f"edits[{len(self._edits)}]"
            edit = parse_edit(value, field, completions, following + 1, self._recorder.vocab_size)
            ranges = {"evicted": edit.evicted, "restored": edit.restored}
            self._edits.append({**value, **ranges, "replacement_ids": edit.replacement_ids})

    def close(self, *, reward: float | None = None, meta: dict[str, Any] | None = None) -> Rollout:
        """Writes the rollout as one line and returns it; ``meta`` adds to what was given at the start.

        On an error (RecordError, or RolloutFileError if the disk is full) nothing is written and ``close`` may be
        called again.
        """
        with self._lock:
            self._check_open()
            edits = [edit for edit in self._edits if edit["before_turn"] < len(self._turns)]
            value = {
                **self._head,
                "reward": reward,
                "turns": self._turns,
                "edits": edits,
                "meta": {**self._meta, **(meta or {})},
            }
            rollout = from_json(value, vocab_size=self._recorder.vocab_size)
            self._recorder._finish(self.id, as_line(as_object(rollout)), len(self._edits) - len(edits))
            self._closed = True
        return rollout

    def _check_open(self) -> None:
        if self._closed:
            raise RecordError("id", f"rollout {self.id!r} is closed")
