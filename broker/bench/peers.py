"""Other systems to measure beside PortalMQ, each as durable as it can be: Redis Streams, RabbitMQ, NATS JetStream.

Their servers and Python clients are optional; what is not installed is left out. Every queue is read by one group with
explicit acknowledgements. The `promise` of a system is what its acknowledgement of a send means.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Callable, Coroutine
from contextlib import closing, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from portalmq.broker.bench.systems import EMPTY_AFTER_S, GROUP, HOST, BenchClient, Site, System, binary, free_ports

CONNECT_WITHIN_S = 2.0
UNACKED_MAX = 20_000


# --- Redis Streams ---------------------------------------------------------------------------------------------------


class _RedisClient(BenchClient):
    """A batch is a pipeline, which shares one fsync. The acks of a batch ride with the next read."""

    def __init__(self, port: int, topic: str, batch: int = 0) -> None:
        self.redis: Any = import_module("redis").Redis(HOST, port, protocol=2)
        self._topic, self._batch, self._name = topic, batch, f"consumer-{os.getpid()}"
        self._unacked: list[bytes] = []

    def send(self, messages: list[bytes]) -> None:
        if len(messages) == 1:
            self.redis.xadd(self._topic, {b"value": messages[0]})
            return
        pipeline = self.redis.pipeline(transaction=False)
        for each in messages:
            pipeline.xadd(self._topic, {b"value": each})
        pipeline.execute()

    def receive(self) -> list[bytes]:
        pipeline = self.redis.pipeline(transaction=False)
        if self._unacked:
            pipeline.xack(self._topic, GROUP, *self._unacked)
        wait_ms = int(1000 * EMPTY_AFTER_S)
        pipeline.xreadgroup(GROUP, self._name, {self._topic: ">"}, count=self._batch, block=wait_ms)
        answer = pipeline.execute()[-1]
        entries = answer[0][1] if answer else []
        self._unacked = [identifier for identifier, _ in entries]
        return [fields[b"value"] for _, fields in entries]

    def close(self) -> None:
        if self._unacked:
            self.redis.xack(self._topic, GROUP, *self._unacked)
        self.redis.close()


class Redis(System):
    name, server, library = "redis", "redis-server", "redis"
    promise = "on disk (appendfsync always)"
    fsync = "always"
    cases = frozenset({"produce", "consume", "wake"})

    def start(self, site: Site) -> None:
        (self.port,) = free_ports(1)
        durable = ["--appendonly", "yes", "--appendfsync", self.fsync, "--save", ""]
        where = ["--bind", HOST, "--port", str(self.port), "--dir", str(site.directory)]
        site.spawn(str(binary(self.server)), *where, *durable)
        site.until(lambda: self.client("").redis.ping())

    def create(self, topic: str) -> None:
        self.client(topic).redis.xgroup_create(topic, GROUP, "0", mkstream=True)

    def drop(self, topic: str) -> None:
        self.client(topic).redis.delete(topic)

    def client(self, topic: str, batch: int = 0, node: int = 0, timeout_s: float = 30.0) -> _RedisClient:
        return _RedisClient(self.port, topic, batch)


# --- RabbitMQ --------------------------------------------------------------------------------------------------------


class _RabbitClient(BenchClient):
    """Sends are confirmed by the broker. Messages are pushed ahead of acks, of which one settles a whole batch."""

    def __init__(self, port: int, topic: str, batch: int, timeout_s: float) -> None:
        amqp = import_module("amqp")
        self._message = amqp.Message
        self._connection: Any = amqp.Connection(
            f"{HOST}:{port}", userid="guest", password="guest", connect_timeout=CONNECT_WITHIN_S
        )
        self._connection.connect()
        self.channel: Any = self._connection.channel()
        self._topic, self._batch, self._timeout_s = topic, batch, timeout_s
        self._sent, self._first_unconfirmed = 0, 1
        self._unconfirmed: set[int] = set()
        self._pushed: list[Any] = []
        if batch:
            self.channel.basic_qos(0, max(100, 2 * batch), False)
            self.channel.basic_consume(topic, callback=self._pushed.append)
        elif topic:
            self.channel.confirm_select()
            self.channel.events["basic_ack"].add(self._confirmed)
            self.channel.events["basic_nack"].add(self._refused)

    def _confirmed(self, tag: int, multiple: bool) -> None:
        if multiple:
            self._unconfirmed.difference_update(range(self._first_unconfirmed, tag + 1))
            self._first_unconfirmed = tag + 1
        else:
            self._unconfirmed.discard(tag)

    def _refused(self, *_: object) -> None:
        raise ConnectionError("RabbitMQ refused a message")

    def send(self, messages: list[bytes]) -> None:
        for each in messages:
            self._sent += 1
            self._unconfirmed.add(self._sent)
            self.channel.basic_publish(self._message(each, delivery_mode=2), "", self._topic)
        while self._unconfirmed:
            self._connection.drain_events(timeout=self._timeout_s)

    def receive(self) -> list[bytes]:
        end = time.monotonic() + EMPTY_AFTER_S
        with suppress(TimeoutError):
            while len(self._pushed) < self._batch:
                left_s = 0.02 if self._pushed else max(0.001, end - time.monotonic())
                self._connection.drain_events(timeout=left_s)
        taken = self._pushed[: self._batch]
        del self._pushed[: self._batch]
        if taken:
            self.channel.basic_ack(taken[-1].delivery_tag, multiple=True)
        return [each.body if isinstance(each.body, bytes) else each.body.encode() for each in taken]

    def close(self) -> None:
        self._connection.collect()


class Rabbit(System):
    name, server, library = "rabbitmq", "rabbitmq-server", "amqp"
    promise = "on disk (durable classic queue, publisher confirms)"
    queue_type = "classic"

    def version(self) -> str:
        return os.path.realpath(_rabbit_program("rabbitmqctl")).partition("rabbitmq_server-")[2].partition("/")[0]

    def start(self, site: Site) -> None:
        self.ports = free_ports(2 * self.nodes + 1)
        self._directory = str(site.directory)
        names = [f"bench{node}@localhost" for node in range(self.nodes)]
        (site.directory / "rabbitmq.conf").write_text(
            "disk_free_limit.absolute = 100MB\ncluster_formation.peer_discovery_backend = classic_config\n"
            + "".join(f"cluster_formation.classic_config.nodes.{n} = {name}\n" for n, name in enumerate(names, 1))
        )
        # Otherwise a node starts one that outlives it.
        site.spawn(str(binary("epmd")), "-port", str(self.ports[-1]), "-address", HOST)
        for node in range(self.nodes):
            (site.directory / f"node{node}").mkdir()
            (site.directory / f"node{node}" / "plugins").write_text("[].")
            site.spawn(_rabbit_program("rabbitmq-server"), environment=self._environment(node))
            if node == 0:  # the others join it
                site.until(lambda: self._connect(0))
        for node in range(1, self.nodes):
            site.until(lambda node=node: self._connect(node))  # type: ignore[misc]
        if self.nodes > 1:
            site.until(lambda: self._ask("eval", "length(rabbit_nodes:all_running()).").strip() == str(self.nodes))

    def _connect(self, node: int) -> bool:
        self.client("", node=node).close()
        return True

    def _environment(self, node: int) -> dict[str, str]:
        base = f"{self._directory}/node{node}"
        return {
            "HOME": self._directory,
            "RUNNING_UNDER_SYSTEMD": "true",  # the script becomes the server and leaves no shell beside it
            "RABBITMQ_NODENAME": f"bench{node}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": HOST,
            "RABBITMQ_NODE_PORT": str(self.ports[node]),
            "RABBITMQ_DIST_PORT": str(self.ports[self.nodes + node]),
            "RABBITMQ_MNESIA_BASE": base,
            "RABBITMQ_LOG_BASE": base,
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{base}/plugins",
            "RABBITMQ_CONFIG_FILE": f"{self._directory}/rabbitmq.conf",
            "ERL_EPMD_ADDRESS": HOST,
            "ERL_EPMD_PORT": str(self.ports[-1]),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        }

    def _ask(self, *arguments: str) -> str:
        environment = {**os.environ, **self._environment(0)}
        command = [_rabbit_program("rabbitmqctl"), "-q", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout

    def create(self, topic: str) -> None:
        arguments = {"x-queue-type": self.queue_type}
        with closing(self.client("")) as client:
            client.channel.queue_declare(topic, durable=True, auto_delete=False, arguments=arguments)

    def drop(self, topic: str) -> None:
        with closing(self.client("")) as client:
            client.channel.queue_delete(topic)

    def client(self, topic: str, batch: int = 0, node: int = 0, timeout_s: float = 30.0) -> _RabbitClient:
        return _RabbitClient(self.ports[node], topic, batch, timeout_s)

    def leader(self, topic: str) -> int:
        lines = self._ask("list_queues", "name", "leader").splitlines()
        name = next(line.split()[1] for line in lines if line.split()[0] == topic)
        return int(name.partition("@")[0].removeprefix("bench"))


class Rabbit3(Rabbit):
    name, nodes, queue_type = "rabbitmq-3", 3, "quorum"
    promise = "on disk on a majority of 3 (quorum queue, publisher confirms)"


def _rabbit_program(name: str) -> str:
    """Return the script itself; Debian's wrapper of it changes the user and the directory."""
    script = f"/usr/lib/rabbitmq/bin/{name}"
    return script if Path(script).exists() else str(binary(name))


