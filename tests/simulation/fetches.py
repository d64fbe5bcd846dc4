"""The fetches of one replica in both roles: its own, sent until they are answered or replaced; and those of its
followers, which wait for data, or for the high watermark to move, half a second at most.

With `polls` a fetch waits until there is an answer, as in the broker: the follower's requests are numbered, each names
the fetch that it has at the leader, and renews it. A follower that has none polls on, as it follows other partitions
there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from portalmq.broker.core.replica.events import (
    Fetch,
    FetchReplied,
    Poll,
    Records,
    Rejected,
    Reply,
    ReplyFetch,
    SendFetch,
)
from portalmq.broker.core.replica.isr import NEVER_MS

if TYPE_CHECKING:
    from simulation.disk import Batch
    from simulation.replica_shell import ReplicaShell

FETCH_WAIT_MS = 500
FETCH_TIMEOUT_MS = 1_500
POLL_EVERY_MS = 200
ENDLESS_MS = 1 << 62


@dataclass(slots=True, frozen=True)
class PollRequest:
    """A request of one broker's life to another. `fetch` is None if it has none there."""

    broker_id: int
    incarnation: int
    turn: int
    fetch: Fetch | None
    answered_ms: int


@dataclass(slots=True, eq=False)
class Session:
    """What a leader's broker knows of a follower's: `fetch` is the last one that it was sent."""

    incarnation: int
    poll: Poll
    turn: int = 0
    fetch: Fetch | None = None


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
        self._sessions: dict[int, Session] = {}
        self._polled: int | None = None
        self._polled_ms = 0
        self._turn = 10 * self.world.now  # above those of an earlier shell of this life

    # --- of its followers --------------------------------------------------------------------------------------------

    def reply(self, action: ReplyFetch) -> None:
        fetch = action.token
        assert isinstance(fetch, Fetch)
        if action.reply is not None:
            self._ended(fetch.broker_id)
            self._send_reply(fetch, action.reply, [])
            return
        session = self._sessions.get(fetch.broker_id)
        if session is not None and session.fetch != fetch:
            return  # it was left while this waited for the disk
        until_ms = self.world.now + FETCH_WAIT_MS if session is None else ENDLESS_MS
        self._waiting[fetch.broker_id] = Waiting(fetch, action.offset, until_ms)
        if self.shell.sendable_end > action.offset:
            self._answer(fetch.broker_id)
        elif self.shell.replica.high_watermark > self._told_high_watermark.get(fetch.broker_id, -1):
            self.shell.soon(self.world.random.randint(0, 100), self._answer, fetch.broker_id)

    def wake(self) -> None:
        """There is more to send, or time has passed."""
        for follower, waiting in list(self._waiting.items()):
            if self.shell.sendable_end > waiting.offset or self.world.now >= waiting.until_ms:
                self._answer(follower)

    def end(self) -> None:
        """The leadership is over, and these fetches are of its epoch."""
        if self.world.options.polls:
            for waiting in self._waiting.values():
                self._send_reply(waiting.fetch, Rejected(self.shell.replica.highest_epoch), [])
            self._waiting.clear()

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
        self._ended(follower)
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

    def _ended(self, follower: int) -> None:
        session = self._sessions.get(follower)
        if session is not None:
            self.shell.replica.fetch_ended(follower, session.poll)

    def polled(self, request: PollRequest) -> None:
        """A follower's broker has sent a request. One that comes late says nothing."""
        follower, now = request.broker_id, self.world.now
        session = self._sessions.get(follower)
        if session is None or session.incarnation < request.incarnation:
            session = self._sessions[follower] = Session(request.incarnation, Poll(now, NEVER_MS))
        if session.incarnation > request.incarnation or session.turn >= request.turn:
            return
        session.turn = request.turn
        if session.fetch != request.fetch:
            self._ended(follower)
            self._waiting.pop(follower, None)
        session.poll.heard_ms, session.poll.sent_after_ms = now, request.answered_ms
        session.fetch = request.fetch
        if request.fetch is not None and follower not in self._waiting:  # the answer to one that was here is lost
            self.shell.fetch(request.fetch, request.answered_ms, session.poll)
        self.shell.soon(self.world.random.randint(0, POLL_EVERY_MS), self._answer_poll, follower)

    def _answer_poll(self, follower: int) -> None:
        node = self.world.nodes[follower]
        self.world.network.send(
            self.node.id, follower, node.call, _ignore, "poll_answered", self.node.id, self.world.now
        )

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
        self._poll()
        asked = self._asked
        if asked is None or self.shell.replica.fetch != asked.fetch:
            self._asked = None
        elif self.world.now - self._asked_ms >= FETCH_TIMEOUT_MS:
            self.world.suspected(self.node.id, asked.leader)
            self._send()

    def _send(self) -> None:
        asked = self._asked
        if asked is not None and self.world.options.polls:
            self._asked_ms, self._polled = self.world.now, asked.leader
            self._send_poll(asked)
        elif asked is not None:
            self._asked_ms = self.world.now
            leader = self.world.nodes[asked.leader]
            heard, answered_ms = self._heard
            content = (asked.fetch, answered_ms if heard == asked.leader else NEVER_MS)
            self.world.network.send(self.node.id, leader.id, leader.call, self._on_refused(asked), "fetch", *content)

    def _poll(self) -> None:
        """Tell the leader that was fetched from last what is still current."""
        if self._polled is None or self.world.now - self._polled_ms < POLL_EVERY_MS:
            return
        asked = self._asked
        if asked is None or asked.leader != self._polled or self.shell.replica.fetch != asked.fetch:
            asked = None
        self._send_poll(asked)

    def _send_poll(self, asked: SendFetch | None) -> None:
        assert self._polled is not None
        self._polled_ms = self.world.now
        self._turn += 1
        leader = self.world.nodes[self._polled]
        heard, answered_ms = self._heard
        request = PollRequest(
            self.node.id,
            self.node.incarnation,
            self._turn,
            asked.fetch if asked else None,
            answered_ms if heard == self._polled else NEVER_MS,
        )
        refused = self._on_refused(asked) if asked else _ignore
        self.world.network.send(self.node.id, leader.id, leader.call, refused, "poll", request)

    def poll_answered(self, leader: int, answered_ms: int) -> None:
        """A leader's broker has answered with nothing."""
        if leader == self._polled:
            self._heard = (leader, max(answered_ms, self._heard[1]) if leader == self._heard[0] else answered_ms)
            if self._asked is not None and self._asked.leader == leader:
                self._asked_ms = self.world.now

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
