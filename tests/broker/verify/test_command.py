"""`portalmq verify`: its report and its exit codes, on the data directories of one broker and by HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import apsw
import msgspec
import pytest
from click.testing import CliRunner, Result
from support.domain import records, running
from support.scripted_broker import Reply, ScriptedBroker

from portalmq import RecordMetadata, wire
from portalmq.broker.core.fold import PartitionFold
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.storage.disk import DataDirectory, read_identity
from portalmq.broker.storage.schema import LogIdentity
from portalmq.broker.storage.state import StateFile
from portalmq.broker.verify.command import verify
from portalmq.broker.verify.directories import StoppedBrokers
from portalmq.cli.receipts import checksum_of, receipt_line
from portalmq.control_plane.state import TopicState


def verified(*words: str) -> Result:
    return CliRunner().invoke(verify, [*words])


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """The data directory of a broker with one topic, `t`, of one replica."""
    home = tmp_path / "broker"
    with running(home) as fixture:
        cluster_id = fixture.broker.cluster_id
        for number in range(5):
            fixture.broker.produce("t", ProduceRequest(records(f"message {number}")))
    DataDirectory.open(home, cluster_id=cluster_id, broker_id=1).close()
    return home


def test_whole_replicas_are_ok(stopped):
    result = verified("--data-dir", str(stopped))
    assert result.exit_code == 0, result.output
    assert "replicas same  1" in result.stdout
    report = json.loads(verified("--data-dir", str(stopped), "--json").stdout)
    assert (report["state"], report["replicas"]) == ("ok", {"same": 1})


def change(stopped: Path, name: str, statement: str) -> None:
    (path,) = stopped.glob(f"partitions/t@*/0/{name}")
    with contextlib.closing(apsw.Connection(str(path))) as connection:
        connection.execute(statement)
        assert connection.changes()


def test_damage_is_named_and_is_exit_code_3(stopped):
    change(stopped, "0*.sqlite", "UPDATE messages SET value = 'spoilt' WHERE offset = 3")
    result = verified("--data-dir", str(stopped))
    assert result.exit_code == 3
    assert "damaged" in result.stdout
    assert json.loads(verified("--data-dir", str(stopped), "--json").stdout)["state"] == "wrong"


@pytest.mark.parametrize("form", ["table", "json"])
def test_a_reader_that_goes_away_does_not_hide_the_exit_code(stopped, form):
    change(stopped, "0*.sqlite", "UPDATE messages SET value = 'spoilt' WHERE offset = 3")
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "portalmq.cli.main", "verify", "--data-dir", str(stopped), "-o", form]
    ended = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (3, "")


def test_a_damaged_state_file_is_named(stopped):
    change(stopped, "state.sqlite", "UPDATE meta SET value = value + 1 WHERE key = 'high_watermark'")
    result = verified("--data-dir", str(stopped))
    assert result.exit_code == 3
    assert "state.sqlite" in result.stdout


def test_a_replica_in_no_directory_is_exit_code_4(stopped):
    (description,) = stopped.glob("partitions/t@*/topic.json")
    content = json.loads(description.read_bytes())
    content["replication_factor"] = 2
    description.write_text(json.dumps(content))
    (stopped / "brokers.json").write_text('{"1": "http://b1", "2": "http://b2"}')
    result = verified("--data-dir", str(stopped))
    assert result.exit_code == 4
    assert "none of the directories" in result.stdout


def test_receipts_are_compared(stopped, tmp_path):
    receipts = tmp_path / "receipts"
    content = [receipt(offset, f"message {offset - 1}") for offset in range(1, 6)]  # the first record starts the epoch
    receipts.write_bytes(b"".join(content))
    words = ["--data-dir", str(stopped), "--receipts", str(receipts)]
    result = verified(*words)
    assert result.exit_code == 0, result.output
    receipts.write_bytes(b"".join([*content, receipt(2, "another"), receipt(77, "gone"), receipt(1, "x", "nowhere")]))
    result = verified(*words)
    assert result.exit_code == 3
    report = json.loads(verified(*words, "--json").stdout)
    assert report["receipts"]["outcomes"] == {"present": 5, "different": 1, "missing": 2}


def receipt(offset: int, text: str, topic: str = "t") -> bytes:
    return receipt_line(RecordMetadata(topic, 0, offset, 0), checksum_of(None, text.encode(), wire.BYTES, {}))


def test_what_cannot_be_used_is_said(stopped, tmp_path):
    result = verified("--data-dir", str(tmp_path))
    assert "no broker's data directory" in str(result.exception)
    result = verified("--data-dir", str(stopped), "--data-dir", str(stopped))
    assert result.exception
    with running(tmp_path / "other"):
        pass
    (tmp_path / "receipts").write_text("rubbish\n")
    assert verified("--receipts", str(tmp_path / "receipts")).exit_code == 2


def test_a_broker_that_does_not_know_digests_leaves_replicas_unknown():
    with ScriptedBroker() as broker:
        partition = wire.PartitionDescription(0, 1, 1, [1], [1], 0, 3, 100)
        topic = wire.TopicDescription("t", [partition], wire.TopicConfig(), replication_factor=1)
        cluster = wire.ClusterDescription("c", 1, [wire.BrokerDescription(1, broker.url, True)])
        broker.script("GET", "/v1/cluster", [lambda *_: Reply(200, msgspec.json.encode(cluster))])
        broker.script("GET", "/v1/topics/t", [lambda *_: Reply(200, msgspec.json.encode(topic))])
        result = verified("--server", broker.url, "t", "--json")
    assert result.exit_code == 4, result.output
    (found,) = json.loads(result.stdout)["partitions"]
    assert found["replicas"][0]["state"] == "unknown"


@pytest.mark.parametrize("is_old", [False, True], ids=["empty", "of an earlier version"])
def test_a_state_file_that_a_broker_begins_again_is_no_damage(stopped, is_old):
    if is_old:
        change(stopped, "state.sqlite", "UPDATE meta SET value = value - 1 WHERE key = 'schema_version'")
    else:
        (file,) = stopped.glob("partitions/t@*/0/state.sqlite")
        file.write_bytes(b"")
    result = verified("--data-dir", str(stopped))
    assert result.exit_code == 4, result.output
    assert "nothing says what is committed" in result.stdout


def test_a_state_saved_for_a_reset_that_did_not_happen_is_no_damage(stopped):
    (directory,) = stopped.glob("partitions/t@*/0")
    identity = read_identity(stopped)
    assert identity is not None
    topic_id = directory.parent.name.partition("@")[2]
    state_file = StateFile(directory, identity=LogIdentity(identity.cluster_id, "t", topic_id, 0))
    state_file.save(PartitionFold(applied=100, log_start_offset=100), 100, lambda offset: offset)
    state_file.close()
    result = verified("--data-dir", str(stopped))
    assert result.exit_code == 4, result.output
    assert "nothing says what is committed" in result.stdout


def test_a_replica_that_is_behind_misses_no_message_that_another_one_may_have():
    brokers = StoppedBrokers([])
    brokers.brokers = 2
    topic = TopicState("t", "id", 1, 0, 2, wire.TopicConfig())
    behind, ahead = (
        SimpleNamespace(high_watermark=40, end_offset=50),
        SimpleNamespace(high_watermark=90, end_offset=100),
    )
    assert brokers.unsettled(topic, behind, [behind, ahead]) == range(40, 100)
    assert not brokers.unsettled(topic, ahead, [behind, ahead])
    assert 1_000 in brokers.unsettled(topic, ahead, [ahead])  # the other directory was not given
    brokers.brokers = 1
    assert not brokers.unsettled(topic, ahead, [ahead])
