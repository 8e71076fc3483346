"""H_T and the live view of a rollout by brute force: a list of tokens, walked through one by one."""

from __future__ import annotations

from dataclasses import dataclass

from mwjax.rollouts import Rollout


@dataclass
class Token:
    number: int
    id: int
    live: bool = True


def replay(rollout: Rollout) -> list[Token]:
    """The text of the main chain with everything that ever was in it; asserts that the edits explain every prompt."""
    text: list[Token] = []

    def by_number(number: int) -> Token:
        (found,) = [token for token in text if token.number == number]
        return found

    for index, turn in enumerate(rollout.turns):
        assert turn.chain == "main"
        for edit in (edit for edit in rollout.edits if edit.before_turn == index):
            assert index > 0
            length = len(text)
            for low, high in edit.evicted:
                assert 0 <= low < high <= length
                for number in range(low, high):
                    token = by_number(number)
                    assert token.live
                    token.live = False
            new = [Token(length + offset, int(id)) for offset, id in enumerate(edit.replacement_ids)]
            if edit.replacement_from is not None:
                source, low, high = edit.replacement_from
                assert source < index
                assert list(rollout.turns[source].completion_ids[low:high]) == [token.id for token in new]
            if new:
                assert edit.inserted_at is not None
                at, passed = 0, 0
                while passed < edit.inserted_at:
                    passed += text[at].live
                    at += 1
                text[at:at] = new
            for low, high in edit.restored:
                assert 0 <= low < high <= length
                for number in range(low, high):
                    token = by_number(number)
                    assert not token.live
                    token.live = True
        kept = [token.id for token in text if token.live]
        prompt = [int(id) for id in turn.prompt_ids]
        assert prompt[: len(kept)] == kept, f"{rollout.id}: turn {index}"
        for id in [*prompt[len(kept) :], *turn.completion_ids]:
            text.append(Token(len(text), int(id)))
    return text
