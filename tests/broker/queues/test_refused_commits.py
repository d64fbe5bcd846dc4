"""A final refusal of a commit rests on committed records only."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gevent
import pytest
from support.domain import running
from support.held_writes import held_writes
from support.outputs import commit, outputs, partition_of, receive, send

from portalmq.broker.cluster.rpc.queues import MemberOffset
from portalmq.broker.cluster.rpc.streams import ClaimShare, CommitShare
from portalmq.broker.core.queue.records import Claim
from portalmq.broker.core.replica.replica import PartitionReplica
from portalmq.broker.partition.writer import Pending
from portalmq.broker.storage.errors import DiskFull
from portalmq.errors import PortalMQError, StorageFull


@pytest.mark.parametrize("mode", ["queue", "stream"])
def test_a_write_that_the_disk_refuses_refuses_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """The sender would take the refusal as final, and a repeat of the commit would then succeed."""
    with running(tmp_path) as fixture:
        send(fixture, "a", "b", "c")
        partition, go = partition_of(fixture), threading.Event()
        real, real_below = partition.log.append, partition.uncommitted.below
        if mode == "queue":
            messages = receive(fixture)

            def try_it() -> Any:
                return commit(fixture, messages, outputs("A"))
        else:
            fixture.broker.put_group("s", {"mode": "stream"})
            partition.append_group_record("s", Claim("m", 3, 0, 1)).wait()
            place = MemberOffset("m", 3, 3)

            def try_it() -> Any:
                return fixture.broker.group_commits.commit_offset("s", "in", 0, place, outputs("A"), forward=True)

        def refused(batches: object) -> None:
            go.wait()
            monkeypatch.setattr(partition.log, "append", real)
            raise DiskFull("no room")

        partition._writer.wait_idle()
        monkeypatch.setattr(partition.log, "append", refused)
        if mode == "queue":
            ack = gevent.spawn(fixture.broker.settlement.settle, "g", [messages[0].receipt])
            while partition.delivery["g"].has_span(messages[0].offset):
                gevent.sleep(0.001)
            wait = ack.join
        else:
            wait = partition.append_group_record("s", Claim("n", 4, 0, 1)).done.wait

        def below(*end_and_kind: Any) -> Pending:
            go.set()
            return real_below(*end_and_kind)

        def let_it_be_refused(seconds: float) -> None:
            go.set()
            wait()

        monkeypatch.setattr(partition.uncommitted, "below", below)
        monkeypatch.setattr(PartitionReplica, "led_at", lambda replica, then_ms: partition.log.append == real)
        monkeypatch.setattr("portalmq.broker.partition.readable.gevent", SimpleNamespace(sleep=let_it_be_refused))
        with pytest.raises(StorageFull) as told:
            try_it()
        assert told.value.outcome == "unknown"
        assert try_it().published == 1


@pytest.mark.parametrize("call", ["commit", "commit of a deleted group", "seek", "claim"])
def test_a_write_that_the_disk_refuses_refuses_no_call_of_a_stream_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with running(tmp_path) as fixture:
        send(fixture, "a", "b", "c")
        fixture.broker.put_group("s", {"mode": "stream"})
        partition, group = partition_of(fixture), fixture.broker.groups.find("s")
        place = fixture.broker.topics.get("in").place(0)
        streams = fixture.broker.offsets._partitions
        partition.append_group_record("s", Claim("m", 3, 0, 1)).wait()

        def try_it() -> Any:
            if call == "seek":
                return streams.seek(group, "earliest", 3, [place], b"id")[place]
            if call == "claim":
                return streams.claim(group, [ClaimShare(*place, "m", 3)])[place]
            return streams.commit(group, "m", 3, [CommitShare(*place, 3)])[place]

        with held_writes(monkeypatch, partition) as writes:
            if "deleted" in call:
                partition.end_group("s")
            else:
                partition.append_group_record("s", Claim("n", 4, 0, 1))
            told = gevent.spawn(try_it)
            gevent.sleep(0)
            assert not told.ready()
            writes.refuse()
            error = told.get()
        assert isinstance(error, StorageFull)
        assert error.outcome == "unknown"
        assert not isinstance(try_it(), PortalMQError)
