"""Bugs that a run plants into its brokers, to show that the checker notices them: `--plant NAME`.

Each is Python that runs first in a broker's process.
"""

from __future__ import annotations

PLANTED = {
    # Acknowledges what only the leader has. Found by: what is acked is stored.
    "commit on one replica": """
from portalmq.broker.core.replica.isr import IsrTracker
IsrTracker.committed_end = lambda self, own_durable_end, brokers, now_ms: own_durable_end
""",
    # Forgets the batches of producers. Found by: what has an identity is stored once.
    "forget duplicates": """
from portalmq.broker.core.replica.producers import Producers
Producers.find_duplicate = lambda self, stamp, count: None
""",
    # Gives messages out again before their leases end. Found by: leases of a message do not overlap.
    "end leases early": """
import msgspec
from portalmq.broker.core.queue.spans import GroupSpans
_put = GroupSpans._put
def _put_early(self, span):
    if span.leased:
        end_ms = min(span.available_at_ms, span.granted_at_ms + 100)
        span = msgspec.structs.replace(span, available_at_ms=end_ms)
    _put(self, span)
GroupSpans._put = _put_early
""",
}
