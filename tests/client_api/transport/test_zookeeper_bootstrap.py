"""zk:// URLs find the brokers that are registered in ZooKeeper."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Literal

import pytest
from click.testing import CliRunner
from support.tls import pem

from portalmq import Consumer, Producer, errors
from portalmq.cli.main import EXIT_UNREACHABLE, main
from portalmq.transport.cluster_metadata import RESOLVE_EVERY_S, ClusterMetadata
from portalmq.transport.zookeeper_bootstrap import ZooKeeperBootstrap


class FakeZooKeeper(ZooKeeperBootstrap):
    """A ZooKeeper with the brokers of a test."""

    def __init__(self, *answers: list[str]) -> None:
        super().__init__("zk://fake")
        self.answers = list(answers)
        self.asked = 0

    def broker_urls(self, timeout_s: float = 0.0) -> list[str]:
        self.asked += 1
        if not self.answers:
            raise errors.Unavailable("no ZooKeeper answers", zookeeper="zk://fake")
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@pytest.mark.parametrize(
    ("url", "hosts", "chroot"),
    [
        ("zk://localhost", "localhost:2181", ""),
        ("zk://a:1,b", "a:1,b:2181", ""),
        ("zk://a:1,b:2/mq/", "a:1,b:2", "/mq"),
        ("zk://[::1]:2181", "[::1]:2181", ""),
        (" zk://user:se@cret@a:1 ", "a:1", ""),
    ],
)
def test_hosts_ports_and_chroot_are_read(url: str, hosts: str, chroot: str) -> None:
    zookeeper = ZooKeeperBootstrap(url)
    assert (zookeeper.hosts, zookeeper.chroot) == (hosts, chroot)
    assert "cret" not in zookeeper.url


@pytest.mark.parametrize("url", ["zk://", "zk:///chroot", "zk://a b", "zk://a:x", "zk://http://a"])
def test_a_url_that_names_no_server_is_refused_at_once(url: str) -> None:
    with pytest.raises(ValueError, match="names no ZooKeeper"):
        Producer(url)


def test_zookeeper_options_follow_the_chroot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "p@ss?word"
    file.write_text("se@cret\n")
    ca = f"zookeeper_tls_ca={pem('authority')}"
    given = ZooKeeperBootstrap(f"zk://a,b:1/mq?{ca}&zookeeper_user=mq&zookeeper_password=@{file}")
    assert (given.hosts, given.chroot, given._credentials) == ("a:2181,b:1", "/mq", "mq:se@cret")
    assert given.url == "zk://a:2181,b:1/mq"
    assert given._tls is not None
    monkeypatch.setenv("PORTALMQ_ZOOKEEPER_TLS_CA", str(pem("authority")))
    assert ZooKeeperBootstrap("zk://a")._tls is not None
    monkeypatch.delenv("PORTALMQ_ZOOKEEPER_TLS_CA")
    assert ZooKeeperBootstrap("zk://u:se?cret@a")._tls is None


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("zookeeper_tls=x", "zookeeper_tls_ca"),
        ("zookeeper_tls_ca=", "no value"),
        ("zookeeper_tls_ca=/missing.pem", r"zookeeper_tls_ca: /missing\.pem"),
        ("zookeeper_tls_key=/k", "needs zookeeper_tls_cert"),
        ("zookeeper_user=x", "go together"),
        ("zookeeper_user=x&zookeeper_password=@/missing", "/missing"),
    ],
)
def test_invalid_zookeeper_options_are_refused_at_once(query: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Producer(f"zk://a:1/mq?{query}")


def test_without_kazoo_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kazoo", None)
    monkeypatch.setitem(sys.modules, "kazoo.client", None)
    with pytest.raises(ImportError, match="pip install kazoo"):
        ZooKeeperBootstrap("zk://localhost:1").broker_urls()


def test_an_unreachable_zookeeper_is_unavailable_and_named() -> None:
    with pytest.raises(errors.Unavailable, match=r"zk://127\.0\.0\.1:1 without TLS") as caught:
        ZooKeeperBootstrap("zk://127.0.0.1:1").broker_urls(timeout_s=0.3)
    assert caught.value.retryable


def book_of(zookeeper: ZooKeeperBootstrap, now: list[float]) -> ClusterMetadata:
    book = ClusterMetadata("zk://fake", lambda: now[0])
    book._zookeeper = zookeeper
    return book


def test_brokers_are_looked_up_once_and_again_when_none_of_them_answers() -> None:
    now = [100.0]
    zookeeper = FakeZooKeeper(["http://one:1", "http://two:2"], ["http://three:3"])
    book = book_of(zookeeper, now)
    assert book.any().url == "http://one:1"
    book.mark_unreachable(book.any())
    assert book.any().url == "http://two:2"
    assert zookeeper.asked == 1
    book.mark_unreachable(book.any())
    assert book.any().url == "http://one:1", "ZooKeeper is not queried repeatedly"
    now[0] += 6.0
    for _ in range(4):
        for known in book.known:
            book.mark_unreachable(known)
    assert book.any().url == "http://three:3"
    assert zookeeper.asked == 2


def test_a_lost_zookeeper_does_not_hide_the_brokers_that_it_named() -> None:
    now = [100.0]
    zookeeper = FakeZooKeeper(["http://one:1"])
    book = book_of(zookeeper, now)
    book.mark_unreachable(book.any())
    zookeeper.answers.clear()
    now[0] += RESOLVE_EVERY_S
    book.mark_unreachable(book.known[0])
    assert (book.any().url, book.any().url) == ("http://one:1", "http://one:1")
    assert zookeeper.asked == 2, "no further queries"


def test_of_concurrent_look_ups_one_asks_a_lost_zookeeper() -> None:
    now = [100.0]
    zookeeper = FakeZooKeeper()
    book = book_of(zookeeper, now)
    told: list[str] = []

    def ask() -> None:
        with pytest.raises(errors.Unavailable) as caught:
            book.any()
        told.append(caught.value.detail)

    class Waited:
        """A lock that is acquired after another thread's look-up has failed."""

        def __enter__(self) -> None:
            book._resolving = threading.Lock()
            now[0] += 5.0
            ask()
            now[0] += 5.0

        def __exit__(self, *fault: object) -> None: ...

    book._resolving = Waited()  # type: ignore[assignment]
    ask()
    assert (told, zookeeper.asked) == (["no ZooKeeper answers"] * 2, 1)


