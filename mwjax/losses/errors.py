"""What the losses raise when the caller's data cannot be trained on."""

from __future__ import annotations


class LossError(ValueError):
    """Rewards, groups or edges that no loss can be formed from; the message says which and what to do."""
