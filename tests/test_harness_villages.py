"""The environment: tasks are fixed by their number, lookups are parsed leniently, answers are judged exactly."""

from __future__ import annotations

import pytest

from mwjax.harness.villages import QUESTIONS, Task, Village, make_task, next_village, reward

VILLAGES = (
    Village("Oakmere", "blue glass", "Monday", "Ada Finch"),
    Village("Fenby", "straw hats", "Friday", "Max Low"),
    Village("Ashford", "goat cheese", "Sunday", "Tom Hale"),
)
TASK = Task("t", "product", "Fenby", {village.name: village for village in VILLAGES})


def test_tasks_are_fixed_by_number_and_seed_and_have_one_answer() -> None:
    tasks = [make_task(index) for index in range(12)]
    assert tasks == [make_task(index) for index in range(12)]
    assert make_task(0, seed=1) != tasks[0]
    for index, task in enumerate(tasks):
        assert task.attribute == list(QUESTIONS)[index % 3]
        values = [getattr(village, task.attribute) for village in task.villages.values()]
        assert len(task.villages) == 3 and values.count(task.answer) == 1
        assert task.answer == getattr(task.villages[task.asked], task.attribute)
        assert task.asked in task.question and task.answer in task.villages[task.asked].document()
        assert [name for name, village in task.villages.items() if village.name != name] == []


@pytest.mark.parametrize(
    ("text", "seen", "expected"),
    [
        (" Ashford", [], "Ashford"),
        (" first FENBY, then Ashford", [], "Fenby"),
        (" Fenby", ["Fenby"], "Oakmere"),
        (" nonsense", ["Oakmere"], "Fenby"),
        ("", ["Oakmere", "Ashford"], "Fenby"),
        (" Oakmere", ["Oakmere", "Fenby", "Ashford"], None),
    ],
)
def test_lookups_are_parsed_leniently(text: str, seen: list[str], expected: str | None) -> None:
    assert next_village(TASK, text, seen) == expected


@pytest.mark.parametrize(
    ("answer", "finished", "expected"),
    [
        (" straw hats", True, 1.0),
        (" Straw hats, market: Friday and so on and so on and so on", False, 1.0),
        (" straw  hats.", True, 1.0),
        (" strawhats", True, 0.2),
        (" hats", True, 0.2),
        (" straws hats", True, 0.2),
        (" hats", False, 0.0),
        ("", True, 0.0),
        (" ...", True, 0.0),
        (" one two three four five six seven eight", True, 0.2),
        (" one two three four five six seven eight nine", True, 0.0),
    ],
)
def test_reward(answer: str, finished: bool, expected: float) -> None:
    assert reward(TASK, answer, finished) == expected
