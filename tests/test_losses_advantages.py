"""Group advantages by hand, and aggregation weights against the averages they stand for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mwjax.losses.advantages import edge_weights, group_advantages
from mwjax.losses.errors import LossError


def test_by_hand():
    rewards, groups = [1.0, 0.0, 0.0, 1.0, 0.2, 5.0, 0.3, 0.3, 0.3], ["a", "a", "a", "a", "b", "c", "d", "d", "d"]
    std = np.sqrt(4 * 0.25 / 3) + 1e-6
    none = [0.0] * 5
    np.testing.assert_array_equal(group_advantages(rewards, groups, "grpo")[4:], none)
    np.testing.assert_allclose(group_advantages(rewards, groups, "grpo")[:4], np.array([0.5, -0.5, -0.5, 0.5]) / std)
    np.testing.assert_array_equal(group_advantages(rewards, groups, "dr_grpo"), [0.5, -0.5, -0.5, 0.5, *none])
    np.testing.assert_allclose(group_advantages(rewards, groups, "rloo"), [2 / 3, -2 / 3, -2 / 3, 2 / 3, *none])


@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(-10, 10)), min_size=1, max_size=12),
    st.sampled_from(["grpo", "dr_grpo", "rloo"]),
    st.randoms(),
)
def test_advantages_against_a_loop_and_in_any_order(pairs, kind, random):
    groups, rewards = zip(*pairs)
    got = group_advantages(rewards, groups, kind)
    for i, (group, reward) in enumerate(pairs):
        mates = np.array([r for g, r in pairs if g == group])
        if len(set(mates)) == 1:
            assert got[i] == 0.0
        elif kind == "grpo":
            assert got[i] == pytest.approx((reward - mates.mean()) / (mates.std(ddof=1) + 1e-6), rel=1e-9, abs=1e-9)
        elif kind == "dr_grpo":
            assert got[i] == pytest.approx(reward - mates.mean(), abs=1e-12)
        else:
            assert got[i] == pytest.approx(reward - (mates.sum() - reward) / (mates.size - 1), abs=1e-12)
    order = list(range(len(pairs)))
    random.shuffle(order)
    shuffled = group_advantages([rewards[i] for i in order], [groups[i] for i in order], kind)
    np.testing.assert_allclose(shuffled, got[order], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("missing", [None, float("nan"), float("inf")])
def test_a_missing_reward_names_its_rollout(missing):
    with pytest.raises(LossError, match="rollout 'r7' has no usable reward"):
        group_advantages([1.0, missing], ["q", "q"], ids=["r6", "r7"])
    with pytest.raises(LossError, match="rollout number 1 has no usable reward"):
        group_advantages([1.0, missing], ["q", "q"])


def test_other_mistakes_are_named():
    with pytest.raises(LossError, match="advantage must be one of grpo, dr_grpo, rloo; got 'ppo'"):
        group_advantages([1.0], ["q"], "ppo")
    with pytest.raises(LossError, match="as many groups as rewards"):
        group_advantages([1.0], ["q", "q"])
    with pytest.raises(LossError, match="aggregation must be one of"):
        edge_weights(np.array([0]), ["q"], "mean")
    with pytest.raises(LossError, match="edges name rollouts 0 to 3, but the mini-batch holds 2"):
        edge_weights(np.array([0, 3]), ["q", "q"])
    with pytest.raises(LossError, match="needs tokens_per_rollout"):
        edge_weights(np.array([0]), ["q"], "constant")


def test_weights_give_the_averages_they_are_named_after():
    """Rollout 3 has no loss token; group "b" has it and rollout 2."""
    rollout, groups = np.array([0, 0, 0, 1, 2, 2, 0]), ["a", "a", "b", "b"]
    losses = np.array([1.0, 2.0, 3.0, 10.0, 5.0, 7.0, 4.0])

    def average(kind, **more):
        weights, denominator = edge_weights(rollout, groups, kind, **more)
        return (weights * losses).sum() / denominator

    assert average("token_mean_global") == pytest.approx(32 / 7)
    assert average("token_mean_group") == pytest.approx((20 / 5 + 12 / 2) / 2)
    assert average("sequence_mean") == pytest.approx((10 / 4 + 10 + 6) / 3)
    assert average("constant", tokens_per_rollout=8) == pytest.approx(32 / 32)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.integers(1, 5), st.randoms())
def test_averages_do_not_depend_on_the_sharding(rollouts, shards, random):
    """Weighted sums of any split of the edges, in any order, add up to the same average."""
    rollout, groups = np.array(rollouts), [0, 0, 1, 1, 2]
    losses = np.arange(rollout.size, dtype=float)
    for kind in ("token_mean_global", "token_mean_group", "sequence_mean"):
        weights, denominator = edge_weights(rollout, groups, kind)
        whole = (weights * losses).sum() / denominator
        shard = np.array([random.randrange(shards) for _ in rollouts])
        parts = [(weights * losses)[shard == s].sum() for s in range(shards)]
        assert sum(parts) / denominator == pytest.approx(whole)
        order = np.array(random.sample(range(rollout.size), rollout.size))
        again, same = edge_weights(rollout[order], groups, kind)
        assert same == denominator
        np.testing.assert_allclose(again, weights[order])


def test_no_edges_have_denominator_zero():
    for kind in ("token_mean_global", "token_mean_group", "sequence_mean"):
        weights, denominator = edge_weights(np.zeros(0, int), ["a"], kind)
        assert weights.size == 0 and denominator == 0.0
