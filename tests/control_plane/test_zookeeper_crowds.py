"""Many callers of one ZooKeeper session at the same time."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.zookeeper import Wire, fresh_chroot, until

from portalmq.control_plane.embedded import EmbeddedZooKeeper
from portalmq.control_plane.plane import Create, Node, clock_s
from portalmq.control_plane.zookeeper import ZooKeeper
from portalmq.control_plane.zookeeper.connection import NotSentError, ReadMany
from portalmq.control_plane.zookeeper.session import REQUESTS_AT_ONCE_MAX, UnansweredError

pytestmark = pytest.mark.cluster

CROWD = 4 * REQUESTS_AT_ONCE_MAX


def test_trap_a_crowd_neither_fills_kazoos_wake_up_sockets_nor_waits_beyond_its_deadlines(
    zookeeper_server: EmbeddedZooKeeper,
) -> None:
    chroot = fresh_chroot()
    with Wire(zookeeper_server.ports[0]) as wire, ThreadPoolExecutor(CROWD) as pool:
        plane = ZooKeeper(wire.hosts + chroot, session_timeout_s=10)
        plane.start()
        try:
            plane.commit(Create("/a", b"1"))
            wire.swallow_answers = True
            in_flight: list[int] = []
            deadline = clock_s() + 2
            asking = [pool.submit(_fault_of_a_read, plane, f"{chroot}/a", deadline) for _ in range(CROWD)]

            def have_ended() -> bool:
                in_flight.append(len(plane._client._queue) + len(plane._client._pending))
                return all(each.done() for each in asking)

            until(have_ended)
            assert REQUESTS_AT_ONCE_MAX <= max(in_flight) < 2 * REQUESTS_AT_ONCE_MAX
            assert Counter(each.result() for each in asking).keys() == {UnansweredError, NotSentError}
            wire.cut()
            wire.heal()
            assert set(pool.map(plane.get, ["/a"] * CROWD)) == {Node("/a", b"1", 0)}
        finally:
            plane.close()


def _fault_of_a_read(plane: ZooKeeper, path: str, deadline: float) -> Any:
    with pytest.raises((UnansweredError, NotSentError)) as fault:
        plane._ask(ReadMany([path]), deadline)
    return fault.type
