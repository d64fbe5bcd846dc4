"""The parts of the demo that need no broker, and its last line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import CliRunner

from portalmq import Consumer, Message, Producer, RecordMetadata
from portalmq.demo_iot import controller, report
from portalmq.demo_iot.demo import LedgerFiles, Outage, conclude, counts_of_a_year, main
from portalmq.demo_iot.ledger import Entry, Ledger, read
from portalmq.demo_iot.processes import DemoFailed, ProcessGroup, wait_for
from portalmq.demo_iot.readings import year
from portalmq.demo_iot.sensor import Sensor
from portalmq.errors import Unavailable


class TestControllers:
    @pytest.mark.parametrize(
        ("reading", "word"),
        [
            ({"kind": "temp", "value": 60.0}, "ok"),
            ({"kind": "temp", "value": 3.0}, "ALERT below 20 F"),
            ({"kind": "temp", "value": 100.0}, "ALERT above 95 F"),
            ({"kind": "wind", "value": 45.0}, "ALERT above 30 mph"),
            ({"kind": "pressure", "value": None, "quality": "missing"}, "missing"),
            ({"kind": "sound", "value": 3.0}, "ALERT unknown kind of sensor 'sound'"),
        ],
    )
    def test_controllers_report_readings_that_need_attention(self, reading: dict[str, Any], word: str) -> None:
        assert controller.verdict(reading) == word

    def test_controllers_skip_messages_that_are_no_readings(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        reading = {"kind": "temp", "value": 60.0, "n": 1}
        strangers = [
            b"hello",
            b"\xff",
            b"[1]",
            b'{"celsius":21.5}',
            b'{"kind":"temp","value":"hot"}',
            b'{"kind":[],"value":1}',
        ]
        values = [*strangers, json.dumps(reading).encode()]
        messages = [Message("temp_1", 0, at, None, value, {}, "text/plain", 0) for at, value in enumerate(values)]
        with Ledger(tmp_path / "seen") as ledger:
            controller.control(cast(Consumer, messages), ledger, None)
        assert [entry.message for entry in read([tmp_path / "seen"])] == [reading]
        assert capsys.readouterr().err.count("is no reading") == len(strangers)


class ProducerStandIn:
    """Acknowledges every reading at once, except those in `refused`."""

    def __init__(self, refused: set[int]) -> None:
        self._refused = refused
        self._offset = 0

    def send(self, topic: str, value: dict[str, Any], *, key: str) -> Future[RecordMetadata]:
        future: Future[RecordMetadata] = Future()
        if value["n"] in self._refused:
            future.set_exception(Unavailable("no broker"))
        else:
            future.set_result(RecordMetadata(topic, 0, self._offset, 0))
            self._offset += 1
        return future


class TestSensors:
    def test_the_ledger_has_what_was_acknowledged_and_only_that(self, tmp_path: Path) -> None:
        readings = list(year("pressure", 3))[:40]
        with Ledger(tmp_path / "sent") as ledger:
            sensor = Sensor(cast(Producer, ProducerStandIn(refused={5, 40})), ledger)
            sensor.run(readings, interval_s=0)
        entries = list(read([tmp_path / "sent"]))
        assert [entry.message for entry in entries] == [
            reading.message() for reading in readings if reading.n not in {5, 40}
        ]
        assert [entry.id for entry in entries] == [f"0-{offset}" for offset in range(38)]
        assert sensor.failed == 2

    def test_readings_keep_their_interval(self) -> None:
        began = time.monotonic()
        Sensor(cast(Producer, ProducerStandIn(set())), Ledger(None)).run(list(year("temp", 1))[:6], interval_s=0.02)
        assert time.monotonic() - began >= 0.1


class TestTheLastLine:
    def run(self, directory: Path, *, lose: int | None = None, report_it: Callable[[], None] | None = None) -> bool:
        ledgers = LedgerFiles(directory)
        for path in ledgers.all_sent + ledgers.all_delivered:
            path.touch()
        with Ledger(ledgers.sent("temp", 1)) as sent, Ledger(ledgers.delivered("temp", 2)) as delivered:
            for reading in list(year("temp", 1))[:50]:
                entry = Entry(reading.n / 10, "temp_1", f"0-{reading.n}", reading.message())
                sent.write(entry)
                if reading.n != lose:
                    delivered.write(entry)
        return conclude(ledgers, Outage(2.05, frozenset({"temp_1"})), report_it)

    def test_it_says_ok_when_all_was_delivered(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.run(tmp_path)
        last = capsys.readouterr().out.splitlines()[-1]
        assert last == "DEMO OK sent=50 delivered=50 lost=0 duplicates=0 failover_ms=100"

    def test_a_planted_loss_is_reported_with_what_is_missing(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert not self.run(tmp_path, lose=17)
        lines = capsys.readouterr().out.splitlines()
        assert lines[-1] == "DEMO FAILED sent=50 delivered=49 lost=1 duplicates=0 failover_ms=100"
        assert any('"n": 17' in line for line in lines)

    def test_an_outage_is_as_long_as_the_longest_gap_of_a_topic_that_the_killed_broker_led(self) -> None:
        def entries(topic: str, *times: float) -> list[Entry]:
            return [Entry(at, topic, str(at), {}) for at in times]

        sent = entries("temp_1", 0, 1, 1.5, 2) + entries("temp_2", 0, 1, 1.7, 2) + entries("temp_3", 0, 1, 3)
        assert Outage(1.1, frozenset({"temp_1", "temp_2"})).longest_ms(sent) == 700
        assert Outage(1.1, frozenset({"temp_3"})).longest_ms(sent) == 2000

    def test_a_clean_run_makes_its_report_before_the_last_line(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.run(tmp_path, report_it=lambda: print("the report"))
        assert capsys.readouterr().out.splitlines()[-2] == "the report"
        (other := tmp_path / "other").mkdir()
        assert not self.run(other, lose=17, report_it=lambda: print("the report"))
        assert "the report" not in capsys.readouterr().out

    def test_a_report_that_cannot_be_made_is_refused_before_anything_is_started(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(report, "find_spec", lambda name: None if name == "pyspark" else object())
        monkeypatch.setattr(report, "find_java", lambda: "java")
        done = CliRunner().invoke(main, ["--report", str(tmp_path / "told")])
        assert done.exit_code == 2
        assert "pyspark not installed: pip install 'portalmq[spark]' mends it" in done.output

    def test_the_whole_year_is_every_row_for_each_kind(self) -> None:
        assert sum(counts_of_a_year(None).values()) == 104_460
        assert set(counts_of_a_year(7).values()) == {7}


class TestTheCrew:
    def test_leaving_ends_every_process(self, tmp_path: Path) -> None:
        with ProcessGroup(tmp_path) as processes:
            processes_running = [processes.start(f"sleeper-{n}", "-c", "import time; time.sleep(60)") for n in range(2)]
            assert [process.exit_code for process in processes_running] == [None] * 2
        assert [process.exit_code for process in processes_running] == [-signal.SIGKILL] * 2

    def test_a_failure_shows_the_end_of_the_log(self, tmp_path: Path) -> None:
        with ProcessGroup(tmp_path) as processes:
            process = processes.start("sensor-x", "-c", "import sys; print('first', flush=True); sys.exit('no broker')")
            wait_for(lambda: process.exit_code is not None, 10, "it did not end")
            with pytest.raises(DemoFailed, match=r"(?s)sensor-x ended with 1.*first.*no broker"):
                process.check_not_failed()

    def test_waiting_has_an_end(self) -> None:
        with pytest.raises(DemoFailed, match=r"it never came within 0\.1 s"):
            wait_for(lambda: False, 0.1, "it never came")

    def test_a_killed_demo_leaves_no_process(self, tmp_path: Path) -> None:
        conductor = (
            "import sys, time; from pathlib import Path; from portalmq.demo_iot.processes import ProcessGroup\n"
            "processes = ProcessGroup(Path(sys.argv[1]))\n"
            "process = processes.start('w', '-c', 'import time; time.sleep(60)')\n"
            "print(process._process.pid, flush=True); time.sleep(60)"
        )
        process = subprocess.Popen([sys.executable, "-c", conductor, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout
        child = int(process.stdout.readline())
        process.kill()
        process.wait()
        process.stdout.close()
        wait_for(lambda: not is_running(child), 10, "the child outlived its conductor")


def is_running(pid: int) -> bool:
    """Return True unless the process has ended or is a zombie."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
