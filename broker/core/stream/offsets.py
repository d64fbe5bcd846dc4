"""A stream group on one partition: the owner and the committed offset.

It is a fold over the partition's log, like a queue group's. The group's coordinator claims the partition for a member
before it assigns it. From then on only that member may commit, in that generation of the group or a later one. So the
log itself fences a member that was given up, whatever it believes (KIP-429).
"""

from __future__ import annotations

from portalmq.broker.core.fold import StreamFold
from portalmq.broker.core.queue.records import Claim, Commit, CommitOffset, Seek, StreamRecord, remember_commit
from portalmq.errors import IllegalGeneration, OffsetMoved, OffsetOutOfRange

COMMITS_REMEMBERED = 10_000


class StreamOffsets:
    """The state of one group. `commits` includes the ids of seeks; `moved_at` is the offset of the newest record that
    moved `committed`, or a later one. Invariant: between seeks `committed` never falls, and `generation` never does."""

    def __init__(self, fold: StreamFold) -> None:
        self.group = fold.group
        self.committed = fold.committed
        self.generation = fold.generation
        self.member = fold.member
        self.last_active_ms = fold.last_active_ms
        self.commits: dict[bytes, int] = dict(fold.commits)
        self.moved_at = -1

    def snapshot(self) -> StreamFold:
        return StreamFold(
            self.group,
            self.committed,
            self.generation,
            self.member,
            self.last_active_ms,
            list(self.commits.items()),
        )

    def apply(self, record: StreamRecord | Commit, offset: int) -> None:
        """Fold the record at `offset`. Records come in the order of the log, each once."""
        before = self.committed
        match record:
            case Claim():
                self.member = record.member
                self.generation = max(self.generation, record.generation)
            case CommitOffset():
                self.committed = max(self.committed, record.offset)
            case Seek():
                self.committed = record.offset
                self.generation = max(self.generation, record.generation)
                if record.seek_id:
                    remember_commit(self.commits, record.seek_id, offset, COMMITS_REMEMBERED)
            case Commit():
                self.committed = max(self.committed, record.offset)
                remember_commit(self.commits, record.commit_id, offset, COMMITS_REMEMBERED)
        if self.committed != before:
            self.moved_at = offset
        self.last_active_ms = max(self.last_active_ms, record.at_ms)

    def purge(self, upto: int) -> None:
        """Take that everything below `upto` is gone from the log."""
        self.committed = max(self.committed, upto)

    # --- decisions ---------------------------------------------------------------------------------------------------

    def check_commit(self, member: str, generation: int, offset: int, high_watermark: int) -> bool:
        """Return whether there is something to commit: False for an offset that is committed already.

        Raise IllegalGeneration for a member that does not own the partition (any more), OffsetOutOfRange for an offset
        above the high watermark or below the committed one.
        """
        self.check_owner(member, generation)
        if not 0 <= offset <= high_watermark:
            raise OffsetOutOfRange(
                f"offset {offset} cannot be committed: the partition can be read up to {high_watermark}",
                high_watermark=high_watermark,
            )
        if offset < self.committed:
            raise OffsetOutOfRange(
                f"offset {offset} is below the committed {self.committed}: commits never go back, a seek does",
                committed=self.committed,
            )
        return offset > self.committed

    def check_owner(self, member: str, generation: int) -> None:
        """Raise IllegalGeneration for a member that does not own the partition (any more)."""
        if member != self.member or generation < self.generation:
            owner = f"{self.member!r} does" if self.member else "no member does"
            raise IllegalGeneration(
                f"member {member!r} of generation {generation} does not own this partition: {owner}, since generation"
                f" {self.generation}. Send a heartbeat to learn the assignment"
            )

    def check_begin(self, committed: int, log_start: int) -> None:
        """Raise OffsetMoved if the input of a commit does not begin at the group's committed offset. `committed` is
        that offset as the caller knows it; retention may have moved it up to `log_start`.

        Outputs depend on what was read from there on. After a commit of unknown outcome a member may read the same
        messages again and cut them into other batches: such a batch holds messages that have their outputs already.
        """
        if not self.committed <= committed <= max(self.committed, log_start):
            at = max(self.committed, log_start)
            raise OffsetMoved(
                f"the commit begins at offset {committed}, and the group has committed {at}: nothing was committed or"
                f" published. Read on from {at}",
                committed=at,
            )

    def check_claim(self, generation: int) -> None:
        """Raise IllegalGeneration for a coordinator that is behind."""
        if generation < self.generation:
            raise IllegalGeneration(
                f"generation {generation} cannot claim this partition: generation {self.generation} has",
                generation=self.generation,
            )


def new_stream(group: str, claim: Claim, offset: int) -> StreamOffsets:
    """Return the state of a group that begins with the claim at `offset`."""
    stream = StreamOffsets(StreamFold(group, claim.start, claim.generation, claim.member, claim.at_ms))
    stream.moved_at = offset
    return stream
