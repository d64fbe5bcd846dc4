"""Brokers behind nginx, with the configuration of docs/deploy: waits, streams, sizes, tokens, and the death of a
broker."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from pathlib import Path

import pytest
from support.broker_process import BrokerProcess
from support.cluster import Cluster, wait_until
from support.nginx import Nginx, needs_nginx

from portalmq import Admin, Consumer, Producer

pytestmark = [pytest.mark.cluster, needs_nginx, pytest.mark.timeout(300)]

SECRET = "a-secret-of-the-test"
TOKEN = {"Authorization": f"Bearer {SECRET}"}
MESSAGES = 300
WITHIN_S = 100.0


def test_one_broker_s_answers_come_through_as_they_are(tmp_path: Path):
    with (
        BrokerProcess(tmp_path / "broker", "--secret", SECRET, command=("dev",)) as broker,
        Nginx(tmp_path / "nginx", [broker.port]) as nginx,
    ):
        assert nginx.request("POST", "/v1/topics/t/messages", b"x").status == 401
        assert nginx.request("POST", "/v1/topics/t/messages", b"x" * 1024 * 1024, TOKEN).status == 200
        refused = nginx.request("POST", "/v1/topics/t/messages", b"x" * (1024 * 1024 + 1), TOKEN)
        assert (refused.status, refused.json()["code"]) == (413, "message_too_large")
        assert "9 MiB" not in refused.json()["detail"], "the broker answers, not nginx"
        _events_come_at_once(nginx)
        wait_until(lambda: _waiting(broker) == 0, "the broker has no follower of the events")
        _a_wait_ends_with_the_message(broker, nginx)
        _who_goes_away_takes_nothing(broker, nginx)


def test_the_client_library_works_through_the_name_alone(tmp_path: Path):
    """If the client cannot reach the brokers' advertised addresses, it stays with the address that it was given."""
    broker = BrokerProcess(tmp_path / "broker", "--advertised-url", "http://127.0.0.1:9", command=("dev",))
    with socket.create_server(("127.0.0.1", 0)) as free:
        broker.port = free.getsockname()[1]
    with broker, Nginx(tmp_path / "nginx", [broker.port]) as nginx:
        with Producer(nginx.url) as producer:
            futures = [producer.send("t", str(number)) for number in range(100)]
            assert len({future.result(60).offset for future in futures}) == 100
        with Consumer("t", group="g", bootstrap=nginx.url) as consumer:
            assert len(consumer.poll(60, 100)) == 100


def _events_come_at_once(nginx: Nginx) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", nginx.port, timeout=10)
    path = "/v1/topics/events/partitions/0/messages?offset=latest"
    nginx.request("POST", "/v1/topics/events/messages", b"before", TOKEN)
    connection.request("GET", path, headers={**TOKEN, "Accept": "text/event-stream"})
    stream = connection.getresponse()
    assert stream.readline() == b"retry: 1000\n"
    for number in range(3):
        nginx.request("POST", "/v1/topics/events/messages", b"event %d" % number, TOKEN)
        while b"event %d" % number not in stream.readline():  # bounded by the connection's time-out, below the 15 s of
            pass  # a sign of life: nothing else pushes an event out
    connection.close()


def _a_wait_ends_with_the_message(broker: BrokerProcess, nginx: Nginx) -> None:
    answers = []

    def wait() -> None:
        body = b'{"topics": ["waited"], "wait_ms": 60000}'
        answers.append(nginx.request("POST", "/v1/groups/g/receive", body, TOKEN))

    nginx.request("PUT", "/v1/topics/waited", b"{}", TOKEN)
    waiting = threading.Thread(target=wait)
    waiting.start()
    wait_until(lambda: _waiting(broker) == 1, "the call waits")
    nginx.request("POST", "/v1/topics/waited/messages", b"now", {**TOKEN, "Content-Type": "text/plain"})
    waiting.join(60)
    assert [message["value"] for message in answers[0].json()["messages"]] == ["now"]


