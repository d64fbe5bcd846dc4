"""System calls: Linux's own and the fallbacks, forced here, give the same results."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import wait_until

from portalmq import system

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the way of Linux")
NO_PROCESS = 2**22 + 1  # above every pid


@pytest.fixture
def no_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "PROC", tmp_path)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        yield process


class TestClock:
    def test_without_boottime_another_clock_never_jumps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(time, "CLOCK_BOOTTIME", raising=False)
        assert system.steady_clock() == time.CLOCK_MONOTONIC
        monkeypatch.setattr(system, "IS_DARWIN", True)
        assert system.steady_clock() == time.CLOCK_MONOTONIC_RAW
        first = system.steady_s()
        assert system.steady_s() >= first

    @ON_LINUX
    def test_linux_counts_the_time_of_suspension(self) -> None:
        assert system.steady_clock() == time.CLOCK_BOOTTIME


class TestSync:
    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        made: list[str] = []
        monkeypatch.setattr(os, "fsync", lambda _: made.append("fsync"))
        monkeypatch.setattr(os, "fdatasync", lambda _: made.append("fdatasync"))
        return made

    @pytest.fixture
    def darwin(self, monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> list[OSError]:
        """A macOS; the list may hold an error of its F_FULLFSYNC."""
        errors: list[OSError] = []

        def answer(_: int, command: int) -> None:
            assert command == system.F_FULLFSYNC
            if errors:
                raise errors[0]
            calls.append("full")

        monkeypatch.setattr(system, "IS_DARWIN", True)
        monkeypatch.setattr(fcntl, "fcntl", answer)
        return errors

    def test_linux_syncs_with_fsync_and_fdatasync(self, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(system, "IS_DARWIN", False)
        system.sync(0)
        system.sync_data(0)
        assert calls == ["fsync", "fdatasync"]
        monkeypatch.delattr(os, "fdatasync")
        system.sync_data(0)
        assert calls[2:] == ["fsync"]

    def test_without_posix_fadvise_a_file_is_read_from_wherever_it_is(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        path = tmp_path / "file"
        path.write_bytes(b"content")
        with open(path, "rb") as file:
            system.drop_cached(file.fileno())
            monkeypatch.delattr(os, "posix_fadvise")
            system.drop_cached(file.fileno())
            assert file.read() == b"content"

    @pytest.mark.usefixtures("darwin")
    def test_macos_syncs_past_the_cache_of_the_drive(self, calls: list[str]) -> None:
        system.sync(0)
        system.sync_data(0)
        assert calls == ["full", "full"]

    def test_a_file_system_without_full_sync_gets_an_fsync(self, calls: list[str], darwin: list[OSError]) -> None:
        darwin.append(OSError(errno.ENOTSUP, "not supported"))
        system.sync_data(0)
        assert calls == ["fsync"]

    def test_a_failed_full_sync_is_a_failure(self, calls: list[str], darwin: list[OSError]) -> None:
        darwin.append(OSError(errno.EIO, "input/output error"))
        with pytest.raises(OSError, match="input/output"):
            system.sync(0)
        assert calls == []


PARENT = """
import subprocess, sys
from portalmq import system
if sys.argv[1] == "without prctl":
    system._prctl = lambda: None
