"""The older queues' protocols under stress: several brokers, killed and paused leaders, races, a secret."""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.broker_process import Answer
from support.cluster import Cluster, wait_until

from portalmq import PortalClient, PortalConsumer, PortalProducer, TopicNotFound, Unauthorized

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

RACERS = 6
# A lease that does not end within a test.
LONG_S = 600.0


def ask(
    cluster: Cluster,
    method: str,
    path: str,
    body: Any = None,
    broker_id: int | None = None,
    headers: dict[str, str] | None = None,
) -> Answer:
    """Ask one broker, or each in turn until one can answer; a refusal (4xx) is an answer."""
    asked = itertools.cycle([broker_id] if broker_id is not None else cluster.running)

    def answered() -> Answer | None:
        with suppress(OSError):
            answer = cluster.brokers[next(asked)].request(method, path, body, headers, timeout_s=20)
            return answer if answer.status < 500 else None
        return None

    return wait_until(answered, f"{method} {path} is answered", 60)


def lease(cluster: Cluster, lease_s: float) -> None:
    """Set the lease of all messages that any broker delivers from now on."""
    wanted_ms = round(lease_s * 1000)
    with cluster.admin() as admin:
        admin.create_group("default", visibility_timeout_ms=wanted_ms)

    def is_known(broker_id: int) -> bool:
        told = cluster.ask("/v1/groups/default", broker_id)
        return told is not None and told["config"]["visibility_timeout_ms"] == wanted_ms

    wait_until(lambda: all(map(is_known, cluster.running)), "all brokers know of the lease")


def made(cluster: Cluster, topic: str, partitions: int = 1, lease_s: float = LONG_S) -> int:
    """Create a topic of that name, in sync; return its leader."""
    with cluster.admin() as admin:
        with suppress(TopicNotFound):
            admin.delete_topic(topic)
        admin.create_topic(topic, partitions=partitions)
    lease(cluster, lease_s)
    cluster.wait_in_sync(topic)
    return cluster.wait_for_leader(topic)


def published(cluster: Cluster, topic: str, *messages: str) -> list[int]:
    bodies = [{"name": topic, "message": message, "id": "p"} for message in messages]
    return [ask(cluster, "POST", "/publish", body).json()["offset"] for body in bodies]


def read(cluster: Cluster, topic: str, broker_id: int | None = None) -> Any:
    answer = ask(cluster, "POST", "/read", {"name": topic, "id": "c"}, broker_id)
    assert answer.status in (200, 204)
    return answer.json() if answer.status == 200 else None


# --- Portal MQ -------------------------------------------------------------------------------------------------------


def test_what_was_read_from_a_leader_that_dies_is_consumed_at_the_next(cluster: Cluster, topic: str) -> None:
    leader = made(cluster, topic)
    first, second = published(cluster, topic, "a", "b")
    shown = read(cluster, topic, leader)
    assert (shown["message"], shown["offset"]) == ("a", first)
    cluster.kill(leader)
    assert ask(cluster, "POST", "/consume", {"name": topic, "offset": second}).status == 204, "not the next message"
    assert ask(cluster, "POST", "/consume", {"name": topic, "offset": first}).status == 200
    assert ask(cluster, "POST", "/consume", {"name": topic, "offset": first}).status == 204
    for broker_id in cluster.running:
        assert read(cluster, topic, broker_id)["message"] == "b"


def test_a_consume_whose_outcome_is_unknown_is_repeated_and_ends_one_message(cluster: Cluster, topic: str) -> None:
    leader = made(cluster, topic)
    first, second = published(cluster, topic, "a", "b")
    follower = next(broker_id for broker_id in cluster.running if broker_id != leader)
    cluster.pause(leader)
    body = {"name": topic, "offset": first}
    with pytest.raises(TimeoutError):
        # It waits in the leader's socket, and is read when the leader continues.
        cluster.brokers[leader].request("POST", "/consume", body, timeout_s=0.5)
    assert ask(cluster, "POST", "/consume", body, follower).status in (200, 204)
    cluster.resume(leader)
    cluster.wait_in_sync(topic)
    wait_until(lambda: (read(cluster, topic) or {}).get("offset") == second, "the second message is next")
    for broker_id in cluster.running:
        assert read(cluster, topic, broker_id)["message"] == "b"


