"""The commands and the asyncio client on a real broker: their output agrees with the broker's state."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import threading
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result
from support.broker_process import BrokerProcess
from support.cluster import wait_until

from portalmq import Admin, AsyncConsumer, AsyncProducer, Consumer, MessageNotFound
from portalmq.cli.main import main

pytestmark = pytest.mark.cluster

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    broker = BrokerProcess(tmp_path_factory.mktemp("broker"), command=("dev",), port=0)
    broker.start()
    yield broker
    broker.end()


@pytest.fixture
def topic() -> str:
    return f"topic-{next(_numbers)}"


def run(broker: BrokerProcess, *words: str, stdin: str | None = None) -> Result:
    result = CliRunner().invoke(main, ["--server", broker.url, *words], input=stdin)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def told(broker: BrokerProcess, *words: str, stdin: str | None = None) -> list[dict[str, object]]:
    return [json.loads(line) for line in run(broker, *words, "-o", "ndjson", stdin=stdin).stdout.splitlines()]


def numbers(count: int) -> str:
    return "".join(f"{number}\n" for number in range(count))


def test_scheduled_messages_are_listed_cancelled_and_delivered(broker: BrokerProcess, topic: str) -> None:
    run(broker, "produce", topic, "--delay", "1h", stdin="late\nlater\n")
    rows = told(broker, "scheduled", "list", topic)
    assert [row["value"] for row in rows] == ["late", "later"]
    assert len(told(broker, "scheduled", "list", topic, "-n", "1")) == 1
    run(broker, "scheduled", "cancel", topic, str(rows[0]["id"]))
    assert [row["value"] for row in told(broker, "scheduled", "list", topic)] == ["later"]
    with Admin(broker.url) as admin, pytest.raises(MessageNotFound):
        admin.cancel_scheduled(topic, str(rows[0]["id"]))
    run(broker, "produce", topic, "--delay", "100ms", stdin="soon\n")
    assert run(broker, "consume", topic, "-g", "g", "-n", "1").stdout == "soon\n"


def test_greater_priorities_are_consumed_first(broker: BrokerProcess, topic: str) -> None:
    for priority in ("0", "9", "31"):
        run(broker, "produce", topic, "--priority", priority, stdin=f"p{priority}\n")
    assert run(broker, "consume", topic, "-g", "g", "-n", "3").stdout.split() == ["p31", "p9", "p0"]


def test_dead_letters_are_listed_redriven_and_dropped(broker: BrokerProcess, topic: str) -> None:
    run(broker, "group", "create", topic, "-c", "max_deliveries=1")
    run(broker, "produce", topic, "--ndjson", stdin='{"n":0}\n{"n":1}\n{"n":2}\n')
    with Consumer(topic, group=topic, bootstrap=broker.url, manual_ack=True) as consumer:
        given: list[object] = []
        while len(given) < 3:
            messages = consumer.poll(5)
            consumer.nack(messages, reason="broken")
            given += messages
    rows = wait_until(lambda: _all_three(broker, topic), "three dead letters")
    assert [(row["value"], row["deliveries"], row["reason"]) for row in rows] == [
        ({"n": number}, 1, rows[0]["reason"]) for number in range(3)
    ]
    assert "broken" in str(rows[0]["reason"])
    where = '{"value.n":{"eq":1}}'
    assert told(broker, "dlq", "redrive", topic, topic, "--where", where, "--dry-run") == [
        {"matched": 1, "redriven": 0}
    ]
    assert told(broker, "dlq", "redrive", topic, topic, "--where", where) == [{"matched": 1, "redriven": 1}]
    assert run(broker, "consume", topic, "-g", topic, "-n", "1").stdout == '{"n":1}\n'
    assert told(broker, "dlq", "drop", topic, topic, "--ids", str(rows[0]["id"]), "-y") == [{"dropped": 1}]
    assert [row["value"] for row in told(broker, "dlq", "list", topic, topic)] == [{"n": 2}]
    assert told(broker, "dlq", "drop", topic, topic, "-y") == [{"dropped": 1}]
    assert told(broker, "dlq", "list", topic, topic) == []


def _all_three(broker: BrokerProcess, topic: str) -> list[dict[str, object]] | None:
    rows = told(broker, "dlq", "list", topic, topic)
    return rows if len(rows) == 3 else None


def test_a_stream_group_is_consumed_sought_and_shown(broker: BrokerProcess, topic: str) -> None:
    run(broker, "topic", "create", topic, "-p", "2")
    run(broker, "produce", topic, stdin=numbers(20))
    first = run(broker, "consume", topic, "-g", topic, "--mode", "stream", "-n", "5").stdout.split()
    rest = run(broker, "consume", topic, "-g", topic, "--mode", "stream", "--exit-at-end").stdout.split()
    assert sorted(map(int, first + rest)) == list(range(20))
    assert sum(int(str(row["lag"])) for row in told(broker, "group", "lag", topic)) == 0
    would = told(broker, "group", "seek", topic, topic, "--to", "earliest", "--dry-run")
    assert {row["to"] for row in would} <= {0, 1}
    assert sum(int(str(row["lag"])) for row in told(broker, "group", "lag", topic)) == 0
    run(broker, "group", "seek", topic, topic, "--to", "earliest")
    assert sum(int(str(row["lag"])) for row in told(broker, "group", "lag", topic)) == 20
    again = run(broker, "consume", topic, "-g", topic, "--mode", "stream", "--exit-at-end").stdout.split()
    assert sorted(map(int, again)) == list(range(20))
    run(broker, "group", "delete", topic, "-y")


def test_settings_are_altered_and_shown(broker: BrokerProcess, topic: str) -> None:
    run(broker, "group", "create", topic, "-c", "visibility_timeout_ms=5000")
    run(broker, "group", "alter", topic, "-c", "max_deliveries=9")
    [group] = told(broker, "group", "show", topic)
    config = group["config"]
    assert isinstance(config, dict)
    assert (config["visibility_timeout_ms"], config["max_deliveries"]) == (5000, 9)


def test_a_purged_topic_is_empty(broker: BrokerProcess, topic: str) -> None:
    run(broker, "produce", topic, stdin=numbers(5))
    assert len(told(broker, "peek", topic)) == 5
    run(broker, "topic", "purge", topic, "-y")
    assert told(broker, "peek", topic) == []


def test_locks_by_hand_and_around_a_command(broker: BrokerProcess, topic: str) -> None:
    [grant] = told(broker, "lock", "acquire", topic, "--owner", "me", "--ttl", "20s")
    [lock] = told(broker, "lock", "show", topic)
    assert (lock["owner"], lock["fencing_token"]) == ("me", grant["fencing_token"])
    busy = CliRunner().invoke(main, ["--server", broker.url, "lock", "run", topic, "--wait", "0s", "--", "true"])
    assert (busy.exit_code, "held by 'me'" in busy.stderr) == (75, True)
    run(broker, "lock", "release", topic, "--owner", "me", "--token", str(grant["fencing_token"]))
    run(broker, "lock", "run", topic, "--wait", "0s", "--", sys.executable, "-c", "pass")
    assert told(broker, "lock", "show", topic)[0]["owner"] is None
    assert topic in {row["name"] for row in told(broker, "lock", "list")}


def test_a_crowd_of_asyncio_consumers_needs_no_threads(broker: BrokerProcess, topic: str) -> None:
    """Half of the receives are cancelled while they wait: the messages that came for them go to others."""

    async def consume(consumer: AsyncConsumer, seen: list[int]) -> None:
        async for message in consumer:
            seen.append(message.json())

    async def test() -> None:
        threads = set(threading.enumerate())
        seen: list[int] = []
        consumers = [AsyncConsumer(topic, group=topic, bootstrap=broker.url) for _ in range(60)]
        async with AsyncProducer(broker.url) as producer:
            await producer.send(topic, 0)
            tasks = [asyncio.create_task(consume(consumer, seen)) for consumer in consumers]
            while 0 not in seen:  # noqa: ASYNC110 - consumers fill it
                await asyncio.sleep(0.01)
            for task in tasks[::2]:
                task.cancel()
            sends = [asyncio.create_task(producer.send(topic, number)) for number in range(1, 301)]
            await asyncio.gather(*(consumer.close() for consumer in consumers[::2]), *sends)
            assert set(threading.enumerate()) <= threads
            while len(set(seen)) < 301:  # noqa: ASYNC110 - consumers fill it
                await asyncio.sleep(0.01)
        await asyncio.gather(*(consumer.close() for consumer in consumers[1::2]))
        await asyncio.gather(*tasks, return_exceptions=True)
        assert set(seen) == set(range(301))

    asyncio.run(asyncio.wait_for(test(), 60))


@pytest.mark.parametrize("mode", ["queue", "stream"])
def test_asyncio_delivers_every_message_once(broker: BrokerProcess, topic: str, mode: str) -> None:
    async def test() -> None:
        async with AsyncProducer(broker.url) as producer:
            placed = await asyncio.gather(*(producer.send(topic, {"n": number}) for number in range(500)))
            assert len({(each.partition, each.offset) for each in placed}) == 500
        seen: list[int] = []
        async with AsyncConsumer(topic, group=topic, bootstrap=broker.url, mode=mode) as consumer:  # type: ignore[arg-type]
            async for message in consumer:
                seen.append(message.json()["n"])
                if len(seen) == 500:
                    await consumer.commit()
                    break
        assert seen == list(range(500))
        async with AsyncConsumer(topic, group=topic, bootstrap=broker.url, mode=mode) as consumer:  # type: ignore[arg-type]
            assert await consumer.poll(1.0) == []

    asyncio.run(asyncio.wait_for(test(), 60))
