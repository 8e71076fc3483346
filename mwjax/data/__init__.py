"""Grain pipelines over rollouts and trees: which rollouts, in which order, in which rows."""

from mwjax.data.index import Index, Layout
from mwjax.data.packing import PackedSet, pack_rollouts
from mwjax.data.pipeline import iterate_steps
from mwjax.data.scanning import scan
from mwjax.data.steps import StepBatches, StepSource, plan_epoch

__all__ = [
    "Index",
    "Layout",
    "PackedSet",
    "StepBatches",
    "StepSource",
    "iterate_steps",
    "pack_rollouts",
    "plan_epoch",
    "scan",
]
