"""Grain pipelines over rollouts and trees: which rollouts, in which order, in which rows."""

from mwjax.data.index import Index, Layout, scan
from mwjax.data.pipeline import iterate_steps
from mwjax.data.steps import StepBatches, StepSource, plan_epoch

__all__ = ["Index", "Layout", "StepBatches", "StepSource", "iterate_steps", "plan_epoch", "scan"]
