"""The defects of the Portal MQ from which this product developed, each with a test that it would have failed."""

from __future__ import annotations

import contextlib
import itertools
import socket
import sqlite3
from collections.abc import Iterator

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError
from support.cluster import Cluster, wait_until

from portalmq import Consumer, Producer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


def tree(client: KazooClient, path: str = "/") -> Iterator[tuple[str, bytes]]:
    """Yield every node in ZooKeeper. A node that is deleted during the walk is left out."""
    try:
        data, _ = client.get(path)
        names = client.get_children(path)
    except NoNodeError:
        return
    yield path, data
    for name in names:
        yield from tree(client, f"{path.rstrip('/')}/{name}")


def messages_path(topic: str) -> str:
    return f"/v1/topics/{topic}/messages"


def test_no_message_body_in_zookeeper(cluster: Cluster, topic: str):
    marker = "confidential-4711"
    with Producer(cluster.urls) as producer:
        for number in range(200):
            producer.send(topic, f"{marker}-{number}", key=marker, headers={"x": marker}).result(timeout=20)
    with Consumer(topic, group=topic, bootstrap=cluster.urls, idle_timeout_s=60) as consumer:
        assert len(list(itertools.islice(consumer, 200))) == 200
    client = KazooClient(cluster.zookeeper.hosts)
    client.start()
    try:
        nodes = dict(tree(client))
    finally:
        client.stop()
        client.close()
    assert any(topic in path for path in nodes), "the walk includes the topic"
    assert not [path for path, data in nodes.items() if marker in path or marker.encode() in data]
    ours = [data for path, data in nodes.items() if not path.startswith("/zookeeper")]
    assert max(map(len, ours)) < 10_000


def test_no_deadlock_of_the_watcher_on_the_leader(cluster: Cluster, topic: str):
    """The seed's leader called ZooKeeper from the callback that ZooKeeper waited for, and got no further events."""
    admin = cluster.admin()
    for number in range(30):
        admin.create_topic(f"{topic}-{number}")
        admin.create_group(f"{topic}-{number}")
    for number in range(0, 30, 2):
        admin.delete_topic(f"{topic}-{number}")
    for broker_id, broker in cluster.brokers.items():
        answer = broker.request("POST", messages_path(f"{topic}-after-{broker_id}"), b"heard")
        assert answer.status == 200, answer.body
    wanted = {f"{topic}-{number}" for number in range(1, 30, 2)}
    for broker_id in cluster.brokers:

        def sees_all(broker_id=broker_id) -> bool:
            answer = cluster.ask("/v1/topics", broker_id)
            seen = {each["name"] for each in answer["topics"]} if answer else set()
            return {name for name in seen if name.startswith(f"{topic}-") and "after" not in name} == wanted

        wait_until(sees_all, f"broker {broker_id} has received every change")


def test_no_write_accepted_by_a_broker_that_does_not_lead(cluster: Cluster, topic: str):
    cluster.admin().create_topic(topic)
    cluster.wait_in_sync(topic)
    leader = cluster.wait_for_leader(topic)
    headers = {"PortalMQ-No-Forward": "1"}
    for broker_id in cluster.running:
        answer = cluster.brokers[broker_id].request("POST", messages_path(topic), b"%d" % broker_id, headers)
        if broker_id == leader:
            assert answer.status == 200
        else:
            assert answer.status == 421
            assert answer.json()["code"] == "not_leader"
            assert answer.json()["leader_url"] == cluster.brokers[leader].url
            assert answer.json()["outcome"] == "not_applied"
    assert [message.text for message in cluster.admin().read_all(topic)] == [str(leader)]


def test_an_expired_session_is_replaced(cluster: Cluster, topic: str):
    """The seed's broker never recovered from an expired session. Here the broker is paused for longer than its
    session."""
    cluster.admin().create_topic(topic)
    cluster.wait_in_sync(topic)
    leader = cluster.wait_for_leader(topic)
    deaf = next(broker_id for broker_id in cluster.running if broker_id != leader)
    cluster.pause(deaf)
    wait_until(lambda: (live := cluster.live()) and deaf not in live, "its session has ended")
    cluster.resume(deaf)
    wait_until(lambda: cluster.live(deaf) == set(cluster.brokers), "it is registered, and sees the others")
    cluster.wait_in_sync(topic)
    for other in cluster.running:
        if other not in {deaf, leader}:
            cluster.kill(other)
    cluster.kill(leader)
    cluster.start(leader)  # with two of three brokers the partition accepts writes again

    def is_written() -> bool:
        answer = cluster.brokers[deaf].request("POST", messages_path(topic), b"x", timeout_s=60)
        # With two brokers down, the sessions decide the election: until then a refusal may be repeated.
        assert answer.status == 200 or answer.json()["outcome"] == "not_applied", answer.body
        return answer.status == 200

    wait_until(is_written, "with two of three brokers it accepts writes again", 60)


