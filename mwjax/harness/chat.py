"""The text of an episode in ChatML, piece by piece. Pieces are tokenised apart: sampled text is never re-encoded."""

from __future__ import annotations

from mwjax.harness.villages import Task

END = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"

SYSTEM = "You answer questions about villages. Look them up one by one and note what matters."
_EXAMPLE = (
    ("user", "Question: On which day is the market in Sandwick?\nVillages: Elm Row, Sandwick."),
    ("assistant", "Lookup: Sandwick"),
    ("user", "Sandwick lies on a cliff and makes rope. Its market is on Sunday. Its mayor is Jo Bell."),
    ("assistant", "Note: Sandwick makes rope, market on Sunday, mayor Jo Bell."),
    ("user", "Question: On which day is the market in Sandwick?"),
    ("assistant", "Answer: Sunday"),
)


def message(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}{END}\n"


def opening(task: Task) -> str:
    """System prompt, one worked example, and the task."""
    example = "".join(message(role, text) for role, text in _EXAMPLE)
    return (
        message("system", SYSTEM)
        + example
        + message("user", f"Question: {task.question}\nVillages: {', '.join(task.documents)}.")
    )


def cue(word: str) -> str:
    """The start of the policy's message, given to it; it goes on from here."""
    return f"<|im_start|>assistant\n{word}:"


def result(task: Task, name: str) -> str:
    return message("user", task.documents[name])


def final_question(task: Task) -> str:
    return message("user", f"Question: {task.question}")


def summary_request() -> str:
    return message("user", "Sum up all your notes in one line.")


def stub(name: str) -> str:
    return message("user", f"({name}: stored)")
