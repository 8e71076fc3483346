"""Recorded rollouts: what a harness left behind, read, checked, written and logged. Needs no jax."""

from mwjax.rollouts.equality import rollouts_equal
from mwjax.rollouts.errors import RecordError, Refusal, RolloutFileError
from mwjax.rollouts.packed import PackedRollouts
from mwjax.rollouts.read import ReadResult, iterate, read
from mwjax.rollouts.record import MAIN_CHAIN, Edit, Rollout, Sampling, Turn
from mwjax.rollouts.recorder import OpenRollout, Recorder
from mwjax.rollouts.source import RolloutFile, open_rollouts
from mwjax.rollouts.validate import from_json
from mwjax.rollouts.write import to_json, write

__all__ = [
    "MAIN_CHAIN",
    "Edit",
    "OpenRollout",
    "PackedRollouts",
    "ReadResult",
    "RecordError",
    "Recorder",
    "Refusal",
    "Rollout",
    "RolloutFile",
    "RolloutFileError",
    "Sampling",
    "Turn",
    "from_json",
    "iterate",
    "open_rollouts",
    "read",
    "rollouts_equal",
    "to_json",
    "write",
]
