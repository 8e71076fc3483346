"""A small environment with exact answers: questions about invented villages, looked up one by one in an archive."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

VILLAGES = (
    "Tarn Hollow", "Brackenby", "Moss End", "Stonewick", "Little Ferry", "Oakmere", "Fenby", "Redcliff", "Larkfield",
    "Greywater", "Thornbury", "Ashford", "Millbrook", "Westray", "Holm Sands", "Birchwood", "Eastwell", "Kingsmoor",
)  # fmt: skip
PRODUCTS = (
    "blue glass", "goat cheese", "wooden toys", "apple cider", "wool blankets", "copper pots", "beeswax candles",
    "leather boots", "paper kites", "clay pipes", "silver spoons", "straw hats",
)  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MAYORS = (
    "Ada Finch", "Tom Hale", "Ruth Vane", "Max Low", "Ellen Marsh", "Peter Rowe", "Nora Wells", "Hugh Ross",
    "Lucy Page", "Frank Moon", "Clara Reed", "Simon Gray",
)  # fmt: skip
# Most words an answer in the right form has.
LONGEST_ANSWER = 8
FORM_REWARD = 0.2


# What is asked of a village, by what its documents call it.
QUESTIONS = {
    "product": "What does {} make?",
    "market": "On which day is the market in {}?",
    "mayor": "Who is the mayor of {}?",
}


@dataclass(frozen=True)
class Village:
    name: str
    product: str
    market: str
    mayor: str

    def document(self) -> str:
        """What the archive returns."""
        return f"Village: {self.name}\nproduct: {self.product}\nmarket: {self.market}\nmayor: {self.mayor}"


@dataclass(frozen=True)
class Task:
    """A question about one of a few villages, which are listed; the exact answer is that village's ``attribute``."""

    id: str
    attribute: str
    asked: str
    villages: Mapping[str, Village]

    @property
    def question(self) -> str:
        return QUESTIONS[self.attribute].format(self.asked)

    @property
    def answer(self) -> str:
        return getattr(self.villages[self.asked], self.attribute)


def make_task(index: int, seed: int = 0, count: int = 3) -> Task:
    """Task number ``index`` of a seed, about ``count`` villages; the attribute asked for goes round."""
    draw = random.Random(f"villages/{seed}/{index}")
    columns = [draw.sample(values, count) for values in (VILLAGES, PRODUCTS, DAYS, MAYORS)]
    villages = {name: Village(name, *rest) for name, *rest in zip(*columns)}
    attribute = list(QUESTIONS)[index % len(QUESTIONS)]
    return Task(f"villages-{seed}-{index}", attribute, draw.choice(list(villages)), villages)


def next_village(task: Task, text: str, seen: Sequence[str]) -> str | None:
    """The village to look up next: the unseen one that ``text`` names first, else the next unseen one of the list."""
    unseen = [name for name in task.villages if name not in seen]
    lowered = text.lower()
    named = [name for name in unseen if name.lower() in lowered]
    if named:
        return min(named, key=lambda name: lowered.index(name.lower()))
    return unseen[0] if unseen else None


def reward(task: Task, answer: str, finished: bool) -> float:
    """1 when the answer contains the exact one word for word; else 0.2 for the right form, 0 without it.

    Right form: the policy ended the answer itself (``finished``), in one to eight words. The partial reward is
    MemoryWalker section 5's (0.2 for a wrong answer in the right format).
    """
    words, wanted = _words(answer), _words(task.answer)
    if any(words[at : at + len(wanted)] == wanted for at in range(len(words))):
        return 1.0
    return FORM_REWARD if finished and 1 <= len(words) <= LONGEST_ANSWER else 0.0


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
