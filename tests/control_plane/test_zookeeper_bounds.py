"""The time limits of the plane's calls, without a server: the tests play the connection."""

from __future__ import annotations

from typing import Any

import pytest

from portalmq.control_plane.plane import PlaneUnavailable, clock_s
from portalmq.control_plane.zookeeper import ZooKeeper
from portalmq.control_plane.zookeeper.connection import NotSentError


def test_a_read_whose_time_is_over_when_the_connection_returns_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for the connection took all the time: each later request is withdrawn unsent."""
    plane = ZooKeeper("localhost:2181")
    tries: list[float] = []

    def take_back(request: Any, deadline: float) -> None:
        tries.append(deadline)
        assert len(tries) < 10, "the read repeats without an end"
        raise NotSentError

    monkeypatch.setattr(plane, "_deadline", lambda: clock_s() - 0.001)
    monkeypatch.setattr(plane, "_await_connection", lambda deadline: 1)
    monkeypatch.setattr(plane, "_ask", take_back)
    with pytest.raises(PlaneUnavailable):
        plane.get("/a")
    assert len(tries) == 1


def test_requests_for_many_nodes_do_not_wait_for_ever_for_those_of_another_caller() -> None:
    plane = ZooKeeper("127.0.0.1:1/nobody", session_timeout_s=0.01)
    with plane._each_at_a_time, pytest.raises(PlaneUnavailable, match="other requests"):
        plane.open_to_others("/a")
