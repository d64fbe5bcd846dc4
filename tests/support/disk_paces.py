"""Disks whose pace a test decides."""

from __future__ import annotations

from portalmq.broker.partition.disk_pace import DiskPace


class SlowDisk(DiskPace):
    """Every transaction is committed on a native thread, where a test may hold it."""

    def is_fast(self, now_s: float) -> bool:
        return False


class FastDisk(DiskPace):
    """Small transactions are committed on the event loop. `on_loop` counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.on_loop = 0

    def is_fast(self, now_s: float) -> bool:
        return True

    def committed(self, seconds: float, now_s: float, *, on_loop: bool) -> None:
        self.on_loop += on_loop
