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
PLACES = ("on a hill", "by a lake", "in a deep forest", "near the old quarry", "on the coast", "beside a slow river")
NEWS = (
    "A new bridge was opened last spring.", "The school has two teachers.", "The old mill burned down long ago.",
    "A bus comes twice a day.", "Its church tower leans to the left.", "The inn is closed in winter.",
)  # fmt: skip

# Most words an answer in the right form has.
LONGEST_ANSWER = 8
FORM_REWARD = 0.2


@dataclass(frozen=True)
class Task:
    """A question, its exact answer, and the archive's documents by name, in the order in which they are listed."""

    id: str
    question: str
    answer: str
    documents: Mapping[str, str]


def make_task(index: int, seed: int = 0, documents: int = 3) -> Task:
    """Task number ``index`` of a seed; the kind of question goes round: market day, mayor, maker, day by product."""
    draw = random.Random(f"villages/{seed}/{index}")
    names = draw.sample(VILLAGES, documents)
    products, days = draw.sample(PRODUCTS, documents), draw.sample(DAYS, documents)
    mayors, places = draw.sample(MAYORS, documents), draw.sample(PLACES, documents)
    news = draw.sample(NEWS, documents)
    texts = {
        name: f"{name} lies {place} and makes {product}. Its market is on {day}. Its mayor is {mayor}. {extra}"
        for name, place, product, day, mayor, extra in zip(names, places, products, days, mayors, news)
    }
    asked = draw.randrange(documents)
    question, answer = (
        (f"On which day is the market in {names[asked]}?", days[asked]),
        (f"Who is the mayor of {names[asked]}?", mayors[asked]),
        (f"Which village makes {products[asked]}?", names[asked]),
        (f"On which day is the market in the village that makes {products[asked]}?", days[asked]),
    )[index % 4]
    return Task(f"villages-{seed}-{index}", question, answer, texts)


def next_document(task: Task, text: str, seen: Sequence[str]) -> str | None:
    """The document to show next: the unseen one that ``text`` names first, else the next unseen one of the list."""
    unseen = [name for name in task.documents if name not in seen]
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
