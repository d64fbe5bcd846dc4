"""Stream groups in one broker: members, offsets, seeking, and the fetch of stored batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gevent
import msgspec
import pytest
from support.domain import FakePeer, Fixture, HandClock, records, running

from portalmq import stream_wire as contract
from portalmq import wire
from portalmq.broker.cluster.rpc import Outcomes, TopicPartition
from portalmq.broker.cluster.rpc.streams import Coordinate, GroupPosition, GroupPositionsCall
from portalmq.broker.core.queue.records import CommitOffset
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.storage.batch import Record, verified_header
from portalmq.broker.streams.checkpoints import Checkpoints
from portalmq.broker.streams.coordinator import Coordinator
from portalmq.control_plane.state import GroupState
from portalmq.errors import (
    Fenced,
    GroupModeMismatch,
    GroupNotFound,
    IllegalGeneration,
    InvalidRequest,
    OffsetOutOfRange,
    Unavailable,
)


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[Fixture]:
    with running(tmp_path) as started:
        started.broker.create_topic("t", wire.CreateTopic(partitions=2))
        yield started


def produce(fixture: Fixture, *values: str, partition: int = 0) -> None:
    fixture.broker.produce("t", ProduceRequest(records(*values), partition=partition))


def join(fixture: Fixture, member: str | None = "a", group: str = "g", **more: object) -> contract.MemberAnswer:
    return fixture.broker.group_coordinators.join(group, contract.JoinRequest(["t"], member, **more))  # type: ignore[arg-type]


def commit(fixture: Fixture, answer: contract.MemberAnswer, partition: int, offset: int) -> None:
    asked = contract.PartitionOffset("t", partition, offset)
    request = contract.CommitOffsetsRequest(answer.member_id, answer.generation, [asked])
    fixture.broker.offsets.commit("g", request)


def standing(fixture: Fixture, partition: int = 0) -> contract.GroupOffset:
    return fixture.broker.offsets.of("g").offsets[partition]


def test_a_member_gets_all_partitions_and_their_offsets(fixture: Fixture) -> None:
    answer = join(fixture)
    assert [(each.topic, each.partition, each.offset) for each in answer.assignment] == [("t", 0, 0), ("t", 1, 0)]
    assert answer.heartbeat_interval_ms == 2_000
    assert fixture.broker.describe_group("g").members == ["a"]
    assert fixture.broker.describe_group("g").mode == "stream"


def test_a_member_without_an_id_is_given_one(fixture: Fixture) -> None:
    assert join(fixture, None).member_id.startswith("member-")


def test_the_first_join_creates_a_missing_topic(fixture: Fixture) -> None:
    answer = fixture.broker.group_coordinators.join("g", contract.JoinRequest(["new"], "a"))
    assert [(each.topic, each.partition) for each in answer.assignment] == [("new", 0)]


def test_commits_rise_and_the_next_owner_continues_there(fixture: Fixture) -> None:
    produce(fixture, "0", "1", "2")
    answer = join(fixture)
    offset = answer.assignment[0].offset + 2
    commit(fixture, answer, 0, offset)
    commit(fixture, answer, 0, offset)
    with pytest.raises(OffsetOutOfRange, match="a seek does"):
        commit(fixture, answer, 0, offset - 1)
    with pytest.raises(OffsetOutOfRange, match="can be read up to"):
        commit(fixture, answer, 0, 1_000)
    fixture.broker.group_coordinators.leave("g", "a")
    assert join(fixture, "b").assignment[0].offset == offset


def test_lag_is_in_messages_and_in_time(fixture: Fixture) -> None:
    produce(fixture, "0", "1", "2")
    answer = join(fixture)
    fixture.clock.advance(5_000)
    assert (standing(fixture).lag, standing(fixture).lag_ms) == (3, 5_000)
    assert standing(fixture, 1) == contract.GroupOffset("t", 1, 0, standing(fixture, 1).high_watermark, 0, 0)
    commit(fixture, answer, 0, 4)
    assert (standing(fixture).lag, standing(fixture).lag_ms) == (0, 0)
    assert fixture.broker.describe_group("g").lag == 0


def test_a_join_of_a_disconnected_client_is_refused(fixture: Fixture) -> None:
    """A paused broker may hold an old request of a client that has joined through another broker since."""
    member, late = join(fixture), FakePeer()
    late.leave()
    request = contract.JoinRequest(["t"], "a")
    with pytest.raises(Unavailable, match="has disconnected"):
        fixture.broker.group_coordinators.join("g", request, late)
    brought = Coordinate("g", fixture.broker.groups.get("g").group_id, "join", "a", ("t",))
    with pytest.raises(Unavailable, match="has disconnected"):
        fixture.broker.group_coordinators.answer(brought, late)
    again = fixture.broker.group_coordinators.heartbeat("g", "a", member.generation)
    assert again.generation == member.generation, "it is not fenced by its own request"


def test_a_zombie_may_not_commit(fixture: Fixture) -> None:
    produce(fixture, "0")
    zombie = join(fixture)
    newer = join(fixture)
    with pytest.raises(IllegalGeneration, match="does not own"):
        commit(fixture, zombie, 0, 1)
    with pytest.raises(Fenced):
        fixture.broker.group_coordinators.heartbeat("g", "a", zombie.generation)
    commit(fixture, newer, 0, 1)


def test_a_client_outside_the_group_may_not_commit(fixture: Fixture) -> None:
    answer = join(fixture)
    with pytest.raises(IllegalGeneration):
        commit(fixture, contract.MemberAnswer("stranger", answer.generation, [], 1), 0, 0)
    with pytest.raises(GroupNotFound):
        fixture.broker.group_coordinators.heartbeat("nothing", "a", 1)


def test_each_of_several_commits_gets_its_result(fixture: Fixture) -> None:
    produce(fixture, "0")
    answer = join(fixture)
    asked = [contract.PartitionOffset("t", 0, 1), contract.PartitionOffset("t", 1, 500)]
    with pytest.raises(OffsetOutOfRange) as refused:
        fixture.broker.offsets.commit("g", contract.CommitOffsetsRequest("a", answer.generation, asked))
    assert refused.value.outcome == "partial"
    assert [result["status"] for result in refused.value.extra["results"]] == ["ok", "offset_out_of_range"]
    with pytest.raises(InvalidRequest, match="twice"):
        fixture.broker.offsets.commit("g", contract.CommitOffsetsRequest("a", answer.generation, asked[:1] * 2))


def test_new_partitions_are_assigned_and_read_from_their_beginning(fixture: Fixture) -> None:
    produce(fixture, "old")
    fixture.broker.put_group("g", {"mode": "stream", "start": "latest"})
    answer = join(fixture)
    assert answer.assignment[0].offset >= 1
    fixture.broker.alter_topic("t", wire.AlterTopic(partitions=3))
    produce(fixture, "first", partition=2)
    with gevent.Timeout(60):
        while len(answer.assignment) < 3:
            gevent.sleep(0.01)
            answer = fixture.broker.group_coordinators.heartbeat("g", "a", answer.generation)
    assert answer.assignment[2].offset == 0


def test_an_existing_group_keeps_its_delivery_setting(fixture: Fixture) -> None:
    for asked in ("exactly_once", "at_least_once"):
        group, _ = fixture.broker.put_group("g", {"mode": "stream"}, {"delivery": asked})
        assert group.config.delivery == "exactly_once"
    with pytest.raises(InvalidRequest):
        fixture.broker.put_group("h", {"mode": "stream"}, {"delivery": "twice"})


def test_a_group_begins_at_a_time(fixture: Fixture) -> None:
    produce(fixture, "old")
    fixture.clock.advance(1_000)
    at_ms = fixture.clock.wall_ms()
    produce(fixture, "new")
    answer = join(fixture)
    sought = fixture.broker.group_coordinators.seek("g", "t", {"at": at_ms}, partition=None, dry_run=False)
    first = sought.offsets[0]
    assert (first.partition, first.to - answer.assignment[0].offset) == (0, 2)


def test_a_seek_moves_members_and_fences_what_is_under_way(fixture: Fixture) -> None:
    produce(fixture, "0", "1", "2")
    answer = join(fixture)
    commit(fixture, answer, 0, 3)
    look = fixture.broker.group_coordinators.seek("g", "t", "earliest", partition=None, dry_run=True)
    assert look.dry_run
    assert [(each.before, each.to) for each in look.offsets] == [(3, 0), (0, 0)]
    assert standing(fixture).committed == 3
    sought = fixture.broker.group_coordinators.seek("g", "t", "earliest", partition=None, dry_run=False)
    assert sought.generation > answer.generation
    assert standing(fixture).committed == 0
    with pytest.raises(IllegalGeneration):
        commit(fixture, answer, 0, 3)
    again = fixture.broker.group_coordinators.heartbeat("g", "a", answer.generation)
    with gevent.Timeout(60):
        while len(again.assignment) < 2:
            gevent.sleep(0.01)
            again = fixture.broker.group_coordinators.heartbeat("g", "a", again.generation)
    assert [(each.offset, each.since) for each in again.assignment] == [(0, sought.generation)] * 2
    commit(fixture, again, 0, 2)
    group = fixture.broker.groups.get("g")
    place = TopicPartition("t", fixture.broker.topics.get("t").state.topic_id, 0)
    late = fixture.broker.group_coordinators._partitions.seek(group, "earliest", sought.generation - 1, [place])
    assert all(isinstance(refused, IllegalGeneration) for refused in late.values()), "a late copy of the seek"
    assert standing(fixture).committed == 2


def seek(fixture: Fixture, to: str | dict[str, int], key: str, **more: int) -> contract.SeekAnswer:
    given = {"partition": None, "dry_run": False} | more
    return fixture.broker.group_coordinators.seek("g", "t", to, idempotency_key=key, **given)  # type: ignore[arg-type]


def test_a_late_copy_of_a_seek_moves_nothing_and_fences_no_member(fixture: Fixture) -> None:
    produce(fixture, "0", "1", "2")
    commit(fixture, join(fixture), 0, 3)
    sought = seek(fixture, "earliest", "once")
    answer = fixture.broker.group_coordinators.heartbeat("g", "a", sought.generation)
    commit(fixture, answer, 0, 2)
    late = seek(fixture, "earliest", "once")
    assert (standing(fixture).committed, [(each.before, each.to) for each in late.offsets]) == (2, [(2, 2), (0, 0)])
    assert late.generation >= sought.generation
    commit(fixture, answer, 0, 3)
    assert seek(fixture, "earliest", "another").offsets[0].to == 0


def test_a_seek_in_a_generation_that_a_partition_has_passed_is_made_again(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another coordinator was faster: the client has done nothing wrong."""
    produce(fixture, "0", "1", "2")
    commit(fixture, join(fixture), 0, 3)
    partitions = fixture.broker.group_coordinators._partitions
    move, generations = partitions.seek, list[int]()

    def behind_at_first(group: GroupState, to: str, generation: int, *more: Any) -> object:
        if generation:
            generations.append(generation)
        return move(group, to, generation if len(generations) != 1 else -1, *more)

    monkeypatch.setattr(partitions, "seek", behind_at_first)
    assert [(each.before, each.to) for each in seek(fixture, "earliest", "once").offsets] == [(3, 0), (0, 0)]
    assert len(generations) == 2
    assert standing(fixture).committed == 0


