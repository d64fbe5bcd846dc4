"""Replicas of one partition in one process: what is acknowledged is on all of them, whoever leads."""

from __future__ import annotations

import gevent
import pytest
from support.replicas import contents, eventually, replicas, send, values

from portalmq.errors import NotEnoughReplicas, NotLeader, Unavailable


def test_what_is_acknowledged_is_on_every_replica_in_sync(tmp_path):
    with replicas(tmp_path, 3) as group:
        eventually(lambda: group.leader.serves)
        for number in range(20):
            send(group.leader, f"m{number}")
            for partition in group.partitions():
                assert values(partition)[-1] == f"m{number}"
        eventually(group.agree)
        assert len(set(map(contents, group.partitions()))) == 1


def test_a_follower_takes_no_messages_and_says_who_leads(tmp_path):
    with replicas(tmp_path) as group:
        eventually(group.agree)
        with pytest.raises(NotLeader) as refused:
            send(group.partition(2), "m")
        assert refused.value.extra == {"leader": 1, "leader_url": "http://broker-1"}


def test_idle_replicas_hardly_talk(tmp_path):
    with replicas(tmp_path) as group:
        eventually(group.agree)
        before = group.hosts[2].network.calls
        gevent.sleep(1.0)
        assert group.hosts[2].network.calls - before <= 7  # polls of 200 ms
