"""A worker that gets SIGTERM while its broker starts ends without waiting for ZooKeeper."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any, NoReturn

import gevent
import pytest
from gevent.event import Event

from portalmq.broker.server import process
from portalmq.broker.server.config import BrokerConfig
from portalmq.broker.server.connections import Connections
from portalmq.broker.server.process import BrokerWorker


class Starting:
    """A broker process whose start continues until the process is ended."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.begun = Event()

    def start(self) -> None:
        self.begun.set()
        try:
            Event().wait()
        finally:
            self.did.append("start ended")

    def drain(self) -> None:
        self.did.append("drain")

    def close(self) -> None:
        self.did.append("close")


@pytest.fixture
def worker() -> Any:
    made = BrokerWorker.__new__(BrokerWorker)
    config = BrokerConfig(drain_timeout_s=1.0)
    made.app = SimpleNamespace(config=config, broker_process=Starting())
    made.alive, made.sockets, made.ppid, made._ending = True, [], os.getppid(), None
    made.wsgi, made.connections = SimpleNamespace(wsgi_app=None), Connections(10, 0)
    return made


def test_the_start_is_given_up_before_the_broker_drains(worker: Any) -> None:
    serving = gevent.spawn(worker.run)
    worker.app.broker_process.begun.wait()
    worker.handle_exit(signal.SIGTERM, None)
    serving.get()
    assert worker.app.broker_process.did == ["start ended", "drain", "close"]


def test_a_broker_that_is_not_built_yet_ends_at_once(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(code: int) -> NoReturn:
        raise SystemExit(code)

    monkeypatch.setattr(process.os, "_exit", end)
    with pytest.raises(SystemExit) as ended:
        worker.handle_exit(signal.SIGTERM, None)
    assert ended.value.code == 0
