"""Is this data, or this trainer's rows, conditioning-consistent? Needs no model, and says more with one."""

from mwjax.audit.compared import ComparedFiles, compare, compared_json
from mwjax.audit.comparison import Comparison, compare_audits, compare_models
from mwjax.audit.consistency import run
from mwjax.audit.model_result import ModelAudit
from mwjax.audit.result import AffectedRollout, AuditResult, MethodAudit, Mismatch, RowsAudit, to_json

__all__ = [
    "AffectedRollout",
    "AuditResult",
    "ComparedFiles",
    "Comparison",
    "MethodAudit",
    "Mismatch",
    "ModelAudit",
    "RowsAudit",
    "compare",
    "compare_audits",
    "compare_models",
    "compared_json",
    "run",
    "to_json",
]
