"""Texts found inside others, and logs of many calls told apart in time that grows with their size, not its square."""

from __future__ import annotations

import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mwjax.rollouts.readers.chains import conversations
from mwjax.rollouts.readers.contained import Contained
from mwjax.rollouts.readers.engine_call import Call
from mwjax.rollouts.readers.said import Asked, Said

TEXT = st.text(alphabet="ab\ud800é😀", max_size=40)


@given(st.lists(TEXT, max_size=8), TEXT)
def test_what_is_found_is_what_a_search_for_each_finds(texts, other):
    assert Contained(texts).inside(other) == {text for text in texts if text and text in other}


def test_texts_longer_than_any_window_are_compared_to_their_end():
    long = "x" * 5000 + "y" + "x" * 5000
    assert Contained([long, long + "z"]).inside(f"-{long}-") == {long}


def episode(number, size):
    """Two calls of an episode and one for its title, in a log of many that share root and wording."""
    system, first = "You are an agent that works.", Said("user", f"Where is the beacon of island {number}?")
    answer = Said("assistant", f"I will look into the map of island {number} next.")
    opening = np.array([1, 2, 3, 100 + number], np.int32)
    later = np.concatenate([opening, [7, 8, 9]]).astype(np.int32)
    title = np.array([5, 100 + number], np.int32)
    asked = [
        (opening, [7, 8], Asked(system, (first,), ("read",)), answer),
        (title, [9], Asked("A title, please.", (Said("user", f"For: {first.text}"),), ()), Said("assistant", "Beacon")),
        (later, [4], Asked(system, (first, answer, Said("tool", "A map.")), ("read",)), Said("assistant", "There.")),
    ]
    for place, (prompt, completion, question, said) in enumerate(asked):
        record = place * size + number + 1  # all first calls, then all titles, then all later calls
        yield Call(record, record, prompt, np.array(completion, np.int32), asked=question, answer=said)


def test_thousands_of_episodes_without_a_session_are_told_apart_in_seconds():
    size = 1500
    calls = sorted((call for number in range(size) for call in episode(number, size)), key=lambda call: call.record)
    began = time.monotonic()
    found = conversations(calls, one=False)
    assert time.monotonic() - began < 20  # comparing each call with each takes minutes
    assert len(found) == size
    for number, conversation in enumerate(found):
        assert [call.record for call in conversation.calls] == [number + 1 + place * size for place in range(3)]
        assert [turn.chain for turn in conversation.turns] == ["main", "title-1", "main"]