QUOTES = [
    "'",
    "''",
    '"',
    "##",
    "a##b##c",
    "'; DROP TABLE messages; --",
    "' OR '1'='1",
    "%s %d {} \\ \0 \n",
    "`$(x)`",
    "ä😀",
]


def test_message_content_never_becomes_sql(cluster: Cluster, topic: str):
    with Producer(cluster.urls) as producer:
        for text in QUOTES:
            headers = {"x": text.replace("\0", "").replace("\n", "")}
            producer.send(topic, text, key=text, headers=headers).result(timeout=20)
    with Consumer(topic, group=topic, bootstrap=cluster.urls) as consumer:
        got = []
        while len(got) < len(QUOTES):
            messages = consumer.poll(timeout_s=20)
            assert messages
            consumer.ack(messages)
            got += messages
    assert {message.text for message in got} == set(QUOTES)
    assert all(message.key == message.text.encode() for message in got)
    assert all(message.headers["x"] == message.text.replace("\0", "").replace("\n", "") for message in got)


def test_what_is_acknowledged_is_in_the_files_of_a_majority(cluster: Cluster, topic: str):
    """The seed logged to ZooKeeper before its own disk had the message. Here it is on two disks before the answer."""
    cluster.admin().create_topic(topic)
    cluster.wait_in_sync(topic)
    for number in range(20):
        value = f"on-disk-{number}"
        answer = cluster.brokers[number % 3 + 1].request("POST", messages_path(topic), value.encode())
        assert answer.status == 200
        holders = [broker_id for broker_id in cluster.brokers if value in stored(cluster, broker_id, topic)]
        assert len(holders) >= 2, f"{value} is acknowledged, and only in the files of {holders}"


def stored(cluster: Cluster, broker_id: int, topic: str) -> set[str]:
    """The messages in the broker's files, read with a SQLite library other than the broker's. A file that is being
    created holds nothing."""
    found = set()
    for file in (cluster.brokers[broker_id].data_dir / "partitions").glob(f"{topic}@*/0/*[0-9].sqlite"):
        connection = sqlite3.connect(f"file:{file}?mode=ro", uri=True)
        with contextlib.closing(connection), contextlib.suppress(sqlite3.OperationalError):
            rows = connection.execute("SELECT CAST(value AS BLOB) FROM messages")
            found |= {bytes(value).decode() for (value,) in rows}
    return found


def test_no_duplicate_when_a_producer_repeats_a_batch_elsewhere(cluster: Cluster, topic: str):
    cluster.admin().create_topic(topic)
    cluster.wait_in_sync(topic)
    broker = cluster.brokers[1]
    identity = broker.request("POST", "/v1/producers", {}, {"Content-Type": "application/json"}).json()
    batch = {
        "messages": [{"value": number, "partition": 0} for number in range(5)],
        "producer": {"id": identity["id"], "epoch": identity["epoch"], "sequence": 0},
    }
    headers = {"Content-Type": "application/vnd.portalmq.batch+json"}
    answers = [
        cluster.brokers[broker_id].request("POST", messages_path(topic), batch, headers) for broker_id in (1, 2, 3)
    ]
    assert {answer.status for answer in answers} == {200}
    assert answers[0].json() == answers[1].json() == answers[2].json()
    assert [message.json() for message in cluster.admin().read_all(topic)] == list(range(5))


def test_no_commit_before_the_caller_has_the_message(cluster: Cluster, topic: str):
    """A consumer that disconnects before it reads the answer has consumed nothing."""
    cluster.brokers[1].request("POST", messages_path(topic), b"precious")
    cluster.brokers[1].request(
        "PUT", f"/v1/groups/{topic}", {"visibility_timeout_ms": 1000}, {"Content-Type": "application/json"}
    )
    body = b'{"topics":["%s"],"wait_ms":0}' % topic.encode()
    head = b"POST /v1/groups/%s/receive HTTP/1.1\r\nHost: x\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    for broker_id in cluster.running:
        with socket.create_connection(("127.0.0.1", cluster.brokers[broker_id].port)) as gone:
            gone.sendall(head % (topic.encode(), len(body)) + body)
    with Consumer(topic, group=topic, bootstrap=cluster.urls) as consumer:
        assert [message.text for message in consumer.poll(timeout_s=60)] == ["precious"]
