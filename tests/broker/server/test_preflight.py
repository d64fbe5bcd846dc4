"""The check of a data directory against ZooKeeper: accepted and refused directories, and the messages."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from support.zookeeper import fresh_chroot

from portalmq.broker.cluster import retry_budget as patience
from portalmq.broker.cluster.exits import StartupError
from portalmq.broker.server import preflight
from portalmq.broker.server.config import BrokerConfig
from portalmq.broker.server.preflight import IdentityAnswer, IdentityRequest, Preflight
from portalmq.broker.storage.disk import StoreIdentity
from portalmq.control_plane.catalog import Catalog
from portalmq.control_plane.embedded import EmbeddedZooKeeper
from portalmq.control_plane.locks import LockTable
from portalmq.control_plane.plane import PlaneRefused
from portalmq.control_plane.standalone import Standalone
from portalmq.control_plane.state import CLUSTER_SECRET, RECEIPT_KEY, BrokerState
from portalmq.control_plane.zookeeper import ZooKeeper

URL = "http://127.0.0.1:1"  # no server listens there


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    plane = Standalone(tmp_path)
    plane.start()
    yield Catalog(plane)
    plane.close()


def joined(catalog: Catalog, asked: IdentityRequest, wanted: int | None) -> IdentityAnswer:
    return preflight.joined(catalog, asked, wanted, patience_s=0.05)


def question(cluster: str = "", broker_id: int = 1, *, store: str = "store", holds: bool = False) -> IdentityRequest:
    return IdentityRequest(StoreIdentity(cluster, broker_id, store) if cluster else None, store, holds, URL)


class TestNewDirectories:
    def test_the_first_one_makes_the_cluster(self, catalog: Catalog) -> None:
        answer = joined(catalog, question(), None)
        assert answer == IdentityAnswer(catalog.cluster_id(), 1)

    def test_others_join_it_under_the_next_ids(self, catalog: Catalog) -> None:
        made = [joined(catalog, question(store=store), None) for store in ("a", "b", "c")]
        assert {answer.cluster_id for answer in made} == {catalog.cluster_id()}
        assert [answer.broker_id for answer in made] == [1, 2, 3]

    def test_the_id_that_is_wanted_is_given(self, catalog: Catalog) -> None:
        assert joined(catalog, question(), 7).broker_id == 7

    def test_an_id_of_a_broker_that_is_there_is_refused(self, catalog: Catalog) -> None:
        joined(catalog, question(store="first"), 7)
        catalog.register_broker(7, BrokerState(URL, 1, "first"))
        # That broker does not listen, so the check waits for its session, which does not end.
        with pytest.raises(StartupError, match="choose another --broker-id") as refused:
            joined(catalog, question(store="second"), 7)
        assert refused.value.exit_code == 73

    def test_an_adoption_that_begins_meanwhile_makes_no_cluster(
        self, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        find = catalog.find_cluster_id

        def find_before_it_begins() -> str | None:
            found = find()
            catalog.begin_adoption("ours")
            return found

        monkeypatch.setattr(catalog, "find_cluster_id", find_before_it_begins)
        with pytest.raises(StartupError, match="`portalmq adopt` is writing") as refused:
            joined(catalog, question(), None)
        assert refused.value.exit_code == 73
        assert catalog.claims() == {}


class TestKnownDirectories:
    def test_one_of_this_cluster_keeps_its_id(self, catalog: Catalog) -> None:
        first = joined(catalog, question(), 4)
        again = question(first.cluster_id, 4, holds=True)
        assert joined(catalog, again, None) == joined(catalog, again, 4) == first

    def test_one_of_another_cluster_is_refused_whatever_id_is_wanted(self, catalog: Catalog) -> None:
        catalog.cluster_id("ours")
        for wanted in (None, 1, 9):
            with pytest.raises(StartupError, match="of cluster theirs, and ZooKeeper of cluster ours") as refused:
                joined(catalog, question("theirs", holds=True), wanted)
            assert refused.value.exit_code == 73
        assert catalog.claims() == {}

    def test_another_id_than_the_directorys_is_refused(self, catalog: Catalog) -> None:
        cluster_id = joined(catalog, question(), 4).cluster_id
        with pytest.raises(StartupError, match="is of broker 4, and --broker-id says 5") as refused:
            joined(catalog, question(cluster_id, 4), 5)
        assert refused.value.exit_code == 73

    def test_one_with_messages_does_not_make_a_cluster_in_an_empty_zookeeper(self, catalog: Catalog) -> None:
        with pytest.raises(StartupError, match="portalmq adopt") as refused:
            joined(catalog, question("lost", holds=True), None)
        assert refused.value.exit_code == 73
        assert catalog.find_cluster_id() is None

    def test_a_directory_without_messages_keeps_its_cluster(self, catalog: Catalog) -> None:
        assert joined(catalog, question("kept", 3), None) == IdentityAnswer("kept", 3)
        assert catalog.find_cluster_id() == "kept"

    def test_an_adoption_that_has_begun_is_seen_through_another_server(
        self, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        catalog.cluster_id("ours")
        monkeypatch.setattr(catalog.plane, "sync", lambda: catalog.begin_adoption("ours"))
        with pytest.raises(StartupError, match="`portalmq adopt` is writing"):
            joined(catalog, question("ours", 3), None)

    def test_a_directory_without_messages_repeats_no_number_that_an_emptied_zookeeper_gave_out(
        self, catalog: Catalog
    ) -> None:
        before_ms = time.time_ns() // 1_000_000
        joined(catalog, question("kept", 3), None)
        assert LockTable(catalog.plane).ask("l", "a", 1_000, lambda *_: 0, {}).state.token > before_ms
        assert catalog.next_producer(None).id >= before_ms * 1_000

    def test_the_old_disk_of_a_broker_takes_its_id_back(self, catalog: Catalog) -> None:
        cluster_id = joined(catalog, question(store="old"), 1).cluster_id
        joined(catalog, question(store="new"), 1)
        assert joined(catalog, question(cluster_id, 1, store="old"), None).broker_id == 1
        assert catalog.claims()[1].value.store_uuid == "old"


def in_tree(config: BrokerConfig) -> Catalog:
    plane = ZooKeeper(config.zookeeper, auth=config.zookeeper_auth)
    plane.start()
    return Catalog(plane)


@pytest.mark.cluster
class TestOpenTrees:
    """A cluster that ran without credentials starts again with them."""

    @pytest.fixture
    def config(self, zookeeper_server: EmbeddedZooKeeper) -> Iterator[BrokerConfig]:
        config = BrokerConfig(zookeeper=zookeeper_server.hosts + fresh_chroot(), session_timeout_ms=10_000)
        self.anyone = in_tree(config)
        self.before = self.anyone.cluster_secret(), self.anyone.receipt_key()
        yield replace(config, zookeeper_user="portal", zookeeper_password="right")
        self.anyone.plane.close()

    def test_the_tree_is_closed_and_exposed_secrets_are_replaced_once(self, config: BrokerConfig) -> None:
        Preflight.begin(config).close()
        with pytest.raises(PlaneRefused):
            self.anyone.cluster_secret()
        ours = in_tree(config)
        renewed = ours.cluster_secret(), ours.receipt_key()
        assert not set(renewed) & set(self.before)
        Preflight.begin(config).close()
        assert (ours.cluster_secret(), ours.receipt_key()) == renewed
        ours.plane.close()

    def test_brokers_that_run_without_credentials_are_not_shut_out(self, config: BrokerConfig) -> None:
        self.anyone.register_broker(7, BrokerState(URL, 1, "store"))
        hasty = replace(config, session_timeout_ms=1_000)  # it waits for twice this time: the broker may be dead
        with pytest.raises(StartupError, match=r"ids 7\): stop all brokers") as refused:
            Preflight.begin(hasty)
        assert refused.value.exit_code == 2
        assert (self.anyone.cluster_secret(), self.anyone.receipt_key()) == self.before
        self.anyone.unregister_broker(7)
        Preflight.begin(config).close()

    def test_secrets_in_use_are_replaced_when_no_broker_runs(self, config: BrokerConfig) -> None:
        """If only the top node of a tree is closed, the running brokers have the credentials."""
        ours = in_tree(config)
        ours.register_broker(7, BrokerState(URL, 1, "store"))
        Preflight.begin(config).close()
        with pytest.raises(PlaneRefused):
            self.anyone.plane.get(CLUSTER_SECRET)
        assert (ours.cluster_secret(), ours.receipt_key()) == self.before
        ours.unregister_broker(7)
        Preflight.begin(config).close()
        assert not {ours.cluster_secret(), ours.receipt_key()} & set(self.before)
        ours.plane.close()

    def test_secrets_that_another_broker_has_replaced_are_kept(self, config: BrokerConfig) -> None:
        ours = in_tree(config)
        seen = {CLUSTER_SECRET: 0, RECEIPT_KEY: 0}
        for _ in range(2):
            ours.note_exposed(seen)
            assert ours.renew_exposed()
        renewed = ours.cluster_secret()
        ours.note_exposed(seen)
        assert ours.renew_exposed()
        assert ours.cluster_secret() == renewed != self.before[0]
        ours.plane.close()


@pytest.mark.cluster
class TestTheChild:
    @pytest.fixture
    def config(self, zookeeper_server: EmbeddedZooKeeper) -> BrokerConfig:
        return BrokerConfig(zookeeper=zookeeper_server.hosts + fresh_chroot())

    def test_the_child_asks_and_ends_without_leftovers(self, config: BrokerConfig) -> None:
        before = psutil.Process().children()
        talk = Preflight.begin(config)
        try:
            cluster_id, broker_id = talk.join(question())
        finally:
            talk.close()
        assert (len(cluster_id), broker_id) == (32, 1)
        assert set(psutil.Process().children()) <= set(before)
        again = Preflight.begin(config)
        assert again.join(question(cluster_id)) == (cluster_id, 1)
        again.close()

    def test_a_refusal_comes_back_with_its_exit_code(self, config: BrokerConfig) -> None:
        talk = Preflight.begin(config)
        try:
            with pytest.raises(StartupError, match="portalmq adopt") as refused:
                talk.join(question("lost", holds=True))
        finally:
            talk.close()
        assert refused.value.exit_code == 73

    def test_it_ends_when_there_is_nothing_to_ask(self, config: BrokerConfig) -> None:
        talk = Preflight.begin(config)
        child = talk._child
        talk.close()
        assert not psutil.pid_exists(child)

    def test_a_zookeeper_that_is_not_there_is_exit_69_within_its_time(self) -> None:
        with pytest.raises(StartupError, match=r"no ZooKeeper answers at 127\.0\.0\.1:1: .*portalmq zookeeper") as no:
            Preflight.begin(BrokerConfig(zookeeper="127.0.0.1:1/chroot", zookeeper_wait_s=0))
        assert no.value.exit_code == 69

    def test_a_wait_for_an_unavailable_zookeeper_is_reported_once(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        now = [0.0]
        clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
        monkeypatch.setattr(patience, "time", clock)
        answers = iter([StartupError("away", 69)] * 5)

        def attempt() -> str:
            now[0] += 5.0
            for refusal in answers:
                raise refusal
            return "connected"

        assert preflight.patience_of(BrokerConfig(zookeeper_wait_s=30))(attempt) == "connected"
        assert capsys.readouterr().err.count("--zookeeper-wait-s") == 1
        for refusals, expected_s in (([StartupError("away", 69)] * 100, 33), ([StartupError("not ours", 73)], 5)):
            now[0], answers = 0.0, iter(refusals)
            with pytest.raises(StartupError):
                preflight.patience_of(BrokerConfig(zookeeper_wait_s=30))(attempt)
            assert now[0] == pytest.approx(expected_s, abs=3), "the limit and one more attempt at most"

    def test_wrong_credentials_are_wrong_usage(self, config: BrokerConfig) -> None:
        right = replace(config, zookeeper_user="portal", zookeeper_password="right")
        Preflight.begin(right).close()
        for wrong in (config, replace(right, zookeeper_password="wrong")):
            with pytest.raises(StartupError, match="zookeeper-password") as refused:
                Preflight.begin(wrong)
            assert refused.value.exit_code == 2

    def test_the_arbiter_stays_clean(self, config: BrokerConfig) -> None:
        program = (
            "import sys, threading\n"
            "from portalmq.broker.server.config import BrokerConfig\n"
            "from portalmq.broker.server.preflight import Preflight\n"
            f"Preflight.begin(BrokerConfig(zookeeper={config.zookeeper!r})).close()\n"
            "assert not {'kazoo', 'portalmq.control_plane.zookeeper'} & set(sys.modules)\n"
            "assert threading.active_count() == 1\n"
        )
        subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
