"""The shipped rollouts are what their data card says, and their script makes more of the kind."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer

from mwjax import model, rollouts, tree
from mwjax.harness import make_task
from mwjax.harness.villages import reward
from mwjax.quickstart import load_quickstart_rollouts_path, sample, tokenizer_path
from mwjax.rollouts import Rollout
from tests.harness_replay import replay

VOCABULARY = 49152
TOKENIZER = Tokenizer.from_file(str(tokenizer_path()))
READ = rollouts.read(load_quickstart_rollouts_path(), vocab_size=VOCABULARY)
SHIPPED = READ.rollouts


@pytest.mark.parametrize("rollout", SHIPPED, ids=lambda rollout: rollout.id)
def test_edits_explain_every_prompt(rollout: Rollout) -> None:
    text = replay(rollout)
    built = tree.build(rollout)
    union = built.unions["main"].ids
    assert [int(id) for id in union] == [token.id for token in sorted(text, key=lambda token: token.number)]
    # Views by brute force: a new one where the prompt is not a continuation of what was there before.
    views: list[list[int]] = []
    for turn in rollout.turns:
        prompt = list(turn.prompt_ids)
        if views and prompt[: len(views[-1])] == views[-1]:
            views.pop()
        views.append([*prompt, *turn.completion_ids])
    assert [list(view.ids) for view in built.views] == views
    assert len(built.junctions) == len(rollout.edits) == len(views) - 1


@pytest.mark.parametrize("rollout", SHIPPED, ids=lambda rollout: rollout.id)
def test_every_turn_is_sampled_and_scored(rollout: Rollout) -> None:
    for turn in rollout.turns:
        assert turn.logprobs is not None and len(turn.logprobs) == len(turn.completion_ids) > 0
        assert np.isfinite(turn.logprobs).all() and (turn.logprobs <= 0).all()
        assert len(turn.prompt_ids) + len(turn.completion_ids) <= 512
        assert turn.sampling.temperature == 1 and turn.sampling.logprobs == "raw" and turn.policy_version == 0
        assert turn.trainable and turn.finish_reason in ("stop", "length")
    task = make_task(int(rollout.meta["task"].rsplit("-", 1)[1]))
    last = rollout.turns[-1]
    assert rollout.meta["answer"] == TOKENIZER.decode(list(last.completion_ids))
    assert (rollout.meta["question"], rollout.meta["gold"]) == (task.question, task.answer)
    assert rollout.reward == reward(task, rollout.meta["answer"], last.finish_reason == "stop")


def test_counts_are_those_of_the_data_card() -> None:
    assert READ.refused == []
    card = (load_quickstart_rollouts_path().parent / "DATA_CARD.md").read_text(encoding="utf-8")
    turns = [turn for rollout in SHIPPED for turn in rollout.turns]
    sampled = sum(len(turn.completion_ids) for turn in turns)
    assert (
        f"{len(SHIPPED)} recorded agent rollouts" in card and f"{len(turns)} turns, {sampled:,} sampled tokens" in card
    )
    assert Counter(Counter(rollout.group for rollout in SHIPPED).values()) == {4: 12}
    assert [rollout.meta["seed"] for rollout in SHIPPED] == list(range(48))
    rewards: dict[str | None, set[float | None]] = {}
    for rollout in SHIPPED:
        rewards.setdefault(rollout.group, set()).add(rollout.reward)
    assert f"differ within {sum(len(found) > 1 for found in rewards.values())} of the 12 groups" in card
    for harness in ("none", "pop", "fold", "offload"):
        mine = [rollout for rollout in SHIPPED if rollout.meta["harness"] == harness]
        built = [tree.build(rollout) for rollout in mine]
        evicted = [sum(high - low for low, high in edit.evicted) for rollout in mine for edit in rollout.edits]
        cut = [turn.finish_reason == "length" for rollout in mine for turn in rollout.turns]
        means = (
            np.mean([len(rollout.turns) for rollout in mine]),
            np.mean([len(one.junctions) for one in built]),
            np.mean(evicted) if evicted else None,
            np.mean([one.sampled.diverging.sum() for one in built]),
            np.mean([len(one.sampled.token) for one in built]),
            np.mean([len(one.unions["main"].ids) for one in built]),
            np.mean([len(view.ids) for one in built if (view := one.compressed)]),
            max(len(view.ids) for one in built for view in one.views),
        )
        shown = ["-" if mean is None else str(int(mean + 0.5)) for mean in means]
        by_reward = Counter(rollout.reward for rollout in mine)
        ends = [f"{sum(cut)} of {len(cut)} turns", " / ".join(str(by_reward[value]) for value in (1.0, 0.2, 0.0))]
        (line,) = re.findall(rf"^\| {harness} \| (.*) \|$", card, re.MULTILINE)
        assert line.split(" | ") == [str(len(mine)), *shown, *ends]


def test_the_script_plays_with_any_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = model.small_config(VOCABULARY, layers=1, width=16, heads=2, key_value_heads=1)
    model.save(tmp_path, config, model.init(config, jax.random.key(0)))
    sample.write_tokenizer(tokenizer_path().parent, tmp_path / "tokenizer.json")
    assert (tmp_path / "tokenizer.json").read_bytes() == tokenizer_path().read_bytes()
    out = tmp_path / "new.jsonl.gz"
    options = ["--harness", "fold", "--task", "3", "--group-size", "2", "--max-tokens", "8", "--seed", "5"]
    assert sample.main(["--out", str(out), "--model", str(tmp_path), *options]) == 0
    assert "2 rollouts" in capsys.readouterr().out
    found = rollouts.read(out, vocab_size=VOCABULARY).rollouts
    assert [(rollout.id, rollout.group, rollout.meta["seed"]) for rollout in found] == [
        ("fold-3-0", "fold-3", 5),
        ("fold-3-1", "fold-3", 6),
    ]
    for rollout in found:
        replay(rollout)
        assert rollout.meta["model"] == tmp_path.name
        assert [edit.replacement_from[0] for edit in rollout.edits if edit.replacement_from] == [3, 5]
    assert sample.main(["--out", str(out), "--model", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err
