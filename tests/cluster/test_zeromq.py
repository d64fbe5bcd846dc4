"""MiniQ over ZeroMQ in front of three brokers: a program written from its text, and the death of each process.

PORTALMQ_MINIQ_MESSAGES=10000 makes the first test long.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support import miniq_zeromq_program
from support.broker_process import REPOSITORY, BrokerProcess
from support.cluster import Cluster, wait_until
from support.zeromq import ZeroMQProcess, ask, service_at, socket_to

from portalmq.broker.protocols.zeromq.service import MiniQService
from portalmq.errors import MessageNotFound, PortalMQError

MESSAGES = int(os.environ.get("PORTALMQ_MINIQ_MESSAGES", "600"))
LEASE_S = 2.0
# Long enough for a machine that does 20 messages a second.
DRAIN_WITHIN_S = 60.0 + MESSAGES / 20

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180 + MESSAGES // 5)]


class Program:
    """The program as a process. Its output goes to a file, so that it never blocks on a pipe."""

    def __init__(self, directory: Path, name: str, miniq: ZeroMQProcess, *arguments: str) -> None:
        self._said = directory / f"{name}.out"
        ports = [str(miniq.ports[door]) for door in ("commands", "producers", "consumers")]
        with self._said.open("wb") as out, (directory / f"{name}.err").open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, miniq_zeromq_program.__file__, *ports, *arguments], stdout=out, stderr=err
            )

    def lines(self) -> list[str]:
        return self._said.read_text().splitlines()


@contextmanager
def ended(programs: list[Program]) -> Iterator[None]:
    try:
        yield
    finally:
        for program in programs:
            program.process.kill()
            program.process.wait()


@pytest.mark.prove
def test_a_program_from_the_text_loses_nothing_when_a_leader_and_a_consumer_die(cluster: Cluster, tmp_path: Path):
    queues = ("orders", "payments")
    cluster.admin().create_topic("orders")
    cluster.admin().create_topic("payments", partitions=3)  # each broker leads one
    cluster.wait_in_sync(*queues)
    leader = cluster.wait_for_leader("orders")
    options = ("--lease", str(LEASE_S), "--timeout", "5")
    programs: list[Program] = []
    with ZeroMQProcess(tmp_path, cluster.urls, *options) as miniq, ended(programs):
        each = max(10, MESSAGES // 4)
        producers: dict[str, Program] = {}

        def produce(queue: str, name: str) -> None:
            producers[name] = Program(tmp_path, name, miniq, "produce", queue, name, str(each))
            programs.append(producers[name])

        # It dies with a message in hand. The others start later: they might leave it too few messages.
        produce("orders", "orders-a")
        dying = Program(tmp_path, "dying", miniq, "consume", "orders", "10")
        programs.append(dying)
        assert dying.process.wait(DRAIN_WITHIN_S) == 9
        for queue, name in (("orders", "orders-b"), ("payments", "payments-a"), ("payments", "payments-b")):
            produce(queue, name)
        consumers = [
            Program(tmp_path, f"{queue}-consumer-{number}", miniq, "consume", queue)
            for queue in queues
            for number in range(2)
        ]
        programs += consumers

        def acked() -> list[str]:
            return [line for producer in producers.values() for line in producer.lines()]

        wait_until(lambda: len(acked()) >= MESSAGES // 3, "a third is acked", DRAIN_WITHIN_S)
        cluster.kill(leader)
        for producer in producers.values():
            assert producer.process.wait(DRAIN_WITHIN_S) == 0
        assert len(acked()) == 4 * each

        def processed() -> list[str]:
            return [line for consumer in [*consumers, dying] for line in consumer.lines()]

        wait_until(lambda: set(acked()) <= set(processed()), "all that was acked is processed", DRAIN_WITHIN_S)
        with service_at(miniq.ports) as service:
            for queue in queues:
                wait_until(lambda queue=queue: service.queue_size(queue) == 0, f"{queue} is empty", DRAIN_WITHIN_S)
        print(f"{len(acked())} acked, {len(processed()) - len(set(processed()))} processed twice")


def test_producers_and_consumers_go_on_when_the_server_is_killed_and_started_again(cluster: Cluster, tmp_path: Path):
    acked: list[str] = []
    faults: list[BaseException] = []
    enough = threading.Event()

    def produce(service: Any) -> None:
        try:
            while not enough.is_set():
                message = f"m{len(acked)}"
                service.produce("jobs", message)
                acked.append(message)
        except BaseException as fault:  # noqa: BLE001 - reported at the end
            faults.append(fault)

    with ZeroMQProcess(tmp_path, cluster.urls, "--lease", str(LEASE_S)) as miniq:
        patient = {"timeout_s": 2.0, "tries": 10}
        with service_at(miniq.ports, **patient) as producer, service_at(miniq.ports, **patient) as consumer:
            thread = threading.Thread(target=produce, args=(producer,))
            thread.start()
            try:
                held = wait_until(lambda: consumer.consume("jobs"), "the first message")
                before = len(acked)
                miniq.kill()
                miniq.start()
                wait_until(lambda: len(acked) > before + 20, "producing continues")
            finally:
                enough.set()
                thread.join(30)
            assert faults == []
            seen: dict[str, int] = {}

            def drained() -> bool:
                message = consumer.consume("jobs")
                if message is not None:
                    # A produce that was repeated stores its text twice, and the copy may be delivered once.
                    seen[message.message] = max(message.deliveries, seen.get(message.message, 0))
                    with contextlib.suppress(MessageNotFound):  # the answer was late, and the delete was repeated
                        consumer.delete(message)
                return set(acked) <= seen.keys() and seen[held.message] >= 2

            wait_until(drained, "every acked message, and the one not deleted again, is delivered", DRAIN_WITHIN_S)


def test_while_no_broker_answers_requests_are_refused_and_then_served_again(tmp_path: Path):
    with (
        BrokerProcess(tmp_path / "broker") as broker,
        ZeroMQProcess(tmp_path, [f"http://127.0.0.1:{broker.port}"], "--timeout", "0.5") as miniq,
        socket_to(miniq.ports["producers"]) as producer,
        socket_to(miniq.ports["consumers"]) as consumer,
    ):
        first = wait_until(lambda: ok(ask(producer, {"queue": "q", "message": "before"})), "it is served")
        broker.kill()
        refused = ask(producer, {"queue": "q", "message": "meanwhile"})
        assert (refused["status"], refused["retryable"]) == ("error", True)
        assert ask(consumer, {"queue": "q"})["status"] == "error"
        broker.start()
        later = wait_until(lambda: ok(ask(producer, {"queue": "q", "message": "after"})), "it is served")
        assert later["id"] != first["id"]
        seen = [wait_until(lambda: ok(ask(consumer, {"queue": "q"})), "a message")["message"] for _ in "12"]
        assert "before" in seen


def ok(answer: dict[str, Any]) -> dict[str, Any] | None:
    return answer if answer["status"] == "ok" else None


def test_miniqs_http_and_zeromq_share_their_messages(tmp_path: Path):
    with (
        BrokerProcess(tmp_path / "broker", "--secret", "strong-secret") as broker,
        ZeroMQProcess(
            tmp_path, [f"http://127.0.0.1:{broker.port}"], "--token", "strong-secret", "--lease", "30"
        ) as miniq,
        service_at(miniq.ports) as service,
    ):
        secret = {"Authorization": "strong-secret"}

        def http(method: str, path: str, body: bytes = b"") -> Any:
            answer = broker.request(method, path, body, secret)
            assert answer.status == 200, answer.body
            return answer.json()

        key = http("POST", "/message", b'{"Message": {"by": "http"}}')["key"]
        message = service.consume()
        assert message is not None
        assert (message.id, message.message) == (key, {"by": "http"})
        http("POST", "/confirm", b'{"Key": "%s"}' % key.encode())
        with socket_to(miniq.ports["producers"]) as producer:
            told = ask(producer, b"by a plain frame")
        shown = http("GET", "/message")
        assert (shown["key"], shown["message"]) == (told["id"], "by a plain frame")
        assert service.queue_size() == 1
        size = http("POST", "/miniq/command", b'{"type": "QUEUE_SIZE", "payload": {"queue": "default"}}')
        assert (size["size"], size["in_flight"]) == (1, 1)
        service.delete(shown["key"])
        assert service.queue_size() == 0
        http("POST", "/v1/topics/default/messages", b"\xff\x00")
        raw = service.consume()
        assert raw is not None
        assert raw.message == b"\xff\x00"


def test_a_server_without_the_brokers_secret_says_so(tmp_path: Path):
    with (
        BrokerProcess(tmp_path / "broker", "--secret", "strong-secret") as broker,
        ZeroMQProcess(tmp_path, [f"http://127.0.0.1:{broker.port}"]) as miniq,
    ):
        with service_at(miniq.ports) as service:
            for call in (service.consume, service.queue_size, lambda: service.produce("q", "x")):
                with pytest.raises(PortalMQError) as caught:
                    call()
                assert caught.value.code == "unauthorized"
        assert miniq.stop() == 0
        assert "token" in miniq.stderr()


@pytest.mark.skipif(shutil.which("curl") is None, reason="the document uses curl")
def test_the_commands_and_the_program_of_the_document_do_what_it_says(tmp_path: Path):
    text = (REPOSITORY / "docs" / "ZEROMQ.md").read_text()
    (curls,) = [block for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) if block.startswith("curl")]
    program, with_keys = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert set(re.findall(r"(\w+)=", with_keys)) <= set(inspect.signature(MiniQService).parameters) | {"miniq"}
    with (
        BrokerProcess(tmp_path / "broker", command=("dev",)) as broker,
        ZeroMQProcess(tmp_path, [broker.url]) as miniq,
    ):
        ports = ", ".join(f"{door[:-1]}_port={port}" for door, port in miniq.ports.items())
        program = program.replace('MiniQService("localhost")', f'MiniQService("localhost", {ports})')
        said = run("bash", "-e", "-c", curls.replace("http://localhost:5000", broker.url))
        assert said.count('"status":"ok"') == 2
        assert '"created":true' in said
        assert '"size":0' in said
        assert run(sys.executable, "-c", program).splitlines() == ["1", "{'n': 1}"]


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_command_refuses_to_start_where_it_makes_no_sense(tmp_path: Path):
    with ZeroMQProcess(tmp_path, ["http://127.0.0.1:1"], "--timeout", "0.5") as miniq:
        assert "Until then" in miniq.stderr(), "the server waits for a cluster that is not running yet"
        taken = start("--command-port", str(miniq.ports["commands"]), "--producer-port", "0", "--consumer-port", "0")
        assert (taken.returncode, "commands" in taken.stderr) == (73, True)
        assert miniq.stop() == 0
    open_to_all = start("--host", "0.0.0.0")
    assert (open_to_all.returncode, "--require-token" in open_to_all.stderr) == (2, True)
    no_file = start("--require-token", str(tmp_path / "missing"))
    assert (no_file.returncode, "cannot be read" in no_file.stderr) == (2, True)
    odd_server = start("--server", "ftp://x")
    assert (odd_server.returncode, "ftp" in odd_server.stderr) == (2, True)


def test_without_pyzmq_the_command_says_what_to_install():
    program = (
        "import sys; sys.modules['zmq'] = None; from portalmq.broker.protocols.zeromq.command import zeromq; zeromq()"
    )
    helped = subprocess.run([sys.executable, "-c", program, "--help"], capture_output=True, text=True, timeout=60)
    assert (helped.returncode, "--command-port" in helped.stdout) == (0, True)
    refused = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (refused.returncode, "portalmq[zeromq]" in refused.stderr) == (2, True)


def start(*options: str) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-m", "portalmq.broker.protocols.zeromq.command", *options]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
