"""Is this data, or this trainer's rows, conditioning-consistent? Needs no model, and says more with one."""

from mwjax.audit.consistency import run
from mwjax.audit.model_result import ModelAudit
from mwjax.audit.result import AffectedRollout, AuditResult, MethodAudit, Mismatch, RowsAudit, to_json

__all__ = ["AffectedRollout", "AuditResult", "MethodAudit", "Mismatch", "ModelAudit", "RowsAudit", "run", "to_json"]
