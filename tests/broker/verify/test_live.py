"""The replicas of a running cluster, as `portalmq verify` asks for them."""

from __future__ import annotations

from typing import Any

import pytest

from portalmq import wire
from portalmq.broker.verify.live import LiveReplica
from portalmq.errors import InvalidRequest, Unavailable

pytestmark = pytest.mark.unit


class OneBrokerDown:
    """An Admin: broker 2 does not answer; broker 3 refuses."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def digest(self, topic: str, _partition: int, broker_id: int, **_: Any) -> wire.ReplicaDigest:
        self.asked.append((topic, broker_id))
        if broker_id == 2:
            raise Unavailable("broker 2 does not answer")
        if broker_id == 3:
            raise InvalidRequest("no")
        return wire.ReplicaDigest(broker_id, 0, 0, 0, 0, 0)


def test_a_broker_that_does_not_answer_is_asked_once_whatever_it_holds():
    admin, silent = OneBrokerDown(), dict[int, Unavailable]()
    for topic in ("a", "b"):
        for broker_id in (1, 2, 3):
            replica = LiveReplica(admin, topic, 0, broker_id, silent)  # type: ignore[arg-type]
            if broker_id == 1:
                replica.digest(0, 10)
                replica.check_file(0)
            else:
                with pytest.raises(Unavailable if broker_id == 2 else InvalidRequest):
                    replica.digest(0, 10)
    assert admin.asked.count(("a", 2)) == 1
    assert ("b", 2) not in admin.asked
    assert {("b", 1), ("b", 3)} <= set(admin.asked)
