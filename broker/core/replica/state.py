"""The state of one replica of a partition: the ends of its log, its epochs, the control plane's state, its leadership.

log start ......... high watermark ......... durable end ......... next offset
              readable               fsynced here         allotted, being written

It also holds what leader and follower have in common: learning of a higher epoch, refreshing the control plane's state,
and stepping down.
"""

from __future__ import annotations

from collections.abc import Mapping

from portalmq.broker.core.replica.epochs import Epochs
from portalmq.broker.core.replica.events import (
    Action,
    Fetch,
    PartitionStateChanged,
    ProposeIsr,
    Refresh,
    RememberEpoch,
    StepDown,
)
from portalmq.broker.core.replica.isr import NEVER_MS, IsrTracker
from portalmq.broker.core.replica.producers import Producers

REFRESH_PAUSE_MS = 300
# All brokers of a cluster must agree on this one. A leader delivers messages for this long after its followers vouched
# for it. Its successor answers no ack before that time is over, plus a margin for clocks that drift.
VOUCHED_FOR_MS = 1_000
SUCCESSOR_WAITS_MS = VOUCHED_FOR_MS + 100


class ReplicaState:
    """The state of one replica.

    `lease_ms` is the time a leader serves without an answer from the control plane or a fetch of every other ISR
    member. `began_ms` is the start of this process, or of this replica in it. `in_sync` tracks the followers while
    this replica leads, `fetch` is set while it waits for its leader's answer.
    """

    # CPython shares the keys of instances with up to 30 attributes; a dict of more takes five times the memory.
    __slots__ = (
        "__dict__",
        "_continues_epoch",
        "_fetches",
        "_leader_high_watermark",
        "_proposal_unknown",
        "_refresh_wanted",
        "_refreshed_ms",
        "_refreshes",
        "_rejected",
        "_reshaping",
        "_resigned",
    )

    def __init__(
        self,
        broker_id: int,
        *,
        producers: Producers,
        epochs: list[tuple[int, int]],
        end_offset: int,
        high_watermark: int,
        highest_epoch: int,
        last_timestamp_ms: int,
        log_start_offset: int = 0,
        incarnation: int = 0,
        store_uuid: str = "",
        lease_ms: int = 4_000,
        lag_ms: int = 3_000,
        began_ms: int = NEVER_MS,
    ) -> None:
        self.broker_id = broker_id
        self.incarnation = incarnation
        self.store_uuid = store_uuid
        self.producers = producers
        self.next_offset = end_offset
        self.durable_end = end_offset
        self.high_watermark = max(log_start_offset, min(high_watermark, end_offset))
        self.log_start_offset = log_start_offset
        self.highest_epoch = highest_epoch
        self.last_timestamp_ms = last_timestamp_ms
        self.lease_ms = lease_ms
        self.lag_ms = lag_ms
        self.state: PartitionStateChanged | None = None
        self.quarantined = ""
        self.fetch: Fetch | None = None
        self._epochs = Epochs(epochs)
        self.in_sync: IsrTracker | None = None
        self._brokers: Mapping[int, tuple[int, str]] = {}
        self._answered_ms = NEVER_MS
        self._began_ms = began_ms
        self._leader_answered_ms = NEVER_MS
        self._settles_from_ms = NEVER_MS
        self._proposal: ProposeIsr | None = None
        self._proposal_unknown = False
        self._refreshes = 0
        self._refresh_wanted = 0
        self._refreshed_ms = NEVER_MS
        # A replica that opens its log does not know what was proposed in its epoch before, so it waits for a synced
        # state.
        self._resigned = True
        self._reshaping = False
        self._rejected = False
        # The epoch that this replica led last, while its log holds all that its followers may have from it; else -1.
        self._continues_epoch = -1
        self._leader_high_watermark = 0
        self._fetches = 0

    # --- queries -----------------------------------------------------------------------------------------------------

    @property
    def leading(self) -> bool:
        return self.in_sync is not None

    @property
    def leader_epoch(self) -> int:
        return self.state.leader_epoch if self.state else self.highest_epoch

    @property
    def epochs(self) -> list[tuple[int, int]]:
        return self._epochs.entries

    @property
    def last_epoch(self) -> int:
        return self._epochs.last

    def may_serve(self, now_ms: int) -> bool:
        """Return whether this replica leads and its lease has not run out (rule 7)."""
        if self.in_sync is None:
            return False
        heard_ms = self.in_sync.heard_from_all_ms()
        return heard_ms is None or now_ms - max(self._answered_ms, heard_ms) <= self.lease_ms

    def may_deliver(self, now_ms: int) -> bool:
        """Return whether messages may be delivered: no successor has answered an ack (rule 14).

        An answer of the control plane does not prove that, as another leader may have been elected since. The successor
        is a member of the ISR, so the followers' fetches do.
        """
        if self.in_sync is None or not self.may_serve(now_ms):
            return False
        vouched_ms = self.in_sync.vouched_by_all_ms()
        return vouched_ms is None or now_ms - vouched_ms <= VOUCHED_FOR_MS

    def led_at(self, then_ms: int) -> bool:
        """Return whether no other broker can have led at `then_ms`: records that are not in this log were not committed
        then (rule 10)."""
        if self.in_sync is None:
            return False
        vouched_ms = self.in_sync.vouched_by_all_ms()
        return vouched_ms is None or vouched_ms >= then_ms

    def may_settle(self, now_ms: int) -> bool:
        """Return whether acks may be answered: an earlier leader no longer delivers messages (rule 14)."""
        return now_ms >= self._settles_from_ms

    @property
    def sendable_end(self) -> int:
        """The offset below which followers may have records: a leader sends them while its own disk writes them, once
        the start of its epoch is durable (rule 1)."""
        leading = self.in_sync
        return self.next_offset if leading is not None and self.durable_end > leading.epoch_start else self.durable_end

    # --- leader and follower alike -----------------------------------------------------------------------------------

    def _learn_epoch(self, epoch: int) -> list[Action]:
        """Enter a higher epoch. The pending fetch of a lower epoch is abandoned: its answer has no authority."""
        self.highest_epoch = epoch
        self.fetch = None
        self._rejected = False
        self._leader_high_watermark = self.high_watermark
        return [RememberEpoch(epoch)]

    def _step_down(self, leader: int | None) -> list[Action]:
        if self.in_sync is None:
            return []
        self.in_sync = None
        self.fetch = None
        self._leader_high_watermark = 0
        if self._proposal is not None and not self._proposal.resigns:
            self._proposal = None
        return [StepDown(leader)]

    def _refresh_now(self, now_ms: int) -> list[Action]:
        """Request a state that is read from now on; earlier readings do not count."""
        action = self._refresh(now_ms)
        self._refresh_wanted = self._refreshes
        return [action]

    def _refresh(self, now_ms: int) -> Refresh:
        self._refreshes += 1
        self._refreshed_ms = now_ms
        return Refresh(self._refreshes)

    def _refresh_sparingly(self, now_ms: int) -> list[Action]:
        return self._refresh_now(now_ms) if now_ms - self._refreshed_ms >= REFRESH_PAUSE_MS else []
