"""Commits are atomic and happen once; a refused commit changes nothing."""

from __future__ import annotations

from types import SimpleNamespace

import gevent
import msgspec
import pytest
from support.domain import running
from support.outputs import commit, outputs, partition_of, receive, send, settled, stored_in, there
from support.replicas import eventually

from portalmq import wire
from portalmq.broker.cluster.rpc.queues import MemberOffset
from portalmq.broker.core.queue.records import Claim, Seek
from portalmq.broker.core.replica.replica import PartitionReplica
from portalmq.broker.queues import commit as committing
from portalmq.broker.queues.settle import SettleRequest
from portalmq.broker.storage.batch import BatchKind
from portalmq.broker.storage.errors import DiskFull
from portalmq.errors import (
    GroupModeMismatch,
    GroupNotFound,
    IllegalGeneration,
    InvalidRequest,
    MessageTooLarge,
    NotLeader,
    OffsetMoved,
    OffsetOutOfRange,
    PartitionNotFound,
    StaleReceipt,
    StorageFull,
    Unavailable,
)


@pytest.fixture
def fixture(tmp_path):
    with running(tmp_path) as it:
        yield it


def test_the_input_is_acked_and_the_output_is_stored_once(fixture):
    send(fixture, "a", "b", "c")
    messages = receive(fixture, 2)
    done = commit(fixture, messages, outputs("A", "B"))
    assert (done.acked, done.published) == (2, 2)
    settled(fixture)
    assert there(fixture) == ["A", "B"]
    fixture.clock.advance(60_000)
    assert [message.record.value for message in receive(fixture)] == [b"c"], "the committed messages are acked"


def test_a_repeat_of_the_same_receipts_gives_the_first_answer_and_publishes_nothing(fixture):
    send(fixture, "a", "b")
    messages = receive(fixture)
    first = commit(fixture, messages, outputs("A"))
    assert commit(fixture, messages[::-1], outputs("something", "else")) == first
    settled(fixture)
    assert there(fixture) == ["A"]


def test_a_commit_sent_twice_at_once_is_done_once(fixture):
    send(fixture, "a")
    messages = receive(fixture)
    tries = [gevent.spawn(commit, fixture, messages, outputs("A")) for _ in range(5)]
    gevent.joinall(tries, raise_error=True)
    assert len({each.value.id for each in tries}) == 1
    settled(fixture)
    assert there(fixture) == ["A"]


@pytest.mark.parametrize("failure", [Unavailable("a batch is damaged"), StorageFull("no descriptor")])
def test_the_repeat_of_a_commit_needs_nothing_of_its_record(fixture, monkeypatch, failure):
    def fail(_offset: int) -> None:
        raise failure

    send(fixture, "a")
    messages = receive(fixture)
    first = commit(fixture, messages, outputs("A"))
    settled(fixture)
    monkeypatch.setattr(partition_of(fixture).reader, "control_at", fail)
    assert commit(fixture, messages, outputs("A")) == first


def test_a_refused_commit_stays_refused_when_it_is_repeated(fixture):
    """A paused broker may hold a copy of the commit in a socket until after the sender has rolled back."""
    send(fixture, "a")
    late = receive(fixture)
    fixture.clock.advance(60_000)
    (held,) = receive(fixture)
    for _ in range(2):
        with pytest.raises(StaleReceipt) as refused:
            commit(fixture, late, outputs("A"))
        assert refused.value.outcome == "not_applied"
        assert fixture.broker.settlement.settle("g", [late[0].receipt]) == [False]
        fixture.broker.settlement.settle(
            "g", [held.receipt], SettleRequest("nack", 60_000)
        )  # from now on it is not leased
    fixture.clock.advance(60_000)
    assert [message.delivery_count for message in receive(fixture)] == [3]
    assert there(fixture) == []


@pytest.fixture
def succeeded(fixture, monkeypatch):
    """Another broker was elected, and this one does not know: its followers do not vouch for it."""

    def pass_by(seconds: float) -> None:
        fixture.clock.advance(round(1_000 * seconds))

    monkeypatch.setattr(fixture.broker.leaders, "_patience_s", 0.0)  # a refusal is not retried
    monkeypatch.setattr("portalmq.broker.partition.readable.gevent", SimpleNamespace(sleep=pass_by))
    monkeypatch.setattr(PartitionReplica, "led_at", lambda replica, then_ms: False)


def test_a_leader_that_may_be_deposed_refuses_no_receipts_for_good(fixture, request):
    """The next leader may hold an earlier attempt whose answer was lost."""
    send(fixture, "a")
    messages = receive(fixture)
    fixture.clock.advance(60_000)
    receive(fixture)
    request.getfixturevalue("succeeded")
    with pytest.raises(Unavailable, match="do not vouch"):
        commit(fixture, messages, outputs("A"))


def test_a_leader_that_may_be_deposed_refuses_no_member_for_good(stream, succeeded):
    for offset, member in ((3, "somebody else"), (10_000, "m")):
        with pytest.raises(Unavailable, match="do not vouch"):
            commit_offset(stream, offset, outputs("A"), member=member)


def test_a_lease_of_another_consumer_refuses_the_whole_commit(fixture):
    send(fixture, "a", "b")
    late = receive(fixture, 1)
    fixture.clock.advance(31_000)
    (again,) = [message for message in receive(fixture, 1) if message.offset == late[0].offset]
    rest = receive(fixture)
    end = partition_of(fixture).replica.next_offset
    with pytest.raises(StaleReceipt, match="nothing was acked") as stale:
        commit(fixture, [*late, *rest], outputs("A"))
    assert stale.value.outcome == "not_applied"
    assert partition_of(fixture).replica.next_offset == end, "nothing was appended"
    commit(fixture, [again, *rest], outputs("A"))
    settled(fixture)
    assert there(fixture) == ["A"]


@pytest.mark.parametrize("how", ["ack", "commit"])
def test_messages_that_are_acked_refuse_a_commit(fixture, how):
    send(fixture, "a", "b")
    messages = receive(fixture)
    if how == "ack":
        fixture.broker.settlement.settle("g", [messages[0].receipt])
    else:
        commit(fixture, messages[:1])
    with pytest.raises(StaleReceipt, match="done already"):
        commit(fixture, messages, outputs("A"))
    settled(fixture)
    assert there(fixture) == []
    commit(fixture, messages[1:], outputs("B"))
    settled(fixture)
    assert there(fixture) == ["B"]


def test_receipts_of_two_partitions_are_refused(fixture):
    fixture.broker.create_topic("in", wire.CreateTopic(partitions=2))
    send(fixture, "a", partition=0)
    send(fixture, "b", partition=1)
    messages = receive(fixture)
    with pytest.raises(InvalidRequest, match="2 partitions"):
        commit(fixture, messages)
    assert commit(fixture, messages[:1]).acked == 1


def test_foreign_and_forged_receipts_are_refused(fixture):
    send(fixture, "a")
    (message,) = receive(fixture)
    receive(fixture, group="other")
    with pytest.raises(InvalidRequest):
        commit(fixture, [message], group="other")
    forged = message.receipt[:20] + ("A" if message.receipt[20] != "A" else "B") + message.receipt[21:]
    with pytest.raises(InvalidRequest):
        fixture.broker.group_commits.commit_receipts("g", [forged], [], forward=True)
    with pytest.raises(GroupNotFound):
        commit(fixture, [message], group="nobody")


def test_outputs_are_checked_whole_before_anything_is_done(fixture):
    fixture.broker.create_topic("out", wire.CreateTopic(partitions=2, config={"max_message_bytes": 10}))
    send(fixture, "a")
    messages = receive(fixture)
    end = partition_of(fixture).replica.next_offset
    with pytest.raises(MessageTooLarge, match="message 1"):
        commit(fixture, messages, outputs("fine", "x" * 11))
    with pytest.raises(PartitionNotFound):
        commit(fixture, messages, outputs("A", partition=2))
    many = [each for number in range(101) for each in outputs("A", topic=f"t{number}")]
    with pytest.raises(InvalidRequest, match="101 topics"):
        commit(fixture, messages, many)
    with pytest.raises(MessageTooLarge, match="10001 messages"):
        commit(fixture, messages, outputs("A") * 10_001)
    assert partition_of(fixture).replica.next_offset == end
    commit(fixture, messages, outputs("A", partition=1))
    settled(fixture)
    assert [(stored.partition, stored.record.value) for stored in stored_in(fixture, "out")] == [(1, b"A")]


def test_at_most_once_groups_have_nothing_to_commit(fixture):
    send(fixture, "a")
    fixture.broker.groups.put("g", {})
    messages = receive(fixture)
    group = fixture.broker.groups.get("g")
    config = msgspec.structs.replace(group.config, delivery="at_most_once")
    fixture.broker.groups._remember("g", msgspec.structs.replace(group, config=config))
    with pytest.raises(InvalidRequest, match="at_most_once"):
        commit(fixture, messages)


# --- refusals and delays ---------------------------------------------------------------------------------------------


def test_a_full_disk_refuses_before_anything_is_done(fixture):
    send(fixture, "a")
    messages = receive(fixture)
    fixture.disk.is_full = True
    with pytest.raises(StorageFull):
        commit(fixture, messages, outputs("A"))
    fixture.disk.is_full = False
    commit(fixture, messages, outputs("A"))
    settled(fixture)
    assert there(fixture) == ["A"]


def test_a_commit_that_the_disk_refuses_leaves_no_trace(fixture, monkeypatch):
    send(fixture, "a")
    fixture.broker.create_topic("out", wire.CreateTopic())
    messages = receive(fixture)
    log = partition_of(fixture).log
    real = log.append

    def refused(batches) -> None:
        if any(batch.kind == BatchKind.COMMIT for batch in batches):
            monkeypatch.setattr(log, "append", real)
            raise DiskFull("no room")
        real(batches)

    monkeypatch.setattr(log, "append", refused)
    with pytest.raises(StorageFull):
        commit(fixture, messages, outputs("A"))
    assert not partition_of(fixture).groups.outbox
    assert there(fixture) == []
    commit(fixture, messages, outputs("A"))
    settled(fixture)
    assert there(fixture) == ["A"]


def test_a_lease_whose_grant_the_disk_refused_does_not_count_for_the_one_after_it(fixture, monkeypatch):
    send(fixture, "a")
    partition = partition_of(fixture)
    real = partition.log.append

    def refused(batches) -> None:
        if any(batch.kind == BatchKind.GRANT for batch in batches):
            monkeypatch.setattr(partition.log, "append", real)
            raise DiskFull("no room")
        real(batches)

    monkeypatch.setattr(partition.log, "append", refused)
    lost = receive(fixture)
    partition._writer.wait_idle()
    held = receive(fixture)
    assert [message.offset for message in held] == [message.offset for message in lost]
    with pytest.raises(StaleReceipt):
        commit(fixture, lost, outputs("lost"))
    commit(fixture, held, outputs("A"))
    settled(fixture)
    assert there(fixture) == ["A"]


# --- stream groups ---------------------------------------------------------------------------------------------------


@pytest.fixture
def stream(fixture):
    """A stream group whose member `m` owns partition 0 in generation 3."""
    fixture.broker.put_group("s", {"mode": "stream"})
    send(fixture, *"abcdef")
    partition_of(fixture).append_group_record("s", Claim("m", 3, 0, 1)).wait()
    return fixture


def commit_offset(
    fixture, offset: int, publish=(), *, member: str = "m", generation: int = 3, committed=None, group: str = "s"
):
    place = MemberOffset(member, generation, offset, committed)
    return fixture.broker.group_commits.commit_offset(group, "in", 0, place, list(publish), forward=True)


def test_a_stream_member_commits_its_offset_with_its_outputs(stream):
    first = commit_offset(stream, 3, outputs("A"))
    assert first.published == 1
    assert partition_of(stream).streams["s"].committed == 3
    assert commit_offset(stream, 3, outputs("A")) == first, "a repeat"
    settled(stream)
    assert there(stream) == ["A"]


def test_a_zombie_member_commits_nothing(stream):
    partition_of(stream).append_group_record("s", Claim("heir", 4, 0, 2)).wait()
    for member, generation in (("m", 3), ("m", 4), ("heir", 3)):
        with pytest.raises(IllegalGeneration):
            commit_offset(stream, 3, outputs("Z"), member=member, generation=generation)
    commit_offset(stream, 3, outputs("A"), member="heir", generation=4)
    settled(stream)
    assert there(stream) == ["A"]


def test_an_offset_that_is_committed_already_publishes_nothing_again(stream):
    commit_offset(stream, 3, outputs("A"))
    with pytest.raises(OffsetOutOfRange, match="committed 3"):
        commit_offset(stream, 2, outputs("B"))
    with pytest.raises(OffsetOutOfRange, match="done already"):
        commit_offset(stream, 3, outputs("B"), generation=4)
    with pytest.raises(OffsetOutOfRange, match="can be read up to"):
        commit_offset(stream, 10_000, outputs("B"))
    settled(stream)
    assert there(stream) == ["A"]


def test_a_commit_from_another_offset_than_the_groups_is_refused_at_any_time(stream):
    """The answer to the first commit was an error, so the member has read its message again, with more after it."""
    first = commit_offset(stream, 2, outputs("A"), committed=0)
    for _ in range(2):
        with pytest.raises(OffsetMoved, match="committed 2") as caught:
            commit_offset(stream, 3, outputs("A", "B"), committed=0)
        assert (caught.value.extra["committed"], caught.value.outcome) == (2, "not_applied")
    assert commit_offset(stream, 2, outputs("A"), committed=0) == first, "a repeat of the same commit"
    commit_offset(stream, 3, outputs("B"), committed=2)
    with pytest.raises(OffsetMoved, match="committed 3"):
        commit_offset(stream, 3, outputs("A", "B"), committed=0)
    with pytest.raises(OffsetMoved, match="committed 3"):
        commit_offset(stream, 5, outputs("C"), committed=4)
    settled(stream)
    assert there(stream) == ["A", "B"]


def test_a_commit_is_refused_only_for_committed_records(stream, monkeypatch):
    """An uncommitted record may be lost with its leader; then the refused commit could succeed later."""
    waited = []
    partition = partition_of(stream)
    commit_offset(stream, 2, outputs("A"), committed=0)
    monkeypatch.setattr(partition, "wait_committed", waited.append)
    with pytest.raises(OffsetMoved):
        commit_offset(stream, 3, outputs("A", "B"), committed=0)
    assert waited == [partition.replica.next_offset - 1]


def test_members_continue_where_retention_has_moved_the_group(stream):
    partition_of(stream).retention.purge(4)
    eventually(lambda: partition_of(stream).streams["s"].committed == 4)
    with pytest.raises(OffsetMoved, match="Read on from 4"):
        commit_offset(stream, 5, outputs("A"), committed=0)
    commit_offset(stream, 5, outputs("A"), committed=4)


def test_after_a_seek_the_same_offset_can_be_committed_again(stream):
    commit_offset(stream, 3, outputs("A"))
    partition_of(stream).append_group_record("s", Seek(0, 4, 2)).wait()
    partition_of(stream).append_group_record("s", Claim("m", 5, 0, 2)).wait()
    commit_offset(stream, 3, outputs("again"), generation=5)
    settled(stream)
    assert there(stream) == ["A", "again"]


def test_a_partition_without_an_owner_takes_no_commit(stream):
    stream.broker.create_topic("in", wire.CreateTopic())
    partition_of(stream).streams.pop("s")
    with pytest.raises(IllegalGeneration, match="join the group"):
        commit_offset(stream, 3)


def test_commits_of_the_other_mode_are_refused(stream):
    messages = receive(stream)
    with pytest.raises(GroupModeMismatch, match="member_id"):
        commit(stream, messages, group="s")
    with pytest.raises(GroupModeMismatch, match='"ack"'):
        commit_offset(stream, 3, group="g")


def test_commits_that_were_forgotten_are_refused_and_not_done_again(fixture, monkeypatch):
    monkeypatch.setattr("portalmq.broker.core.queue.delivery.COMMITS_REMEMBERED", 2)
    send(fixture, *"abcd")
    messages = receive(fixture)
    for message in messages:
        commit(fixture, [message], outputs(str(message.offset)))
    with pytest.raises(StaleReceipt, match="done already"):
        commit(fixture, messages[:1], outputs("again"))
    settled(fixture)
    assert len(there(fixture)) == 4


def test_a_refusal_after_an_attempt_of_unknown_outcome_is_not_applied(fixture):
    send(fixture, "a")
    messages = receive(fixture)
    commit(fixture, messages)
    tries = [NotLeader("the leadership moved while this was on its way", outcome="unknown")]
    real = fixture.broker.group_commits._apply

    def apply(call, place):
        if tries:
            raise tries.pop()
        return real(call, place)

    fixture.broker.group_commits._apply = apply
    partition_of(fixture).delivery["g"].commits.clear()
    with pytest.raises(StaleReceipt) as refused:
        commit(fixture, messages, outputs("A"))
    assert tries == []
    assert refused.value.outcome == "not_applied"


def test_the_calls_between_brokers_carry_all_of_a_commit(fixture):
    send(fixture, "a")
    messages = receive(fixture)
    call_of: list[committing.CommitCall] = []
    real = fixture.broker.group_commits._forward

    def brought(call, place, forward):
        call_of.append(msgspec.msgpack.decode(msgspec.msgpack.encode(call), type=committing.CommitCall))
        return real(call, place, forward)

    fixture.broker.group_commits._forward = brought
    first = commit(fixture, messages, outputs("A", key=b"k"))
    answer = fixture.broker.serve_peer("commit", msgspec.msgpack.encode(call_of[0]), None)
    ((value, refused),) = msgspec.msgpack.decode(answer)
    assert (value, refused) == ([1, 1, int(first.id.split("-")[1])], None)
