"""Replicas of one partition on several brokers of one process: real logs, real fetches, and a network of function
calls.

Group(tmp_path, 3)     three hosts, the partition's state, and its leader
  .partition(1)        the replica there
  .elect(2)            the control plane's election
  .cut(3) .mend(3)     the host's calls and calls to it are not delivered
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import gevent
import msgspec
from support.disk_paces import SlowDisk

from portalmq.broker.cluster.replicas import Files, Replicas
from portalmq.broker.cluster.rpc.brokers import ReplicaLogEnd
from portalmq.broker.cluster.unclean_election import is_whole_elsewhere, log_end_of
from portalmq.broker.core.replica.events import (
    BrokersChanged,
    IsrAnswered,
    LeaseRenewed,
    Outcome,
    PartitionStateChanged,
    ProposeIsr,
    Tick,
)
from portalmq.broker.partition.cache import BatchCache
from portalmq.broker.partition.clock import Clock
from portalmq.broker.partition.disk_pace import DiskPace
from portalmq.broker.partition.greenlets import KeptGreenlets
from portalmq.broker.partition.native import NativeThreads
from portalmq.broker.partition.partition import Partition
from portalmq.broker.partition.partition_state import partition_state_of
from portalmq.broker.replication.fetch_server import FetchServer
from portalmq.broker.replication.fetcher import Fetchers
from portalmq.broker.storage.batch import Record
from portalmq.control_plane.state import BrokerState, PartitionState, TopicState, with_isr
from portalmq.errors import Unavailable
from portalmq.wire import TopicConfig

CLUSTER = "cluster-1"
TOPIC_ID = "topic-id-1"


BEAT_S = 0.05
# A later beat is late because the process was paused.
BEAT_MAX_S = 0.1


def eventually(is_so: Callable[[], object], within_s: float = 60.0) -> None:
    """Wait until the condition holds; the bound is for a condition that never does."""
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline, "the condition did not become true"
        gevent.sleep(0.005)


class BeatenClock(Clock):
    """The hosts' clock advances with the beats of their group: a pause of their process, however long, is no time to
    them."""

    def __init__(self) -> None:
        super().__init__()
        self._lived_s = time.time()
        self._beaten_at_s = time.monotonic()

    def beat(self) -> None:
        self._lived_s, self._beaten_at_s = self._now_s(), time.monotonic()

    def _now_s(self) -> float:
        return self._lived_s + min(time.monotonic() - self._beaten_at_s, BEAT_MAX_S)

    def now_ms(self) -> int:
        return int(1_000 * self._now_s())


class Unreached(Unavailable):
    """The call did not arrive."""


class Network:
    """Calls between hosts. `calls` counts them."""

    def __init__(self, group: Group, source: int) -> None:
        self.group = group
        self.source = source
        self.calls = 0
        self.alter: Callable[[bytes], bytes] = lambda answer: answer

    def call_bytes(self, broker_id: int, name: str, body: bytes, *, timeout_s: float) -> bytes:
        self.calls += 1
        group = self.group
        if {self.source, broker_id} & group.severed or broker_id not in group.hosts:
            gevent.sleep(0.002)
            raise Unreached("cut")
        asked = gevent.spawn(group.hosts[broker_id].replication.serve, body, None)
        answer = asked.get(timeout=timeout_s)
        if {self.source, broker_id} & group.severed:
            raise Unreached("cut")
        return self.alter(answer)


class Mirror:
    def __init__(self, group: Group) -> None:
        self.brokers: dict[int, BrokerState] = {}
        self._group = group

    def url_of(self, broker_id: int) -> str | None:
        return f"http://broker-{broker_id}"


class Membership:
    """The control plane as a function call. `holds` delays compare-and-sets."""

    def __init__(self, group: Group, host: Host) -> None:
        self.mirror = Mirror(group)
        self.suspected: list[tuple[int, bool]] = []
        self._group = group
        self._host = host

    def answered_ms(self) -> int:
        return self._host.clock.now_ms()

    def suspect(self, broker_id: int, incarnation: int, *, refused: bool) -> None:
        self.suspected.append((broker_id, refused))

    def change_isr(self, topic_id: str, number: int, proposal: ProposeIsr, least: int | None) -> IsrAnswered:
        gevent.sleep(0)
        group = self._group
        if proposal.version != group.version:
            return IsrAnswered(proposal.version, Outcome.CONFLICT)
        resigning = self._host.broker_id if proposal.resigns else None
        group.state = with_isr(
            group.state, proposal.isr, proposal.store_uuids, proposal.incarnations, resigning=resigning
        )
        group.version += 1
        group.proposals.append(proposal)
        gevent.spawn(group.announce)
        return IsrAnswered(
            proposal.version, Outcome.APPLIED, partition_state_of(group.state, group.version, group.least)
        )

    def reread(self, topic_id: str, number: int, refresh: int, least: int | None) -> PartitionStateChanged | None:
        gevent.sleep(0)
        return partition_state_of(self._group.state, self._group.version, self._group.least, refresh=refresh)


class Host:
    """One broker, as far as a partition needs it."""

    def __init__(self, group: Group, broker_id: int, incarnation: int = 1) -> None:
        self.cluster_id = CLUSTER
        self.broker_id = broker_id
        self.incarnation = incarnation
        self.store_uuid = f"store-{broker_id}"
        self.clock = group.clock
        self.cache = BatchCache(8 * 1024 * 1024)
        self.pool = NativeThreads(2)
        self.disk_pace: DiskPace = SlowDisk()
        self.greenlets = KeptGreenlets()
        self.lag_ms = group.lag_ms
        self.lease_ms = 60_000
        self.began_ms = 0
        self.faults: list[BaseException] = []
        self.is_full = False
        self.partition: Partition | None = None
        self.membership = Membership(group, self)
        self.network = Network(group, broker_id)
        self.fetchers = Fetchers(self, self.network, wait_ms=200)
        self.on_opened: Callable[[Partition], None] = lambda partition: None
        self.replication = FetchServer(self, self)

    def local(self, topic_id: str, number: int) -> Partition | None:
        return self.partition if topic_id == TOPIC_ID else None

    def disk_is_full(self) -> bool:
        return self.is_full

    def storage_failed(self, fault: BaseException) -> None:
        self.faults.append(fault)

    def committed(self, seconds: float) -> None: ...


class Group:
    """The replicas of one partition. All (or `isr`) are in sync at first, and the first leads."""

    def __init__(
        self,
        root: Path,
        brokers: int = 2,
        *,
        least: int | None = None,
        segment_bytes: int = 1 << 30,
        lag_ms: int = 1_000,
        isr: tuple[int, ...] | None = None,
    ) -> None:
        self.root = root
        self.clock = BeatenClock()
        self.lag_ms = lag_ms
        self.least = least
        self.topic = TopicState("t", TOPIC_ID, 1, 1, brokers, TopicConfig(segment_bytes=segment_bytes))
        self.hosts: dict[int, Host] = {}
        self.severed: set[int] = set()
        self.proposals: list[ProposeIsr] = []
        self.stepped_down: list[int] = []
        self.led: list[int] = []
        self.unusable: dict[int, ReplicaLogEnd] = {}
        ids = tuple(range(1, brokers + 1))
        self.version = 0
        self.state = PartitionState(1, 1, isr or ids, ids, {n: f"store-{n}" for n in ids}, dict.fromkeys(ids, 1))
        self._beat = gevent.spawn(self._tick)
        for broker_id in ids:
            self.start(broker_id)

    # --- brokers -----------------------------------------------------------------------------------------------------

    def start(self, broker_id: int, incarnation: int = 1) -> Partition | None:
        host = self.hosts[broker_id] = Host(self, broker_id, incarnation)
        self.introduce()
        return self.open(host)

    def open(self, host: Host) -> Partition | None:
        files = Files(self.root / str(host.broker_id), CLUSTER, host.store_uuid)
        partition = Replicas(host, files).open(self.topic, 0, lambda: self._is_whole_elsewhere(host))
        if isinstance(partition, ReplicaLogEnd):
            self.unusable[host.broker_id] = partition
            host.partition = None
            return None
        assert partition is not None, host.faults
        partition.on_damaged = lambda it: self._rebuild(host, files, it)
        partition.on_leading = lambda it: self.led.append(host.broker_id)
        partition.on_stepped_down = lambda it: self.stepped_down.append(host.broker_id)
        host.partition = partition
        self.update(host)
        host.on_opened(partition)
        return partition

    def _is_whole_elsewhere(self, host: Host) -> bool | None:
        def ask(broker_id: int) -> ReplicaLogEnd:
            if broker_id in self.severed or broker_id not in self.hosts:
                raise Unreached("cut")
            partition = self.hosts[broker_id].partition
            return log_end_of(partition) if partition is not None else self.unusable[broker_id]

        return is_whole_elsewhere(self.state, host.broker_id, ask)

    def _rebuild(self, host: Host, files: Files, partition: Partition) -> None:
        if not self._is_whole_elsewhere(host):
            return
        partition.rebuild_reason = partition.fault
        partition.close(saves=False)
        Replicas(host, files).set_aside(self.topic, 0)
        self.open(host)

    def stop(self, broker_id: int, *, saves: bool = True) -> None:
        host = self.hosts.pop(broker_id)
        host.fetchers.close()
        host.replication.close()
        assert host.partition is not None
        host.partition.close(saves=saves)

    def partition(self, broker_id: int) -> Partition:
        partition = self.hosts[broker_id].partition
        assert partition is not None
        return partition

    @property
    def leader(self) -> Partition:
        assert self.state.leader is not None
        return self.partition(self.state.leader)

    # --- the control plane -------------------------------------------------------------------------------------------

    def introduce(self) -> None:
        known = {host.broker_id: (host.incarnation, host.store_uuid) for host in self.hosts.values()}
        for host in self.hosts.values():
            host.membership.mirror.brokers = {
                number: BrokerState(f"http://broker-{number}", incarnation, store)
                for number, (incarnation, store) in known.items()
            }
            if host.partition is not None and not host.partition.closed:
                host.partition.step(BrokersChanged(known))

    def update(self, host: Host) -> None:
        if host.partition is not None and not host.partition.closed:
            known = {each.broker_id: (each.incarnation, each.store_uuid) for each in self.hosts.values()}
            host.partition.on_partition_state(partition_state_of(self.state, self.version, self.least), known)

    def announce(self) -> None:
        for host in tuple(self.hosts.values()):
            if host.broker_id not in self.severed:
                self.update(host)

    def elect(self, broker_id: int | None, *, isr: tuple[int, ...] | None = None, unclean: bool = False) -> None:
        epoch = self.state.leader_epoch + 1
        host = self.hosts.get(broker_id) if broker_id is not None else None
        incarnations = dict(self.state.incarnations)
        if host is not None and broker_id is not None:
            incarnations[broker_id] = host.incarnation
        self.state = msgspec.structs.replace(
            self.state,
            leader=broker_id,
            leader_epoch=epoch,
            isr=self.state.isr if isr is None else isr,
            incarnations=incarnations,
            unclean=(*self.state.unclean, epoch) if unclean else self.state.unclean,
        )
        self.version += 1
        self.announce()

    def cut(self, broker_id: int) -> None:
        self.severed.add(broker_id)

    def mend(self, broker_id: int) -> None:
        self.severed.discard(broker_id)
        self.announce()

    def _tick(self) -> None:
        while True:
            gevent.sleep(BEAT_S)
            self.clock.beat()
            for host in tuple(self.hosts.values()):
                partition = host.partition
                if partition is not None and not partition.closed and host.broker_id not in self.severed:
                    partition.step(LeaseRenewed(host.clock.now_ms()))
                if partition is not None and not partition.closed:
                    partition.step(Tick())

    def close(self) -> None:
        self._beat.kill()
        for broker_id in tuple(self.hosts):
            self.stop(broker_id)

    # --- contents of the logs ----------------------------------------------------------------------------------------

    def agree(self) -> bool:
        """Return whether all replicas have the same log, and know that all of it is committed."""
        ends = {host.partition.replica.high_watermark for host in self.hosts.values() if host.partition}
        return ends == {self.leader.replica.next_offset} and len(set(map(contents, self.partitions()))) == 1

    def partitions(self) -> list[Partition]:
        return [host.partition for host in self.hosts.values() if host.partition is not None]


def contents(partition: Partition) -> tuple[tuple[int, int, int], ...]:
    """Every batch of the log, checked: base offset, leader epoch, checksum."""
    log = partition.log
    batches = log.read(log.log_start_offset)
    return tuple((batch.base_offset, batch.leader_epoch, batch.crc) for batch in batches)


def values(partition: Partition) -> list[str]:
    batches = partition.log.read(partition.log.log_start_offset)
    return [record.value.decode() for batch in batches for record in batch.records]


def send(partition: Partition, *texts: str, **more: object) -> tuple[int, int]:
    records = tuple(Record(text.encode()) for text in texts)
    return partition.append(records, sum(len(text) for text in texts), **more)  # type: ignore[arg-type]


@contextmanager
def replicas(root: Path, brokers: int = 2, **more: object) -> Iterator[Group]:
    group = Group(root, brokers, **more)  # type: ignore[arg-type]
    try:
        yield group
        assert not [fault for host in group.hosts.values() for fault in host.faults]
    finally:
        group.close()