# --- NATS JetStream --------------------------------------------------------------------------------------------------


class _NatsClient(BenchClient):
    """A batch is sent without waiting between its messages. A call fails at once when the connection breaks."""

    def __init__(self, port: int, topic: str, batch: int = 0, timeout_s: float = 30.0) -> None:
        self._loop = asyncio.new_event_loop()
        self._topic, self._batch, self._timeout_s = topic, batch, timeout_s
        self._subscription: Any = None
        self._loop.run_until_complete(asyncio.wait_for(self._connect(port), CONNECT_WITHIN_S))

    async def _connect(self, port: int) -> None:
        nats = import_module("nats")
        self._lost = asyncio.Event()

        async def lost() -> None:
            self._lost.set()

        async def ignore(_: Exception) -> None: ...

        self._nats: Any = await nats.connect(
            f"nats://{HOST}:{port}", allow_reconnect=False, disconnected_cb=lost, error_cb=ignore
        )
        self.stream: Any = self._nats.jetstream(timeout=30, publish_async_max_pending=UNACKED_MAX)

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(self._unless_lost(call))

    async def _unless_lost(self, call: Coroutine[Any, Any, Any]) -> Any:
        work, lost = asyncio.ensure_future(call), asyncio.ensure_future(self._lost.wait())
        await asyncio.wait({work, lost}, return_when=asyncio.FIRST_COMPLETED)
        lost.cancel()
        if not work.done():
            work.cancel()
            raise ConnectionError("the server closed the connection")
        return work.result()

    def send(self, messages: list[bytes]) -> None:
        self.run(self._send(messages))

    async def _send(self, messages: list[bytes]) -> None:
        if len(messages) == 1:
            await self.stream.publish(self._topic, messages[0], timeout=self._timeout_s)
            return
        sent = [await self.stream.publish_async(self._topic, each) for each in messages]
        await asyncio.wait_for(asyncio.gather(*sent), self._timeout_s)

    def receive(self) -> list[bytes]:
        return list(self.run(self._receive()))

    async def _receive(self) -> list[bytes]:
        if self._subscription is None:
            self._subscription = await self.stream.pull_subscribe_bind(durable=GROUP, stream=self._topic)
        try:
            messages = await self._subscription.fetch(self._batch, timeout=EMPTY_AFTER_S)
        except import_module("nats.errors").TimeoutError:
            return []
        for each in messages:
            await each.ack()
        return [each.data for each in messages]

    def close(self) -> None:
        self._loop.run_until_complete(self._nats.close())