def test_of_consumers_that_race_for_a_message_one_wins(cluster: Cluster, topic: str) -> None:
    made(cluster, topic)
    offsets = published(cluster, topic, *(str(number) for number in range(10)))
    brokers = itertools.cycle(cluster.running)
    for offset in offsets:
        statuses: list[int] = []
        barrier = threading.Barrier(RACERS)

        def race(broker_id: int, offset: int = offset, statuses: list[int] = statuses, barrier: Any = barrier) -> None:
            barrier.wait(20)
            answer = ask(cluster, "POST", "/consume", {"name": topic, "offset": offset}, broker_id)
            statuses.append(answer.status)

        threads = [threading.Thread(target=race, args=(next(brokers),)) for _ in range(RACERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(statuses) == [200] + [204] * (RACERS - 1)
    assert read(cluster, topic) is None


def sleepers(cluster: Cluster, broker_id: int) -> float:
    """The number of calls that wait at a broker."""
    lines = cluster.brokers[broker_id].request("GET", "/metrics").body.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(b"portalmq_waiting_calls "))


def test_a_sleeping_consumer_is_woken_through_any_broker(cluster: Cluster, topic: str) -> None:
    made(cluster, topic)
    woken: list[Any] = []

    def sleep(broker_id: int) -> None:
        body = {"name": topic, "id": str(broker_id), "wait_ms": 60_000}
        woken.append(cluster.brokers[broker_id].request("POST", "/read", body, timeout_s=90).json()["message"])

    threads = [threading.Thread(target=sleep, args=(broker_id,)) for broker_id in cluster.running]
    for thread in threads:
        thread.start()
    for broker_id in cluster.running:
        wait_until(lambda asked=broker_id: sleepers(cluster, asked) > 0, "it sleeps")
    began = time.monotonic()
    published(cluster, topic, "wake up")
    for thread in threads:
        thread.join(90)
    assert woken == ["wake up"] * len(threads), "all are notified"
    assert time.monotonic() - began < 40, "the calls end before their time limit"


def test_the_classes_follow_the_brokers_when_the_named_one_dies(cluster: Cluster, topic: str) -> None:
    leader = made(cluster, topic)
    told = cluster.brokers[leader].url
    acked: list[int] = []
    with (
        PortalProducer(topic, "sensor", told) as producer,
        PortalConsumer(topic, "controller", told) as consumer,
    ):
        acked += [producer.publish(number) for number in range(20)]
        handled = [next(consumer).message for _ in range(10)]
        cluster.kill(leader)
        acked += [producer.publish(number) for number in range(20, 40)]
        handled += [next(consumer).message for _ in range(30)]
        last = consumer.read()
        assert last is not None
        assert last.message == 39, "the last message is still in hand"
    assert handled == list(range(40)), "in order, each once: the only consumer gets no message again"
    assert len(set(acked)) == 40
    with cluster.admin() as admin:
        assert [message.json() for message in admin.read_all(topic)] == list(range(40)), "retries are one message"


# --- WonderQ and MiniQ -----------------------------------------------------------------------------------------------


def test_a_message_is_taken_at_one_broker_and_ended_at_another(cluster: Cluster) -> None:
    made(cluster, "default", partitions=3)
    one, two, three = cluster.running
    numbers = {
        ask(cluster, "POST", "/v1/publish", {"message": n}, broker_id).json()["id"]
        for n, broker_id in zip(range(30), itertools.cycle(cluster.running), strict=False)
    }
    assert {number >> 40 for number in numbers} == {0, 1, 2}
    taken = ask(cluster, "GET", "/v1/consumer?cid=1&limit=100", broker_id=one).json()["messages"]
    assert {each["id"] for each in taken} == numbers
    assert ask(cluster, "GET", "/v1/consumer?cid=2&limit=100", broker_id=two).json()["messages"] == []
    for number in sorted(numbers):
        assert ask(cluster, "DELETE", f"/v1/consumer?cid=2&id={number}", broker_id=two).json() is False
        assert ask(cluster, "DELETE", f"/v1/consumer?cid=1&id={number}", broker_id=three).json() is True
    assert ask(cluster, "GET", "/v1/queue", broker_id=two).json()["messages"] == []
    keys = [ask(cluster, "POST", "/message", {"Message": n}, one).json()["key"] for n in range(6)]
    shown = [ask(cluster, "GET", "/message", broker_id=two).json()["key"] for _ in keys]
    assert sorted(shown) == sorted(keys)
    assert all(ask(cluster, "POST", "/confirm", {"Key": key}, three).status == 200 for key in keys)
    assert ask(cluster, "GET", "/messages", broker_id=one).json()["messages"] == []


def test_a_lock_that_is_replicated_outlives_the_leader_that_gave_it(cluster: Cluster) -> None:
    """A lock is not replicated before the answer, so one of the last moment may be lost with the leader: the message is
    then offered again. It is certainly replicated when a later message in the log is acknowledged."""
    leader = made(cluster, "default")
    number = ask(cluster, "POST", "/v1/publish", {"message": "a"}).json()["id"]
    assert len(ask(cluster, "GET", "/v1/consumer?cid=1").json()["messages"]) == 1
    behind = ask(cluster, "POST", "/v1/publish", {"message": "b"}).json()["id"]
    cluster.kill(leader)
    shown = ask(cluster, "GET", "/v1/consumer?cid=2").json()["messages"]
    assert [each["id"] for each in shown] == [behind], "the first one is still locked"
    assert ask(cluster, "DELETE", f"/v1/consumer?cid=2&id={number}").json() is False
    assert ask(cluster, "DELETE", f"/v1/consumer?cid=1&id={number}").json() is True
    assert [each["id"] for each in ask(cluster, "GET", "/v1/queue").json()["messages"]] == [behind]


def test_an_expired_lock_goes_to_another_consumer_at_every_broker(cluster: Cluster) -> None:
    made(cluster, "default", lease_s=0.5)
    number = ask(cluster, "POST", "/v1/publish", {"message": "a"}).json()["id"]
    assert len(ask(cluster, "GET", "/v1/consumer?cid=1").json()["messages"]) == 1
    lease(cluster, LONG_S)
    again = wait_until(lambda: ask(cluster, "GET", "/v1/consumer?cid=2").json()["messages"], "it is unlocked")
    assert [each["id"] for each in again] == [number]
    for broker_id in cluster.running:
        assert ask(cluster, "DELETE", f"/v1/consumer?cid=1&id={number}", broker_id=broker_id).json() is False
    assert ask(cluster, "DELETE", f"/v1/consumer?cid=2&id={number}").json() is True


def test_a_confirmation_is_kept_by_the_next_leader(cluster: Cluster) -> None:
    leader = made(cluster, "default", lease_s=0.5)
    keys = [ask(cluster, "POST", "/message", {"Message": n}).json()["key"] for n in range(2)]
    assert ask(cluster, "GET", "/message").json()["key"] == keys[0]
    assert ask(cluster, "POST", "/confirm", {"Key": keys[0]}).status == 200
    cluster.kill(leader)
    assert ask(cluster, "POST", "/confirm", {"Key": keys[0]}).status == 200, "a repeat succeeds"
    for _ in range(2):
        shown = wait_until(lambda: message_at(cluster), "the second message")
        assert shown["key"] == keys[1], "the first one is not delivered again"


def message_at(cluster: Cluster) -> Any:
    answer = ask(cluster, "GET", "/message")
    return answer.json() if answer.status == 200 else None


# --- with a secret ---------------------------------------------------------------------------------------------------


def test_brokers_with_a_secret_serve_only_clients_that_send_it(tmp_path: Path) -> None:
    with Cluster(tmp_path, "--secret", "strong-secret") as cluster:
        secret = {"Authorization": "strong-secret"}
        for broker in cluster.brokers.values():
            for method, path in (("POST", "/publish"), ("GET", "/message"), ("GET", "/v1/consumer?cid=1")):
                assert broker.request(method, path, b"{}" if method == "POST" else None).status == 401
        keys = [
            ask(cluster, "POST", "/message", {"Message": str(broker_id)}, broker_id, secret).json()["key"]
            for broker_id in cluster.brokers
        ]
        shown = [
            ask(cluster, "GET", "/message", None, broker_id, secret).json()["key"] for broker_id in cluster.brokers
        ]
        assert sorted(shown) == sorted(keys), "forwarding works at every broker"
        with PortalProducer("t", "p", cluster.urls, token="strong-secret") as producer:
            producer.publish("x")
        with PortalConsumer("t", "c", cluster.urls, token="strong-secret") as consumer:
            assert next(consumer).message == "x"
        with PortalClient(cluster.urls, token="wrong") as stranger, pytest.raises(Unauthorized):
            stranger.topic_exists("t")
