"""The topics and groups of a run, and what the clients do with them."""

from __future__ import annotations

from chaos.evidence import Workload

WORKLOAD = Workload(
    partitions={
        "orders": 3,
        "plain": 2,
        "later": 2,
        "poison": 2,
        "poison.dlq": 2,
        "queue-in": 2,
        "queue-out": 2,
        "stream-in": 2,
        "stream-out": 2,
        "probe": 3,
    },
    queue_groups={
        "workers": ("orders", "plain", "later"),
        "strict": ("poison",),
        "queue-transform": ("queue-in",),
    },
    stream_groups={"readers": ("orders", "plain"), "stream-transform": ("stream-in",)},
    outputs={"queue-in": "queue-out", "stream-in": "stream-out"},
    dead_letters={"poison": ("poison.dlq", "strict")},
)
LEASE_S = 4.0
MEMBER_SESSION_S = 6.0
STRICT_DELIVERIES = 3
# Each process of clients, by name: its role, and whether a fault may kill it.
PROCESSES = {
    "producers": ("producers", False),
    "senders": ("senders", False),
    "queue-a": ("queue", True),
    "queue-b": ("queue", True),
    "stream-a": ("stream", True),
    "stream-b": ("stream", True),
    "locks-a": ("locks", True),
    "locks-b": ("locks", True),
}
GROUP_SETTINGS = {
    "workers": {"visibility_timeout_ms": int(LEASE_S * 1000), "max_deliveries": 1_000},
    "strict": {"visibility_timeout_ms": int(LEASE_S * 1000), "max_deliveries": STRICT_DELIVERIES},
    "queue-transform": {"visibility_timeout_ms": int(LEASE_S * 1000), "max_deliveries": 1_000},
}