@pytest.mark.parametrize("mode", ["queue", "stream"])
def test_a_poll_reports_that_no_zookeeper_answers(mode: Literal["queue", "stream"], no_zookeeper: None) -> None:
    told = None
    with Consumer("t", bootstrap="zk://fake", mode=mode) as consumer:
        while told is None:  # a member's thread may make its first try after the end of a short poll
            try:
                assert consumer.poll(0.05) == []
            except errors.Unavailable as error:
                told = str(error)
    assert told == "no ZooKeeper answers"


def test_a_command_without_zookeeper_exits_as_without_a_broker(no_zookeeper: None) -> None:
    result = CliRunner().invoke(main, ["topic", "list", "--server", "zk://fake"])
    assert (result.exit_code, result.stderr) == (EXIT_UNREACHABLE, "portalmq: no ZooKeeper answers\n")


@pytest.fixture
def no_zookeeper(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not by a patch of ZooKeeperBootstrap: a thread that ends after the test would meet the real one.
    monkeypatch.setattr("portalmq.transport.cluster_metadata.zookeeper_of", lambda _: FakeZooKeeper())
    monkeypatch.setattr("portalmq.cli.session.REACH_TIMEOUT_S", 0.05)


def test_urls_show_the_zookeeper() -> None:
    assert ClusterMetadata("zk://u:secret@a:1/mq", lambda: 0.0).urls == ["zk://a:1/mq"]
