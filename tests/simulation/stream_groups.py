"""A leader's stream groups: claims of the group's coordinator, commits of members, seeks, and reading.

The simulation has one log; a stream group reads it as several partitions with the same content, each under a name of
its own: "stream/0", "stream/1". So members have partitions to share, and every claim and commit is replicated under all
faults.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from simulation.coordinator import Behind

from portalmq.broker.core.queue.records import Claim, Commit, CommitOffset, Output, Seek
from portalmq.broker.core.stream.offsets import StreamOffsets
from portalmq.errors import IllegalGeneration, OffsetMoved, OffsetOutOfRange

if TYPE_CHECKING:
    from simulation.group_host import Answer, GroupHost

FETCHED_MAX = 10


class StreamGroups:
    def __init__(self, host: GroupHost) -> None:
        self.host = host
        self.node = host.node
        self.world = host.world

    def _stream(self, name: str) -> StreamOffsets:
        stream = self.host.groups.streams.get(name)
        if stream is None:
            raise IllegalGeneration("no member has claimed it")
        return stream

    def claim(self, name: str, member: str, generation: int, back: Answer) -> None:
        """The member owns the partition from this generation on; the answer is the offset at which it continues."""
        stream = self.host.groups.streams.get(name)
        if stream is not None:
            try:
                stream.check_claim(generation)
            except IllegalGeneration:
                back(Behind(stream.generation))
                return
        self.host.append(name, Claim(member, generation, self.host.shell.disk.start, self.node.now_ms))
        claimed = self._stream(name).committed
        self.host.wait_appended(lambda error: back(error or claimed))

    def commit(self, name: str, member: str, generation: int, offset: int, back: Answer) -> None:
        if self._stream(name).check_commit(member, generation, offset, self.host.high_watermark):
            self.host.append(name, CommitOffset(offset, member, generation, self.node.now_ms))
        self.host.wait_appended(lambda error: back(error or offset))

    def transform(
        self,
        name: str,
        member: str,
        generation: int,
        offset: int,
        committed: int,
        call: str,
        outputs: int,
        back: Answer,
    ) -> None:
        """The commit call of a stream: the offset and the outputs, or neither."""
        stream = self._stream(name)
        shown = (name, member, generation, offset, committed)
        commit_id = blake2b(repr(shown).encode(), digest_size=16).digest()
        if commit_id not in stream.commits:
            try:
                stream.check_owner(member, generation)
                stream.check_begin(committed, self.host.shell.disk.start)
                is_news = stream.check_commit(member, generation, offset, self.host.high_watermark)
            except (IllegalGeneration, OffsetMoved, OffsetOutOfRange) as refused:
                self.host.refuse(refused, back)
                return
            if is_news:
                ordered = tuple(Output("output", f"{call}/{number}") for number in range(outputs))
                record = Commit(
                    commit_id, self.node.now_ms, ordered, offset=offset, member=member, generation=generation
                )
                self.host.append(name, record)
        self.host.wait_appended(lambda error: back(error or offset))

    def seek(self, name: str, generation: int, offset: int, back: Answer) -> None:
        """Move the offset there, at most to the end of the log; older generations are fenced."""
        self._stream(name).check_claim(generation)
        offset = max(self.host.shell.disk.start, min(offset, self.host.high_watermark))
        self.host.append(name, Seek(offset, generation, self.node.now_ms))
        self.host.wait_appended(lambda error: back(error or offset))

    def fetch(self, name: str, offset: int, back: Answer) -> None:
        """Return messages from `offset` on, and the next offset."""
        disk = self.host.shell.disk
        first = disk.index_from(offset + 1) - 1
        at = disk.batches[first].base if first >= 0 and disk.batches else disk.start
        batches: list[Any] = self.host.shell.read(at) or []
        batches = batches[:FETCHED_MAX]
        found = [at for batch in batches for at in range(batch.base, batch.end) if batch.mail and at >= offset]
        end = batches[-1].end if batches else max(offset, disk.start)
        self.world.checker.groups.fetched(name, found)
        back((found, end))
