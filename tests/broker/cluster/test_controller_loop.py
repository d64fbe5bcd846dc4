"""The controller's pass while the mirror changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from portalmq import wire
from portalmq.broker.cluster.membership import Membership
from portalmq.broker.partition.clock import Clock
from portalmq.control_plane import state
from portalmq.control_plane.catalog import Catalog
from portalmq.control_plane.plane import Set
from portalmq.control_plane.standalone import Standalone
from portalmq.control_plane.state import BrokerState


def test_a_partition_that_changes_in_a_pause_is_left_for_the_next_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = Standalone(tmp_path)
    plane.start()
    catalog = Catalog(plane)
    me = BrokerState("http://localhost:5000", 2, "store")
    before = {1: BrokerState(me.url, 1, me.store_uuid)}
    topic, _ = catalog.create_topic("t", wire.CreateTopic(partitions=2), brokers=before)
    alone = Membership(catalog, 1, me, Clock(), on_fatal=pytest.fail)
    path = state.partition_path(topic.topic_id, 0)

    def meanwhile() -> None:
        node = plane.get(path)
        assert node is not None
        plane.commit(Set(path, node.data, node.version))
        alone.mirror.note(path)
        alone.mirror.refresh()

    def epochs() -> list[int]:
        return [held.value.leader_epoch for held in catalog.partitions(topic).values()]

    alone.mirror.refresh()
    alone.mirror.brokers[1] = me
    held = catalog.elect_controller(1, me.incarnation)
    assert held is not None
    with monkeypatch.context() as patched:
        patched.setattr("portalmq.broker.cluster.controller_loop.give_way", meanwhile)
        alone.controller_loop._elect_leaders(held)
    assert epochs() == [1, 2]
    alone.mirror.refresh()
    alone.controller_loop._elect_leaders(held)
    assert epochs() == [2, 2]
    plane.close()