def test_a_repeated_seek_continues_on_the_remaining_partitions(fixture: Fixture) -> None:
    for partition in (0, 1):
        produce(fixture, "0", "1", "2", partition=partition)
    answer = join(fixture)
    commit(fixture, answer, 0, 3)
    commit(fixture, answer, 1, 3)
    first = seek(fixture, "earliest", "once", partition=0)
    answer = fixture.broker.group_coordinators.heartbeat("g", "a", first.generation)
    commit(fixture, answer, 0, 2)
    again = seek(fixture, "earliest", "once")
    assert [(each.before, each.to) for each in again.offsets] == [(2, 2), (3, 0)]
    assert [each.committed for each in fixture.broker.offsets.of("g").offsets] == [2, 0]


def test_a_repeated_seek_to_a_removed_offset_succeeds(fixture: Fixture) -> None:
    produce(fixture, "0", "1", "2")
    join(fixture)
    seek(fixture, {"offset": 1}, "once", partition=0)
    fixture.broker.browser.purge("t", partition=0, before_offset=2)
    assert seek(fixture, {"offset": 1}, "once", partition=0).offsets[0].to == 2
    with pytest.raises(OffsetOutOfRange):
        seek(fixture, {"offset": 1}, "another", partition=0)


def test_seeks_are_remembered_by_the_log(tmp_path: Path) -> None:
    with running(tmp_path) as it:
        it.broker.create_topic("t", wire.CreateTopic())
        produce(it, "0", "1")
        join(it)
        seek(it, "earliest", "once")
    with running(tmp_path) as it:
        answer = join(it)
        commit(it, answer, 0, 2)
        seek(it, "earliest", "once")
        assert standing(it).committed == 2


