"""The loop: a policy answers a question turn by turn while a harness edits its context, and everything is recorded."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from mwjax.engine.interface import Completion, Engine, SamplingParams
from mwjax.harness import chat
from mwjax.harness.state import EditorState, Harness, Span
from mwjax.harness.villages import Task, next_village, reward
from mwjax.rollouts.record import Edit, Rollout, Turn
from mwjax.tree.history import History, apply_edit


@dataclass(frozen=True)
class Episode:
    """One rollout to play. The seed of ``sampling`` is the episode's; its stop ids are set to the end of a message."""

    id: str
    task: Task
    harness: Harness
    sampling: SamplingParams
    group: str | None = None
    meta: dict[str, Any] = field(default_factory=dict)


Request = tuple[np.ndarray, SamplingParams]


def run_episode(engine: Engine, tokenizer: Tokenizer, episode: Episode) -> Rollout:
    """Play one episode. Raises what the engine raises, and TreeError for an editor whose edit does not apply."""
    return run_episodes(engine, tokenizer, [episode])[0]


def run_episodes(
    engine: Engine,
    tokenizer: Tokenizer,
    episodes: Sequence[Episode],
    on_turn: Callable[[int], None] | None = None,
) -> list[Rollout]:
    """Play several at once: their current turns are one batch of the engine. ``on_turn(n)`` is told of n turns done."""
    plays = [_play(tokenizer, episode) for episode in episodes]
    waiting = {number: next(play) for number, play in enumerate(plays)}
    rollouts: dict[int, Rollout] = {}
    while waiting:
        requests = list(waiting.values())
        completions = engine.generate([prompt for prompt, _ in requests], [sampling for _, sampling in requests])
        for number, completion in zip(list(waiting), completions):
            try:
                waiting[number] = plays[number].send(completion)
            except StopIteration as finished:
                rollouts[number] = finished.value
                del waiting[number]
        if on_turn:
            on_turn(len(completions))
    return [rollouts[number] for number in range(len(plays))]


def _play(tokenizer: Tokenizer, episode: Episode) -> Generator[Request, Completion, Rollout]:
    """The episode as a coroutine: yields what to sample, is sent the completion, returns the rollout."""
    task, log = episode.task, _Transcript(tokenizer, episode.sampling, episode.id)
    log.add(chat.opening(task), "opening")
    log.add(chat.cue("Lookup"), "cue")
    text = yield from log.sample("act")
    seen: list[str] = []
    while (name := next_village(task, text, seen)) is not None:
        seen.append(name)
        yield from _edit(log, episode.harness, final=False)
        log.close()
        log.step += 1
        log.add(chat.result(task, name), "result", name)
        log.add(chat.cue("Note"), "cue")
        text = yield from log.sample("act")
    yield from _edit(log, episode.harness, final=True)
    log.close()
    log.add(chat.final_question(task), "question")
    log.add(chat.answer_cue(task), "cue")
    answer = yield from log.sample("act")
    return Rollout(
        id=episode.id,
        turns=tuple(log.turns),
        edits=tuple(log.edits),
        group=episode.group,
        reward=reward(task, answer, finished=log.turns[-1].finish_reason == "stop"),
        meta={
            **episode.meta,
            "harness": episode.harness.name,
            "task": task.id,
            "question": task.question,
            "gold": task.answer,
            "answer": answer,
            "seed": episode.sampling.seed,
        },
    )


def _edit(log: _Transcript, harness: Harness, final: bool) -> Generator[Request, Completion, None]:
    """Let the harness edit before the next turn, after a summary by the policy where it wants one."""
    summary = None
    if harness.wants_summary(log.history.live_view(), log.state(None, final)):
        log.close()
        log.add(chat.summary_request(), "ask")
        log.add(chat.cue("Note"), "cue")
        yield from log.sample("summarise")
        turn = len(log.turns) - 1
        ids = log.turns[turn].completion_ids
        summary = (turn, ids[:-1] if len(ids) and ids[-1] == log.end else ids)
    edit = harness.edit(log.history.live_view(), log.state(summary, final))
    if edit is not None:
        log.apply(edit)


class _Transcript:
    """The record while it grows: ``H_T`` with its live view, what each stretch of it is, turns and edits."""

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams, rollout_id: str):
        self.tokenizer, self.rollout_id = tokenizer, rollout_id
        self.history = History()
        self.spans: list[Span] = []
        self.turns: list[Turn] = []
        self.edits: list[Edit] = []
        self.step = 0
        self.last_text = ""
        self.end = tokenizer.token_to_id(chat.END)
        stops = [tokenizer.token_to_id(token) for token in (chat.END, chat.END_OF_TEXT)]
        self.sampling = replace(sampling, stop_ids=tuple(stop for stop in stops if stop is not None))
        self.seeds = np.random.SeedSequence(sampling.seed)

    def encode(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def live_ids(self) -> np.ndarray:
        return np.concatenate([np.zeros(0, np.int32), *self.history.ids])[self.history.live_view()]

    def state(self, summary: tuple[int, np.ndarray] | None, final: bool) -> EditorState:
        return EditorState(
            turn=len(self.turns),
            spans=tuple(self.spans),
            edits=tuple(self.edits),
            last_text=self.last_text,
            summary=summary,
            final=final,
            encode=self.encode,
        )

    def add(self, text: str, kind: str, name: str | None = None) -> None:
        """Text of the harness's own at the end of the context."""
        positions = self.history.append(self.encode(text))
        self.history.place_last(positions)
        self._mark(kind, positions, name)

    def close(self) -> None:
        """End the last message, as far as the policy has not done so itself."""
        tail = self.tokenizer.decode(list(self.live_ids()[-2:]), skip_special_tokens=False)
        if not tail.endswith(f"{chat.END}\n"):
            self.add("\n" if tail.endswith(chat.END) else f"{chat.END}\n", "close")

    def _mark(self, kind: str, positions: np.ndarray, name: str | None = None) -> None:
        if len(positions):
            self.spans.append(Span(kind, int(positions[0]), int(positions[-1]) + 1, self.step, name))

    def sample(self, purpose: str) -> Generator[Request, Completion, str]:
        """One turn of the policy on the live view; returns its text."""
        prompt = self.live_ids()
        (child,) = self.seeds.spawn(1)
        sampling = replace(self.sampling, seed=int(child.generate_state(1)[0]))
        completion = yield prompt, sampling
        turn = Turn(
            prompt_ids=prompt,
            completion_ids=completion.ids,
            logprobs=completion.logprobs,
            purpose=purpose,
            finish_reason=completion.finish_reason,
            sampling=sampling.recorded(),
            policy_version=completion.policy_version,
        )
        positions = self.history.append(completion.ids, len(self.turns))
        self.history.place_last(positions)
        ended = len(completion.ids) > 0 and completion.ids[-1] == self.end
        self._mark("sampled", positions[:-1] if ended else positions)
        self._mark("close", positions[-1:] if ended else positions[:0])
        self.turns.append(turn)
        self.last_text = self.tokenizer.decode(list(completion.ids), skip_special_tokens=True)
        return self.last_text

    def apply(self, edit: Edit) -> None:
        before = self.history.length
        apply_edit(self.history, edit, self.rollout_id, f"edits[{len(self.edits)}]")
        self._mark("inserted", np.arange(before, self.history.length), edit.stored_as)
        self.edits.append(edit)
