"""`portalmq lock`: a command under a lock, and the lock by hand."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from support.lock_broker import PATH, LockBroker
from support.scripted_broker import Reply, refuse
from support.stopping import stop

from portalmq import wire
from portalmq.cli.main import main

WITHIN_S = 20.0
SLEEPER = ("sh", "-c", "echo on; exec sleep 60")
SHOW = "import os; print(os.environ['PORTALMQ_LOCK'], os.environ['PORTALMQ_FENCING_TOKEN'])"


@pytest.fixture
def broker() -> Iterator[LockBroker]:
    with LockBroker() as broker:
        yield broker


def run(broker: LockBroker, *words: str) -> Result:
    return CliRunner().invoke(main, ["--server", broker.url, "lock", *words])


def process(broker: LockBroker, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "portalmq.cli.main", "--server", broker.url, "lock", "run", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, "that did not come"
        time.sleep(0.01)


def test_a_lock_is_acquired_and_released_by_hand(broker: LockBroker) -> None:
    taken = json.loads(run(broker, "acquire", "l", "--owner", "me", "--ttl", "5s", "-o", "json").stdout)
    assert taken == {"owner": "me", "fencing_token": 1, "expires_in_ms": 5000}
    assert json.loads(run(broker, "acquire", "l", "--owner", "me", "-o", "json").stdout)["fencing_token"] == 1
    held = run(broker, "acquire", "l", "--owner", "other", "--wait", "0s")
    assert (held.exit_code, held.stderr) == (1, "portalmq: held\n")
    assert run(broker, "release", "l", "--owner", "other", "--token", "1").exit_code == 1
    assert run(broker, "release", "l", "--owner", "me", "--token", "1").exit_code == 0
    assert broker.holder is None


def test_locks_are_listed_and_shown(broker: LockBroker) -> None:
    lock = wire.LockDescription("l", "me", 7, 30_000, 12_000, 2)
    broker.script("GET", "/v1/locks/l", [lambda *_: Reply(body=msgspec.json.encode(lock))])
    assert json.loads(run(broker, "show", "l", "-o", "json").stdout)["fencing_token"] == 7
    broker.script("GET", "/v1/locks", [lambda *_: Reply(body=msgspec.json.encode({"locks": [lock]}))])
    assert run(broker, "list").stdout.split()[-5:] == ["l", "me", "7", "12000", "2"]


@pytest.mark.parametrize(
    "words",
    [
        ["run", "l"],
        ["run", "l", "--ttl", "1ms", "--", "true"],
        ["run", "l", "--ttl", "soon", "--", "true"],
        ["run", "l", "--tll", "5s", "--", "true"],
        ["acquire", "l"],
        ["acquire", "l", "--owner", ""],
        ["release", "l", "--owner", "me", "--token", "x"],
    ],
)
def test_usage_errors_request_no_lock(broker: LockBroker, words: list[str]) -> None:
    assert run(broker, *words).exit_code == 2
    assert broker.calls_of("POST", PATH) == []


def test_a_command_runs_under_the_lock_and_sets_the_exit_code(broker: LockBroker) -> None:
    child = process(broker, "l", "--", sys.executable, "-c", f"{SHOW}; raise SystemExit(7)")
    assert child.communicate(timeout=WITHIN_S)[0].split() == ["l", "1"]
    assert child.returncode == 7
    assert broker.holder is None


def test_a_failed_release_does_not_hide_the_exit_code(broker: LockBroker) -> None:
    broker.script("DELETE", PATH, [refuse(403, "forbidden")])
    child = process(broker, "l", "--", sys.executable, "-c", "raise SystemExit(7)")
    told = child.communicate(timeout=WITHIN_S)[1]
    assert child.returncode == 7
    assert "lock l could not be released, and expires by itself: scripted forbidden" in told


def test_a_missing_command_releases_the_lock(broker: LockBroker) -> None:
    child = process(broker, "l", "--", "/no/such/command")
    assert "/no/such/command" in child.communicate(timeout=WITHIN_S)[1]
    assert child.returncode == 127
    assert broker.holder is None


def test_a_held_lock_runs_no_command(broker: LockBroker, tmp_path: Path) -> None:
    broker.pass_on()
    child = process(broker, "l", "--wait", "0s", "--", "touch", str(tmp_path / "ran"))
    assert "held" in child.communicate(timeout=WITHIN_S)[1]
    assert child.returncode == 75
    assert not (tmp_path / "ran").exists()


def test_a_command_is_stopped_when_the_lock_is_lost(broker: LockBroker) -> None:
    child = process(broker, "l", "--ttl", "6s", "--", *SLEEPER)
    assert child.stdout is not None
    assert child.stdout.readline() == "on\n"
    broker.pass_on()
    _, told = child.communicate(timeout=WITHIN_S)
    assert child.returncode == 75
    assert "lock l is lost" in told
    assert broker.holder == "another"


def test_a_paused_holder_stops_its_command_when_it_wakes(broker: LockBroker) -> None:
    child = process(broker, "l", "--ttl", "2s", "--", *SLEEPER)
    assert child.stdout is not None
    assert child.stdout.readline() == "on\n"
    stop(child.pid)
    paused_at = time.monotonic()
    until(lambda: time.monotonic() > paused_at + 2.5)
    child.send_signal(signal.SIGCONT)
    child.communicate(timeout=WITHIN_S)
    assert child.returncode == 75


def test_signals_reach_the_command_and_the_lock_is_released(broker: LockBroker) -> None:
    trap = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(3)); print('on', flush=True)"
    child = process(broker, "l", "--", sys.executable, "-c", f"{trap}; time.sleep(60)")
    assert child.stdout is not None
    assert child.stdout.readline() == "on\n"
    os.kill(child.pid, signal.SIGTERM)
    child.communicate(timeout=WITHIN_S)
    assert child.returncode == 3
    assert broker.holder is None


def test_a_signal_during_the_commands_start_ends_it_too(broker: LockBroker) -> None:
    told_at_once = """
import os, signal, subprocess
class Told(subprocess.Popen):
    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        os.kill(os.getpid(), signal.SIGTERM)
subprocess.Popen = Told
from portalmq.cli.main import main
main()
"""
    words = ["--server", broker.url, "lock", "run", "l", "--", "sleep", "60"]
    assert subprocess.run([sys.executable, "-c", told_at_once, *words], timeout=50).returncode == 128 + signal.SIGTERM
    assert broker.holder is None


def test_ctrl_c_on_a_terminal_reaches_the_command_once(broker: LockBroker) -> None:
    """The terminal signals all foreground processes, the command too, which may read a second signal as an urgent
    end."""
    count = "import signal, time; n = []; signal.signal(signal.SIGINT, lambda *_: n.append(1)); print('on', flush=True)"
    wait = (
        "[time.sleep(0.01) for _ in iter(lambda: bool(n), True)]; time.sleep(0.5); print('heard', len(n), flush=True)"
    )
    words = ["--server", broker.url, "lock", "run", "l", "--", sys.executable, "-c", f"{count}; {wait}"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-m", "portalmq.cli.main", *words])
    try:
        said = b""
        while b"on" not in said:
            said += os.read(terminal, 1000)
        os.write(terminal, b"\x03")
        while b"heard 1" not in said and b"heard 2" not in said:
            said += os.read(terminal, 1000)
    finally:
        _, status = os.waitpid(pid, 0)
        os.close(terminal)
    assert b"heard 1" in said
    assert os.waitstatus_to_exitcode(status) == 0
    assert broker.holder is None
