"""The demo with real processes: a small complete run, and its scripts as users start them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import psutil
import pytest

from portalmq import Admin
from portalmq.demo_iot import readings, report
from portalmq.demo_iot.ledger import read
from portalmq.demo_iot.processes import DemoBroker, DemoFailed, ProcessGroup, wait_for

pytestmark = pytest.mark.cluster

# The scripts as files, at the installed package's location: users start them by path.
FOLDER = Path(readings.__file__).parent


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with ProcessGroup(tmp_path) as processes:
        broker = DemoBroker(processes, "broker", "dev")
        broker.wait_until_ready()
        yield broker.url


def run(*command: str, cwd: Path, within_s: float = 60) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, capture_output=True, text=True, timeout=within_s, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_scripts_run_by_path_and_from_inside_their_folder(url: str) -> None:
    sent = run(f"{FOLDER.name}/sensor.py", "temp", "1", "0.01", "--count", "5", "--server", url, cwd=FOLDER.parent)
    assert "temp_1 #5 2013-01-01T10:00:00Z EWR" in sent
    run("sensor.py", "temp", "1", "0", "--count", "5", "--server", url, cwd=FOLDER)
    seen = run(f"{FOLDER.name}/controller.py", "temp_1", "--count", "4", "--server", url, cwd=FOLDER.parent)
    seen += run("controller.py", "temp_1", "--count", "6", "--server", url, cwd=FOLDER)
    assert [seen.count(f"temp_1 #{n} ") for n in range(1, 6)] == [2] * 5
    assert seen.count(" ok") == 10


def test_two_controllers_share_a_topic_and_end_on_sigterm(url: str, tmp_path: Path) -> None:
    with ProcessGroup(tmp_path) as processes:
        controllers = [
            processes.start(f"controller-{n}", "-m", "portalmq.demo_iot.controller", "wind_2", "--server", url)
            for n in range(2)
        ]
        command = ("-m", "portalmq.demo_iot.sensor", "wind", "2", "0.005", "--server", url)
        sensor = processes.start("sensor", *command, "--ledger", str(tmp_path / "sent"))

        def seen() -> list[list[int]]:
            logs = [controller.log.read_text() for controller in controllers]
            return [[int(number) for number in re.findall(r"wind_2 #(\d+) ", log)] for log in logs]

        def is_all_seen() -> bool:
            return {entry.message["n"] for entry in read([tmp_path / "sent"])} <= {*chain(*seen())}

        wait_for(lambda: all(seen()), 60, "one controller gets everything")
        sensor.kill()
        wait_for(is_all_seen, 60, "not every reading came")
        # A reading is shown before it is acked, and one that is not acked at SIGTERM goes to the other controller.
        admin = Admin(url)
        wait_for(lambda: admin.group("controllers").lag == 0, 60, "not every reading is acked")
        for controller in controllers:
            controller.end_well()
        assert max(Counter(chain(*seen())).values()) == 1, "each reading reached one controller"


@pytest.mark.spark
@pytest.mark.timeout(240)
def test_the_demo_kills_a_leader_loses_nothing_and_reports(tmp_path: Path) -> None:
    # Long enough that half of it remains when the leader is killed, so that a fail-over can be measured.
    command = ("-m", "portalmq.demo_iot.demo", "--count", "60", "--seconds", "12", "--report", "told")
    out = run(*command, cwd=tmp_path, within_s=220)
    last = out.splitlines()[-1]
    found = re.fullmatch(r"DEMO OK sent=(\d+) delivered=(\d+) lost=0 duplicates=\d+ failover_ms=(\d+)", last)
    assert found, out
    assert found.group(1) == found.group(2) == "720"
    assert int(found.group(3)) > 0
    assert "report: told/report.html" in out
    assert "720 messages" in (tmp_path / "told" / "report.html").read_text()
    report = json.loads((tmp_path / "told" / "report.json").read_text())
    assert (report["totals"]["messages"], report["totals"]["topics"]) == (720, 12)
    assert sum(group["acked"] for group in report["groups"]) == 720
    # Including the killed leader's last deliveries, which were acked at the next one without a record of their
    # delivery.
    assert sum(group["delivered"] for group in report["groups"]) == 720
    led = {(epoch["topic"], epoch["partition"]) for epoch in report["fail_overs"] if epoch["leader_epoch"] > 1}
    assert led, "the killed leader's partitions have no second epoch in the report"


@pytest.fixture
def data_directory(tmp_path: Path) -> Path:
    """The data directory of a stopped broker: 20 messages."""
    with ProcessGroup(tmp_path) as processes:
        broker = DemoBroker(processes, "data", "dev")
        broker.wait_until_ready()
        run("-m", "portalmq.demo_iot.sensor", "wind", "2", "0", "--count", "20", "--server", broker.url, cwd=tmp_path)
        broker.process.end_well()
    return tmp_path / "data"


@pytest.mark.spark
def test_ctrl_c_while_spark_reads_leaves_no_process(tmp_path: Path, data_directory: Path) -> None:
    conductor = (
        "import sys; from pathlib import Path\n"
        "from portalmq.demo_iot import report; from portalmq.demo_iot.processes import ProcessGroup\n"
        "work, data, out = map(Path, sys.argv[1:])\n"
        "with ProcessGroup(work) as group: report.make(group, [data], out, print)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", conductor, str(tmp_path), str(data_directory), str(tmp_path / "told")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    children: list[psutil.Process] = []

    def java_runs() -> bool:
        children[:] = psutil.Process(process.pid).children(recursive=True)
        return any(is_java(child) for child in children)

    wait_for(java_runs, 60, "no Java was started")
    process.send_signal(signal.SIGINT)
    assert process.wait(30) != 0
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []


def is_java(process: psutil.Process) -> bool:
    try:
        return process.name() == "java"
    except psutil.NoSuchProcess:
        return False


def test_a_report_that_fails_says_why(tmp_path: Path) -> None:
    with (
        ProcessGroup(tmp_path) as processes,
        pytest.raises(DemoFailed, match=r"(?s)report ended with 2.*nothing-there"),
    ):
        report.make(processes, [tmp_path / "nothing-there"], tmp_path / "told", print)


def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as output:
        demo = subprocess.Popen(
            [sys.executable, "-m", "portalmq.demo_iot.demo", "--seconds", "60"], stdout=output, cwd=tmp_path
        )
    wait_for(lambda: "sensors send" in (tmp_path / "out").read_text(), 60, "the demo did not begin")
    children = psutil.Process(demo.pid).children(recursive=True)
    assert len(children) > 20
    demo.send_signal(signal.SIGINT)
    assert demo.wait(30) == 130
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []
