"""The groups of one replica: the fold over its log, as a broker keeps it, and the entry of all their requests.

On a leader the fold runs ahead of the high watermark, from the append of a record on; on a follower from the time it is
durable. After a truncation or a refused transaction the rest is folded again, as at a start: from the newest STATE
record in the log, or from its beginning.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from simulation.content import Control, Mail
from simulation.network import CLIENTS
from simulation.outbox import Outbox
from simulation.queue_groups import QueueGroups
from simulation.stream_groups import StreamGroups
from simulation.submission import Submission

from portalmq.broker.core.fold import PartitionFold, encode_fold
from portalmq.broker.core.queue.records import Cancel, GroupEnd, GroupRecord, Purge, Reschedule
from portalmq.broker.core.queue.selection import NEVER_MS
from portalmq.broker.partition.folding import GroupsFold, StateRecord
from portalmq.broker.partition.readable import VOUCHED_WITHIN_MS
from portalmq.errors import NotLeader, PortalMQError, Unavailable

if TYPE_CHECKING:
    from simulation.disk import Batch
    from simulation.replica_shell import ReplicaShell

Answer = Callable[[Any], None]


class Lanes:
    """The messages of a log by lane, as storage finds them: (due_ms, offset), sorted."""

    def __init__(self) -> None:
        self.mail: dict[int, tuple[Mail, int, int]] = {}  # offset -> (message, time of append, uid of its batch)
        self.places: dict[int, list[tuple[int, int]]] = {}

    def add(self, batch: Batch) -> None:
        at_ms = batch.head.appended_at_ms
        for offset, mail in enumerate(batch.mail, batch.base):
            lane, due_ms, _ = mail.spot(offset, at_ms)
            self.mail[offset] = (mail, at_ms, batch.uid)
            insort(self.places.setdefault(lane, []), (due_ms, offset))

    def drop_below(self, start: int) -> None:
        self.mail = {offset: found for offset, found in self.mail.items() if offset >= start}
        self.places = {lane: [place for place in places if place[1] >= start] for lane, places in self.places.items()}

    def after(self, lane: int, place: tuple[int, int]) -> list[tuple[int, int]]:
        places = self.places.get(lane, [])
        return places[bisect_left(places, place) :]


class GroupHost:
    def __init__(self, shell: ReplicaShell) -> None:
        self.shell = shell
        self.node = shell.node
        self.world = shell.world
        self.groups = GroupsFold()
        self.lanes = Lanes()
        self._unreadable: deque[tuple[int, int]] = deque()  # (end, time) of batches of messages
        self._own: set[int] = set()  # folded when they were appended, and not written yet
        self._book: object = None
        self._took_over = False
        self.queue = QueueGroups(self)
        self.stream = StreamGroups(self)
        self.outbox = Outbox(self)
        self.rebuild()

    # --- the fold ----------------------------------------------------------------------------------------------------

    def rebuild(self) -> None:
        disk = self.shell.disk
        before, self.groups = self.groups, GroupsFold()
        self.groups.go_on_after(before)
        self.lanes = Lanes()
        self._unreadable.clear()
        states = [number for number, batch in enumerate(disk.batches) if batch.state is not None]
        first = states[-1] if states and (disk.start or self.world.chance(0.7)) else 0
        for batch in disk.batches[:first]:
            self.lanes.add(batch)
            if batch.mail:
                self._unreadable.append((batch.end, batch.head.appended_at_ms))
        for batch in disk.batches[first:]:
            self._take(batch)
        self.groups.forget_below(disk.start)
        self._own.clear()
        self._took_over = False
        self.world.checker.groups.forgets(self)

    def state(self, offset: int) -> tuple[bytes, int]:
        """Return the groups' part of a STATE record at `offset`, and its log start."""
        log_start = max(self.shell.disk.start, self.groups.purged_upto)
        fold = self.groups.snapshot_into(PartitionFold(applied=offset, log_start_offset=log_start))
        return encode_fold(fold), log_start

    def fold(self, batch: Batch) -> None:
        """A leader has appended this. It knows the content of a STATE record already."""
        if batch.state is None:
            self._take(batch)
        else:
            self.groups.state_written(batch.base, batch.log_start)
        self._own.add(batch.uid)

    def written(self, batches: list[Batch]) -> None:
        """A follower folds durable batches."""
        for batch in batches:
            if batch.uid not in self._own:
                self._take(batch)
            self._own.discard(batch.uid)

    def _take(self, batch: Batch) -> None:
        self.lanes.add(batch)
        if batch.mail:
            self._unreadable.append((batch.end, batch.head.appended_at_ms))
        if batch.state is not None:
            self.groups.take_state(batch.base, StateRecord(batch.state))
        elif batch.control is not None:
            record = batch.control.record
            if isinstance(record, Cancel):
                self.groups.cancel(record)
            elif isinstance(record, Reschedule):
                self.groups.reschedule(batch.base, record)
            elif isinstance(record, Purge):
                self.groups.purge(batch.base, record.upto)
            elif isinstance(record, GroupEnd):
                self.groups.end(batch.control.group)
            else:
                self.groups.apply(batch.control.group, record, batch.base, batch.head.leader_epoch)

    def readable_by_ms(self) -> int:
        """The time by which all due messages are readable: an unreadable message is due after the time of its batch."""
        while self._unreadable and self._unreadable[0][0] <= self.high_watermark:
            self._unreadable.popleft()
        return self._unreadable[0][1] if self._unreadable else NEVER_MS

    def record_at(self, offset: int) -> GroupRecord | None:
        """Return the record at that offset of the log."""
        disk = self.shell.disk
        index = disk.index_from(offset)
        if index == len(disk.batches) or disk.batches[index].base != offset:
            return None
        control = disk.batches[index].control
        return control.record if control is not None else None

    def purge(self, upto: int) -> None:
        """Purge everything below `upto` that neither a group nor the outbox needs, by a record. Only whole batches are
        purged."""
        if not self.serves():
            return
        delivery = [each.floor() for each in self.groups.delivery.values()]
        streams = [each.committed for each in self.groups.streams.values()]
        upto = min([upto, *delivery, *streams, *self.outbox.needed(), *self.queue.first_unpassed()])
        index = self.shell.disk.index_from(upto + 1) - 1
        upto = self.shell.disk.batches[index].base if index >= 0 else 0
        if upto > max(self.shell.disk.start, self.groups.purged_upto):
            with suppress(Unavailable):
                self.append("", Purge(upto))

    # --- requests to a leader ----------------------------------------------------------------------------------------

    @property
    def high_watermark(self) -> int:
        return self.shell.replica.high_watermark

    @property
    def epoch(self) -> int:
        """Of this leader."""
        return self.shell.replica.leader_epoch

    def serves(self) -> bool:
        """Return whether it leads, may serve, and has committed the start of its epoch: then it knows everything
        before."""
        replica = self.shell.replica
        book = replica.in_sync
        if book is None or book.epoch_start < 0 or replica.high_watermark <= book.epoch_start:
            return False
        if self.shell.closed or self.shell.is_busy or not replica.may_serve(self.world.now):
            return False
        if not self._took_over or self._book is not book:
            self._took_over = True
            for delivery in self.groups.delivery.values():
                delivery.take_over(self.node.now_ms)
        if self._book is not book:
            self._book = book
            self.outbox.begin()
            self.world.checker.groups.agrees(self)
        return True

    def request(self, name: str, content: tuple[Any, ...], answer: Answer) -> None:
        """Take a request; `answer` is called at the sender, with the result or the refusal."""

        def back(result: Any) -> None:
            self.world.network.send(self.node.id, CLIENTS, answer, result)

        place, _, verb = name.partition(".")
        if place == "coordinator":
            self.node.coordinator.request(verb, content, back)
            return
        try:
            if not self.serves():
                leader = self.shell.replica.state.leader if self.shell.replica.state else None
                raise NotLeader("not here, or not now", leader=leader)
            getattr(getattr(self, place), verb)(*content, back)
        except PortalMQError as error:
            back(error)

    def append(
        self,
        group: str,
        record: Any,
        then: Callable[[PortalMQError | None], None] | None = None,
        *,
        not_before_ms: int = 0,
        delivers: bool = False,
    ) -> int:
        """Append and fold a record; `then` is called when it is committed, or its outcome unknown. Return its
        offset."""
        control = Control(group, record, self.node.now_ms, self.node.wall_ms, self.high_watermark)
        submission = Submission(
            self.world.next_uid(),
            1,
            control=control,
            then=self._when_settled(then),
            not_before_ms=not_before_ms,
            delivers=delivers,
        )
        self.shell.submit(submission)
        if submission.base < 0:
            raise Unavailable("refused")
        self.world.checker.groups.appended(self, control)
        return submission.base

    def wait_appended(self, then: Callable[[PortalMQError | None], None]) -> None:
        """Call `then` when everything appended by now is committed."""
        settled = self._when_settled(then)
        assert settled is not None
        self.shell.wait_for(self.shell.replica.next_offset, settled)

    def refuse(self, error: PortalMQError, back: Answer) -> None:
        """Answer for good: when no other broker can have led at the time of the request, and all that is appended is
        committed."""
        self._refuse(error, back, self.world.now)

    def _refuse(self, error: PortalMQError, back: Answer, asked_ms: int) -> None:
        if self.shell.replica.led_at(asked_ms):
            self.wait_appended(lambda failed: back(failed or error))
        elif not self.shell.replica.leading or self.world.now >= asked_ms + VOUCHED_WITHIN_MS:
            back(Unavailable("nobody vouches for this leader"))
        else:
            self.shell.soon(50, self._refuse, error, back, asked_ms)

    def _when_settled(
        self, then: Callable[[PortalMQError | None], None] | None
    ) -> Callable[[PortalMQError | None], None] | None:
        """Answer when no earlier leader can deliver any more."""

        def answer(error: PortalMQError | None) -> None:
            assert then is not None
            if error is None and not self.shell.replica.may_settle(self.world.now):
                self.shell.soon(100, answer, None)
            else:
                then(error)

        return answer if then is not None else None

    def committed(self, high_watermark: int) -> None:
        self.outbox.committed(high_watermark)

    def tick(self) -> None:
        if self.serves():
            self.queue.sweep()
            self.outbox.work()
