"""`portalmq verify` on three brokers: running, one down, and on their data directories."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import apsw
import pytest
from click.testing import CliRunner
from support.cluster import Cluster

from portalmq.broker.verify.command import verify
from portalmq.cli.main import main

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


def verified(*arguments: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(verify, [*arguments, "--json"])
    return result.exit_code, json.loads(result.stdout) if result.stdout else {"stderr": result.stderr}


def produced(cluster: Cluster, topic: str, receipts: Path) -> None:
    cluster.admin().create_topic(topic, partitions=2)
    lines = "".join(f"message {number}\n" for number in range(3_000))
    words = ["--server", cluster.urls[0], "produce", topic, "--receipts", str(receipts)]
    result = CliRunner().invoke(main, words, input=lines)
    assert result.exit_code == 0, result.stderr
    assert len(receipts.read_text().splitlines()) == 3_000


def states(report: dict[str, Any]) -> list[list[str]]:
    return [[replica["state"] for replica in found["replicas"]] for found in report["partitions"]]


def test_replicas_and_receipts_are_verified_live_and_in_data_directories(
    cluster: Cluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    receipts = tmp_path / "receipts"
    produced(cluster, topic, receipts)
    cluster.wait_in_sync(topic)
    code, report = verified("--server", cluster.urls[-1], "--receipts", str(receipts))
    assert (code, report["state"], states(report)) == (0, "ok", [["same"] * 3] * 2), report
    assert report["receipts"]["outcomes"] == {"present": 3_000}
    for found in report["partitions"]:
        assert len({replica["sha256"] for replica in found["replicas"]}) == 1
        assert found["committed"] == found["replicas"][0]["compared_to"] > 0

    # Messages without keys fill one partition after another: the fuller one has at least half of them.
    fuller = max((0, 1), key=lambda number: report["partitions"][number]["committed"])

    down = next(broker_id for broker_id in cluster.running if broker_id != cluster.leader(topic))
    cluster.kill(down)
    # The comparison gives up a broker after this time. The cluster is idle: the others answer at once.
    monkeypatch.setattr("portalmq.cli.session.COMMAND_TIMEOUT_S", 10.0)
    code, report = verified("--server", ",".join(cluster.urls), topic)
    assert (code, report["state"]) == (4, "unknown"), report
    assert all(sorted(each) == ["same", "same", "unknown"] for each in states(report))

    for broker_id in cluster.running:
        cluster.brokers[broker_id].stop()
    homes = [broker.data_dir for broker in cluster.brokers.values()]
    directories = [word for home in homes for word in ("--data-dir", str(home))]
    code, report = verified(*directories, "--receipts", str(receipts))
    assert report["receipts"]["outcomes"] == {"present": 9_000}, report["receipts"]
    assert code in (0, 4), report  # the killed broker may not have learned that all of it is committed

    home = cluster.brokers[down].data_dir
    (file,) = home.glob(f"partitions/{topic}@*/{fuller}/0*.sqlite")
    with contextlib.closing(apsw.Connection(str(file))) as connection:
        before = connection.execute("SELECT offset, value FROM messages ORDER BY offset LIMIT 1 OFFSET 700").fetchone()
        connection.execute("UPDATE messages SET value = 'spoilt' WHERE offset = ?", (before[0],))
    code, report = verified(*directories, "--receipts", str(receipts))
    assert (code, report["state"]) == (3, "wrong")
    assert [sorted(each) for each in states(report)][fuller] == ["damaged", "same", "same"]
    (damaged,) = [each for each in report["partitions"][fuller]["replicas"] if each["state"] == "damaged"]
    assert damaged["broker"] == down
    assert damaged["first_difference"] <= before[0]
    with contextlib.closing(apsw.Connection(str(file))) as connection:
        connection.execute("UPDATE messages SET value = ? WHERE offset = ?", (before[1], before[0]))
    assert verified(*directories[:4], topic)[0] == 4  # a replica is in none of these
