"""Add up what the rows of single rollouts said."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mwjax.audit.result import RowsAudit
from mwjax.audit.row_matching import KINDS, RowsFacts
from mwjax.audit.training_rows import TrainingRows
from mwjax.audit.verdict import judge_rows
from mwjax.rollouts.read import Refusal


def rows_audit(
    rows: TrainingRows, facts: Sequence[RowsFacts], known: set[str], unnamed: Sequence[int], shown: int
) -> RowsAudit:
    """Sum up a file of rows.

    known: ids of the usable rollouts; rows of others are refused. unnamed: the trainable sampled tokens of every
    rollout that no row names.
    """
    missing = [
        Refusal(rows.file, row.line, "rollout_id", f"no usable rollout {rollout_id!r} among the rollouts given")
        for rollout_id, some in rows.of_rollout.items()
        if rollout_id not in known
        for row in some
    ]
    refused = sorted([*rows.refused, *missing], key=lambda refusal: refusal.line)
    kinds = dict(zip(KINDS, np.sum([fact.kinds for fact in facts], axis=0).tolist() if facts else [0] * len(KINDS)))

    def total(name: str) -> int:
        return sum(getattr(fact, name) for fact in facts)

    loss_tokens = sum(kinds.values())
    mismatches = sorted((m for fact in facts for m in fact.mismatches), key=lambda m: (m.line, m.position))
    never = total("never") + sum(unnamed)
    verdict, advice = judge_rows(
        loss_tokens=loss_tokens,
        **kinds,
        position_gaps=total("position_gaps"),
        surplus=total("surplus"),
        never=never,
    )
    return RowsAudit(
        file=rows.file,
        rows=total("rows"),
        segments=total("segments"),
        tokens=total("tokens"),
        refused=tuple(refused),
        loss_tokens=loss_tokens,
        **kinds,
        position_gaps=total("position_gaps"),
        double=total("double"),
        surplus=total("surplus"),
        never=never,
        unnamed_rollouts=len(unnamed),
        unnamed_tokens=sum(unnamed),
        ignored_keys=rows.ignored_keys,
        mismatches=tuple(mismatches[:shown]),
        verdict=verdict,
        advice=advice,
    )
