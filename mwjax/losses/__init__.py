"""Losses over hidden states and edge lists, as sums that the caller divides once by a global denominator."""

from mwjax.losses.advantages import edge_weights, group_advantages
from mwjax.losses.balance import Balance, load_balance
from mwjax.losses.checks import check_edges
from mwjax.losses.errors import LossError
from mwjax.losses.logprobs import EdgeScores, edge_logprobs
from mwjax.losses.metrics import Metrics, combine, finalise
from mwjax.losses.policy_gradient import PolicyGradientConfig, edge_log_ratio, policy_gradient_loss, unit_means
from mwjax.losses.recipes import RECIPES, Recipe
from mwjax.losses.sdcc import lambda_at, sdcc_kl
from mwjax.losses.sft import sft_loss
from mwjax.losses.total import LossConfig, Teacher, batch_loss

__all__ = [
    "RECIPES",
    "Balance",
    "EdgeScores",
    "LossConfig",
    "LossError",
    "Metrics",
    "PolicyGradientConfig",
    "Recipe",
    "Teacher",
    "batch_loss",
    "check_edges",
    "combine",
    "edge_log_ratio",
    "edge_logprobs",
    "edge_weights",
    "finalise",
    "group_advantages",
    "lambda_at",
    "load_balance",
    "policy_gradient_loss",
    "sdcc_kl",
    "sft_loss",
    "unit_means",
]
