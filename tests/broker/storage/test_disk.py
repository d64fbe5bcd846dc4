"""The data directory: it has an identity, one broker uses it, and a guard keeps it from running full."""

import json
import os
import subprocess
import sys

import pytest

from portalmq.broker.storage.disk import DataDirectory, DirectoryInUse, DiskGuard, WrongCluster
from portalmq.broker.storage.errors import StorageFault


def test_a_new_directory_gets_an_identity_that_stays(tmp_path):
    first = DataDirectory.open(tmp_path / "data", cluster_id="c1", broker_id=4)
    first.close()
    again = DataDirectory.open(tmp_path / "data")
    assert again.identity == first.identity
    assert (again.identity.cluster_id, again.identity.broker_id) == ("c1", 4)
    assert json.loads((tmp_path / "data" / "identity.json").read_text()) == {
        "cluster_id": "c1", "broker_id": 4, "store_uuid": again.identity.store_uuid,
    }  # fmt: skip
    again.close()


def test_two_directories_are_two_stores(tmp_path):
    one, two = DataDirectory.open(tmp_path / "1"), DataDirectory.open(tmp_path / "2")
    assert one.identity.store_uuid != two.identity.store_uuid
    assert one.identity.cluster_id != two.identity.cluster_id
    one.close()
    two.close()


@pytest.mark.parametrize("asked", [{"cluster_id": "c2"}, {"broker_id": 2}])
def test_another_clusters_or_brokers_data_is_refused_and_the_lock_released(tmp_path, asked):
    DataDirectory.open(tmp_path, cluster_id="c1", broker_id=1).close()
    for _ in range(2):
        with pytest.raises(WrongCluster, match="data-dir"):
            DataDirectory.open(tmp_path, **asked)
    DataDirectory.open(tmp_path, cluster_id="c1", broker_id=1).close()


def test_a_directory_in_use_is_refused_with_the_pid_of_its_user(tmp_path):
    first = DataDirectory.open(tmp_path)
    with pytest.raises(DirectoryInUse, match=str(os.getpid())):
        DataDirectory.open(tmp_path)
    first.close()
    DataDirectory.open(tmp_path).close()


def test_a_lock_ends_with_its_process(tmp_path):
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from portalmq.broker.storage.disk import DataDirectory\n"
        "held = DataDirectory.open(Path(sys.argv[1]))\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(DirectoryInUse, match=str(holder.pid)):
            DataDirectory.open(tmp_path)
        holder.kill()
        holder.wait()
    DataDirectory.open(tmp_path).close()


def test_a_damaged_identity_is_a_fault(tmp_path):
    DataDirectory.open(tmp_path).close()
    (tmp_path / "identity.json").write_text("{")
    with pytest.raises(StorageFault, match="identity"):
        DataDirectory.open(tmp_path)


class Disk:
    def __init__(self, monkeypatch, free):
        self.free, self.asked = free, 0
        monkeypatch.setattr(os, "statvfs", self.statvfs)

    def statvfs(self, path):
        self.asked += 1
        return os.statvfs_result((4_096, 1_000, 0, 0, self.free // 1_000, 0, 0, 0, 0, 255))


def test_below_the_low_water_mark_the_disk_is_full(tmp_path, monkeypatch):
    disk = Disk(monkeypatch, 5_000_000)
    guard = DiskGuard(tmp_path, low_water_bytes=1_000_000, ballast_bytes=0)
    assert not guard.full(0)
    disk.free = 999_000
    assert guard.full(100)
    disk.free = 1_001_000
    assert not guard.full(200)


def test_the_file_system_is_queried_at_most_every_100_ms(tmp_path, monkeypatch):
    disk = Disk(monkeypatch, 5_000_000)
    guard = DiskGuard(tmp_path, low_water_bytes=1_000_000, ballast_bytes=0)
    for now_ms in (1_000, 1_001, 1_099):
        assert not guard.full(now_ms)
    assert disk.asked == 1
    disk.free = 0
    assert guard.full(1_100)
    assert disk.asked == 2
    guard.full(5)  # the clock was set back
    assert disk.asked == 3


def test_the_ballast_takes_room_until_it_is_released(tmp_path):
    guard = DiskGuard(tmp_path, low_water_bytes=0, ballast_bytes=1_000_000)
    assert guard.ballast_path.stat().st_blocks * 512 >= 1_000_000
    DiskGuard(tmp_path, low_water_bytes=0, ballast_bytes=500_000)
    assert guard.ballast_path.stat().st_size == 500_000
    assert guard.release()
    assert not guard.ballast_path.exists()
    assert not guard.release()


def test_the_ballast_takes_room_where_the_system_cannot_reserve_it(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate")
    guard = DiskGuard(tmp_path, low_water_bytes=0, ballast_bytes=2_500_000)
    assert guard.ballast_path.stat().st_blocks * 512 >= 2_500_000
    assert guard.ballast_path.stat().st_size == 2_500_000


def test_a_disk_without_room_for_ballast_has_none(tmp_path, monkeypatch):
    def no_room(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    guard = DiskGuard(tmp_path, low_water_bytes=0, ballast_bytes=1_000_000)
    assert list(tmp_path.iterdir()) == []
    assert not guard.release()


def test_a_data_directory_that_vanished_is_a_fault(tmp_path):
    guard = DiskGuard(tmp_path / "gone", low_water_bytes=0, ballast_bytes=0)
    with pytest.raises(StorageFault):
        guard.full(0)
