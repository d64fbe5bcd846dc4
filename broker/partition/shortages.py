"""The errors that callers get when a resource has run out: room on the disk, or file descriptors."""

from __future__ import annotations

from portalmq.broker.storage.errors import Shortage, TooManyOpenFiles
from portalmq.errors import Outcome, PortalMQError, StorageFull, Unavailable

DISK_FULL = "the broker's disk is full: free space or add disk, then repeat"
NO_DESCRIPTOR = "the broker has no file descriptor left: raise its limit of open files (ulimit -n), then repeat"


def refusal_of(shortage: Shortage, outcome: Outcome = "not_applied") -> PortalMQError:
    """Return the public error for `shortage`, for a call with that outcome."""
    if isinstance(shortage, TooManyOpenFiles):
        return Unavailable(NO_DESCRIPTOR, outcome=outcome, retry_after_s=1)
    return StorageFull(DISK_FULL, outcome=outcome, retry_after_s=5)
