"""SQL over the segment files of this broker: each query in a process of its own (storage/sql_query.py).

The process begins with the interpreter alone, not as a copy of the broker; it gets the places of the files, with what
is readable of each, on its standard input. Reading its answer blocks nobody else, and it is killed when its time is
over, or when the client is gone. Few run at a time: each may take a processor and SQL_MEMORY.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from signal import SIGKILL

import gevent
import msgspec
from gevent.lock import BoundedSemaphore
from gevent.os import nb_read, nb_write

from portalmq.broker.cluster.topics import Topics
from portalmq.broker.partition.long_poll import Peer
from portalmq.broker.partition.yielding import in_short_turns
from portalmq.broker.storage.sql_query import ANSWER_BYTES_MAX, PartitionFiles, SqlOrder
from portalmq.errors import Backpressure, InvalidRequest, QueryLimit, Unavailable

QUERIES_MAX = 2
TIMEOUT_MS_MAX = 30_000
# The process stops a query itself; so much later it is killed.
GRACE_S = 10.0
EXIT_WITHIN_S = 5.0
PROGRAM = "portalmq.broker.storage.sql_query"


class SqlRows(msgspec.Struct):
    """A SqlAnswer, whose rows stay JSON."""

    columns: list[str] = []
    rows: msgspec.Raw = msgspec.Raw(b"[]")
    truncated: bool = False
    refused: str = ""
    detail: str = ""


class SqlQueries:
    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._slots = BoundedSemaphore(QUERIES_MAX)

    def run(
        self,
        query: str,
        *,
        limit: int,
        timeout_ms: int,
        peer: Peer | None = None,
        make_room: Callable[[int], None] = lambda size: None,
    ) -> SqlRows:
        """Return at most `limit` rows. `make_room` is called with the size of the answer, and may refuse it. Raises
        InvalidRequest for anything but one SELECT, QueryLimit for one that takes too long or too much memory,
        Backpressure while others run, Unavailable when `peer`, the client, is gone, or a file cannot be read now."""
        if not self._slots.acquire(blocking=False):
            raise Backpressure(f"{QUERIES_MAX} queries run already: repeat in a moment", retry_after_s=1)
        try:
            request = SqlOrder(query, limit, timeout_ms, self._partitions())
            data = _run(msgspec.json.encode(request), timeout_ms / 1000 + GRACE_S, peer)
        finally:
            self._slots.release()
        make_room(len(data))
        try:
            answer = msgspec.json.decode(data, type=SqlRows)
        except msgspec.DecodeError:
            # It was killed: by its own limit of processor time or of addresses, or by the system for want of memory.
            raise QueryLimit("the query takes too much time or memory: name a topic and a partition") from None
        if answer.refused == "unreadable":
            raise Unavailable(answer.detail, retry_after_s=1)
        if answer.refused:
            raise (QueryLimit if answer.refused == "limit" else InvalidRequest)(answer.detail)
        return answer

    def _partitions(self) -> list[PartitionFiles]:
        return sorted(
            (
                PartitionFiles(
                    partition.topic,
                    partition.number,
                    str(partition.log.directory.absolute()),
                    partition.log.log_start_offset,
                    partition.high_watermark,
                )
                for partition in in_short_turns(self._topics.partitions())
            ),
            key=lambda files: (files.topic, files.partition),
        )


def _run(request: bytes, within_s: float, peer: Peer | None) -> bytes:
    """Return what the process answers. It is killed when the time is over or the client is gone."""
    with _process() as process:
        unwatch = peer.watch(process.kill) if peer is not None else lambda: None
        try:
            with gevent.Timeout(within_s, QueryLimit("the query took too long")):
                process.send(request)
                data = process.receive()
        finally:
            unwatch()
            process.kill()
    if peer is not None and peer.gone():
        raise Unavailable("the client is gone: its query was ended")
    return data


class _Process:
    """A process that runs: its id, and the descriptors to write to and to read from."""

    def __init__(self, pid: int, to_process: int, from_process: int) -> None:
        self.pid = pid
        self._to = to_process
        self._from = from_process
        self._open = {to_process, from_process}
        for descriptor in self._open:
            os.set_blocking(descriptor, False)

    def send(self, request: bytes) -> None:
        rest = memoryview(request)
        with suppress(BrokenPipeError):
            while rest:
                rest = rest[nb_write(self._to, rest) :]
        self._close(self._to)

    def receive(self) -> bytes:
        """Return all that the process writes until it ends. Raises QueryLimit for more than it may write."""
        parts, size = [], 0
        while part := nb_read(self._from, 1 << 16):
            parts.append(part)
            size += len(part)
            if size > ANSWER_BYTES_MAX:
                raise QueryLimit(f"the answer is over {ANSWER_BYTES_MAX} bytes: name fewer columns, or a smaller limit")
        return b"".join(parts)

    def kill(self) -> None:
        """Kill it, which may have ended. `end` has not been called, so its id is not another process's yet."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, SIGKILL)

    def _close(self, descriptor: int) -> None:
        self._open.remove(descriptor)
        os.close(descriptor)

    def end(self) -> None:
        """Close what is open, and wait for the end of the process, which is killed or ends by itself."""
        for descriptor in tuple(self._open):
            self._close(descriptor)
        with gevent.Timeout(EXIT_WITHIN_S, False):
            while os.waitpid(self.pid, os.WNOHANG)[0] == 0:
                gevent.sleep(0.005)


@contextmanager
def _process() -> Iterator[_Process]:
    """Start the process. On exit it has ended."""
    read, to_process = os.pipe()
    from_process, write = os.pipe()
    command = [sys.executable, "-P", "-m", PROGRAM]
    actions = [(os.POSIX_SPAWN_DUP2, read, 0), (os.POSIX_SPAWN_DUP2, write, 1)]
    try:
        pid = os.posix_spawn(sys.executable, command, os.environ, file_actions=actions)
    except OSError as fault:
        os.close(to_process)
        os.close(from_process)
        raise Unavailable(f"no process can be started for the query: {fault.strerror}") from None
    finally:
        os.close(read)
        os.close(write)
    process = _Process(pid, to_process, from_process)
    try:
        yield process
    finally:
        process.end()