def test_an_invalid_seek_changes_nothing(fixture: Fixture) -> None:
    produce(fixture, "0")
    answer = join(fixture)
    with pytest.raises(OffsetOutOfRange):
        fixture.broker.group_coordinators.seek("g", "t", {"offset": 999}, partition=0, dry_run=False)
    with pytest.raises(InvalidRequest, match="name the one"):
        fixture.broker.group_coordinators.seek("g", "t", {"offset": 0}, partition=None, dry_run=False)
    commit(fixture, answer, 0, 1)


def test_a_group_without_members_can_be_sought(fixture: Fixture) -> None:
    produce(fixture, "0", "1")
    fixture.broker.put_group("g", {"mode": "stream"})
    fixture.broker.group_coordinators.seek("g", "t", {"offset": 1}, partition=0, dry_run=False)
    assert join(fixture).assignment[0].offset == 1


def test_the_mode_of_a_group_stays(fixture: Fixture) -> None:
    join(fixture)
    with pytest.raises(GroupModeMismatch):
        fixture.broker.receive_handler.receive("g", wire.ReceiveRequest(["t"]), None)
    with pytest.raises(GroupModeMismatch):
        fixture.broker.put_group("g", {"mode": "queue"})
    fixture.broker.receive_handler.receive("q", wire.ReceiveRequest(["t"]), None)
    with pytest.raises(GroupModeMismatch):
        join(fixture, group="q")
    with pytest.raises(GroupModeMismatch):
        fixture.broker.offsets.of("q")


