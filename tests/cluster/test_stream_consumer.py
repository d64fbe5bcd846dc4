"""Consumer(mode="stream") against a real broker: iterating, committing, two members, seeking, and one name in use
twice."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support.broker_process import BrokerProcess
from support.cluster import wait_until

from portalmq import (
    Admin,
    AsyncConsumer,
    Consumer,
    Fenced,
    GroupModeMismatch,
    IllegalGeneration,
    InvalidRequest,
    Producer,
)
from portalmq.transport.request import Request

pytestmark = pytest.mark.cluster

_numbers = itertools.count(1)
# The time limits for events that must happen, and that must not.
WITHIN_S = 60.0
NOTHING_FOR_S = 0.5
# No member is lost because the machine pauses.
SESSION_S = 60.0


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with BrokerProcess(tmp_path_factory.mktemp("broker")) as broker:
        yield broker.url


@pytest.fixture
def topic() -> str:
    return f"stream-{next(_numbers)}"


def consumer(url: str, topic: str, **options: object) -> Consumer:
    settings = {"group": f"g-{topic}", "mode": "stream", "session_timeout_s": SESSION_S, **options}
    return Consumer(topic, bootstrap=url, **settings)  # type: ignore[arg-type]


def produce(url: str, topic: str, count: int, *, first: int = 0, partitions: int = 1, **more: object) -> None:
    with Producer(url) as producer:
        for number in range(first, first + count):
            producer.send(topic, str(number), partition=number % partitions, **more)  # type: ignore[arg-type]


def committed(url: str, topic: str) -> list[int]:
    answer = Admin(url)._transport.get(f"/v1/groups/g-{topic}/offsets", dict)
    return [each["committed"] for each in answer["offsets"]]


def lag(url: str, topic: str) -> int:
    answer = Admin(url)._transport.get(f"/v1/groups/g-{topic}/offsets", dict)
    return sum(each["lag"] for each in answer["offsets"])


def numbers(messages: Iterator[object] | list[object] | Consumer) -> list[int]:
    return [int(message.text) for message in messages]  # type: ignore[union-attr]


def first(reading: Consumer, count: int) -> list[object]:
    """Take `count` messages, in batches of any size; with manual_ack that acks nothing."""
    found: list[object] = []
    deadline = time.monotonic() + WITHIN_S
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} were received"
        found += reading.poll(1, count - len(found))
    return found


def all_of(reading: Consumer, count: int) -> list[int]:
    """Take `count` messages and any that follow, which should be none. All are settled then."""
    return numbers(itertools.islice(reading, count)) + numbers(reading.poll(NOTHING_FOR_S))


def test_messages_come_in_order_and_once(url: str, topic: str) -> None:
    produce(url, topic, 2_000)
    with consumer(url, topic) as reading:
        assert all_of(reading, 2_000) == list(range(2_000))
    assert lag(url, topic) == 0
    produce(url, topic, 10, first=2_000)
    with consumer(url, topic) as reading:
        assert all_of(reading, 10) == list(range(2_000, 2_010))


def test_a_message_whose_handling_failed_is_delivered_again(url: str, topic: str) -> None:
    produce(url, topic, 5)
    with consumer(url, topic) as reading:
        assert numbers(itertools.islice(reading, 4)) == [0, 1, 2, 3]  # and 3 is in hand at the close
    with consumer(url, topic) as reading:
        assert all_of(reading, 2) == [3, 4]


def test_at_most_once_commits_before_it_hands_out(url: str, topic: str) -> None:
    produce(url, topic, 5)
    with consumer(url, topic, delivery="at_most_once") as reading:
        first = next(reading)
        assert committed(url, topic)[0] > first.offset
    produce(url, topic, 1, first=5)
    with consumer(url, topic, delivery="at_most_once") as reading:
        found = list(itertools.takewhile(lambda number: number != 5, (int(message.text) for message in reading)))
        assert 0 not in found


def test_manual_ack_commits_only_on_request(url: str, topic: str) -> None:
    produce(url, topic, 6)
    with consumer(url, topic, manual_ack=True) as reading:
        messages = first(reading, 4)
        messages[1].ack()
        wait_until(lambda: committed(url, topic) == [messages[1].offset + 1], "the ack is committed")
        reading.commit()
        assert committed(url, topic) == [messages[3].offset + 1]
        assert numbers(first(reading, 2)) == [4, 5]
    with consumer(url, topic) as reading:
        assert all_of(reading, 2) == [4, 5]


def test_two_members_share_the_partitions_and_a_third_takes_over_from_one_that_closed(url: str, topic: str) -> None:
    Admin(url).create_topic(topic, partitions=4)
    with consumer(url, topic) as one, consumer(url, topic) as other:
        found: list[int] = []
        lock = threading.Lock()

        def read(reading: Consumer) -> None:
            for message in reading:
                with lock:
                    found.append(int(message.text))

        threads = [threading.Thread(target=read, args=(each,)) for each in (one, other)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(one.assignment) == len(other.assignment) == 2, "each has two partitions")
        produce(url, topic, 200, partitions=4)
        wait_until(lambda: len(found) >= 200 and lag(url, topic) == 0, "all messages arrived, and are settled")
        one.close()
        wait_until(lambda: len(other.assignment) == 4, "the other one has all four")
        produce(url, topic, 40, first=200, partitions=4)
        wait_until(lambda: len(found) >= 240, "all messages arrived")
        other.close()
        for thread in threads:
            thread.join(10)
    assert sorted(found) == list(range(240))


def test_of_two_consumers_with_one_member_id_the_older_is_fenced(url: str, topic: str) -> None:
    produce(url, topic, 3)
    with consumer(url, topic, member_id="one") as older, consumer(url, topic, member_id="one") as newer:
        assert next(older).text == "0"
        assert next(newer).text == "0"
        with pytest.raises(Fenced, match="member id of its own"):
            list(older)


def test_a_static_member_that_comes_back_has_its_partitions_at_once(url: str, topic: str) -> None:
    Admin(url).create_topic(topic, partitions=2)
    with consumer(url, topic, member_id="one") as one, consumer(url, topic, member_id="two") as two:
        one.poll(0.1)
        two.poll(0.1)
        wait_until(lambda: len(one.assignment) == len(two.assignment) == 1, "each has one")
        before = one.assignment
        one.close()
        with consumer(url, topic, member_id="one") as again:
            again.poll(0.1)
            wait_until(lambda: again.assignment == before, "it has its partitions again", SESSION_S / 2)
            assert len(two.assignment) == 1


def test_a_seek_sets_the_whole_group_back(url: str, topic: str) -> None:
    produce(url, topic, 10)
    between = datetime.now(UTC) + timedelta(milliseconds=1)
    wait_until(lambda: datetime.now(UTC) > between, "times are whole milliseconds: no message has this one")
    produce(url, topic, 10, first=10)
    with consumer(url, topic) as reading:
        messages = list(itertools.islice(reading, 20))
        assert numbers(messages) == list(range(20))
        reading.seek(topic, "earliest")
        assert all_of(reading, 20) == list(range(20))
        reading.seek(topic, between)
        assert all_of(reading, 10) == list(range(10, 20))
        reading.seek(topic, messages[18].offset, partition=0)
        assert all_of(reading, 2) == [18, 19]
        reading.seek(topic, "latest")
        assert all_of(reading, 0) == []


def test_paused_partitions_are_not_delivered(url: str, topic: str) -> None:
    Admin(url).create_topic(topic, partitions=2)
    with consumer(url, topic) as reading:
        reading.poll(0.1)
        wait_until(lambda: len(reading.assignment) == 2, "it has both")
        reading.pause(topic, 1)
        produce(url, topic, 20, partitions=2)
        found: list[int] = []
        while len(found) < 10:
            found += numbers(reading.poll(5))
        assert {number % 2 for number in found} == {0}
        assert reading.poll(0.3) == []
        reading.resume(topic, 1)
        while len(found) < 20:
            found += numbers(reading.poll(5))
    assert sorted(found) == list(range(20))


def test_expired_messages_are_left_out(url: str, topic: str) -> None:
    produce(url, topic, 3, ttl_s=0.2)
    produce(url, topic, 1, first=3)
    time.sleep(0.3)  # the time to live passes
    with consumer(url, topic) as reading:
        assert all_of(reading, 1) == [3]
    assert lag(url, topic) == 0


def test_a_partition_that_is_added_is_read_from_its_beginning(url: str, topic: str) -> None:
    produce(url, topic, 1)
    with consumer(url, topic, start="latest") as reading:
        reading.poll(0.1)
        wait_until(lambda: len(reading.assignment) == 1, "it has the first")
        Admin(url)._transport.send_json("PATCH", f"/v1/topics/{topic}", {"partitions": 2}, object)
        with Producer(url) as producer:
            producer.send(topic, "7", partition=1).result(WITHIN_S)
        assert numbers(reading.poll(WITHIN_S)) == [7]


def test_a_queue_consumer_of_a_stream_group_is_refused(url: str, topic: str) -> None:
    produce(url, topic, 1)
    with consumer(url, topic) as reading:
        assert reading.poll(WITHIN_S)
    with pytest.raises(GroupModeMismatch), Consumer(topic, group=f"g-{topic}", bootstrap=url) as queue:
        queue.poll(1)


def test_what_a_member_was_too_late_to_commit_is_refused(url: str, topic: str) -> None:
    produce(url, topic, 3)
    with consumer(url, topic, manual_ack=True) as reading:
        assert reading.poll(WITHIN_S)
        hear_no_more(reading)
        Admin(url)._transport.send_json("POST", f"/v1/groups/g-{topic}/seek", {"topic": topic, "to": "latest"}, object)
        with pytest.raises(IllegalGeneration):
            reading.commit()


def hear_no_more(reading: Consumer) -> None:
    """Cut the member off from the group: from now on it learns nothing of it."""
    member, is_deaf = reading._stream, threading.Event()
    assert member is not None

    async def turn() -> float:
        is_deaf.set()
        return WITHIN_S

    member._step = turn  # type: ignore[method-assign]
    assert is_deaf.wait(WITHIN_S)


def test_delivery_of_a_queue_group_is_fixed_at_its_creation(url: str, topic: str, tmp_path: Path) -> None:
    produce(url, topic, 1)
    with Consumer(topic, group=topic, bootstrap=url) as plain:
        assert plain.poll(WITHIN_S)
    with (
        pytest.raises(ValueError, match="at_least_once"),
        Consumer(topic, group=topic, bootstrap=url, delivery="exactly_once") as other,
    ):
        other.poll(1)


def test_a_place_and_outputs_are_committed_together(url: str, topic: str) -> None:
    produce(url, topic, 3)
    with consumer(url, topic, delivery="exactly_once") as reading:
        for message in itertools.islice(reading, 3):
            reading.commit_with(message, [{"topic": f"{topic}-out", "value": message.value}])
    assert lag(url, topic) == 0
    with Consumer(f"{topic}-out", group=topic, bootstrap=url) as outputs:
        assert sorted(all_of(outputs, 3)) == [0, 1, 2]


def test_a_message_whose_commit_failed_is_read_again(url: str, topic: str) -> None:
    produce(url, topic, 3)
    with consumer(url, topic, delivery="exactly_once") as reading:
        message = next(reading)
        with pytest.raises(ValueError, match="value"):
            reading.commit_with(message, [{"topic": f"{topic}-out"}])
        assert all_of(reading, 3) == [0, 1, 2]


def test_a_group_with_another_delivery_is_not_read(url: str, topic: str) -> None:
    produce(url, topic, 1)
    with consumer(url, topic) as reading:
        assert reading.poll(WITHIN_S)
    with consumer(url, topic, delivery="at_most_once") as other, pytest.raises(InvalidRequest, match="at_least_once"):
        other.poll(WITHIN_S)


def test_an_asynchronous_consumer_reads_streams_too(url: str, topic: str) -> None:
    produce(url, topic, 100)

    async def read() -> list[int]:
        async with AsyncConsumer(topic, group=f"g-{topic}", bootstrap=url, mode="stream") as reading:
            found: list[int] = []
            async for message in reading:
                found.append(int(message.text))
                if len(found) == 100:
                    break
            return found + [int(message.text) for message in await reading.poll(NOTHING_FOR_S)]

    assert asyncio.run(read()) == list(range(100))


def test_what_was_purged_before_it_was_read_is_passed_over(url: str, topic: str) -> None:
    produce(url, topic, 3)
    with consumer(url, topic) as reading:
        assert all_of(reading, 3) == [0, 1, 2]
        reading.pause()
        feeds = reading._stream.buffers.by_partition.values()  # type: ignore[union-attr]
        wait_until(lambda: not any(feed.in_flight for feed in feeds), "no fetch is on its way")
        produce(url, topic, 10, first=3)
        Admin(url)._transport.call(Request("DELETE", f"/v1/topics/{topic}/messages?partition=0", repeatable=True))
        produce(url, topic, 2, first=13)
        reading.resume()
        assert all_of(reading, 2) == [13, 14]
    assert lag(url, topic) == 0


def test_a_commit_of_what_a_purge_has_passed_over_is_no_error(url: str, topic: str) -> None:
    Admin(url).create_topic(topic, partitions=2)
    produce(url, topic, 40, partitions=2)
    with consumer(url, topic, manual_ack=True) as reading:
        in_hand: list[object] = []
        while len({message.partition for message in in_hand}) < 2:  # type: ignore[attr-defined]
            in_hand += reading.poll(5, 5)
        Admin(url)._transport.call(Request("DELETE", f"/v1/topics/{topic}/messages", repeatable=True))
        passed_over = committed(url, topic)
        reading.commit()
        assert committed(url, topic) == passed_over
        produce(url, topic, 2, first=40, partitions=2)
        wait_until(lambda: {message.text for message in reading.poll(1, 100)} & {"40", "41"}, "reading continues")
        reading.commit()
    assert [now > before for now, before in zip(committed(url, topic), passed_over, strict=True)].count(True) >= 1


def test_a_member_reads_several_topics(url: str, topic: str) -> None:
    produce(url, topic, 10)
    produce(url, f"{topic}-too", 10, first=10)
    with Consumer(topic, f"{topic}-too", group=f"g-{topic}", bootstrap=url, mode="stream") as reading:
        assert sorted(all_of(reading, 20)) == list(range(20))