subprocess.Popen(["sleep", "600"], preexec_fn=system.dies_with_this_process())
print("started", flush=True)
sys.stdin.read()
"""


class TestChildren:
    @pytest.mark.parametrize("way", [pytest.param("with prctl", marks=ON_LINUX), "without prctl"])
    def test_a_child_dies_with_a_parent_that_is_killed(self, way: str) -> None:
        command = [sys.executable, "-c", PARENT, way]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
            assert parent.stdout is not None
            assert parent.stdout.readline() == b"started\n"
            parent.kill()
            assert parent.stdout.read() == b"", "the pipe ends when no process holds it"

    def test_the_process_that_watches_ends_with_the_child(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(system, "_prctl", lambda: None)
        monkeypatch.setattr(system, "PARENT_CHECK_S", 0.01)
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE, preexec_fn=system.dies_with_this_process()) as child:
            (watching,) = system.children_of(child.pid)
            assert system.start_of(watching) is not None
        wait_until(lambda: system.start_of(watching) is None, "the end of the watching process")

    def test_without_prctl_die_with_returns_false(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
        assert not system.die_with(os.getppid())


class TestProcesses:
    def test_a_process_is_identified_by_its_start(self, child: subprocess.Popen[bytes]) -> None:
        started = system.start_of(child.pid)
        assert started is not None
        assert system.start_of(child.pid) == started
        assert system.start_of(NO_PROCESS) is None

    @pytest.mark.usefixtures("no_proc")
    def test_without_proc_the_start_comes_from_ps_in_unix_seconds(self, child: subprocess.Popen[bytes]) -> None:
        started = system.start_of(child.pid)
        assert started is not None
        assert abs(started - time.time()) < 3_600
        assert system.start_of(NO_PROCESS) is None
        assert system.boot_id() == "", "a time of day needs no boot id"

    @pytest.mark.parametrize("way", ["/proc", "ps"])
    def test_a_process_that_only_left_its_exit_code_has_ended(
        self, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if way == "ps":
            monkeypatch.setattr(system, "PROC", tmp_path)
        with subprocess.Popen(["true"]) as ended:
            os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
            assert system.start_of(ended.pid) is None

    @pytest.mark.parametrize("way", ["/proc", "ps"])
    def test_children_and_their_usage_are_read(
        self, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, child: subprocess.Popen[bytes]
    ) -> None:
        if way == "ps":
            monkeypatch.setattr(system, "PROC", tmp_path)
        assert child.pid in system.children_of(os.getpid())
        assert system.children_of(child.pid) == []
        usage = system.usage_of(os.getpid())
        assert usage.resident_bytes > 1_000_000
        assert usage.processor_s >= 0

    @pytest.mark.parametrize(
        ("taken", "seconds"), [("00:01:05", 65), ("2-01:00:00", 176_400), ("0:01.50", 1.5), ("75:00.00", 4_500)]
    )
    @pytest.mark.usefixtures("no_proc")
    def test_processor_time_as_ps_prints_it(self, taken: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(system, "_ps", lambda *_: f"  2048 {taken}\n")
        assert system.usage_of(1) == (2_097_152, seconds)

    def test_processors(self, monkeypatch: pytest.MonkeyPatch) -> None:
        own = system.cores()
        system.pin(0, own)
        monkeypatch.delattr(os, "sched_getaffinity", raising=False)
        monkeypatch.delattr(os, "sched_setaffinity", raising=False)
        assert len(system.cores()) >= len(own)
        system.pin(0, own)


class TestMemory:
    @ON_LINUX
    def test_resident_memory_grows_with_the_data_of_a_process(self) -> None:
        before = system.resident_bytes()
        held = b"\1" * 64_000_000
        after = system.resident_bytes()
        assert before is not None
        assert after is not None
        assert after - before > 32_000_000
        assert len(held) == 64_000_000
        peak = system.peak_resident_bytes(os.getpid())
        assert peak is not None
        assert peak > 64_000_000

    @pytest.mark.usefixtures("no_proc")
    def test_a_system_without_memory_figures_is_no_error(self) -> None:
        assert system.resident_bytes() is None
        assert system.peak_resident_bytes(os.getpid()) is None
        assert system.threads_of(os.getpid()) == [os.getpid()]
        (system.PROC / "self").mkdir()
        (system.PROC / "self/statm").write_text("x")
        assert system.resident_bytes() is None

    def test_the_smallest_memory_limit_counts(self, tmp_path: Path) -> None:
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        container, unlimited = tmp_path / "container", tmp_path / "unlimited"
        container.write_text("1000000\n")
        unlimited.write_text("max\n")
        assert system.memory_limit_bytes((container, tmp_path / "missing")) == 1_000_000
        assert system.memory_limit_bytes((unlimited,)) == machine
        assert system.memory_limit_bytes(()) == machine
