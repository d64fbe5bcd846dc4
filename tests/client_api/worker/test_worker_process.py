"""`portalmq worker` with a real broker: what happens to messages when its processes are killed, stopped, reloaded."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from portalmq import Admin, Producer
from portalmq.testing import DevBroker

pytestmark = pytest.mark.cluster
WITHIN_S = 60.0

PROGRAM = """
    import os, sys, time
    from portalmq import App
    app = App(os.environ["BROKER"])

    @app.handler("{topic}", group="{topic}", concurrency=8, visibility_timeout_s=2, max_deliveries=9)
    def handle(number: int, message):
        say("begin", number, message.delivery_count, os.getpid())
        while os.path.exists("hold"):
            time.sleep(0.01)
        say("end", number)

    def say(*words):  # in one piece, among those of other threads and processes
        os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""


@pytest.fixture(scope="module")
def broker() -> Iterator[DevBroker]:
    with DevBroker() as broker:
        yield broker


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


def until(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


class Started:
    """`portalmq worker` in `directory`, where `tasks.py` is its program."""

    def __init__(self, directory: Path, broker: DevBroker, topic: str, *options: str) -> None:
        self.directory = directory
        self.broker = broker
        self.topic = topic
        (directory / "tasks.py").write_text(textwrap.dedent(PROGRAM).format(topic=topic))
        self.output = (directory / "out").open("w+b")
        command = [sys.executable, "-m", "portalmq.cli.main", "worker", "tasks:app", *options]
        self.process = subprocess.Popen(
            command,
            cwd=directory,
            env={**os.environ, "BROKER": broker.url, "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=self.output,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        family = [psutil.Process(self.process.pid), *self.children()] if self.process.poll() is None else []
        for each in family:
            each.kill()
        self.process.wait(WITHIN_S)
        self.output.close()

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def said(self) -> str:
        return (self.directory / "out").read_text()

    def begun(self) -> list[tuple[int, int]]:
        return [(int(number), int(count)) for number, count in re.findall(r"^begin (\d+) (\d+)", self.said(), re.M)]

    def ended(self) -> list[int]:
        return [int(number) for number in re.findall(r"^end (\d+)", self.said(), re.M)]

    def send(self, *numbers: int) -> None:
        with Producer(self.broker.url) as producer:
            for number in numbers:
                producer.send(self.topic, number)

    def counts(self) -> dict[str, int]:
        with Admin(self.broker.url) as admin:
            group = admin.group(self.topic)
        return {"ready": group.ready or 0, "in_flight": group.in_flight or 0, "dead": group.dead or 0}

    def stop(self, *signals: signal.Signals) -> int:
        for each in signals or (signal.SIGTERM,):
            self.process.send_signal(each)
        return self.process.wait(WITHIN_S)


def test_after_kill_9_its_messages_are_handled_by_another(broker: DevBroker, topic: str, tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    (tmp_path / "first" / "hold").touch()
    with (
        Started(tmp_path / "first", broker, topic) as first,
        Started(tmp_path / "second", broker, f"{topic}.other") as second,
    ):
        first.send(*range(8))
        until(lambda: len(first.begun()) == 8)  # eight at a time
        first.process.send_signal(signal.SIGKILL)
        first.process.wait(WITHIN_S)
        second.__exit__()
        with Started(tmp_path / "second", broker, topic) as third:
            until(lambda: sorted(third.ended()) == list(range(8)))
            until(lambda: third.counts() == {"ready": 0, "in_flight": 0, "dead": 0})
            assert {count for _, count in third.begun()} == {2}


def test_sigterm_lets_handlers_end_and_takes_no_more(broker: DevBroker, topic: str, tmp_path: Path) -> None:
    (tmp_path / "hold").touch()
    with Started(tmp_path, broker, topic) as worker:
        worker.send(*range(10))
        until(lambda: len(worker.begun()) == 8)
        worker.process.send_signal(signal.SIGTERM)
        until(lambda: "stopping" in worker.said())
        (tmp_path / "hold").unlink()
        assert worker.process.wait(WITHIN_S) == 0
        assert len(worker.begun()) == len(worker.ended()) == 8
        assert worker.counts() == {"ready": 2, "in_flight": 0, "dead": 0}


def test_after_the_grace_the_rest_goes_back_uncounted(broker: DevBroker, topic: str, tmp_path: Path) -> None:
    (tmp_path / "hold").touch()
    with Started(tmp_path, broker, topic, "--grace", "0.1") as worker:
        worker.send(1)
        until(lambda: worker.begun())
        assert worker.stop() == 0
        assert worker.counts() == {"ready": 1, "in_flight": 0, "dead": 0}
    (tmp_path / "hold").unlink()
    with Started(tmp_path, broker, topic) as again:
        until(lambda: again.ended() == [1])
        assert again.begun() == [(1, 1)]


def test_a_second_signal_ends_the_grace(broker: DevBroker, topic: str, tmp_path: Path) -> None:
    (tmp_path / "hold").touch()
    with Started(tmp_path, broker, topic, "--grace", "3600") as worker:
        worker.send(1)
        until(lambda: worker.begun())
        worker.process.send_signal(signal.SIGINT)
        until(lambda: "stopping" in worker.said())
        assert worker.stop() == 0
        assert worker.counts()["ready"] == 1


def test_processes_share_the_work_and_one_that_is_killed_starts_again(
    broker: DevBroker, topic: str, tmp_path: Path
) -> None:
    (tmp_path / "hold").touch()
    with Started(tmp_path, broker, topic, "--processes", "2", "--port", "0") as worker:
        worker.send(*range(16))
        until(lambda: len(worker.begun()) == 16)
        until(lambda: "/metrics" in worker.said())
        found = re.search(r"(http://\S+)/metrics", worker.said())
        assert found is not None
        until(lambda: get(f"{found[1]}/readyz")[0] == 200)
        pids = {int(pid) for pid in re.findall(r"^begin \d+ \d+ (\d+)", worker.said(), re.M)}
        assert len(pids) == 2
        os.kill(min(pids), signal.SIGKILL)
        (tmp_path / "hold").unlink()
        until(lambda: set(worker.ended()) == set(range(16)))
        until(lambda: "it starts again" in worker.said())
        until(lambda: get(f"{found[1]}/readyz")[0] == 200)
        assert 'process="1"' in get(f"{found[1]}/metrics")[1]
        until(lambda: worker.counts() == {"ready": 0, "in_flight": 0, "dead": 0})
        assert worker.stop() == 0


def test_when_the_supervisor_is_killed_its_processes_stop(broker: DevBroker, topic: str, tmp_path: Path) -> None:
    with Started(tmp_path, broker, topic, "--processes", "2") as worker:
        until(lambda: worker.said().count("handler handle") == 2)
        children = worker.children()
        worker.process.kill()
        _, alive = psutil.wait_procs(children, WITHIN_S)
        assert alive == []


def test_a_changed_file_reloads_also_after_an_error(broker: DevBroker, topic: str, tmp_path: Path) -> None:
    with Started(tmp_path, broker, topic, "--reload") as worker:
        worker.send(1)
        until(lambda: worker.ended() == [1])
        program = (tmp_path / "tasks.py").read_text()
        (tmp_path / "tasks.py").write_text("this is no Python")
        until(lambda: "waits for a change" in worker.said())
        (tmp_path / "tasks.py").write_text(program.replace('"end", number', '"end", number + 100'))
        worker.send(2)
        until(lambda: worker.ended() == [1, 102])
        assert worker.stop() == 0


def test_an_app_that_is_not_there_is_a_usage_error(broker: DevBroker, topic: str, tmp_path: Path) -> None:
    for options in ((), ("--processes", "2")):
        command = [sys.executable, "-m", "portalmq.cli.main", "worker", "nothing:app", *options]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=WITHIN_S, check=False)
        assert done.returncode == 2
        assert "there is no module 'nothing'" in done.stderr


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, json.dumps(str(refused))
