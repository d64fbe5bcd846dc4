"""The output that Dead and Commit records order, and its destination.

The leader works on committed records, sends each output under an id derived from the record's offset, repeats it until
it is answered, and logs Done. The destination is another partition with message ids: it accepts each id once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulation.network import CLIENTS

from portalmq.broker.core.queue.records import Commit, Dead, Done, Reschedule
from portalmq.errors import PortalMQError

if TYPE_CHECKING:
    from simulation.group_host import GroupHost
    from simulation.node import Node
    from simulation.world import World

AGAIN_MS = 400
DEAD_LETTERS = "dead letters"
RESCHEDULED = "rescheduled"

# (offset of the record, number of the output)
Id = tuple[int, ...]


class Destination:
    """A log elsewhere."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.log: list[tuple[str, str]] = []  # topic, content
        self._ids: set[Id] = set()

    def append(self, sender: Node, id: Id, topic: str, content: str) -> None:
        """Accept an output once, and confirm it to its sender."""
        if id not in self._ids:
            self._ids.add(id)
            self.log.append((topic, content))
            self.world.checker.groups.arrived(id, topic, content)
        else:
            self.world.count("output repeated")
        self.world.network.send(CLIENTS, sender.id, sender.call, _ignore, "arrived", id)


class Outbox:
    """The outbox of one replica. It keeps nothing that a new leader would miss: open records are in the fold."""

    def __init__(self, host: GroupHost) -> None:
        self.host = host
        self.world = host.world
        self._left: dict[int, dict[int, tuple[str, str]]] = {}  # record -> number -> (topic, content), unanswered
        self._sent_ms: dict[int, int] = {}

    def begin(self) -> None:
        self._left.clear()
        self._sent_ms.clear()

    def needed(self) -> list[int]:
        """The offsets that the log must keep for it."""
        needed = list(self.host.groups.outbox)
        for offset in self.host.groups.outbox:
            record = self.host.record_at(offset)
            if record is None:  # it is not written yet
                needed.append(0)
            elif isinstance(record, Dead | Reschedule):
                needed += [start for start, *_ in record.ranges]
        return needed

    def committed(self, high_watermark: int) -> None:
        if any(offset < high_watermark and offset not in self._sent_ms for offset in self.host.groups.outbox):
            self.host.shell.soon(0, self.host.tick)

    def work(self) -> None:
        """Send committed output that has no answer, and repeat it now and then."""
        for offset, group in list(self.host.groups.outbox.items()):
            if not self.is_committed(offset):
                continue
            if self.world.now - self._sent_ms.get(offset, -AGAIN_MS) < AGAIN_MS:
                continue
            if offset not in self._left:
                self._left[offset] = self._ordered(offset)
            self._sent_ms[offset] = self.world.now
            for number, (topic, content) in self._left[offset].items():
                self._send(self.id_of(offset, number), topic, content)
            self._finish(offset, group)

    def is_committed(self, offset: int) -> bool:
        return offset < self.host.high_watermark

    def id_of(self, offset: int, number: int) -> Id:
        return offset, number

    def _ordered(self, offset: int) -> dict[int, tuple[str, str]]:
        record = self.host.record_at(offset)
        if isinstance(record, Commit):
            return {number: (output.topic, output.record) for number, output in enumerate(record.outputs)}
        assert isinstance(record, Dead | Reschedule), (offset, record)
        topic = record.topic if isinstance(record, Dead) else RESCHEDULED
        named = [at for start, end, *_ in record.ranges for at in range(start, end) if at in self.host.lanes.mail]
        return {number: (topic, f"{at} by {offset}") for number, at in enumerate(named)}

    def _send(self, id: Id, topic: str, content: str) -> None:
        self.world.network.send(
            self.host.node.id, CLIENTS, self.world.destination.append, self.host.node, id, topic, content
        )

    def arrived(self, id: Id) -> None:
        """The destination has it."""
        offset, number = id[:2]
        self._left.get(offset, {}).pop(number, None)
        if self.host.serves() and offset in self.host.groups.outbox:
            self._finish(offset, self.host.groups.outbox[offset])

    def _finish(self, offset: int, group: str) -> None:
        if offset in self._left and not self._left[offset]:
            try:
                self.host.append(group, Done(offset))
            except PortalMQError:
                return  # next time, or the next leader
            del self._left[offset]


def _ignore() -> None:
    pass
