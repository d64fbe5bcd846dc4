"""A small broker in this process for tests of the client: it works, until a script makes it fail.

    with ScriptedBroker() as broker:
        broker.script("POST", "/v1/topics/t/messages", [lose_answer, refuse(503, "unavailable")])

Each matching request uses up one step of a script; after the last one the broker works again.
"""

from __future__ import annotations

import itertools
import socket
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import msgspec

from portalmq import wire
from portalmq.errors import ERRORS_BY_CODE, PortalMQError


@dataclass
class Call:
    """One request as it arrived."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes
    connection: int

    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    def batch(self) -> wire.PackBatch:
        return msgspec.msgpack.decode(self.body, type=wire.PackBatch)


@dataclass
class Reply:
    status: int = 200
    body: bytes = b""
    content_type: str = wire.JSON
    headers: dict[str, str] = field(default_factory=dict)


class HangUp(Exception):
    """Close the connection without an answer."""


Step = Callable[["ScriptedBroker", Call], Reply]


def hang_up(broker: ScriptedBroker, call: Call) -> Reply:
    """The connection breaks before the request is executed."""
    raise HangUp


def lose_answer(broker: ScriptedBroker, call: Call) -> Reply:
    """The request is executed, and its answer is lost."""
    broker.work(call)
    raise HangUp


def refuse(status: int, code: str, *, retry_after: str | None = None, **members: Any) -> Step:
    def step(broker: ScriptedBroker, call: Call) -> Reply:
        error = ERRORS_BY_CODE[code](f"scripted {code}", **members)
        return problem(error, status, retry_after)

    return step


def hold(until: threading.Event) -> Step:
    """Answer only when the event is set, as a slow broker does."""

    def step(broker: ScriptedBroker, call: Call) -> Reply:
        assert until.wait(30)
        return broker.work(call)

    return step


def problem(error: PortalMQError, status: int | None = None, retry_after: str | None = None) -> Reply:
    headers = {} if retry_after is None else {"Retry-After": retry_after}
    return Reply(status or error.status, msgspec.json.encode(error.problem()), wire.PROBLEM, headers)


class ScriptedBroker:
    """Listens on a free port of 127.0.0.1. All its requests are in `calls`."""

    def __init__(self, partitions: int = 1, *, auto_create: bool = True) -> None:
        self.partitions = partitions
        # Consumers fetch ahead only from a group that they could look up.
        self.shows_groups = False
        self.leader_url: str | None = None
        self.leader_epoch = 1
        self.calls: list[Call] = []
        self.topics: dict[str, list[list[wire.PackMessage]]] = {}
        self.stamps: dict[tuple[str, int, int, int], tuple[int, int]] = {}
        self.leased: dict[str, tuple[str, int, int]] = {}
        self.attempts: dict[str, list[wire.PackMessageOut]] = {}
        self.commits: dict[frozenset[str], wire.Committed] = {}
        self.done: set[tuple[str, int, int]] = set()
        self.deliveries: dict[tuple[str, int, int], int] = defaultdict(int)
        self.changed = threading.Condition()
        self._auto_create = auto_create
        self._numbers = itertools.count(1)
        self._scripts: list[tuple[str, str, list[Step]]] = []
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def script(self, method: str, path: str, steps: list[Step]) -> None:
        """The next requests of `method` whose path begins with `path` meet these steps, one each."""
        self._scripts.append((method, path, list(steps)))

    def calls_of(self, method: str, path: str) -> list[Call]:
        return [call for call in self.calls if call.method == method and call.path == path]

    def values(self, topic: str, partition: int = 0) -> list[bytes]:
        return [message.value for message in self.topics[topic][partition]]

    def fill(self, topic: str, values: list[bytes]) -> None:
        self.topics.setdefault(topic, [[] for _ in range(self.partitions)])
        self.topics[topic][0] += [wire.PackMessage(value=value) for value in values]

    def wait_for(self, what: Callable[[], bool]) -> None:
        """Wait until a request has made the condition true."""
        with self.changed:
            assert self.changed.wait_for(what, timeout=30)

    def drop_connections(self) -> None:
        """Close every kept-alive connection, as a restarting broker does."""
        self._server.drop_connections()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.drop_connections()
        self._server.server_close()
        self._thread.join()

    # --- the broker --------------------------------------------------------------------------------------------------

    def answer(self, call: Call) -> Reply:
        with self.changed:
            self.calls.append(call)
            step = self._next_step(call)
            self.changed.notify_all()
        try:
            return step(self, call) if step else self.work(call)
        except PortalMQError as error:
            return problem(error)
        finally:
            with self.changed:
                self.changed.notify_all()

    def _next_step(self, call: Call) -> Step | None:
        for method, path, steps in self._scripts:
            if steps and call.method == method and call.path.startswith(path):
                return steps.pop(0)
        return None

    def work(self, call: Call) -> Reply:
        with self.changed:
            parts = call.path.strip("/").split("/")[1:]
            match call.method, *parts:
                case "GET", "metadata":
                    return self._metadata(call)
                case "POST", "producers":
                    return Reply(body=msgspec.json.encode(wire.ProducerIdentity(next(self._numbers), 0)))
                case "PUT", "topics", topic:
                    if call.query.get("first_use") == "true" and not self._auto_create:
                        return problem(ERRORS_BY_CODE["topic_not_found"](f"there is no topic {topic!r}: create it"))
                    self.topics.setdefault(topic, [[] for _ in range(self.partitions)])
                    return Reply(201, b"{}")
                case "POST", "topics", topic, "messages":
                    return self._produce(topic, call)
                case "GET", "groups", group if self.shows_groups:
                    shown = wire.GroupDescription(group, "queue", [], 0, 0, 0, 0, 0, 0, wire.GroupConfig())
                    return Reply(body=msgspec.json.encode(shown))
                case "PUT", "groups", _:
                    return Reply(body=b"{}")
                case "POST", "groups", _, "receive":
                    return self._receive(call)
                case "POST", "groups", _, "commit":
                    return self._commit(call)
                case "POST", "groups", _, verb:
                    return self._settle(verb, call)
            return problem(ERRORS_BY_CODE["not_found"](call.path))

    def _metadata(self, call: Call) -> Reply:
        wanted = [name for name in call.query.get("topics", "").split(",") if name in self.topics]
        url, epoch = self.leader_url or self.url, self.leader_epoch
        metadata = wire.Metadata(
            [wire.BrokerDescription(1, url, True)],
            [
                wire.TopicMetadata(
                    name,
                    [wire.PartitionLeader(partition, 1, epoch, url) for partition in range(len(self.topics[name]))],
                )
                for name in wanted
            ],
        )
        return Reply(body=msgspec.json.encode(metadata))

    def _produce(self, topic: str, call: Call) -> Reply:
        if self._auto_create:
            self.topics.setdefault(topic, [[] for _ in range(self.partitions)])
        partition = int(call.query["partition"])
        batch = call.batch()
        log = self.topics[topic][partition]
        where = (len(log), len(batch.messages))
        if batch.producer is not None:
            stamp = (topic, partition, batch.producer.id, batch.producer.sequence)
            if stamp in self.stamps:
                where = self.stamps[stamp]
            else:
                expected = sum(
                    count
                    for (its_topic, its_partition, producer, _), (_, count) in self.stamps.items()
                    if (its_topic, its_partition, producer) == stamp[:3]
                )
                if batch.producer.sequence != expected:
                    raise ERRORS_BY_CODE["out_of_order_sequence"](f"expected {expected}")
                self.stamps[stamp] = where
                log += batch.messages
        else:
            log += batch.messages
        if call.query["acks"] == "none":
            return Reply(202)
        produced = wire.ProducedRange(partition, where[0], where[1], 1_700_000_000_000)
        return Reply(body=msgspec.msgpack.encode(produced), content_type=wire.BATCH_MSGPACK)

    def _receive(self, call: Call) -> Reply:
        request = msgspec.json.decode(call.body, type=wire.ReceiveRequest)
        stale = [receipt for receipt in request.ack if not self._settled("ack", receipt)]
        messages = self.attempts.get(request.attempt_id or "")
        if messages is None:
            messages = self._lease(request)
            if not messages and request.wait_ms:
                self.changed.wait(min(request.wait_ms / 1000, 0.05))
                messages = self._lease(request)
            self.attempts[request.attempt_id or ""] = messages
        received = wire.PackReceived(messages, stale)
        return Reply(body=msgspec.msgpack.encode(received), content_type=wire.BATCH_MSGPACK)

    def _lease(self, request: wire.ReceiveRequest) -> list[wire.PackMessageOut]:
        taken = set(self.leased.values()) | self.done
        messages: list[wire.PackMessageOut] = []
        for topic in request.topics:
            for partition, log in enumerate(self.topics.get(topic, [])):
                for offset, message in enumerate(log):
                    place = (topic, partition, offset)
                    if place in taken or len(messages) >= request.max_messages:
                        continue
                    self.deliveries[place] += 1
                    receipt = f"{topic}.{partition}.{offset}.{self.deliveries[place]}"
                    self.leased[receipt] = place
                    messages.append(
                        wire.PackMessageOut(
                            partition, offset, message.value, 0, topic=topic, receipt=receipt,
                            delivery_count=self.deliveries[place], content_type=message.content_type or wire.BYTES,
                        )
                    )  # fmt: skip
        return messages

    def _commit(self, call: Call) -> Reply:
        commit = msgspec.msgpack.decode(call.body, type=wire.PackCommit)
        shown = frozenset(commit.ack or [])
        if shown not in self.commits:
            if not all(receipt in self.leased for receipt in shown):
                raise ERRORS_BY_CODE["stale_receipt"]("stale")
            self.done.update(self.leased.pop(receipt) for receipt in shown)
            for output in commit.publish:
                self.topics.setdefault(output.topic, [[]])[0].append(output)
            self.commits[shown] = wire.Committed(len(shown), len(commit.publish), f"0-{len(self.commits)}")
        return Reply(body=msgspec.msgpack.encode(self.commits[shown]), content_type=wire.BATCH_MSGPACK)

    def _settle(self, verb: str, call: Call) -> Reply:
        results = [
            {"receipt": receipt, "status": "ok" if self._settled(verb, receipt) else "stale_receipt"}
            for receipt in call.json()["receipts"]
        ]
        if any(result["status"] != "ok" for result in results):
            raise ERRORS_BY_CODE["stale_receipt"]("stale", outcome="partial", results=results)
        return Reply(body=msgspec.json.encode({"results": results}))

    def _settled(self, verb: str, receipt: str) -> bool:
        place = self.leased.get(receipt)
        already = verb == "ack" and self._place_of(receipt) in self.done
        if place and verb in {"ack", "nack"}:
            del self.leased[receipt]
            if verb == "ack":
                self.done.add(place)
        return bool(place or already)

    def _place_of(self, receipt: str) -> tuple[str, int, int]:
        topic, partition, offset, _ = receipt.rsplit(".", 3)
        return topic, int(partition), int(offset)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._open: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def drop_connections(self) -> None:
        for connection in list(self._open):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                self._open.discard(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that disconnects."""


def _handler(broker: ScriptedBroker) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def _serve(self) -> None:
            parts = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            headers = {name.lower(): value for name, value in self.headers.items()}
            call = Call(self.command, parts.path, query, headers, body, self.client_address[1])
            try:
                reply = broker.answer(call)
            except HangUp:
                self.close_connection = True
                return
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            if reply.status == 204:  # a 204 has no body: one that is sent is read as the next answer
                self.end_headers()
                return
            self.send_header("Content-Type", reply.content_type)
            self.send_header("Content-Length", str(len(reply.body)))
            self.end_headers()
            self.wfile.write(reply.body)

        do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = _serve

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    return Handler