def _who_goes_away_takes_nothing(broker: BrokerProcess, nginx: Nginx) -> None:
    """nginx closes its connection to the broker, so the broker notices."""
    nginx.request("PUT", "/v1/topics/left", b"{}", TOKEN)
    connection = http.client.HTTPConnection("127.0.0.1", nginx.port, timeout=10)
    connection.request("POST", "/v1/groups/g/receive", b'{"topics": ["left"], "wait_ms": 60000}', TOKEN)
    wait_until(lambda: _waiting(broker) == 1, "the call waits")
    connection.close()
    wait_until(lambda: _waiting(broker) == 0, "the broker has no waiting call", 30)
    nginx.request("POST", "/v1/topics/left/messages", b"mine", TOKEN)
    answer = nginx.request("POST", "/v1/groups/g/receive", b'{"topics": ["left"], "wait_ms": 5000}', TOKEN)
    assert [message["delivery_count"] for message in answer.json()["messages"]] == [1]


def _waiting(broker: BrokerProcess) -> int:
    text = broker.request("GET", "/metrics", headers=TOKEN).body.decode()
    (told,) = [line for line in text.splitlines() if line.startswith("portalmq_waiting_calls ")]
    return int(float(told.split()[1]))


def test_a_broker_dies_behind_the_name_and_nothing_that_was_acknowledged_is_lost(tmp_path: Path):
    """Programs that know one address: a sender with keys that retries until it is answered, a consumer that deletes its
    messages. The leader is killed half way."""
    with Cluster(tmp_path / "cluster") as cluster:
        ports = [broker.port for broker in cluster.brokers.values()]
        with Nginx(tmp_path / "nginx", ports) as nginx:
            assert nginx.request("PUT", "/v1/topics/default", b"{}").status == 201
            cluster.wait_in_sync("default")
            acked: list[str] = []
            sender = threading.Thread(target=_send, args=(nginx, acked))
            sender.start()
            wait_until(lambda: len(acked) >= MESSAGES // 3, "a third is sent", WITHIN_S)
            cluster.kill(cluster.wait_for_leader("default"))
            sender.join(WITHIN_S)
            assert len(acked) == MESSAGES
            cluster.admin().create_group("default", visibility_timeout_ms=600_000)  # no lease ends during the test
            for broker_id in cluster.running:
                with Admin(cluster.brokers[broker_id].url) as admin:
                    assert admin.queue_counts("default", "default").ready == MESSAGES
                    looked = [(each.message.text, each.state) for each in admin.unfinished("default", "default")]
                assert looked == [(text, "ready") for text in acked], "every broker shows the same queue"
            taken = _consume(nginx, len(acked))
            assert not list(cluster.admin().unfinished("default", "default"))
        assert sorted(taken) == sorted(acked), "each acknowledged message is consumed once"


def _send(nginx: Nginx, acked: list[str]) -> None:
    for number in range(MESSAGES):
        text = f"message {number}"
        deadline = time.monotonic() + WITHIN_S
        while time.monotonic() < deadline:
            headers = {"Idempotency-Key": text, "Content-Type": "text/plain"}
            answer = nginx.request("POST", "/v1/topics/default/messages", text.encode(), headers)
            if answer.status == 200:
                acked.append(text)
                break
            assert answer.json()["retryable"], answer
            time.sleep(0.05)


def _consume(nginx: Nginx, wanted: int) -> list[str]:
    """Receive and delete by WonderQ's protocol."""
    taken: dict[int, str] = {}
    deadline = time.monotonic() + WITHIN_S
    while len(taken) < wanted and time.monotonic() < deadline:
        answer = nginx.request("GET", "/v1/consumer?cid=7&limit=50&wait_ms=500")
        if answer.status != 200:
            assert answer.json()["retryable"], answer
            continue
        for each in answer.json()["messages"]:
            taken[each["id"]] = each["message"]
            deleted = nginx.request("DELETE", f"/v1/consumer?cid=7&id={each['id']}")
            while deleted.status != 200 and time.monotonic() < deadline:
                assert deleted.json()["retryable"], deleted
                deleted = nginx.request("DELETE", f"/v1/consumer?cid=7&id={each['id']}")
            assert (deleted.status, deleted.json()) == (200, True)
    return list(taken.values())
