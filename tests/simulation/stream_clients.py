"""Members of the stream group: they join, heartbeat, read, commit and leave, and sometimes stop heartbeating while they
read on; later they return under their id, or another client does. After a commit of unknown outcome some repeat it, and
some read again from the committed offset that they know, and commit other batches with other outputs."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from simulation.coordinator import Elsewhere, name_of
from simulation.group_clients import Caller

from portalmq.errors import Fenced, IllegalGeneration, OffsetMoved, OffsetOutOfRange, PortalMQError

if TYPE_CHECKING:
    from simulation.world import World

    from portalmq.broker.core.stream.events import AnswerMember


@dataclass(slots=True, eq=False)
class Reading:
    """A partition of the member, its position, the committed offset as far as the member knows, and the newest
    generation in which it owned the partition."""

    name: str
    since: int
    position: int
    committed: int
    generation: int


class Member(Caller):
    def __init__(self, world: World, member_id: str, *, is_double: bool = False) -> None:
        super().__init__(world)
        self.is_double = is_double
        self.member_id = member_id
        self.timeout_ms = world.groups.session_timeout_ms
        self.generation = -1
        self.reading: dict[str, Reading] = {}
        self.silent_until = 0
        # A generator of its own: other decisions of the seed remain the same.
        self.recut = Random(f"{member_id} of {world.options.seed}")
        self._coordinator = world.random.choice(world.ids)
        self._turn = 0
        world.after(world.random.randint(1, 500), self._join, self._turn)

    # --- the coordinator ---------------------------------------------------------------------------------------------

    def _again(self, delay_ms: int) -> None:
        self._turn += 1
        if self.is_double and self.world.faults.stopped:
            self.reading.clear()
            return
        act = self._join if self.generation < 0 else self._heartbeat
        self.world.after(delay_ms, act, self._turn)

    def _join(self, turn: int) -> None:
        if turn == self._turn:
            self._ask("join", (self.member_id, self.timeout_ms), turn)

    def _heartbeat(self, turn: int) -> None:
        """Send a heartbeat. Some members go silent, perhaps for longer than their session, or leave and return."""
        world = self.world
        if turn != self._turn:
            return
        if not world.faults.stopped and world.chance(0.03):
            self._again(world.random.randint(1, 3 * self.timeout_ms))
        elif not world.faults.stopped and world.chance(0.02):
            self.generation = -1
            self.reading.clear()
            self.call(self._coordinator, "coordinator.leave", (self.member_id,), lambda result: None)
            self._again(world.random.randint(1, 3 * self.timeout_ms))
        elif not world.faults.stopped and world.chance(0.01) and len(world.members) < 6:
            world.members.append(Member(world, self.member_id, is_double=True))  # two clients with one name
            self._again(100)
        else:
            self._ask("heartbeat", (self.member_id, self.generation), turn)

    def _ask(self, verb: str, content: tuple[Any, ...], turn: int) -> None:
        def answered(result: Any) -> None:
            if turn != self._turn:
                return
            if isinstance(result, Elsewhere):
                self._coordinator = result.broker_id
                self._again(self.world.random.randint(1, 100))
            elif isinstance(result, IllegalGeneration | Fenced):
                self.generation = -1
                self.reading.clear()
                self._again(self.world.random.randint(1, 500))
            elif isinstance(result, PortalMQError):
                self._coordinator = self.world.random.choice(self.world.ids)
                self._again(self.world.random.randint(1, 200))
            else:
                self._assigned(result)
                self._again(result.heartbeat_interval_ms)

        self.call(self._coordinator, f"coordinator.{verb}", content, answered)

    def _assigned(self, answer: AnswerMember) -> None:
        if answer.generation < self.generation:
            return  # a newer answer has arrived
        self.generation = answer.generation
        before, self.reading = self.reading, {}
        for assigned in answer.assignment:
            name = name_of(assigned.partition)
            known = before.get(name)
            if known is not None and known.since == assigned.since:
                self.reading[name] = known
                known.generation = answer.generation
            else:
                self.reading[name] = Reading(name, assigned.since, assigned.offset, assigned.offset, answer.generation)
                self._read(self.reading[name])

    # --- its partitions ----------------------------------------------------------------------------------------------

    def _is_its(self, reading: Reading) -> bool:
        return self.reading.get(reading.name) is reading

    def _read(self, reading: Reading) -> None:
        if self._is_its(reading):

            def fetched(result: Any) -> None:
                if isinstance(result, PortalMQError) or result[1] <= reading.position:
                    self.world.after(self.world.random.randint(10, 200), self._read, reading)
                elif result[0]:
                    self._commit(reading, result)
                else:  # a batch of group records: a commit of each would never end
                    reading.position = result[1]
                    self.world.after(self.world.random.randint(1, 100), self._read, reading)

            self.call(self.leader(), "stream.fetch", (reading.name, reading.position), fetched)

    def _commit(self, reading: Reading, result: tuple[list[int], int]) -> None:
        """Commit the messages read, alone or with outputs."""
        inputs, offset = result
        call = f"call {self.world.next_uid()}"
        self.world.checker.groups.transforms(reading.name, call, inputs)
        content = (reading.name, self.member_id, reading.generation, offset)
        self._try(reading, offset, content, (*content, reading.committed, call, self.world.random.randint(0, 2)))

    def _try(self, reading: Reading, offset: int, commit: tuple[Any, ...], transform: tuple[Any, ...]) -> None:
        """Repeat the same commit while its outcome is unknown, or commit other batches from the committed offset."""
        with_outputs = self.world.chance(self.world.groups.commit)

        def answered(result: Any) -> None:
            if isinstance(result, IllegalGeneration | OffsetOutOfRange | OffsetMoved):
                self.world.count(f"refused {result.code}")
                if with_outputs:
                    self.world.checker.groups.stream_refused(reading.name, transform[-2])
                if self._is_its(reading) and "committed" in result.extra:
                    self._read_from(reading, result.extra["committed"])  # another commit of this name was applied
                elif self._is_its(reading):
                    del self.reading[reading.name]  # until a heartbeat assigns it again
            elif isinstance(result, PortalMQError):
                if self._is_its(reading) and self.recut.random() < 0.5:
                    self.world.count("cut again")
                    self._read_from(reading, reading.committed)
                elif self._is_its(reading):
                    self.world.after(self.world.random.randint(1, 300), self._try, reading, offset, commit, transform)
            else:
                self.world.count("stream commit")
                self._read_from(reading, offset)

        if not self._is_its(reading) and not self.world.chance(0.2):
            return  # otherwise it lets go late
        if with_outputs:
            self.call(self.leader(), "stream.transform", transform, answered)
        else:
            self.call(self.leader(), "stream.commit", commit, answered)

    def _read_from(self, reading: Reading, committed: int) -> None:
        reading.position = reading.committed = committed
        self.world.after(self.world.random.randint(1, 100), self._read, reading)