def test_a_deleted_group_begins_again(fixture: Fixture) -> None:
    produce(fixture, "0")
    commit(fixture, join(fixture), 0, 1)
    fixture.broker.group_admin.delete("g")
    with pytest.raises(GroupNotFound):
        fixture.broker.group_coordinators.heartbeat("g", "a", 2)
    assert join(fixture).assignment[0].offset == 0
    assert fixture.plane.children("/streams") == [fixture.broker.groups.get("g").group_id]


def test_a_restart_loses_neither_members_nor_offsets(tmp_path: Path) -> None:
    clock = HandClock()
    with running(tmp_path, clock) as fixture:
        fixture.broker.create_topic("t", wire.CreateTopic(partitions=2))
        produce(fixture, "0", "1")
        before = join(fixture)
        commit(fixture, before, 0, 1)
    with running(tmp_path, clock) as fixture:
        after = fixture.broker.group_coordinators.heartbeat("g", "a", before.generation)
        with gevent.Timeout(60):
            while len(after.assignment) < 2:
                gevent.sleep(0.01)
                after = fixture.broker.group_coordinators.heartbeat("g", "a", before.generation)
        assert [each.since for each in after.assignment] == [each.since for each in before.assignment]
        assert standing(fixture).committed == 1
        commit(fixture, before, 0, 2)


def test_offsets_are_checkpointed_to_the_control_plane(fixture: Fixture) -> None:
    produce(fixture, "0", "1")
    commit(fixture, join(fixture), 0, 1)
    group_id = fixture.broker.groups.get("g").group_id
    with gevent.Timeout(60):
        while kept_offset(fixture, group_id) != 1:
            gevent.sleep(0.02)


def test_background_work_for_a_group_continues_after_a_fault(fixture: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    produce(fixture, "0", "1")
    commit(fixture, join(fixture), 0, 1)
    for kind, name in ((Checkpoints, "_copy"), (Coordinator, "tell")):
        faults, did = iter([RuntimeError("broken")]), gevent.event.Event()
        monkeypatch.setattr(kind, name, failing_first(getattr(kind, name), faults, did))
        assert did.wait(60)
        assert next(faults, None) is None


def failing_first(method: Any, faults: Iterator[Exception], did: gevent.event.Event) -> Any:
    def call(*arguments: Any) -> Any:
        for fault in faults:
            raise fault
        did.set()
        return method(*arguments)

    return call


def kept_offset(fixture: Fixture, group_id: str) -> int | None:
    """Return the offset of partition 0 in the control plane."""
    nodes = fixture.plane.get_children(f"/streams/{group_id}/offsets")
    return msgspec.json.decode(nodes[0].data)["offsets"].get("0", [None])[0] if nodes else None


def test_a_purge_moves_the_committed_offset(fixture: Fixture) -> None:
    produce(fixture, "0", "1", "2")
    join(fixture)
    fixture.broker.browser.purge("t", partition=0, before_offset=2)
    assert standing(fixture).committed == 2
    assert standing(fixture).lag == 2


# --- fetch -----------------------------------------------------------------------------------------------------------


def fetched(fixture: Fixture, offset: int, partition: int = 0, **more: int) -> contract.FetchedPartition:
    request = contract.FetchRequest([contract.PartitionOffset("t", partition, offset)], **more)
    (answer,) = fixture.broker.reader_fetch.fetch(request, None)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(answer), type=contract.FetchedPartition)


