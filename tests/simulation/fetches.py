"""The fetches of one replica in both roles: its own, sent until they are answered or replaced; and those of its
followers, which wait for data, or for the high watermark to move, half a second at most."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from portalmq.broker.core.replica.events import Fetch, FetchReplied, Records, Rejected, Reply, ReplyFetch, SendFetch
from portalmq.broker.core.replica.isr import NEVER_MS

if TYPE_CHECKING:
    from simulation.disk import Batch
    from simulation.replica_shell import ReplicaShell

FETCH_WAIT_MS = 500
FETCH_TIMEOUT_MS = 1_500


@dataclass(slots=True, eq=False)
class Waiting:
    """A follower's fetch whose log matches: it waits for the batches from `offset` on."""

    fetch: Fetch
    offset: int
    until_ms: int


class Fetches:
    def __init__(self, shell: ReplicaShell) -> None:
        self.shell = shell
        self.node = shell.node
        self.world = shell.world
        self.disk = shell.disk
        self._asked: SendFetch | None = None
        self._asked_ms = 0
        self._waiting: dict[int, Waiting] = {}
        self._told_high_watermark: dict[int, int] = {}
        self._heard: tuple[int, int] = (0, NEVER_MS)  # the leader that answered last, and when on its clock

    # --- of its followers --------------------------------------------------------------------------------------------

    def reply(self, action: ReplyFetch) -> None:
        fetch = action.token
        assert isinstance(fetch, Fetch)
        if action.reply is not None:
            self._send_reply(fetch, action.reply, [])
            return
        self._waiting[fetch.broker_id] = Waiting(fetch, action.offset, self.world.now + FETCH_WAIT_MS)
        if self.shell.sendable_end > action.offset:
            self._answer(fetch.broker_id)
        elif self.shell.replica.high_watermark > self._told_high_watermark.get(fetch.broker_id, -1):
            self.shell.soon(self.world.random.randint(0, 100), self._answer, fetch.broker_id)

    def wake(self) -> None:
        """There is more to send, or time has passed."""
        for follower, waiting in list(self._waiting.items()):
            if self.shell.sendable_end > waiting.offset or self.world.now >= waiting.until_ms:
                self._answer(follower)

    def high_watermark_moved(self) -> None:
        for follower in self._waiting:
            self.shell.soon(self.world.random.randint(0, 100), self._answer, follower)

    def _answer(self, follower: int) -> None:
        waiting = self._waiting.pop(follower, None)
        if waiting is None or self.shell.closed:
            return
        replica = self.shell.replica
        if not replica.leading or replica.leader_epoch != waiting.fetch.leader_epoch:
            self._send_reply(waiting.fetch, Rejected(replica.highest_epoch), [])
            return
        if waiting.offset < self.disk.start:  # dropped in the meantime
            self.shell.fetch(waiting.fetch)  # no news of the follower
            return
        first = self.disk.index_from(waiting.offset)
        batches = self.disk.batches[first : first + self.world.fetch_batches_max]
        ahead = self.shell.ahead_from(max(waiting.offset, self.disk.end))
        if ahead and len(batches) < self.world.fetch_batches_max:
            self.world.count("sent ahead")
            batches = [*batches, *ahead][: self.world.fetch_batches_max]
        if batches:
            self.shell.sent_end = max(self.shell.sent_end, batches[-1].end)
        if any(batch.uid in self.disk.flipped for batch in batches):
            self.shell.damaged()
            return
        self._told_high_watermark[follower] = replica.high_watermark
        records = Records(tuple(batch.head for batch in batches), replica.high_watermark)
        self._send_reply(waiting.fetch, records, batches)

    def _send_reply(self, fetch: Fetch, reply: Reply, batches: list[Batch]) -> None:
        follower = self.world.nodes[fetch.broker_id]
        answer = FetchReplied(fetch, reply)
        content = (answer, batches, self.world.now)
        self.world.network.send(self.node.id, follower.id, follower.call, _ignore, "replied", *content)

    # --- its own -----------------------------------------------------------------------------------------------------

    def ask(self, action: SendFetch) -> None:
        self._asked = action
        self._send()

    def tick(self) -> None:
        self.wake()
        asked = self._asked
        if asked is None or self.shell.replica.fetch != asked.fetch:
            self._asked = None
        elif self.world.now - self._asked_ms >= FETCH_TIMEOUT_MS:
            self.world.suspected(self.node.id, asked.leader)
            self._send()

    def _send(self) -> None:
        asked = self._asked
        if asked is not None:
            self._asked_ms = self.world.now
            leader = self.world.nodes[asked.leader]
            heard, answered_ms = self._heard
            content = (asked.fetch, answered_ms if heard == asked.leader else NEVER_MS)
            self.world.network.send(self.node.id, leader.id, leader.call, self._on_refused(asked), "fetch", *content)

    def heard(self, fetch: Fetch, answered_ms: int) -> None:
        """An answer arrived. The next fetch states that it was sent after this."""
        asked = self._asked
        if asked is not None and asked.fetch == fetch:
            self._heard = (asked.leader, answered_ms)

    def _on_refused(self, asked: SendFetch) -> Callable[[], None]:
        def refused() -> None:
            self.world.suspected(self.node.id, asked.leader)
            self.shell.soon(self.world.random.randint(20, 500), again)

        def again() -> None:
            if self._asked is asked and self.shell.replica.fetch == asked.fetch:
                self._send()

        return refused


def _ignore() -> None:
    pass
