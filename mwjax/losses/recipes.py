"""Published policy-gradient recipes: the surrogate, the advantage and the aggregation that belong together."""

from __future__ import annotations

from dataclasses import dataclass

from mwjax.losses.advantages import AdvantageKind, Aggregation
from mwjax.losses.policy_gradient import PolicyGradientConfig


@dataclass(frozen=True)
class Recipe:
    """What a paper fixes: `policy_gradient` for the loss, `advantage` and `aggregation` for `advantages`."""

    policy_gradient: PolicyGradientConfig
    advantage: AdvantageKind
    aggregation: Aggregation


RECIPES: dict[str, Recipe] = {
    # MemoryWalker's settings; it does not state an aggregation, ours is the mean over all loss tokens.
    "memorywalker": Recipe(PolicyGradientConfig(), "grpo", "token_mean_global"),
    # Multi-Conv DAPO with the released recipe's dual clip (arXiv:2507.02259).
    "memagent": Recipe(
        PolicyGradientConfig("dapo", clip_low=0.2, clip_high=0.2, dual_clip=3.0), "dr_grpo", "token_mean_global"
    ),
    # GRPO as first published: symmetric clip, mean over rollouts of token means (arXiv:2402.03300, eq. 3; KL 0.04).
    "grpo": Recipe(PolicyGradientConfig(clip_high=0.2, kl_coefficient=0.04), "grpo", "sequence_mean"),
    # No standard deviation, constant normaliser, no KL (arXiv:2503.20783).
    "dr_grpo": Recipe(PolicyGradientConfig("dr_grpo", clip_high=0.2, kl_coefficient=0.0), "dr_grpo", "constant"),
    # Clip-higher, token mean within a group, no KL (arXiv:2503.14476, eq. 8).
    "dapo": Recipe(PolicyGradientConfig("dapo", kl_coefficient=0.0), "grpo", "token_mean_group"),
    # Sequence ratios move little, hence the narrow clip (arXiv:2507.18071, section 5.1).
    "gspo": Recipe(
        PolicyGradientConfig("gspo", clip_low=3e-4, clip_high=4e-4, kl_coefficient=0.0), "grpo", "sequence_mean"
    ),
    # No lower clip; the paper tunes the upper one and prints no value (arXiv:2506.13585, eq. 4).
    "cispo": Recipe(PolicyGradientConfig("cispo", clip_low=1.0, kl_coefficient=0.0), "grpo", "token_mean_group"),
}
