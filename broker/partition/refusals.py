"""Errors for callers that a partition or the disk refuses for now."""

from __future__ import annotations

from portalmq.broker.storage.errors import Shortage, StorageError, TooManyOpenFiles
from portalmq.errors import Outcome, PortalMQError, StorageFull, Unavailable


class FaultyFiles(Unavailable):
    """A file is damaged, or no descriptor is left. A repeated call would meet that again, until another broker leads: a
    client repeats it."""


DISK_FULL = "the broker's disk is full: free space or add disk, then repeat"
NO_DESCRIPTOR = "the broker has no file descriptor left: raise its limit of open files (ulimit -n), then repeat"


def refusal_of(shortage: Shortage, outcome: Outcome = "not_applied") -> PortalMQError:
    """Return the public error for `shortage`, for a call with that outcome."""
    if isinstance(shortage, TooManyOpenFiles):
        return FaultyFiles(NO_DESCRIPTOR, outcome=outcome, retry_after_s=1)
    return StorageFull(DISK_FULL, outcome=outcome, retry_after_s=5)


def answer_to(fault: StorageError) -> PortalMQError:
    """Return the public error for a shortage or damage that a change has met: it may be applied."""
    if isinstance(fault, Shortage):
        return refusal_of(fault, "unknown")
    return FaultyFiles(f"a file is damaged on this broker: {fault}", outcome="unknown")


def not_serving_yet() -> Unavailable:
    return Unavailable("this broker was elected, and has not begun to lead yet", retry_after_s=0.1)


def leadership_changing() -> Unavailable:
    return Unavailable("the partition's leadership is just changing", retry_after_s=0.1)


def closing() -> Unavailable:
    return Unavailable("the partition is being closed", retry_after_s=0.5)
