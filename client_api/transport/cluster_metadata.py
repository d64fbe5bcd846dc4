"""The cluster as one client knows it: brokers, leaders, and brokers that are excluded for now.

A broker that gives no answer is excluded while others can be asked, for longer after each failure; one that says it
cannot answer now, for a moment. If all are excluded, the one whose exclusion ends first is asked all the same, and from
then on all exclusions are short.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable

from portalmq import wire
from portalmq.errors import Unavailable
from portalmq.network.connection import Address, parse_address
from portalmq.network.trust import may_receive_token, warn_of_unknown_host
from portalmq.transport import system_random
from portalmq.transport.zookeeper_bootstrap import CONNECT_WITHIN_S, ZooKeeperBootstrap
from portalmq.transport.zookeeper_bootstrap import SCHEME as ZOOKEEPER

DEFAULT_URL = "http://localhost:5000"
# How long a broker that gave no answer is excluded; doubled with each failure in a row.
EXCLUDE_S = 1.0
EXCLUDE_S_MAX = 30.0
# The longest exclusion of a broker that says it cannot answer now.
EXCLUDE_BUSY_S_MAX = 1.0
# While another one says that it cannot answer now, or all are silent, no exclusion is longer: the broker may be back.
EXCLUDE_S_WHEN_NONE_ANSWER = 2.0
RESOLVE_EVERY_S = 5.0

Bootstrap = str | Iterable[str] | None
TopicPartition = tuple[str, int]


def bootstrap_addresses(bootstrap: Bootstrap) -> list[Address]:
    """Return the first brokers to ask, from a URL, several (a list, or separated by commas), or PORTALMQ_URL if
    None."""
    addresses = [parse_address(text) for text in _texts(bootstrap)]
    if not addresses:
        raise ValueError(f"no broker is named; write for instance {DEFAULT_URL}")
    return list(dict.fromkeys(addresses))


def zookeeper_of(bootstrap: Bootstrap) -> ZooKeeperBootstrap | None:
    """Return the ZooKeeper to ask for brokers, if `bootstrap` names one."""
    if bootstrap is not None and not isinstance(bootstrap, str):
        bootstrap = list(bootstrap)
        if len(bootstrap) != 1:
            return None
        bootstrap = bootstrap[0]
    text = (bootstrap if bootstrap is not None else os.environ.get("PORTALMQ_URL", "")).strip()
    return ZooKeeperBootstrap(text) if text.startswith(ZOOKEEPER) else None


def _texts(bootstrap: Bootstrap) -> list[str]:
    if bootstrap is None:
        bootstrap = os.environ.get("PORTALMQ_URL") or DEFAULT_URL
    texts = bootstrap.split(",") if isinstance(bootstrap, str) else list(bootstrap)
    return [text for text in texts if text.strip()]


class ClusterMetadata:
    """Thread-safe: each method is one step on dictionaries; the look-up in ZooKeeper holds a lock."""

    def __init__(
        self, bootstrap: Bootstrap, clock: Callable[[], float], *, shows_token: bool = False, is_open: bool = False
    ) -> None:
        """`shows_token`: requests carry a token, which only named hosts may receive, or all advertised ones if
        `is_open`."""
        bootstrap = bootstrap if bootstrap is None or isinstance(bootstrap, str) else list(bootstrap)
        self._clock = clock
        self._is_wary = shows_token and not is_open
        self._zookeeper = zookeeper_of(bootstrap)
        self.bootstrap = [] if self._zookeeper else bootstrap_addresses(bootstrap)
        self._known = list(self.bootstrap)
        self._leaders: dict[TopicPartition, Address] = {}
        self._share = system_random.fraction()
        self._epochs: dict[TopicPartition, int] = {}
        self._excluded_until: dict[Address, float] = {}
        self._failures: dict[Address, int] = {}
        self._resolving = threading.Lock()
        self._resolved_at = 0.0
        self._unresolved: Unavailable | None = None
        self._unresolved_at = 0.0

    def reset_in_child(self) -> None:
        """Replace the lock in the child of a fork."""
        self._resolving = threading.Lock()

    @property
    def urls(self) -> list[str]:
        """The URLs at which this client starts, for people."""
        return [self._zookeeper.url] if self._zookeeper else [address.url for address in self.bootstrap]

    @property
    def known(self) -> list[Address]:
        return self._known

    @property
    def is_alone(self) -> bool:
        """True if one broker is known, and none beside it could be asked."""
        return len(self._known) < 2

    # --- where -------------------------------------------------------------------------------------------------------

    def leader_of(self, partition: TopicPartition) -> Address | None:
        """Return the leader, if it is known and not excluded."""
        leader = self._leaders.get(partition)
        if leader is not None and self._excluded_until and self._is_excluded(leader):
            return None
        return leader

    def any(self, within_s: float = CONNECT_WITHIN_S) -> Address:
        """Return a broker to ask. Raises the error of a look-up in ZooKeeper, unless an earlier one has found
        brokers."""
        for address in self._known:
            if not self._is_excluded(address):
                return address
        if self._zookeeper is not None:
            self._resolve(self._zookeeper, within_s)
        return min(self._known, key=lambda address: self._excluded_until.get(address, 0.0))

    @property
    def asks_zookeeper(self) -> bool:
        """True if any() looks up brokers in ZooKeeper now, which blocks."""
        return self._zookeeper is not None and all(map(self._is_excluded, self._known))

    def other_than(self, address: Address) -> Address | None:
        """Return another broker that can be asked now; different clients choose different ones."""
        others = [other for other in self._known if other != address and not self._is_excluded(other)]
        return others[int(self._share * len(others))] if others else None

    def _is_excluded(self, address: Address) -> bool:
        return self._excluded_until.get(address, 0.0) > self._clock()

    def _resolve(self, zookeeper: ZooKeeperBootstrap, within_s: float) -> None:
        began = self._clock()
        with self._resolving:
            if self._known and self._clock() < self._resolved_at + RESOLVE_EVERY_S:
                return
            if self._unresolved is not None and self._unresolved_at > began:
                # Another thread failed while this one waited: trying again one by one would take the time of all.
                raise Unavailable(self._unresolved.detail, **self._unresolved.extra)
            try:
                urls = zookeeper.broker_urls(within_s)
            except Unavailable as error:
                if self._known:
                    self._resolved_at = self._clock()  # the brokers may be back before ZooKeeper
                    return
                self._unresolved, self._unresolved_at = error, self._clock()
                raise
            self.bootstrap = bootstrap_addresses(urls)
            self._known = list(self.bootstrap)
            self._excluded_until.clear()
            self._failures.clear()
            self._resolved_at = self._clock()

    # --- what is learned ---------------------------------------------------------------------------------------------

    def learn(self, metadata: wire.Metadata) -> None:
        advertised = [self._member(broker.url) for broker in metadata.brokers if broker.live]
        self._known = list(dict.fromkeys([*self.bootstrap, *(one for one in advertised if one is not None)]))
        for topic in metadata.topics:
            for partition in topic.partitions:
                leader = None if partition.leader_url is None else self._member(partition.leader_url)
                if leader is None:
                    self._leaders.pop((topic.name, partition.partition), None)
                else:
                    self._leaders[topic.name, partition.partition] = leader
                    self._epochs[topic.name, partition.partition] = partition.leader_epoch

    def epoch_of(self, partition: TopicPartition) -> int:
        """Return the epoch of the latest leader in any metadata; -1 if there was none."""
        return self._epochs.get(partition, -1)

    def has_moved(self, partition: TopicPartition, metadata: wire.Metadata) -> bool:
        """Return whether `metadata` has a later leader than this client knows."""
        return any(
            topic.name == partition[0]
            and each.partition == partition[1]
            and each.leader_url is not None
            and each.leader_epoch > self.epoch_of(partition)
            for topic in metadata.topics
            for each in topic.partitions
        )

    def leads(self, partition: TopicPartition, url: object) -> bool:
        """Record the leader that a broker reported. Return False if it is none, or not usable."""
        leader = self._member(url) if isinstance(url, str) else None
        if leader is None:
            self._leaders.pop(partition, None)
            return False
        self._leaders[partition] = leader
        return True

    def _member(self, url: str) -> Address | None:
        """Return the advertised address; None if a token would travel less safely to it than to the bootstrap
        brokers."""
        try:
            address = parse_address(url)
        except ValueError:
            return None
        if self.bootstrap and address.scheme != self.bootstrap[0].scheme:
            return None
        if self._is_wary and not may_receive_token(address, self.bootstrap):
            warn_of_unknown_host(address)
            return None
        return address

    def answered(self, address: Address) -> None:
        if self._failures:
            self._failures.pop(address, None)
        if self._excluded_until:
            self._excluded_until.pop(address, None)

    def mark_unreachable(self, address: Address) -> None:
        failures = self._failures[address] = min(self._failures.get(address, 0) + 1, 10)
        self._excluded_until[address] = self._clock() + min(EXCLUDE_S * 2 ** (failures - 1), EXCLUDE_S_MAX)
        if all(map(self._is_excluded, self._known)):
            self._shorten_exclusions()

    def mark_busy(self, address: Address, seconds: float | None) -> None:
        """Exclude a broker that said it cannot answer now, for a moment."""
        self._shorten_exclusions()
        self._excluded_until[address] = self._clock() + min(seconds or EXCLUDE_BUSY_S_MAX, EXCLUDE_BUSY_S_MAX)

    def _shorten_exclusions(self) -> None:
        """Shorten all exclusions, as no broker is known to answer: an excluded one may be back."""
        at_most = self._clock() + EXCLUDE_S_WHEN_NONE_ANSWER
        for address, until in list(self._excluded_until.items()):
            self._excluded_until[address] = min(until, at_most)
