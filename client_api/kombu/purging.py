"""The number of messages that a queue has ready, and their removal."""

from __future__ import annotations

from portalmq.errors import TopicNotFound
from portalmq.kombu.leases import GroupLeases
from portalmq.kombu.readers import Receives
from portalmq.kombu.session import ClusterSession

SCHEDULED_AT_ONCE = 10_000
PURGED_AT_ONCE = 1_000


def count_ready(session: ClusterSession, group: str, topic: str) -> int:
    try:
        return session.admin.queue_counts(group, topic).ready
    except TopicNotFound:
        return 0


def purge_ready(session: ClusterSession, leases: GroupLeases, topic: str) -> int:
    """Remove what a group has ready now; return the number."""
    left = count_ready(session, leases.group, topic)  # what arrives meanwhile stays, so that this ends
    removed = 0
    receives = Receives(session.calls, leases.group, [topic], session.options.visibility_timeout_s, None)
    while left > removed:
        received = receives.receive(min(left - removed, PURGED_AT_ONCE), 0.0)
        if not received.messages:
            break
        for message in received.messages:
            leases.ack(message.receipt or "")
        leases.flush()
        removed += len(received.messages)
    return removed


def cancel_scheduled(session: ClusterSession, topic: str) -> int:
    """Remove the messages of a topic that are not due yet; return the number."""
    removed = 0
    while True:
        try:
            done = session.admin.change_scheduled(topic, "cancel", limit=SCHEDULED_AT_ONCE)
        except TopicNotFound:
            return removed
        removed += done.get("cancelled", 0)
        if not done.get("cancelled"):
            return removed