def values_of(answer: contract.FetchedPartition) -> list[bytes]:
    decode = msgspec.msgpack.Decoder(tuple[contract.FrameRecord, ...]).decode
    return [record.value for frame in answer.frames for record in decode(frame.body)]


def test_a_fetch_returns_whole_batches_and_no_control_records(fixture: Fixture) -> None:
    produce(fixture, "0", "1")
    join(fixture)
    produce(fixture, "2")
    answer = fetched(fixture, 0)
    assert values_of(answer) == [b"0", b"1", b"2"]
    assert answer.next_offset == answer.high_watermark
    assert values_of(fetched(fixture, 1)) == [b"0", b"1", b"2"]
    assert all(verified_header(frame).count for frame in answer.frames)  # type: ignore[arg-type]


def test_a_fetch_names_the_id_of_the_topic_even_when_refused(fixture: Fixture) -> None:
    produce(fixture, "0")
    first = fixture.broker.describe_topic("t").topic_id
    assert first
    assert fetched(fixture, 0).topic_id == first
    refused = fetched(fixture, wire.INTEGER_MAX)
    assert refused.error is not None
    assert (refused.error["code"], refused.topic_id) == ("offset_out_of_range", first)
    fixture.broker.delete_topic("t")
    fixture.broker.create_topic("t", wire.CreateTopic(partitions=2))
    assert fetched(fixture, 0).topic_id == fixture.broker.describe_topic("t").topic_id != first


def test_a_fetch_goes_on_where_the_last_one_ended(fixture: Fixture) -> None:
    for number in range(10):
        produce(fixture, f"{number}" * 100)
    offset, values = 0, []
    while (answer := fetched(fixture, offset, max_bytes=300)).frames:
        values += values_of(answer)
        offset = answer.next_offset
    assert values == [f"{number}".encode() * 100 for number in range(10)]


def test_a_fetch_waits_for_the_first_message(fixture: Fixture) -> None:
    end = fetched(fixture, 0).high_watermark
    waiting = gevent.spawn(fetched, fixture, end, wait_ms=60_000)
    gevent.sleep(0)
    produce(fixture, "at last")
    assert values_of(waiting.get(timeout=50)) == [b"at last"]


def test_a_fetch_of_an_unknown_offset_or_partition_is_an_error(fixture: Fixture) -> None:
    produce(fixture, "0")
    assert fetched(fixture, 500).error["code"] == "offset_out_of_range"  # type: ignore[index]
    assert fetched(fixture, 0, 7).error["code"] == "partition_not_found"  # type: ignore[index]
    fixture.broker.browser.purge("t", partition=0, before_offset=1)
    with gevent.Timeout(60):
        while (error := fetched(fixture, 0).error) is None:
            gevent.sleep(0.01)
    assert error["log_start_offset"] == 1


def test_frames_are_made_from_memory_and_from_disk_alike(tmp_path: Path) -> None:
    with running(tmp_path) as fixture:
        fixture.broker.create_topic("t", wire.CreateTopic())
        fixture.broker.produce("t", ProduceRequest([Record(b"\x00", "image/png", b"k", {"h": "1"})], partition=0))
        from_memory = fetched(fixture, 0)
    with running(tmp_path) as fixture:
        from_disk = fetched(fixture, 0)
    assert from_memory.frames == from_disk.frames