class Nats(System):
    name, server, library = "nats", "nats-server", "nats"

    @property
    def _syncs(self) -> bool:
        """Whether this version can flush before it acknowledges (`sync_interval`, since 2.10)."""
        return tuple(int(part) for part in self.version().split(".") if part) >= (2, 10)

    @property
    def promise(self) -> str:  # type: ignore[override]
        where = "on disk (sync_interval always)" if self._syncs else "in the page cache, fsync every 2 minutes"
        return f"{where}{', on a majority of 3' if self.nodes > 1 else ''}"

    def start(self, site: Site) -> None:
        self.ports = free_ports(2 * self.nodes)
        routes = ", ".join(f"nats://{HOST}:{port}" for port in self.ports[self.nodes :])
        for node in range(self.nodes):
            sync = "sync_interval: always, " if self._syncs else ""
            text = f"server_name: n{node}\nlisten: {HOST}:{self.ports[node]}\n"
            text += f'jetstream {{ {sync}store_dir: "{site.directory}/node{node}", max_file_store: 50GB }}\n'
            if self.nodes > 1:
                at = self.ports[self.nodes + node]
                text += f"cluster {{ name: bench, listen: {HOST}:{at}, routes: [{routes}] }}\n"
            (site.directory / f"{node}.conf").write_text(text)
            site.spawn(str(binary(self.server)), "-c", f"{node}.conf")
        site.until(self._accepts_streams)

    def _accepts_streams(self) -> bool:
        self.create("probe")
        self.drop("probe")
        return True

    def _run(self, call: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
        with closing(self.client("")) as client:
            return client.run(call(client.stream))

    def create(self, topic: str) -> None:
        api = import_module("nats.js.api")

        async def make(stream: Any) -> None:
            await stream.add_stream(
                api.StreamConfig(name=topic, subjects=[topic], storage="file", num_replicas=self.nodes)
            )
            group = api.ConsumerConfig(durable_name=GROUP, ack_policy="explicit", max_ack_pending=UNACKED_MAX)
            await stream.add_consumer(topic, group)

        self._run(make)

    def drop(self, topic: str) -> None:
        self._run(lambda stream: stream.delete_stream(topic))

    def client(self, topic: str, batch: int = 0, node: int = 0, timeout_s: float = 30.0) -> _NatsClient:
        return _NatsClient(self.ports[node], topic, batch, timeout_s)

    def leader(self, topic: str) -> int:
        return int(self._run(lambda stream: stream.stream_info(topic)).cluster.leader.removeprefix("n"))


class Nats3(Nats):
    name, nodes = "nats-3", 3


PEERS: tuple[type[System], ...] = (Redis, Rabbit, Rabbit3, Nats, Nats3)
