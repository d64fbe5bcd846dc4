"""The demo with real processes: the whole of it, small, and its scripts as users start them."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from portalmq.demo_iot import readings
from portalmq.demo_iot.crew import Broker, Crew, wait_for

pytestmark = pytest.mark.cluster

# The scripts as files, wherever the package is installed: users start them by path.
FOLDER = Path(readings.__file__).parent


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with Crew(tmp_path) as crew:
        broker = Broker(crew, "broker", "dev")
        broker.wait_until_ready()
        yield broker.url


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, timeout=60, check=False)
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


def test_two_controllers_share_a_topic_and_leave_when_told(url: str, tmp_path: Path) -> None:
    with Crew(tmp_path) as crew:
        controllers = [
            crew.start(f"controller-{n}", "-m", "portalmq.demo_iot.controller", "wind_2", "--server", url)
            for n in range(2)
        ]
        run("-m", "portalmq.demo_iot.sensor", "wind", "2", "0.005", "--count", "300", "--server", url, cwd=tmp_path)

        def lines() -> list[int]:
            return [controller.log.read_text().count("wind_2 #") for controller in controllers]

        wait_for(lambda: sum(lines()) == 300, 30, "300 readings did not come")
        assert all(lines()), "one controller got everything"
        for controller in controllers:
            controller.end_well()


def test_the_demo_kills_a_leader_and_loses_nothing(tmp_path: Path) -> None:
    out = run("-m", "portalmq.demo_iot.demo", "--count", "60", "--seconds", "2", cwd=tmp_path)
    last = out.splitlines()[-1]
    found = re.fullmatch(r"DEMO OK sent=(\d+) delivered=(\d+) lost=0 duplicates=\d+ failover_ms=(\d+)", last)
    assert found, out
    assert found.group(1) == found.group(2) == "720"
    assert int(found.group(3)) > 0


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
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []
