"""Batches whose messages have idempotency keys: each key is one message, however often and in whatever batch it is
sent."""

from __future__ import annotations

import random
import zlib
from queue import SimpleQueue

import gevent
import pytest
from support.domain import HandClock, running
from support.replicas import eventually, replicas

from portalmq import wire
from portalmq.broker.messages.idempotency import SEARCHED_HERE_MAX, find_known, identified
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.partition.readable import IDS_SOUGHT_AT_ONCE
from portalmq.broker.storage.batch import Record
from portalmq.broker.storage.errors import DiskFull, StorageFault
from portalmq.broker.storage.log import Log
from portalmq.errors import (
    IdempotencyKeyReused,
    InvalidRequest,
    PartitionNotFound,
    PortalMQError,
    RequestInProgress,
    StorageFull,
    Unavailable,
)

# The hub searches for few ids, native threads for many.
SIZES = (SEARCHED_HERE_MAX // 2, 4 * SEARCHED_HERE_MAX)


@pytest.fixture
def fixture(tmp_path):
    with running(tmp_path) as fixture:
        yield fixture


def send(fixture, names, *, value=lambda name: name, acks="all", partition=None, partitions=None, **record):
    """Send a batch in which each message's name is its idempotency key and, by default, its value."""
    return fixture.broker.produce(
        "t",
        ProduceRequest(
            [Record(value(name).encode(), "text/plain", **record) for name in names],
            partitions,
            acks=acks,
            partition=partition,
            keys=[(name, ()) for name in names],
        ),
    )


def stored(fixture) -> list[str]:
    return [each.record.value.decode() for each in fixture.broker.browser.read_all("t", None)]


def names(size: int, start: int = 0) -> list[str]:
    return [f"row-{number}" for number in range(start, start + size)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("partitions", [1, 3])
def test_a_batch_that_is_sent_again_is_answered_as_the_first_one_was(fixture, size, partitions):
    fixture.broker.create_topic("t", wire.CreateTopic(partitions=partitions))
    first = send(fixture, names(size))
    fixture.clock.advance(1_000)
    assert send(fixture, names(size)) == first
    assert sorted(stored(fixture)) == sorted(names(size))


@pytest.mark.parametrize("size", SIZES)
def test_the_unknown_messages_of_a_partly_known_batch_are_appended_in_order(fixture, size):
    fixture.broker.create_topic("t", wire.CreateTopic())
    first = send(fixture, names(size))
    mixed = [name for pair in zip(names(size), names(size, start=size), strict=True) for name in pair]
    second = send(fixture, mixed)
    assert [second[index] for index in range(0, len(mixed), 2)] == first
    assert stored(fixture) == names(2 * size)
    assert [result.offset for result in second[1::2]] == sorted(result.offset for result in second[1::2])


def test_a_repeat_may_be_sent_in_other_batches_and_in_another_order(fixture):
    fixture.broker.create_topic("t", wire.CreateTopic(partitions=4))
    rows = names(3 * SEARCHED_HERE_MAX)
    first = dict(zip(rows, send(fixture, rows), strict=True))
    random.Random(7).shuffle(rows)
    for start in range(0, len(rows), 7):
        part = rows[start : start + 7]
        assert send(fixture, part) == [first[name] for name in part]
    assert len(stored(fixture)) == len(rows)


def test_each_goes_to_the_partition_of_its_id_and_is_found_there_after_growth_and_a_restart(tmp_path):
    clock = HandClock()
    with running(tmp_path, clock) as before:
        before.broker.create_topic("t", wire.CreateTopic(partitions=3))
        first = send(before, names(50))
        assert [result.partition for result in first] == [
            zlib.crc32(wire.message_id_of(name)) % 3 for name in names(50)
        ]
        before.broker.alter_topic("t", wire.AlterTopic(partitions=8))
    with running(tmp_path, clock) as after:
        assert send(after, names(50)) == first


def test_a_key_is_the_same_in_a_batch_and_in_the_header(fixture):
    fixture.broker.create_topic("t", wire.CreateTopic(partitions=3))
    (single,) = fixture.broker.produce("t", ProduceRequest([Record(b"a", "text/plain")], idempotency_key="a"))
    assert send(fixture, ["a", "b"])[0] == single


def test_a_message_twice_in_a_batch_is_one_message(fixture):
    fixture.broker.create_topic("t", wire.CreateTopic(partitions=2))
    results = send(fixture, ["a", "b", "a"])
    assert results[2] == results[0]
    assert sorted(stored(fixture)) == ["a", "b"]


def test_two_messages_of_one_key_in_a_batch_are_refused_and_nothing_is_appended(fixture):
    fixture.broker.create_topic("t", wire.CreateTopic(partitions=5))
    records = [Record(b"other"), Record(b"one"), Record(b"two")]
    with pytest.raises(IdempotencyKeyReused, match="messages 1 and 2"):
        fixture.broker.produce("t", ProduceRequest(records, keys=[None, ("k", ()), ("k", ())]))
    assert stored(fixture) == []


@pytest.mark.parametrize("size", SIZES)
def test_another_message_under_a_known_key_refuses_the_whole_batch(fixture, size):
    fixture.broker.create_topic("t", wire.CreateTopic())
    send(fixture, names(size))
    with pytest.raises(IdempotencyKeyReused):
        send(fixture, names(size, start=1), value=lambda name: "other" if name == "row-1" else name)
    assert stored(fixture) == names(size)


def test_a_batch_over_several_partitions_is_refused_share_by_share(fixture):
    fixture.broker.create_topic("t", wire.CreateTopic(partitions=2))
    send(fixture, ["a"], partitions=[0])
    results = fixture.broker.produce(
        "t",
        ProduceRequest(
            [Record(b"other", "text/plain"), Record(b"with it"), Record(b"elsewhere")],
            [0, 0, 1],
            keys=[("a", ()), ("b", ()), ("c", ())],
        ),
    )
    assert [isinstance(result, IdempotencyKeyReused) for result in results] == [True, True, False]
    assert stored(fixture) == ["a", "elsewhere"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("acks", ["leader", "none"])
def test_a_repeated_batch_is_answered_by_its_own_acks(fixture, acks, size):
    fixture.broker.create_topic("t", wire.CreateTopic())
    first = send(fixture, names(size))
    again = send(fixture, names(size), acks=acks)
    assert again == first if acks == "leader" else {result.offset for result in again} == {-1}
    assert send(fixture, names(size, start=1), acks=acks)
    wait_for(lambda: len(stored(fixture)) == size + 1)
    assert stored(fixture) == names(size + 1)


def wait_for(condition) -> None:
    with gevent.Timeout(60):
        while not condition():
            gevent.sleep(0.005)


def test_messages_without_a_key_are_appended_each_time(fixture):
    fixture.broker.create_topic("t", wire.CreateTopic())
    for _ in range(2):
        fixture.broker.produce("t", ProduceRequest([Record(b"keyed"), Record(b"plain")], keys=[("k", ()), None]))
    assert stored(fixture) == ["keyed", "plain", "plain"]


def test_the_same_content_under_two_keys_is_two_messages(fixture):
    send(fixture, ["a", "b"], value=lambda name: "same")
    assert stored(fixture) == ["same", "same"]


def test_a_producers_stamp_and_keys_are_two_identities_and_refused(fixture):
    stamp = wire.ProducerStamp(1, 0, 0)
    with pytest.raises(InvalidRequest, match="stamp"):
        fixture.broker.produce("t", ProduceRequest([Record(b"a")], partition=0, producer=stamp, keys=[("a", ())]))


def test_a_key_may_be_used_again_after_the_window(fixture):
    fixture.broker.create_topic("t", wire.CreateTopic(config={"dedup_window_ms": 1_000}))
    many = names(2 * SEARCHED_HERE_MAX)
    send(fixture, many)
    fixture.clock.advance(1_001)
    send(fixture, many)
    assert stored(fixture) == [*many, *many]


def test_messages_in_older_segments_are_found(fixture):
    fixture.broker.create_topic("t", wire.CreateTopic())
    partition = fixture.broker.topics.get("t").partition(0)
    rows = names(5 * SEARCHED_HERE_MAX)
    first = []
    for start in range(0, len(rows), SEARCHED_HERE_MAX):
        first += send(fixture, rows[start : start + SEARCHED_HERE_MAX])
        partition.log.roll()
    assert send(fixture, rows) == first


def test_many_messages_over_many_partitions_do_not_hold_up_the_broker(fixture, monkeypatch):
    """A few ids in each of many partitions count as many: the hub searches for no more than in one partition."""
    on_the_hub = []
    find = Log.find_message_id

    def noted(log, *arguments):
        on_the_hub.append(arguments)
        return find(log, *arguments)

    monkeypatch.setattr(Log, "find_message_id", noted)
    fixture.broker.create_topic("t", wire.CreateTopic(partitions=10))
    rows = names(10 * SEARCHED_HERE_MAX)
    spread = [number % 10 for number in range(len(rows))]
    first = send(fixture, rows, partitions=spread)
    assert len(on_the_hub) <= SEARCHED_HERE_MAX
    assert send(fixture, rows, partitions=spread) == first
    assert sorted(stored(fixture)) == sorted(rows)


@pytest.mark.parametrize("size", SIZES)
def test_copies_and_outputs_are_searched_for_as_a_batch_is(fixture, monkeypatch, size):
    """Copies of dead letters and outputs of commits come in batches, each record with an id."""
    on_the_hub = []
    find = Log.find_message_id

    def noted(log, *arguments):
        on_the_hub.append(arguments)
        return find(log, *arguments)

    monkeypatch.setattr(Log, "find_message_id", noted)
    fixture.broker.create_topic("t", wire.CreateTopic())
    copies = [Record(name.encode(), "text/plain", message_id=wire.message_id_of(name)) for name in names(size)]
    for _ in range(2):
        assert fixture.broker.produce_handler.copies(fixture.broker.topics.get("t"), {0: copies}) == {}
    assert stored(fixture) == names(size)
    assert len(on_the_hub) <= 2 * SEARCHED_HERE_MAX


def test_more_ids_than_one_query_takes_are_found(fixture):
    fixture.broker.create_topic("t", wire.CreateTopic())
    rows = names(2 * IDS_SOUGHT_AT_ONCE + 1)
    first = send(fixture, rows)
    assert send(fixture, rows) == first
    assert len(stored(fixture)) == len(rows)


# --- at the same time ------------------------------------------------------------------------------------------------


def attempt(fixture, batch, **options):
    try:
        return send(fixture, batch, **options)
    except PortalMQError as error:
        return error


@pytest.mark.parametrize("size", SIZES)
def test_batches_that_overlap_at_the_same_time_leave_each_message_once(fixture, size):
    """Two attempts of one Spark task overlap like this: they cut the rows into different batches, and both finish."""
    fixture.broker.create_topic("t", wire.CreateTopic(partitions=2))
    rows = names(3 * size)

    def bring(cut: int) -> dict[str, object]:
        brought = {}
        for start in range(0, len(rows), cut):
            part = rows[start : start + cut]
            while isinstance(results := attempt(fixture, part), RequestInProgress) or any(
                isinstance(result, RequestInProgress) for result in results
            ):
                gevent.sleep(0.001)
            brought |= dict(zip(part, results, strict=True))
        return brought

    with gevent.Timeout(60):
        greenlets = [gevent.spawn(bring, cut) for cut in (size, size + 1, 2 * size + 1, 3)]
        gevent.joinall(greenlets, raise_error=True)
    assert sorted(stored(fixture)) == sorted(rows)
    assert all(greenlet.get() == greenlets[0].get() for greenlet in greenlets)


def test_no_request_appends_messages_that_another_one_searches_for(fixture, monkeypatch):
    fixture.broker.create_topic("t", wire.CreateTopic())
    partition = fixture.broker.topics.get("t").partition(0)
    many = names(2 * SEARCHED_HERE_MAX)
    met = []
    find = partition.reader.find_ids

    def find_while_others_try(*arguments):
        monkeypatch.setattr(partition.reader, "find_ids", find)
        met.extend([attempt(fixture, many), attempt(fixture, many[:2]), attempt_single(fixture, many[0])])
        return find(*arguments)

    monkeypatch.setattr(partition.reader, "find_ids", find_while_others_try)
    first = send(fixture, many)
    assert [type(error) for error in met] == [RequestInProgress] * 3
    assert all(error.retryable and error.outcome == "unknown" for error in met)
    assert stored(fixture) == many
    assert send(fixture, many) == first


def attempt_single(fixture, name):
    try:
        record = Record(name.encode(), "text/plain")
        return fixture.broker.produce("t", ProduceRequest([record], idempotency_key=name))
    except PortalMQError as error:
        return error


@pytest.mark.parametrize("failing", ["the search", "the append"])
def test_searched_messages_can_be_sent_again_after_a_failure(fixture, monkeypatch, failing):
    fixture.broker.create_topic("t", wire.CreateTopic())
    partition = fixture.broker.topics.get("t").partition(0)
    many = names(2 * SEARCHED_HERE_MAX)

    def fail(*arguments, **options):
        raise Unavailable("just now", outcome="not_applied", retryable=False)

    with monkeypatch.context() as patch:
        if failing == "the search":
            patch.setattr(partition.reader, "find_ids", fail)
        else:
            patch.setattr(partition, "submit", fail)
        assert isinstance(attempt(fixture, many), Unavailable)
    assert send(fixture, many)
    assert stored(fixture) == many


@pytest.mark.parametrize(
    ("failure", "told", "ends"),
    [(DiskFull("full"), StorageFull, False), (StorageFault("I/O error"), Unavailable, True)],
)
def test_a_full_disk_refuses_a_search_and_one_that_failed_ends_the_broker(fixture, monkeypatch, failure, told, ends):
    fixture.broker.create_topic("t", wire.CreateTopic())
    partition = fixture.broker.topics.get("t").partition(0)

    def fail(*arguments):
        raise failure

    many = names(2 * SEARCHED_HERE_MAX)
    with monkeypatch.context() as patch:
        patch.setattr(partition.log, "find_message_ids", fail)
        assert isinstance(attempt(fixture, many), told)
    assert bool(fixture.faults) == ends
    assert ends or send(fixture, many)


def test_a_search_that_outlasts_the_leadership_appends_nothing(fixture, monkeypatch):
    """Another leader may have appended the messages in an epoch between, so the result of the search is void."""
    fixture.broker.create_topic("t", wire.CreateTopic())
    partition = fixture.broker.topics.get("t").partition(0)
    epoch = partition.replica.leader_epoch
    find, submit = partition.reader.find_ids, partition.submit
    seen: list[str] = []

    def find_across_an_election(*arguments):
        found = find(*arguments)
        if "election" not in seen:
            monkeypatch.setattr(type(partition.replica), "leader_epoch", property(lambda replica: epoch + 1))
            seen.append("election")
        else:
            seen.append("search")
        return found

    def note_submit(*arguments, **options):
        seen.append("append")
        return submit(*arguments, **options)

    monkeypatch.setattr(partition.reader, "find_ids", find_across_an_election)
    monkeypatch.setattr(partition, "submit", note_submit)
    many = names(2 * SEARCHED_HERE_MAX)
    assert send(fixture, many)
    assert seen.index("append") > seen.index("search") > seen.index("election")
    assert seen.count("append") == 1


@pytest.mark.parametrize("size", SIZES)
def test_a_new_leader_refuses_a_search_until_it_has_written_its_log(tmp_path, monkeypatch, size):
    """The new leader has these messages, but neither its files nor its memory have their ids yet."""
    records = tuple(identified(Record(name.encode()), name, ()) for name in names(size))

    def known(partition):
        with find_known(partition, records, "none", are_many=size > SEARCHED_HERE_MAX) as found:
            return found

    with replicas(tmp_path, 3, lag_ms=3_600_000) as group:
        eventually(lambda: group.leader.serves and group.agree())
        first, second = group.partition(1), group.partition(2)
        gate, append = SimpleQueue(), second.log.append

        def waiting(batches):
            gate.get()
            gate.put(None)  # once open, it stays so
            return append(batches)

        monkeypatch.setattr(second.log, "append", waiting)
        base_offset, _ = first.append(records, size, acks="leader")
        eventually(lambda: second.replica.next_offset == first.replica.next_offset)
        group.elect(2)
        eventually(lambda: second.replica.leading)
        try:
            with pytest.raises(Unavailable) as told:
                known(second)
        finally:
            gate.put(None)
        assert told.value.retryable
        assert told.value.outcome == "not_applied"
        eventually(lambda: second.serves)
        assert [known(second)[record.message_id][0] for record in records] == list(
            range(base_offset, base_offset + size)
        )


def test_nothing_is_kept_in_memory(fixture):
    fixture.broker.create_topic("t", wire.CreateTopic())
    send(fixture, names(1_000))
    uncommitted = fixture.broker.topics.get("t").partition(0).uncommitted
    assert (uncommitted._ids, uncommitted._sought) == ({}, set())


def test_an_unknown_partition_refuses_the_batch(fixture):
    fixture.broker.create_topic("t", wire.CreateTopic(partitions=2))
    with pytest.raises(PartitionNotFound):
        send(fixture, ["a"], partitions=[5])


def test_keys_with_a_common_prefix_are_adjacent_in_the_index():
    ids = [wire.message_id_of(f"job/{number}") for number in range(100)]
    assert len({each[:4] for each in ids}) == 1
    assert len(set(ids)) == 100
    assert wire.message_id_of("job2/1")[:4] != ids[0][:4]
    assert {len(wire.message_id_of(key)) for key in ("a", "/a", "a/b", "a/b/c")} == {16}
