"""A broker's process: how it starts, refuses to start and ends, and that no child process remains."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time

import pytest
from support.broker_process import END_WITHIN_S, BrokerProcess, has_ended, stood_in_line_s, wait_until_gone

pytestmark = pytest.mark.cluster

MESSAGES = "/v1/topics/t/messages"
# A call may wait for 60 s: a broker that has ended by then did not wait for it.
ENDS_BEFORE_WAITS_S = 30


@pytest.fixture
def broker(tmp_path):
    with BrokerProcess(tmp_path) as broker:
        yield broker


def refused(tmp_path, *options, **more):
    """Return the exit code and the message of a broker that must not start, or ends by itself."""
    broker = BrokerProcess(tmp_path, *options, **more)
    process = broker.launch()
    try:
        return process.wait(END_WITHIN_S), broker.stderr()
    finally:
        broker.end()


# --- start ---


def start_took_s(broker):
    """Return the start time without the time in which its processes waited for a processor."""
    return broker.ready_after_s - sum(map(stood_in_line_s, broker.family()))


def test_a_broker_is_ready_within_two_seconds_and_small(tmp_path):
    with BrokerProcess(tmp_path, is_forked=False) as broker:
        took_s = [start_took_s(broker)]
        for _ in range(2):  # two starts: a pause of the machine does not lengthen both
            broker.restart()
            took_s.append(start_took_s(broker))
        assert min(took_s) < 2, took_s
        # A page that both processes share counts once.
        resident = sum(process.memory_full_info().pss for process in broker.family())
        assert resident < 85 * 1024 * 1024, f"{resident / 1024 / 1024:.0f} MiB"


def test_there_is_one_worker(broker):
    assert len(broker.family()) == 2


def test_dev_prints_its_address_in_one_line(tmp_path):
    with BrokerProcess(tmp_path, command=("dev",)) as broker:
        assert broker.stderr() == (
            f"PortalMQ broker 1 is ready at http://127.0.0.1:{broker.port} (data in {broker.data_dir})\n"
        )


def test_what_was_acknowledged_survives_kill_9_and_a_restart(broker):
    for n in range(10):
        assert broker.request("POST", MESSAGES, b"%d" % n).status == 200
    broker.kill()
    broker.start()
    values = [message["value"] for message in broker.request("GET", MESSAGES).json()["messages"]]
    assert values == [str(n) for n in range(10)]


def test_a_clean_restart_keeps_everything(broker):
    broker.request("PUT", "/v1/topics/t", {"partitions": 2})
    broker.request("POST", f"{MESSAGES}?partition=1", b"x")
    broker.request("PUT", "/v1/groups/g", {"max_deliveries": 7})
    before = broker.request("GET", "/v1/cluster").json()["cluster_id"]
    broker.restart()
    assert broker.request("GET", "/v1/cluster").json()["cluster_id"] == before
    assert broker.request("GET", MESSAGES).json()["messages"][0]["partition"] == 1
    assert broker.request("GET", "/v1/groups/g").json()["config"]["max_deliveries"] == 7


# --- refusing to start ---


def test_a_port_in_use_is_exit_73(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        broker = BrokerProcess(tmp_path)
        broker.port = taken.getsockname()[1]
        process = broker.launch()
        assert process.wait(END_WITHIN_S) == 73
        assert f"port {broker.port} of 127.0.0.1 is taken" in broker.stderr()


def test_a_data_directory_in_use_is_exit_73(tmp_path, broker):
    code, said = refused(tmp_path)
    assert code == 73
    assert str(broker.process.pid) in said


def test_another_brokers_data_directory_is_exit_73(tmp_path, broker):
    broker.stop()
    code, said = refused(tmp_path, "--broker-id", "9")
    assert code == 73
    assert "broker 1" in said


def test_metadata_of_another_cluster_is_exit_73(tmp_path, broker):
    broker.stop()
    other = tmp_path / "other"
    with BrokerProcess(other):
        pass
    journal = other / "data" / "control" / "journal"
    journal.replace(tmp_path / "data" / "control" / "journal")
    code, said = refused(tmp_path)
    assert code == 73
    assert "copied here from elsewhere" in said


@pytest.mark.parametrize(
    "options",
    [
        ("--host", "0.0.0.0"),
        ("--broker-id", "x"),
        ("--token-file", "missing"),
        ("--log-format", "xml"),
        ("--no-such-option",),
    ]
    + [("--host", "192.0.2.1", "--insecure"), ("--keepalive-s", "0")],
)
def test_wrong_usage_is_exit_2(tmp_path, options):
    code, said = refused(tmp_path, *options)
    assert code == 2
    assert said.count("Traceback") == 0
    assert said


def test_a_network_address_needs_a_token_or_the_word_insecure(tmp_path):
    for options in (("--insecure",), ("--secret", "s")):
        with BrokerProcess(tmp_path / options[0], "--host", "0.0.0.0", *options) as broker:
            assert broker.request("GET", "/livez").status == 200
            assert "0.0.0.0" not in broker.stderr()


def test_a_missing_zookeeper_is_exit_69_and_says_where_it_looked(tmp_path):
    at_once = ("--zookeeper-wait-s", "0")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        code, said = refused(tmp_path, command=("broker", "--zookeeper", f"{address}/chroot", *at_once))
        assert code == 69
        assert "--zookeeper none" in said
    code, said = refused(tmp_path, command=("broker", "--zookeeper", address, *at_once))
    assert code == 69
    assert address in said
    assert "portalmq dev" in said


# --- ending ---


def test_sigterm_ends_waiting_calls_and_exits_with_0(broker):
    broker.request("POST", "/v1/groups/g/receive", {"topics": ["t"]})
    answers = []
    parked = [
        threading.Thread(
            target=lambda: answers.append(
                broker.request("POST", "/v1/groups/g/receive", {"topics": ["t"], "wait_ms": 60_000}, timeout_s=90)
            )
        )
        for _ in range(3)
    ]
    for thread in parked:
        thread.start()
    wait_for(lambda: b"portalmq_waiting_calls 3.0" in broker.request("GET", "/metrics").body)
    broker.process.send_signal(signal.SIGTERM)
    assert broker.wait(ENDS_BEFORE_WAITS_S) == 0
    for thread in parked:
        thread.join(60)
    assert [(answer.status, answer.json()) for answer in answers] == [(200, {"messages": []})] * 3


def test_sigterm_ends_a_tail_and_idle_connections(broker):
    broker.request("POST", MESSAGES, b"x")
    idle = socket.create_connection(("127.0.0.1", broker.port))
    tail = socket.create_connection(("127.0.0.1", broker.port))
    tail.settimeout(60)
    tail.sendall(b"GET /v1/topics/t/partitions/0/messages HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\n\r\n")
    wait_for(lambda: b"portalmq_waiting_calls 1.0" in broker.request("GET", "/metrics").body)
    assert broker.stop() == 0
    received = b""
    while chunk := tail.recv(65536):
        received += chunk
    assert b"id: 1\ndata: {" in received
    assert received.endswith(b"0\r\n\r\n")
    idle.close()
    tail.close()


def test_ctrl_c_ends_as_sigterm_does(broker):
    for process in broker.family():  # a terminal sends it to both
        process.send_signal(signal.SIGINT)
    assert broker.wait() == 0


@pytest.mark.parametrize("name", ["SIGTTIN", "SIGTTOU", "SIGUSR1", "SIGUSR2", "SIGWINCH"])
def test_signals_that_gunicorn_knows_and_a_broker_does_not_change_nothing(broker, name):
    worker = broker.worker.pid
    broker.process.send_signal(getattr(signal, name))
    assert broker.request("POST", MESSAGES, b"x").status == 200
    wait_for(lambda: broker.worker.pid == worker)
    assert len(broker.family()) == 2


def test_kill_9_of_the_started_process_takes_the_worker_too(broker):
    worker = broker.worker
    os.kill(broker.process.pid, signal.SIGKILL)
    assert broker.wait() == -signal.SIGKILL
    wait_until_gone(worker)


def test_the_port_and_the_directory_are_free_at_once_after_kill_9(broker):
    os.kill(broker.process.pid, signal.SIGKILL)
    broker.wait()
    broker.start()
    assert broker.request("GET", "/readyz").status == 200


def test_a_worker_that_is_killed_ends_the_broker(broker):
    broker.worker.kill()
    assert broker.wait() == 128 + signal.SIGKILL
    assert "exit code 137" in broker.stderr()


def test_a_stopped_worker_does_not_keep_the_started_process_from_ending_it(broker):
    worker = broker.worker
    worker.suspend()
    os.kill(broker.process.pid, signal.SIGKILL)
    broker.wait()
    wait_until_gone(worker)


def test_a_storage_fault_ends_the_broker_with_74(tmp_path):
    program = (
        "import gevent, portalmq.broker.broker as b, portalmq.broker.storage.errors as e\n"
        "start = b.Broker.start\n"
        "def broken(self, *arguments):\n"
        "    start(self, *arguments)\n"
        "    gevent.spawn_later(0.5, self.storage_failed, e.StorageFault('disk gone'))\n"
        "b.Broker.start = broken\n"
    )
    code, said = refused(tmp_path, prelude=program)  # it may have ended before it is found ready
    assert code == 74
    assert "disk gone" in said


def test_logs_are_json_when_asked_for(tmp_path):
    with BrokerProcess(tmp_path, "--log-format", "json") as broker:
        broker.stop()
        events = [json.loads(line) for line in broker.stderr().splitlines()]
    assert {"time", "level", "logger", "pid", "message"} <= events[0].keys()
    assert events[-1]["message"] == "draining"


def wait_for(condition, within_s=30.0):
    """Poll until another process makes the condition true."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.02)


def test_no_process_is_left_over(tmp_path):
    with BrokerProcess(tmp_path) as broker:
        family = broker.family()
        broker.stop()
    assert all(has_ended(process) for process in family)
