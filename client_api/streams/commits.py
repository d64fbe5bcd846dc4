"""Offset commits of a stream group's member, at the leaders of its partitions.

done --commit--> PUT offsets                      in the generation in which this member has the partitions messages and
outputs --commit_with--> one commit  both or neither
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from portalmq import stream_wire as contract
from portalmq import wire
from portalmq.consumers.commit import Output, packed, partition_of, send_commit
from portalmq.errors import IllegalGeneration, OffsetMoved, OffsetOutOfRange, PortalMQError, Unavailable
from portalmq.message import Message
from portalmq.network.either import Waits, settled
from portalmq.streams.fetch_buffer import FetchBuffer, PartitionBuffer, TopicPartition
from portalmq.transport.calls import EitherCalls
from portalmq.transport.request import json_request


class OffsetCommitter:
    """Thread-safe; `buffers.lock` also guards `generation`, in which the member reads and commits: -1 while it is not
    in the group. `on_refused` is called when a leader refuses a commit: then
    the member has to ask the coordinator at once."""

    def __init__(
        self,
        transport: EitherCalls,
        group: str,
        member_id: str,
        buffers: FetchBuffer,
        on_refused: Callable[[], None],
        waits: Waits,
    ) -> None:
        self.generation = -1
        self._transport = transport
        self._group = group
        self._member_id = member_id
        self._buffers = buffers
        self._on_refused = on_refused
        # One at a time.
        self._commit_lock = waits.mutex()

    async def commit(self, buffers: Sequence[PartitionBuffer], timeout_s: float | None = None) -> None:
        """Commit what is done at the leaders; durable on return. Raises IllegalGeneration for partitions that were
        taken away.

        `timeout_s` also bounds the wait for another commit: the member has heartbeats to send.
        """
        if not await self._commit_lock.acquire(timeout_s):
            raise Unavailable("another commit is on its way")
        try:
            with self._buffers.lock:
                changed = [
                    (buffer, buffer.done) for buffer in buffers if buffer.done > buffer.committed and not buffer.gone
                ]
                generation = self.generation
            if changed:
                await self._put_offsets(changed, generation, timeout_s)
        finally:
            self._commit_lock.release()

    async def _put_offsets(
        self, changed: Sequence[tuple[PartitionBuffer, int]], generation: int, timeout_s: float | None
    ) -> None:
        offsets = [contract.PartitionOffset(*buffer.place, done) for buffer, done in changed]
        body = contract.CommitOffsetsRequest(self._member_id, generation, offsets)
        request = json_request("PUT", wire.group_path(self._group, "offsets"), body, near=changed[0][0].place)
        try:
            await settled(self._transport.call(request, timeout_s=timeout_s))
        except PortalMQError as error:
            results = error.extra.get("results") or []
            ok = {(each["topic"], each["partition"]) for each in results if each.get("status") == "ok"}
            self._committed([(buffer, done) for buffer, done in changed if buffer.place in ok])
            if isinstance(error, OffsetOutOfRange) and len(changed) > 1:
                for buffer, done in changed:  # the error may concern any of them: commit each alone
                    if buffer.place not in ok:
                        await self._put_offsets([(buffer, done)], generation, timeout_s)
                return
            committed = error.extra.get("committed")
            if isinstance(error, OffsetOutOfRange) and isinstance(committed, int):
                # A purge or retention has moved the group past these offsets, so all below is done.
                self._committed([(buffer, committed) for buffer, _ in changed])
                return
            if isinstance(error, IllegalGeneration | OffsetOutOfRange):
                self._on_refused()
            raise
        self._committed(changed)

    def _committed(self, changed: Iterable[tuple[PartitionBuffer, int]]) -> None:
        with self._buffers.lock:
            for buffer, done in changed:
                buffer.committed = max(buffer.committed, done)

    async def commit_with(self, messages: Sequence[Message], outputs: Iterable[Output]) -> wire.Committed:
        """Commit the offset after these messages of one partition and publish `outputs`, both or neither. Raises
        IllegalGeneration if another member has the partition, OffsetMoved if another offset is committed.

        After an error the partition is read again from the committed offset: asking for more must not commit input
        without outputs. After an unknown outcome that offset may be outdated: the next commit names it, and is refused
        with the right one."""
        place, end = partition_of(messages), max(message.offset for message in messages) + 1
        async with self._commit_lock:
            try:
                generation, committed = self._check_owned(place, messages)
                commit = wire.PackCommit(
                    publish=packed(outputs),
                    member_id=self._member_id,
                    generation=generation,
                    offsets=[wire.InputOffset(*place, end, committed)],
                )
                answer = await send_commit(self._transport, self._group, place, commit)
            except BaseException as error:
                self._read_from_committed(place, error)
                raise
            with self._buffers.lock:
                buffer = self._buffers.by_partition.get(place)
                if buffer is not None:
                    buffer.committed = max(buffer.committed, end)
                    buffer.done = max(buffer.done, end)
        return answer

    def _check_owned(self, place: TopicPartition, messages: Sequence[Message]) -> tuple[int, int]:
        """Return the generation in which this member owns these messages, and the committed offset as far as it knows.
        Raises IllegalGeneration if another member had the partition in between: it has published for them."""
        offsets = [message.offset for message in messages]
        with self._buffers.lock:
            buffer = self._buffers.by_partition.get(place)
            if buffer is None or min(offsets) < buffer.committed or max(offsets) >= buffer.handed:
                raise IllegalGeneration(
                    f"partition {place[1]} of topic {place[0]!r} was taken away, or is read again, since these messages"
                    " were handed out: what is not committed of them comes again"
                )
            return self.generation, buffer.committed

    def _read_from_committed(self, place: TopicPartition, error: BaseException) -> None:
        with self._buffers.lock:
            buffer = self._buffers.by_partition.get(place)
            if buffer is not None:
                # The leader's answer: an earlier try with an unknown outcome was applied.
                committed = error.extra.get("committed") if isinstance(error, OffsetMoved | OffsetOutOfRange) else None
                offset = committed if isinstance(committed, int) else buffer.committed
                self._buffers.add([contract.AssignedPartition(*place, offset, buffer.since)])
        self._on_refused()
