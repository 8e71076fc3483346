"""Episodes under every editor, played by engines that sample made-up tokens: what is recorded is what happened."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mwjax import tree
from mwjax.engine import Completion, SamplingParams
from mwjax.harness import HARNESSES, Episode, make_task, run_episode, run_episodes
from mwjax.harness.editors import fold, offload, pop
from mwjax.harness.state import Harness
from mwjax.quickstart import tokenizer_path
from mwjax.rollouts import Rollout
from tests.harness_replay import replay

TOKENIZER = Tokenizer.from_file(str(tokenizer_path()))
END = TOKENIZER.token_to_id("<|im_end|>")
TASK = make_task(0)
NAMES = list(TASK.villages)


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def decode(ids: np.ndarray) -> str:
    return TOKENIZER.decode(list(ids), skip_special_tokens=False)


class ScriptedEngine:
    """Says the given texts in turn; "|" at the end of one stands for the end-of-message token."""

    def __init__(self, texts: Sequence[str]):
        self.texts = iter(texts)
        self.seeds: list[int] = []

    def generate(
        self, batch: Sequence[Sequence[int] | np.ndarray], sampling: SamplingParams | Sequence[SamplingParams]
    ) -> list[Completion]:
        assert not isinstance(sampling, SamplingParams)
        return [self.answer(one) for one in sampling]

    def answer(self, sampling: SamplingParams) -> Completion:
        assert sampling.stop_ids[0] == END
        self.seeds.append(sampling.seed)
        text = next(self.texts)
        ids = encode(text.removesuffix("|")) + [END] * text.endswith("|")
        reason = "stop" if text.endswith("|") else "length"
        return Completion(np.array(ids, np.int32), -np.arange(1.0, len(ids) + 1), reason, 5)


class RandomEngine(ScriptedEngine):
    """Samples ordinary tokens and village names; completions end by themselves or by length, some at once."""

    def __init__(self, seed: int):
        super().__init__(())
        self.random = np.random.default_rng(seed)

    def answer(self, sampling: SamplingParams) -> Completion:
        ids = list(self.random.integers(20, 49152, self.random.integers(0, 12)))
        if self.random.random() < 0.4:
            ids += encode(" " + str(self.random.choice(NAMES)))
        ended = not ids or self.random.random() < 0.6
        ids = [*ids, END] if ended else ids
        return Completion(np.array(ids, np.int32), np.full(len(ids), -0.5), "stop" if ended else "length", 0)


def play(harness: Harness, texts: Sequence[str]) -> Rollout:
    engine = ScriptedEngine(texts)
    rollout = run_episode(engine, TOKENIZER, Episode("r", TASK, harness, SamplingParams(seed=3), group="g"))
    assert next(engine.texts, None) is None and len(set(engine.seeds)) == len(rollout.turns)
    replay(rollout)
    return rollout


NOTES = [f" {NAMES[1]}|", " note one|", " note two", " note three|"]
GOLD = f" {TASK.answer}|"


def documents_in(text: str) -> list[str]:
    """Villages of the task whose document is in the text, in its order."""
    found = [name for name in NAMES if TASK.villages[name].document() in text]
    return sorted(found, key=lambda name: text.index(TASK.villages[name].document()))


ORDER = [NAMES[1], NAMES[0], NAMES[2]]  # the one named first, then the rest as listed


def test_none_only_grows() -> None:
    rollout = play(HARNESSES["none"](), [*NOTES, GOLD])
    assert rollout.edits == () and rollout.reward == 1.0 and rollout.group == "g"
    assert [turn.purpose for turn in rollout.turns] == ["act"] * 5
    for before, after in zip(rollout.turns, rollout.turns[1:]):
        whole = np.concatenate([before.prompt_ids, before.completion_ids])
        np.testing.assert_array_equal(after.prompt_ids[: len(whole)], whole)
    text = decode(rollout.turns[-1].prompt_ids)
    assert documents_in(text) == ORDER
    assert text.endswith(f"Question: {TASK.question}<|im_end|>\n<|im_start|>assistant\nAnswer: {TASK.asked}, product:")
    # A message cut off by length is ended by the harness, one that ended itself is not ended twice.
    assert " note one<|im_end|>\n<|im_start|>user" in text and " note two<|im_end|>\n<|im_start|>user" in text
    first = rollout.turns[0]
    assert (first.policy_version, first.finish_reason, first.sampling.logprobs) == (5, "stop", "raw")
    np.testing.assert_array_equal(first.logprobs, -np.arange(1.0, len(first.completion_ids) + 1))


def test_pop_removes_the_oldest_result_outright() -> None:
    rollout = play(pop(), [*NOTES, GOLD])
    assert [edit.before_turn for edit in rollout.edits] == [3, 4]
    assert [documents_in(decode(turn.prompt_ids)) for turn in rollout.turns] == [
        [],
        ORDER[:1],
        ORDER[:2],
        ORDER[1:],
        ORDER[2:],
    ]
    for edit, name in zip(rollout.edits, ORDER):
        ((low, high),) = edit.evicted
        evicted = [token.id for token in sorted(replay(rollout), key=lambda token: token.number)][low:high]
        document = TASK.villages[name].document()
        assert decode(np.array(evicted)) == f"<|im_start|>user\n{document}<|im_end|>\n"
    assert " note one" in decode(rollout.turns[-1].prompt_ids)


def test_fold_puts_the_policys_own_tokens_in_place_of_what_it_sums_up() -> None:
    rollout = play(fold(budget=275), [*NOTES[:3], " sum of one and two|", " note three|", " sum of the sum", GOLD])
    assert [turn.purpose for turn in rollout.turns] == ["act"] * 3 + ["summarise", "act", "summarise", "act"]
    first, second = rollout.edits
    assert (first.before_turn, first.replacement_from) == (4, (3, 0, len(rollout.turns[3].completion_ids) - 1))
    assert (second.before_turn, second.replacement_from) == (6, (5, 0, len(rollout.turns[5].completion_ids)))
    opening = decode(rollout.turns[0].prompt_ids)
    head = f"{opening} {NAMES[1]}<|im_end|>\n<|im_start|>assistant\nNote: "
    lookup = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\nNote:"
    step = {name: lookup.format(TASK.villages[name].document()) for name in NAMES}
    kept = f"<|im_end|>\n{step[ORDER[1]]} note two<|im_end|>\n"
    assert decode(rollout.turns[4].prompt_ids) == f"{head}sum of one and two{kept}{step[ORDER[2]]}"
    question = f"<|im_start|>user\nQuestion: {TASK.question}<|im_end|>\n<|im_start|>assistant\nAnswer: {TASK.asked}"
    kept = f"<|im_end|>\n{step[ORDER[2]]} note three<|im_end|>\n"
    assert decode(rollout.turns[6].prompt_ids) == f"{head}sum of the sum{kept}{question}, product:"


def test_an_empty_summary_still_folds() -> None:
    rollout = play(fold(budget=275), [*NOTES[:3], "|", " note three|", "|", GOLD])
    assert all(edit.evicted and not len(edit.replacement_ids) for edit in rollout.edits)
    assert all(edit.replacement_from is None and edit.inserted_at is None for edit in rollout.edits)


def test_fold_without_a_kept_step() -> None:
    texts = [*NOTES[:2], " all|", " note two", " all two|", " note three|", " all three|", GOLD]
    rollout = play(fold(budget=200, keep_last=0), texts)
    assert [edit.before_turn for edit in rollout.edits] == [3, 5, 7]
    shown = [documents_in(decode(rollout.turns[turn].prompt_ids)) for turn in (3, 5, 7)]
    assert shown == [ORDER[1:2], ORDER[2:], []]
    assert "Note: all three<|im_end|>\n<|im_start|>user\nQuestion" in decode(rollout.turns[7].prompt_ids)


def test_short_contexts_are_not_folded() -> None:
    rollout = play(fold(budget=2000), [*NOTES, GOLD])
    assert rollout.edits == ()


def test_offload_leaves_stubs_and_restores_everything_before_the_answer() -> None:
    rollout = play(offload(), [*NOTES, GOLD])
    assert [(e.before_turn, e.author, e.trigger, e.stored_as) for e in rollout.edits] == [
        (2, "harness", "count", ORDER[0]),
        (3, "harness", "count", ORDER[1]),
        (4, "harness", "terminal", None),
    ]
    shown = [decode(turn.prompt_ids) for turn in rollout.turns]
    assert [documents_in(text) for text in shown] == [[], *([name] for name in ORDER), ORDER]
    assert f"({ORDER[0]}: stored)" in shown[3] and f"({ORDER[1]}: stored)" in shown[3] and "stored" not in shown[4]
    # Restored text stands where it was: the last prompt is what it would have been without any edit.
    assert shown[4] == decode(play(HARNESSES["none"](), [*NOTES, GOLD]).turns[-1].prompt_ids)


def test_offload_retrieves_what_the_policy_names() -> None:
    rollout = play(offload(), [*NOTES[:2], f" see {ORDER[0]}", " note three|", GOLD])
    retrieval = rollout.edits[1]
    assert (retrieval.before_turn, retrieval.author, retrieval.trigger) == (3, "policy", "model")
    assert documents_in(decode(rollout.turns[3].prompt_ids)) == ORDER
    # Nothing is stored any more when the answer is due.
    assert len(rollout.edits) == 2 and documents_in(decode(rollout.turns[4].prompt_ids)) == ORDER


@settings(max_examples=25, derandomize=True, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    harness=st.sampled_from(
        [pop(0), pop(1), offload(0), offload(1), fold(200, 0), fold(250, 1), fold(300, 2), HARNESSES["none"]()]
    ),
)
def test_any_policy_leaves_a_consistent_record(seed: int, harness: Harness) -> None:
    episode = Episode("r", TASK, harness, SamplingParams(seed=seed))
    rollout = run_episode(RandomEngine(seed), TOKENIZER, episode)
    text = replay(rollout)
    built = tree.build(rollout)
    assert len(built.unions["main"].ids) == len(text)
    last = rollout.turns[-1]
    assert [token.id for token in text if token.live] == [*last.prompt_ids, *last.completion_ids]
    for turn in rollout.turns:
        # Messages are whole: one begins only at the start or after the end of another.
        shown = decode(turn.prompt_ids)
        assert (
            shown.count("<|im_start|>") == shown.count("<|im_end|>\n<|im_start|>") + 1 == shown.count("<|im_end|>") + 1
        )


def test_episodes_played_together_are_those_played_alone() -> None:
    episodes = [Episode(name, TASK, HARNESSES[name](), SamplingParams(seed=8)) for name in HARNESSES]
    notified: list[int] = []

    class Echo(ScriptedEngine):
        """The completion is a function of the prompt's length."""

        def generate(
            self, batch: Sequence[Sequence[int] | np.ndarray], sampling: SamplingParams | Sequence[SamplingParams]
        ) -> list[Completion]:
            return [
                Completion(
                    np.array([*encode(f" {len(prompt)}"), END], np.int32),
                    np.full(len(str(len(prompt))) + 2, -1.0),
                    "stop",
                )
                for prompt in batch
            ]

    together = run_episodes(Echo(()), TOKENIZER, episodes, notified.append)
    assert sum(notified) == sum(len(rollout.turns) for rollout in together)
    for episode, rollout in zip(episodes, together):
        alone = run_episode(Echo(()), TOKENIZER, episode)
        assert rollout.id == alone.id == episode.id and rollout.meta == alone.meta
        for one, other in zip(rollout.turns, alone.turns, strict=True):
            np.testing.assert_array_equal(one.prompt_ids, other.prompt_ids)
            np.testing.assert_array_equal(one.completion_ids, other.completion_ids)


@pytest.mark.parametrize("seed", [0, 1])
def test_every_turn_of_every_episode_has_its_own_seed(seed: int) -> None:
    seen: list[int] = []
    for number in range(3):
        engine = ScriptedEngine([*NOTES, GOLD])
        sampling = SamplingParams(seed=seed * 100 + number)
        run_episode(engine, TOKENIZER, Episode("r", TASK, HARNESSES["none"](), sampling))
        seen += engine.seeds
    assert len(set(seen)) == len(seen) == 15
