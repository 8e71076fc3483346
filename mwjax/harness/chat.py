"""The text of an episode in ChatML, piece by piece. Pieces are tokenised apart: sampled text is never re-encoded."""

from __future__ import annotations

from mwjax.harness.villages import QUESTIONS, Task, Village

END = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"

SYSTEM = "You look up villages one by one, copy what you find, then answer."
_EXAMPLE = (Village("Sandwick", "rope", "Sunday", "Jo Bell"), Village("Elm Row", "salt", "Friday", "Al Reed"))


def message(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}{END}\n"


def opening(task: Task) -> str:
    """System prompt, a worked example of the same kind of question, and the task."""
    first, second = _EXAMPLE
    question = QUESTIONS[task.attribute].format(first.name)
    dialogue = (
        ("user", f"Question: {question}\nVillages: {first.name}, {second.name}."),
        ("assistant", f"Lookup: {first.name}"),
        ("user", first.document()),
        ("assistant", _note(first)),
        ("user", second.document()),
        ("assistant", _note(second)),
        ("user", f"Question: {question}"),
        ("assistant", f"Answer: {first.name}, {task.attribute}: {getattr(first, task.attribute)}"),
        ("user", f"Question: {task.question}\nVillages: {', '.join(task.villages)}."),
    )
    return message("system", SYSTEM) + "".join(message(role, text) for role, text in dialogue)


def _note(village: Village) -> str:
    return f"Note: {village.name}, product: {village.product}, market: {village.market}, mayor: {village.mayor}"


def cue(words: str) -> str:
    """The start of the policy's message, given to it; it goes on after the colon."""
    return f"<|im_start|>assistant\n{words}:"


def answer_cue(task: Task) -> str:
    return cue(f"Answer: {task.asked}, {task.attribute}")


def result(task: Task, name: str) -> str:
    return message("user", task.villages[name].document())


def final_question(task: Task) -> str:
    return message("user", f"Question: {task.question}")


def summary_request() -> str:
    return message("user", "Sum up all your notes in one line.")


def stub(name: str) -> str:
    return message("user", f"({name}: stored)")