def test_lag_comes_from_the_checkpoint_while_a_leader_is_away(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    produce(fixture, "0", "1", "2")
    commit(fixture, join(fixture), 0, 2)
    group_id = fixture.broker.groups.get("g").group_id
    with gevent.Timeout(60):
        while kept_offset(fixture, group_id) != 2:
            gevent.sleep(0.02)
    before = standing(fixture)
    monkeypatch.setattr(fixture.broker.offsets, "_partitions", LeadersAway(fixture, 0, 1))
    fixture.clock.advance(1_000)
    after = standing(fixture)
    assert (after.committed, after.lag) == (before.committed, before.lag) == (2, 2)
    assert after.lag_ms == 1_000


def test_an_offset_is_listed_once_its_commit_is_committed(fixture: Fixture) -> None:
    produce(fixture, "0", "1", "2")
    answer = join(fixture)
    commit(fixture, answer, 0, 1)
    partitions = fixture.broker.stream_partitions
    partition = next(topic for topic in fixture.broker.topics if topic.name == "t").partition(0)
    place = TopicPartition("t", partition.topic_id, 0)
    record = CommitOffset(2, answer.member_id, answer.generation, fixture.clock.now_ms())
    pending = partition.append_group_record("g", record)
    (found,) = partitions.local_positions(GroupPositionsCall("g", [place], False))([place]).values()
    assert isinstance(found, Unavailable)
    pending.wait()
    assert standing(fixture).committed == 2


class LeadersAway:
    """The partitions' leaders; those of some partitions do not answer."""

    def __init__(self, fixture: Fixture, *away: int) -> None:
        self._there = fixture.broker.offsets._partitions
        self._away = away

    def positions(self, group: str, places: Sequence[TopicPartition], **more: Any) -> Outcomes[GroupPosition]:
        answering = [place for place in places if place.number not in self._away]
        found: Outcomes[GroupPosition] = {place: Unavailable("no leader") for place in places}
        return found | self._there.positions(group, answering, **more)


def test_a_new_coordinator_keeps_the_checkpoint_of_a_partition_whose_leader_is_away(fixture: Fixture) -> None:
    produce(fixture, "0", "1", "2")
    produce(fixture, "0", "1", partition=1)
    answer = join(fixture)
    commit(fixture, answer, 0, 2)
    group_id = fixture.broker.groups.get("g").group_id
    with gevent.Timeout(60):
        while kept_offset(fixture, group_id) != 2:
            gevent.sleep(0.02)
    coordinators = fixture.broker.group_coordinators
    coordinator = coordinators._own[group_id]
    coordinators.drain()
    commit(fixture, answer, 1, 1)
    new = Checkpoints(coordinators._store, LeadersAway(fixture, 0), coordinators._mirror, fixture.clock)  # type: ignore[arg-type]
    new.save(coordinator)
    (kept,) = coordinators._store.checkpoints(group_id).values()
    assert {number: committed for number, (committed, *_) in kept.offsets.items()} == {0: 2, 1: 1}


def test_a_member_that_has_left_may_not_commit_even_without_a_successor(fixture: Fixture) -> None:
    produce(fixture, "0", "1")
    answer = join(fixture)
    commit(fixture, answer, 0, 1)
    fixture.broker.group_coordinators.leave("g", "a")
    with pytest.raises(IllegalGeneration, match="no member does"):
        commit(fixture, answer, 0, 2)
    again = join(fixture)
    assert [each.offset for each in again.assignment] == [1, 0]
    commit(fixture, again, 0, 2)


def test_a_member_that_has_timed_out_may_not_commit_even_without_a_successor(fixture: Fixture) -> None:
    produce(fixture, "0", "1")
    answer = join(fixture, session_timeout_ms=500)
    fixture.clock.advance(1_000)

    def is_fenced() -> bool:
        try:
            commit(fixture, answer, 0, 1)
        except IllegalGeneration:
            return True
        return False

    with gevent.Timeout(60):
        while not is_fenced():
            gevent.sleep(0.05)
    assert fixture.broker.describe_group("g").members == []
    assert join(fixture, "b").assignment[0].offset <= 1


def test_a_seek_lists_the_partitions_in_order(fixture: Fixture) -> None:
    join(fixture)
    fixture.broker.alter_topic("t", wire.AlterTopic(partitions=12))
    sought = fixture.broker.group_coordinators.seek("g", "t", "latest", partition=None, dry_run=True)
    assert [each.partition for each in sought.offsets] == list(range(12))


def test_a_repeated_put_of_the_settings_shows_the_members(fixture: Fixture) -> None:
    produce(fixture, "0", "1")
    join(fixture)
    description, created = fixture.broker.put_group("g", {"mode": "stream"})
    assert (description.members, description.lag, created) == (["a"], 2, False)


def test_an_unknown_generation_is_refused(fixture: Fixture) -> None:
    produce(fixture, "0")
    answer = join(fixture)
    ahead = contract.MemberAnswer("a", answer.generation + 1, [], 1)
    with pytest.raises(IllegalGeneration, match="never was in"):
        commit(fixture, ahead, 0, 1)
    commit(fixture, answer, 0, 1)
    join(fixture, "b")
    commit(fixture, ahead, 0, 2)
