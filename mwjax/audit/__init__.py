"""Is this data, or this trainer's rows, conditioning-consistent? Needs no model."""

from mwjax.audit.consistency import run
from mwjax.audit.result import AffectedRollout, AuditResult, MethodAudit, Mismatch, RowsAudit, to_json

__all__ = ["AffectedRollout", "AuditResult", "MethodAudit", "Mismatch", "RowsAudit", "run", "to_json"]
