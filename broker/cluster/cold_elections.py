"""Elections among replicas that have all restarted: the controller compares their logs before it chooses a leader.

After a power cut of all brokers no process remembers what was committed, and a disk may have forgotten what it fsynced.
An acknowledged record is on every member of the last ISR. So of two members that answer one holds it even if the disk
of the other lied, and that one has the longer log. The controller waits a bounded time for members that are away or
still opening their files: a leader that forgot is a loss, waiting is a delay. When the time is over the longest log of
those that answered leads. A single answer has nothing to be compared with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import gevent

from portalmq.broker.cluster.rpc.brokers import ReplicaLogEnd
from portalmq.broker.partition.clock import Clock
from portalmq.control_plane.controller import LogEnd
from portalmq.control_plane.mirror import PartitionKey
from portalmq.control_plane.state import BrokerState, PartitionState
from portalmq.errors import PortalMQError

log = logging.getLogger(__name__)

WAIT_FOR_ABSENT_MS = 10_000
# How many partitions one call asks for.
ASKED_AT_ONCE = 500

# Asks a broker for its log ends in these partitions; None for one that is not open there yet. Raises PortalMQError.
AskLogEnds = Callable[[int, Sequence[PartitionKey]], Sequence[ReplicaLogEnd | None]]


class ColdElections:
    """Invariant: `_since_ms` holds the partitions that were cold in the last pass, and since when."""

    def __init__(self, ask: AskLogEnds, clock: Clock) -> None:
        self._ask = ask
        self._clock = clock
        self._since_ms: dict[PartitionKey, int] = {}
        self._waited_out: set[PartitionKey] = set()

    @property
    def is_waiting(self) -> bool:
        return bool(self._since_ms)

    def log_ends(
        self, cold: Mapping[PartitionKey, PartitionState], live: Mapping[int, BrokerState]
    ) -> dict[PartitionKey, dict[int, LogEnd]]:
        """Return the log ends of the live ISR members for the partitions that can be decided; the others wait."""
        now_ms = self._clock.now_ms()
        for key in self._since_ms.keys() - cold.keys():
            del self._since_ms[key]
        self._waited_out &= cold.keys()
        asked: dict[int, list[PartitionKey]] = {}
        for key, held in cold.items():
            self._since_ms.setdefault(key, now_ms)
            for broker_id in held.isr:
                if broker_id in live:
                    asked.setdefault(broker_id, []).append(key)
        answers: dict[PartitionKey, dict[int, LogEnd]] = {key: {} for key in cold}
        gevent.joinall(
            [gevent.spawn(self._ask_one, broker_id, keys, cold, answers) for broker_id, keys in asked.items()]
        )
        return {key: ends for key, ends in answers.items() if self._is_decided(key, cold[key], ends, now_ms)}

    def _ask_one(
        self,
        broker_id: int,
        keys: list[PartitionKey],
        cold: Mapping[PartitionKey, PartitionState],
        answers: dict[PartitionKey, dict[int, LogEnd]],
    ) -> None:
        try:
            for start in range(0, len(keys), ASKED_AT_ONCE):
                part = keys[start : start + ASKED_AT_ONCE]
                for key, log_end in zip(part, self._ask(broker_id, part), strict=True):
                    if log_end is not None:
                        is_whole = log_end.is_whole(cold[key], broker_id)
                        answers[key][broker_id] = (log_end.last_epoch, log_end.end) if is_whole else None
        except (PortalMQError, ValueError) as error:
            log.info("broker %d does not report its log ends yet: %s", broker_id, error)

    def _is_decided(self, key: PartitionKey, held: PartitionState, ends: dict[int, LogEnd], now_ms: int) -> bool:
        waited_ms = now_ms - self._since_ms[key]
        silent = [broker_id for broker_id in held.isr if broker_id not in ends]
        if silent and waited_ms < WAIT_FOR_ABSENT_MS:
            return False
        if silent and key not in self._waited_out:
            self._waited_out.add(key)
            log.warning(
                "partition %d of topic id %s: brokers %s of the ISR reported no log end within %d ms, and the election"
                " waits for them no longer",
                *(key[1], key[0], silent, waited_ms),
            )
        return True
