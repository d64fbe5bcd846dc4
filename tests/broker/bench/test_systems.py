"""Servers of the benchmark: none outlives it, and none of another program is measured."""

from __future__ import annotations

import os
import signal
import stat
import time
from pathlib import Path

import click
import pytest

from portalmq.broker.bench import peers, systems
from portalmq.broker.bench.peers import PEERS, Nats, Nats3, Redis
from portalmq.broker.bench.systems import Site, System, running, version_in
from portalmq.system import start_of


def _program(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


def test_a_peer_without_its_server_or_its_client_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systems, "binary", lambda name: None)
    monkeypatch.setattr(systems, "find_spec", lambda name: None)
    assert Redis().left_out() == "no redis-server and no Python package redis"
    assert all(kind().left_out() for kind in PEERS)
    monkeypatch.setattr(systems, "binary", lambda name: f"/usr/sbin/{name}")
    assert Redis().left_out() == "no Python package redis"
    monkeypatch.setattr(systems, "find_spec", lambda name: object())
    assert Redis().left_out() == ""


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.3.0 bits=64", "7.0.15"),
        ("nats-server: v2.9.10", "2.9.10"),
        ("nothing known", ""),
    ],
)
def test_versions_are_read_from_what_servers_print(text: str, version: str) -> None:
    assert version_in(text) == version


@pytest.mark.parametrize(
    ("version", "promise"),
    [("2.9.10", "in the page cache, fsync every 2 minutes"), ("2.11.0", "on disk (sync_interval always)")],
)
def test_what_nats_promises_depends_on_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, promise: str
) -> None:
    _program(tmp_path, "nats-server", f"echo nats-server: v{version}")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert Nats().version() == version
    assert Nats().promise == promise
    assert Nats3().promise == f"{promise}, on a majority of 3"


class _Sleeping(System):
    name = "sleeping"

    def start(self, site: Site) -> None:
        site.spawn("sh", "-c", "sleep 600 & echo $! >child; wait")
        site.until(lambda: (site.directory / "child").exists() and (site.directory / "child").read_text())


def test_servers_their_children_and_their_directory_end_with_the_block(tmp_path: Path) -> None:
    seen: list[int] = []

    def interrupted() -> None:
        with running(_Sleeping(), tmp_path) as site:
            seen.extend([*site.pids(), int((site.directory / "child").read_text())])
            os.kill(seen[0], signal.SIGSTOP)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(seen) == 2
    while start_of(seen[1]) is not None:  # init reaps the child
        time.sleep(0.01)
    assert start_of(seen[0]) is None
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_ends_at_once_is_not_replaced_by_another_that_listens(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.spawn("sh", "-c", "echo the port is taken; exit 3")
    while not (tmp_path / "0.log").read_text():
        time.sleep(0.01)
    with pytest.raises(click.ClickException, match="ended with 3: the port is taken"):
        site.until(lambda: False)
    site.stop()


def test_redis_flushes_each_write_before_it_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _program(tmp_path / "bin", "redis-server", 'echo "$@"; sleep 600')
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")

    class Answering:
        def __init__(self, *_: object) -> None:
            self.redis = self

        def ping(self) -> bool:
            return bool((tmp_path / "0.log").read_text())

    monkeypatch.setattr(peers, "_RedisClient", Answering)
    site = Site(tmp_path)
    try:
        Redis().start(site)
        arguments = (tmp_path / "0.log").read_text()
        assert "--appendonly yes --appendfsync always" in arguments
        assert "--bind 127.0.0.1" in arguments
    finally:
        site.stop()
