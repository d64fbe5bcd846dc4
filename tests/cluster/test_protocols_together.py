"""Every protocol receives the messages of every other: text, JSON and bytes, unchanged, in order."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.broker_process import BrokerProcess
from support.zeromq import ZeroMQProcess, ask, service_at, socket_to

from portalmq import Consumer, Message, PortalConsumer, PortalProducer, Producer, publishMessage, subscribeMessage
from portalmq.broker.protocols.zeromq.service import MiniQService

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

# The one topic that every protocol reaches.
TOPIC = "default"
MESSAGES = ["text: ü\n", "", '{"looks": "like JSON"}', {"celsius": [21.5, None]}, 7, None, b"\xff\x00"]
# (the message's place, message)
Came = list[tuple[str, Any]]


class Doors:
    """Each writer publishes a message and returns its id; each reader takes all messages and settles them."""

    def __init__(self, broker: BrokerProcess, zeromq: ZeroMQProcess, miniq: MiniQService) -> None:
        self.broker = broker
        self.zeromq = zeromq
        self.miniq = miniq
        self.marks: set[str] = set()

    def ask(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        answer = self.broker.request(method, path, body, {"Content-Type": kind})
        assert answer.status in (200, 204), (method, path, answer.status, answer.body)
        return answer.json() if answer.status == 200 else None

    def place(self, key: str) -> str:
        """Return the message's place from one of MiniQ's keys, which all begin with the same mark of their queue."""
        mark, place = key.split("-", 1)
        self.marks.add(mark)
        assert self.marks == {mark}
        return place

    # --- in ----------------------------------------------------------------------------------------------------------

    def in_by_portal_mq(self, message: Any) -> str:
        told = self.ask("POST", "/publish", {"name": TOPIC, "id": "p"} | carried(message))
        return f"0-{told['offset']}"

    def in_by_portal_producer(self, message: Any) -> str:
        with PortalProducer(TOPIC, "q", self.broker.url) as producer:
            return f"0-{producer.publish(message)}"

    def in_by_miniq(self, message: Any) -> str:
        body = message if isinstance(message, bytes) else {"Message": message}
        return self.place(self.ask("POST", "/message", body)["key"])

    def in_by_wonderq(self, message: Any) -> str:
        return f"0-{self.ask('POST', '/v1/publish', carried(message))['id']}"

    def in_by_zeromq(self, message: Any) -> str:
        if not isinstance(message, bytes):
            return self.place(self.miniq.produce(TOPIC, message))
        # A frame that is no JSON object is a message, unchanged.
        with socket_to(self.zeromq.ports["producers"]) as socket:
            return self.place(ask(socket, message)["id"])

    def in_by_v1(self, message: Any) -> str:
        if isinstance(message, bytes):
            body, kind = message, "application/octet-stream"
        elif isinstance(message, str):
            body, kind = message.encode(), "text/plain; charset=utf-8"
        else:
            body, kind = json.dumps(message).encode(), "application/json"
        told: str = self.ask("POST", f"/v1/topics/{TOPIC}/messages", body, kind)["id"]
        return told

    def in_by_producer(self, message: Any) -> str:
        with Producer(self.broker.url) as producer:
            return f"0-{producer.send(TOPIC, message).result(20).offset}"

    def in_by_publish_message(self, message: Any) -> str:
        return f"0-{publishMessage(TOPIC, message, bootstrap=self.broker.url).offset}"

    # --- out ---------------------------------------------------------------------------------------------------------

    def out_by_portal_mq(self) -> Came:
        came: Came = []
        while (shown := self.ask("POST", "/read", {"name": TOPIC, "id": "c"})) is not None:
            assert self.ask("POST", "/consume", {"name": TOPIC, "offset": shown["offset"]}) is not None
            came.append((f"0-{shown['offset']}", carried_by(shown)))
        return came

    def out_by_portal_consumer(self) -> Came:
        with PortalConsumer(TOPIC, "d", self.broker.url, idle_timeout_s=0) as consumer:
            return [(f"0-{each.offset}", each.message) for each in consumer]

    def out_by_miniq(self) -> Came:
        came: Came = []
        while (answer := self.broker.request("GET", "/message")).status == 200:
            shown = answer.json()
            self.ask("POST", "/confirm", {"Key": shown["key"]})
            came.append((self.place(shown["key"]), carried_by(shown)))
        assert answer.status == 404
        return came

    def out_by_wonderq(self) -> Came:
        came: Came = []
        while shown := self.ask("GET", "/v1/consumer?cid=1&limit=7")["messages"]:
            for each in shown:
                assert self.ask("DELETE", f"/v1/consumer?cid=1&id={each['id']}") is True
                came.append((f"0-{each['id']}", carried_by(each)))
        return came

    def out_by_zeromq(self) -> Came:
        came: Came = []
        while (message := self.miniq.consume(TOPIC)) is not None:
            self.miniq.delete(message)
            came.append((self.place(message.id), message.message))
        return came

    def out_by_v1(self) -> Came:
        came: Came = []
        while shown := self.ask("POST", "/v1/groups/default/receive", {"topics": [TOPIC], "wait_ms": 0})["messages"]:
            self.ask("POST", "/v1/groups/default/ack", {"receipts": [each["receipt"] for each in shown]})
            came += [(each["id"], carried_by(each, "value")) for each in shown]
        return came

    def out_by_browsing(self) -> Came:
        page = self.ask("GET", f"/v1/topics/{TOPIC}/partitions/0/messages?limit=1000")
        return [(each["id"], carried_by(each, "value")) for each in page["messages"]]

    def out_by_consumer(self) -> Came:
        with Consumer(TOPIC, bootstrap=self.broker.url, idle_timeout_s=0) as consumer:
            return [(each.id, value_of(each)) for each in consumer]

    def out_by_stream_consumer(self) -> Came:
        end = self.ask("GET", f"/v1/topics/{TOPIC}/partitions/0/messages?offset=latest")["next_offset"]
        with Consumer(TOPIC, group="s", mode="stream", bootstrap=self.broker.url, idle_timeout_s=30) as consumer:
            came = [next(consumer)]
            while came[-1].offset < end - 1:
                came.append(next(consumer))
            return [(each.id, value_of(each)) for each in came]

    def out_by_subscribe_message(self) -> Came:
        messages = subscribeMessage(TOPIC, bootstrap=self.broker.url, idle_timeout_s=0)
        return [(each.id, value_of(each)) for each in messages]


def carried(message: Any) -> dict[str, Any]:
    if isinstance(message, bytes):
        return {"message_base64": base64.b64encode(message).decode()}
    return {"message": message}


def carried_by(shown: dict[str, Any], name: str = "message") -> Any:
    return shown[name] if name in shown else base64.b64decode(shown[f"{name}_base64"])


def value_of(message: Message) -> Any:
    if message.content_type == "application/json":
        return message.json()
    return message.text if message.content_type.startswith("text/") else message.value


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    directory = tmp_path_factory.mktemp("doors")
    with (
        BrokerProcess(directory / "broker", command=("dev",)) as broker,
        ZeroMQProcess(directory, [broker.url]) as process,
        service_at(process.ports) as miniq,
    ):
        yield Doors(broker, process, miniq)


def named(prefix: str) -> list[str]:
    return [name for name in vars(Doors) if name.startswith(prefix)]


@pytest.mark.parametrize("way_out", named("out_by_"))
def test_messages_of_every_protocol_are_received_by_this_protocol(doors: Doors, way_out: str) -> None:
    sent: Came = []
    for way_in in named("in_by_"):
        write: Callable[[Any], str] = getattr(doors, way_in)
        sent += [(write(message), message) for message in MESSAGES]
    came: Came = getattr(doors, way_out)()
    # Some readers have read the older messages. Others, with or without an offset of their own, see them again.
    assert came[-len(sent) :] == sent
    assert [type(message) for _, message in came[-len(sent) :]] == [type(message) for _, message in sent]
    assert len({place for place, _ in came}) == len(came)


def test_the_protocols_of_a_queue_group_share_its_messages(doors: Doors) -> None:
    """A message that one protocol has leased is not delivered by another, and any of them can settle it."""
    doors.out_by_v1()
    sent = [doors.in_by_v1(str(number)) for number in range(4)]
    (one,) = doors.ask("GET", "/v1/consumer?cid=5&limit=1")["messages"]
    two = doors.ask("GET", "/message")
    three = doors.miniq.consume(TOPIC)
    assert three is not None
    (four,) = doors.ask("POST", "/v1/groups/default/receive", {"topics": [TOPIC], "max_messages": 1})["messages"]
    assert [f"0-{one['id']}", doors.place(two["key"]), doors.place(three.id), four["id"]] == sent
    assert doors.ask("DELETE", f"/v1/consumer?cid=6&id={one['id']}") is False, "WonderQ's lock is its consumer's"
    doors.ask("POST", "/confirm", {"Key": sent[0]})
    assert doors.ask("DELETE", f"/v1/consumer?cid=5&id={sent[1][2:]}") is False, "another consumer holds the message"
    doors.miniq.delete(two["key"])
    doors.ask("POST", "/confirm", {"Key": three.id})
    doors.ask("POST", "/v1/groups/default/ack", {"receipts": [four["receipt"]]})
    assert doors.ask("GET", "/v1/queue")["messages"] == []
