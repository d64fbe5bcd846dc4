"""Records of processes, and checks of ports, for `portalmq up`; tests/cluster/test_up.py starts whole clusters."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import msgspec
import pytest
from support.ports import kept_ports

from portalmq.broker.cluster.exits import StartupError
from portalmq.broker.ops.supervisor import (
    ClusterRecord,
    Plan,
    ProcessRecord,
    boot_id,
    check_ports,
    free_ports,
    read_record,
    start_of,
)
from portalmq.broker.server.config import load_config


def me() -> ProcessRecord:
    started = start_of(os.getpid())
    assert started
    return ProcessRecord("me", os.getpid(), started, "log")


def record(boot: str, *processes: ProcessRecord) -> ClusterRecord:
    return ClusterRecord(boot, processes[0], list(processes[1:]), "127.0.0.1:2181", [], True)


def test_a_process_differs_from_a_later_one_with_its_pid():
    assert me().is_there
    assert not msgspec.structs.replace(me(), started=me().started - 1).is_there


def test_a_process_that_has_ended_is_not_running_before_it_is_reaped():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert start_of(child.pid) is not None
        assert child.stdin is not None
        child.stdin.write(b"\n")
        child.stdin.close()
        deadline = time.monotonic() + 60
        while start_of(child.pid) is not None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert os.path.exists(f"/proc/{child.pid}"), "the process is a zombie"
    finally:
        child.wait()
    assert start_of(child.pid) is None


def test_process_ids_of_an_earlier_boot_are_ignored():
    gone = ProcessRecord("gone", me().pid, me().started + 1, "log")
    assert record(boot_id(), me(), gone).running == [me()]
    assert record("another boot", me()).running == []


def test_a_record_that_is_missing_or_broken_is_none(tmp_path):
    assert read_record(tmp_path) is None
    (tmp_path / "cluster.json").write_text("{")
    assert read_record(tmp_path) is None
    (tmp_path / "cluster.json").write_bytes(msgspec.json.encode(record(boot_id(), me())))
    assert read_record(tmp_path) == record(boot_id(), me())


def test_free_ports_are_all_different():
    assert len(set(free_ports("127.0.0.1", 9))) == 9


@pytest.mark.parametrize(("which", "option"), [("broker", "--base-port"), ("zookeeper", "--zookeeper-port")])
def test_a_taken_port_is_reported_before_anything_starts(tmp_path, which, option):
    def plan_for(broker_port, zookeeper_port):
        broker = load_config({"port": broker_port}, environ={})
        return Plan(tmp_path, {"broker-1": broker}, "", 1, zookeeper_port)

    with socket.create_server(("127.0.0.1", 0)) as taken, kept_ports(2) as (free, other):
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"port {port} .*{option}") as refused:
            check_ports(plan_for(port, other) if which == "broker" else plan_for(other, port))
        assert refused.value.exit_code == 73
        check_ports(plan_for(free, other) if which == "broker" else plan_for(other, free))


def test_ports_of_a_zookeeper_that_is_not_started_are_not_checked(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        check_ports(Plan(tmp_path, {}, "127.0.0.1:1", 0, taken.getsockname()[1]))
