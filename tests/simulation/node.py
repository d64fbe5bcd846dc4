"""A simulated broker: a process that starts, pauses and crashes, and a disk that stays.

Timers and answers of one life of the process do not reach the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from simulation.coordinator import GroupCoordinator
from simulation.disk import Disk
from simulation.membership import Membership
from simulation.replica_shell import ReplicaShell

from portalmq.broker.core.replica.events import BrokersChanged, Event, LeaseRenewed, PartitionStateChanged, SessionLost

if TYPE_CHECKING:
    from simulation.world import World

# Unix time when a run begins: more than the largest backward jump of a clock.
BEGAN_MS = 100_000_000


class Node:
    def __init__(self, world: World, broker_id: int, disk: Disk) -> None:
        self.world = world
        self.id = broker_id
        self.disk = disk
        self.alive = False
        self.paused = False
        self.life = 0
        self.incarnation = 0
        self.wall_offset_ms = 0
        self.anchor_ms = 0
        self.shell: ReplicaShell
        self.membership: Membership
        self.coordinator: GroupCoordinator
        self.brokers: Mapping[int, tuple[int, str]] = {}
        self._answered_ms: int | None = None
        self._inbox: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    # --- the process -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Make all data that a crash left durable before the broker claims any of it (rule 12)."""
        if self.alive:
            return
        if self.disk.flipped and self.world.chance(0.5):
            if self.world.may_lose(self):
                self.damaged_at_rest()
            else:
                self.disk.flipped.clear()
        self.alive = True
        self.paused = False
        self.life += 1
        self.incarnation = self.world.next_incarnation()
        self.brokers = {}
        self._answered_ms = None
        self.anchor_ms = self.wall_offset_ms
        self._inbox.clear()
        self.world.note(self.id, "starts as {} with store {}, log to {}", self.incarnation, self.store, self.disk.end)
        self.shell = ReplicaShell(self, self.disk.saved_high_watermark)
        if self.world.options.groups is not None:
            self.coordinator = GroupCoordinator(self)
        self.membership = Membership(self)

    def crash(self, *, cleanly: bool = False) -> None:
        if not self.alive:
            return
        self.world.note(self.id, "crashes")
        self.shell.crash(cleanly=cleanly)
        self.alive = self.paused = False
        self.life += 1

    def pause(self, duration_ms: int) -> None:
        if self.alive and not self.paused:
            self.world.note(self.id, "is paused for {} ms", duration_ms)
            self.paused = True
            self.world.after(duration_ms, self.resume, self.life)

    def resume(self, life: int) -> None:
        if life == self.life and self.paused:
            self.world.note(self.id, "goes on")
            self.paused = False
            inbox, self._inbox = self._inbox, []
            for number, (act, content) in enumerate(inbox):
                if life != self.life:
                    return
                if self.paused:
                    self._inbox += inbox[number:]
                    return
                act(*content)

    @property
    def store(self) -> str:
        return self.disk.replica_store

    @property
    def wall_ms(self) -> int:
        return BEGAN_MS + self.world.now + self.wall_offset_ms

    @property
    def now_ms(self) -> int:
        """The clock of leases: Unix time at the start of this process, without later jumps."""
        return BEGAN_MS + self.world.now + self.anchor_ms

    # --- events ------------------------------------------------------------------------------------------------------

    def hear(self, life: int, act: Callable[..., None], *content: Any) -> None:
        """Deliver to one life of this process: kept while it is paused, lost when that life is over."""
        if life != self.life or not self.alive:
            return
        if self.paused:
            self._inbox.append((act, content))
        else:
            act(*content)

    def call(self, refused: Callable[[], None], name: str, *content: Any) -> None:
        """Deliver a request from outside to the current life."""
        if not self.alive:
            refused()
        elif self.paused:
            self._inbox.append((self.call, (refused, name, *content)))
        else:
            getattr(self.shell, name)(*content)

    def soon(self, delay_ms: int, act: Callable[..., None], *content: Any) -> None:
        self.world.after(delay_ms, self.hear, self.life, act, *content)

    def every(self, period_ms: int, act: Callable[[], None]) -> None:
        def again() -> None:
            self.soon(period_ms, again)
            act()

        self.soon(self.world.random.randint(1, period_ms), again)

    # --- events of membership ----------------------------------------------------------------------------------------

    def on_state(self, state: PartitionStateChanged) -> None:
        self._tell(state)

    def lease_renewed(self, answered_ms: int) -> None:
        self._answered_ms = answered_ms
        self._tell(LeaseRenewed(answered_ms))

    def session_lost(self) -> None:
        self.world.note(self.id, "learns that its session is over")
        self._answered_ms = None
        self._tell(SessionLost())

    def brokers_changed(self, brokers: Mapping[int, tuple[int, str]]) -> None:
        self.brokers = brokers
        self._tell(BrokersChanged(brokers))

    def _tell(self, event: Event) -> None:
        self.shell.tell(event)

    # --- damage ------------------------------------------------------------------------------------------------------

    def damaged_at_rest(self) -> None:
        """Batches do not match their CRC: this replica is discarded, and a new one begins in its place."""
        self.world.checker.disk_lost(self.disk)
        self.disk.empty()
        self.world.note(self.id, "finds its replica damaged and starts over as {}", self.store)

    def reopen(self, high_watermark: int) -> None:
        """Create another replica object over the same disk, within this life, with the known state. It may continue to
        lead in its epoch, so it continues the lease numbers; a real broker keeps its replica object."""
        before, self.shell = self.shell, ReplicaShell(self, high_watermark)
        if before is not None and before.host is not None and self.shell.host is not None:
            self.shell.host.groups.go_on_after(before.host.groups)
        if self._answered_ms is not None:
            self._tell(LeaseRenewed(self._answered_ms))
        self._tell(BrokersChanged(self.brokers))
        self.membership.tell_again()
