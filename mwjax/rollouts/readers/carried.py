"""Texts that the calls of a session carry to one another: an answer that comes back, a task that is handed over."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence

from mwjax.rollouts.readers.contained import Contained
from mwjax.rollouts.readers.engine_call import Call
from mwjax.rollouts.readers.said import Asked, Said

SHORTEST_CARRIED = 16  # characters; shorter texts occur by chance
TASK_WORDS = 4
SHORTEST_TASK = 2 * TASK_WORDS - 1  # characters of as many words

_CLOSED = re.compile(r"</([\w-]+)>\Z")


class Texts:
    """Who said what in a session: for each text, the calls that answered it, or whose tool calls hand it over."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = calls
        self.answered: dict[str, list[int]] = {}
        for index in range(len(calls)):
            for text in self.answers(index):
                self.answered.setdefault(text, []).append(index)
        self._answers = Contained(self.answered)
        tasks = (call.asked.first_user.strip() for call in calls if call.asked is not None)
        self._tasks = Contained(task for task in tasks if len(task) >= SHORTEST_CARRIED)
        self._handed_over: dict[str, list[int]] = {}
        self._endings: dict[str, list[tuple[str, int]]] = {}
        for index, call in enumerate(calls):
            for _, arguments in call.answer.calls if call.answer is not None else ():
                for task in self._tasks.inside(_unescaped(arguments)):
                    self._handed_over.setdefault(task, []).append(index)
                for value in _values(arguments):
                    self._endings.setdefault(value[-SHORTEST_TASK:], []).append((value, index))

    def answers(self, index: int) -> list[str]:
        """What a later call may hold of this one's answer: all of it, or the block in tags with which it ends, such as
        ``<summary>``, whose tags harnesses take off."""
        answer = self.calls[index].answer
        whole = "" if answer is None else answer.text.strip()
        found = [whole]
        if closed := _CLOSED.search(whole):
            _, opened, block = whole[: closed.start()].partition(f"<{closed[1]}>")
            found += [block.strip()] if opened else []
        return [text for text in found if len(text) >= SHORTEST_CARRIED]

    def task(self, index: int) -> str:
        """The first user message of a call."""
        asked = self.calls[index].asked
        return "" if asked is None else asked.first_user.strip()

    def carried(self, messages: Iterable[Said]) -> set[str]:
        """The answers, of any call, that these messages hold."""
        return {answer for each in messages for answer in self._answers.inside(each.text)}

    def said(self, index: int) -> list[tuple[str, str]]:
        """By what a later call of the conversation can be known: this call's answers, and its first user message."""
        asked = self.calls[index].asked
        answers = [("answer", text) for text in self.answers(index)]
        return answers if asked is None else [*answers, ("user", asked.first_user)]

    def hints(self, index: int) -> list[tuple[str, str]]:
        """What this call's messages hold of other calls: ``said``, where it is no opening, which episodes may share."""
        asked = self.calls[index].asked
        if asked is None:
            return []
        opening = not any(each.role in ("assistant", "tool") for each in asked.messages)
        carried = [("answer", answer) for answer in self.carried(asked.messages)]
        return carried if opening else [*carried, ("user", asked.first_user)]

    def handed_over_by(self, index: int) -> int | None:
        """The latest earlier call whose tool call holds the first user message of this one, before which a harness may
        have put words of its own: a sub-agent's task. What a call of the same root was itself asked first is none:
        whoever searches for the question in its own words hands nothing over."""
        asked, task = self.calls[index].asked, self.task(index)
        if asked is None or len(task) < SHORTEST_CARRIED:
            return None
        whole = self._handed_over.get(task, [])
        ends = [k for value, k in self._endings.get(task[-SHORTEST_TASK:], ()) if task.endswith(value)]
        return max((k for k in (*whole, *ends) if k < index and not self._asked_the_same(k, asked)), default=None)

    def _asked_the_same(self, index: int, asked: Asked) -> bool:
        known = self.calls[index].asked
        return known is not None and self.task(index) == asked.first_user.strip() and known.same_root(asked)


def _values(arguments: str) -> Iterator[str]:
    """The texts among a tool call's arguments that could be a task: fewer words could be a path or a command that a
    prompt happens to end with."""
    try:
        values = json.loads(arguments)
    except ValueError:
        return
    for each in values.values() if isinstance(values, dict) else ():
        if isinstance(each, str) and len(each.split()) >= TASK_WORDS:
            yield each


def _unescaped(arguments: str) -> str:
    return arguments.replace("\\n", "\n").replace('\\"', '"').replace("\\\\", "\\")
