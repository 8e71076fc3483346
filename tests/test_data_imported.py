"""What was imported from messages is kept out of training where it is not what a model saw and sampled."""

from __future__ import annotations

import dataclasses

import pytest

from mwjax import rollouts
from mwjax.data import Layout, pack_rollouts, scan
from mwjax.rollouts import PackedRollouts
from mwjax.tree import RowShape
from tests.random_rollouts import simulate

RENDERED = {"rendered": {"tokenizer": "tokenizer.json"}}
INCOMPLETE = {**RENDERED, "context_incomplete": ["system prompt", "tool list"]}


@pytest.fixture
def dataset(tmp_path):
    metas = [{}, RENDERED, INCOMPLETE]
    made = [
        dataclasses.replace(simulate(seed, name=f"r{seed}").rollout, meta=meta, reward=float(seed))
        for seed, meta in enumerate(metas)
    ]
    path = tmp_path / "rollouts.jsonl"
    rollouts.write(path, made)
    return str(path)


def layout(**changes):
    return Layout("packed", RowShape(160, 160), **changes)


def test_sft_takes_rendered_rollouts_but_not_those_whose_context_is_not_known(dataset):
    index = scan([dataset], layout())
    assert index.ids == ("r0", "r1")
    (refusal,) = index.refused
    assert (refusal.line, refusal.field) == (3, "meta.context_incomplete")
    assert "does not hold the system prompt, the tool list" in refusal.reason


def test_a_policy_gradient_refuses_ids_that_were_not_sampled(dataset):
    index = scan([dataset], layout(ratios=True))
    assert index.ids == ("r0",)
    assert {(refusal.line, refusal.field) for refusal in index.refused} == {
        (2, "meta.rendered"),
        (3, "meta.context_incomplete"),
    }


def test_packed_sets_are_asked_as_well(dataset, tmp_path):
    packed = tmp_path / "packed"
    pack_rollouts([dataset], packed)
    assert len(PackedRollouts(packed)) == 3
    assert scan([str(packed)], layout()).ids == ("r0", "r1")
    assert scan([str(packed)], layout(ratios=True)).ids == ("r0",)  # not the measurements of the scan before


def test_nothing_left_to_train_on_says_why(dataset, tmp_path):
    found = rollouts.read(dataset).rollouts[1:]
    path = tmp_path / "rendered.jsonl"
    rollouts.write(path, found)
    with pytest.raises(ValueError, match=r"no usable rollout .* 2 refused; the first reason: .*meta\.rendered"):
        scan([str(path)], layout(ratios=True))
