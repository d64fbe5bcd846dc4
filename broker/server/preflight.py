"""The check of ZooKeeper before the fork: does it answer, which cluster is it, and which of its brokers is this?

A child process asks and ends: kazoo, its threads and its session end with it, and the arbiter stays small. The arbiter
must not touch port and data directory before ZooKeeper has answered, and no id may be claimed before the directory is
locked. So there are two steps:

    arbiter                              child
    begin ------- fork ---------------->  opens a session, within 5 s or --zookeeper-wait-s
          <------ connected --------------
    (binds the port, locks the directory)
    join  ------- the store's identity ->   compares cluster ids, claims the broker id
          <------ cluster id, broker id ---

Either answer may be a refusal: a sentence and an exit code with which the broker does not start.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import urlsplit

import msgspec

from portalmq.broker.cluster.exits import EX_CANTCREAT, EX_SOFTWARE, EX_UNAVAILABLE, EX_USAGE, StartupError
from portalmq.broker.cluster.retry_budget import RetryBudget
from portalmq.broker.server.config import BrokerConfig
from portalmq.broker.storage.disk import StoreIdentity
from portalmq.system import die_with

if TYPE_CHECKING:
    from portalmq.control_plane.catalog import Catalog
    from portalmq.control_plane.plane import PlaneRefused
    from portalmq.control_plane.zookeeper import ZooKeeper

CONNECT_WITHIN_S = 5.0
# The longest time that the arbiter waits for an answer of the child, beyond the child's wait for ZooKeeper. The child's
# own limits are shorter.
ANSWER_WITHIN_S = 60.0
END_WITHIN_S = 1.0
POLL_S = 0.01
TAKEN_POLL_S = 0.25
PROBE_TIMEOUT_S = 1.0


class IdentityRequest(msgspec.Struct, frozen=True):
    """Asks for the cluster and the broker id of a data directory. `held` is None for a new one; `in_use` says whether
    it has partitions, or knows other brokers of its cluster; `url` is the URL of this broker."""

    held: StoreIdentity | None
    store_uuid: str
    in_use: bool
    url: str


class IdentityAnswer(msgspec.Struct, frozen=True, tag="joined"):
    """`left_s`: how long the rest of the start may still wait for ZooKeeper."""

    cluster_id: str
    broker_id: int
    left_s: float = 0.0


class Connected(msgspec.Struct, frozen=True, tag="connected"):
    pass


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    sentence: str
    exit_code: int


Reply = Connected | IdentityAnswer | Refused


class Preflight:
    """The arbiter's side of the check."""

    def __init__(self, child: int, connection: socket.socket, answer_within_s: float = ANSWER_WITHIN_S) -> None:
        self._child = child
        self._socket = connection
        self._answer_within_s = answer_within_s
        # How long the rest of the start may wait for ZooKeeper, once `join` has answered.
        self.left_s = 0.0

    @classmethod
    def begin(cls, config: BrokerConfig) -> Preflight:
        """Fork the child, and return when ZooKeeper has answered. Raises StartupError when it does not answer within
        `zookeeper_wait_s`, at least 5 s."""
        arbiter_end, child_end = socket.socketpair()
        arbiter = os.getpid()
        child = os.fork()
        if child == 0:
            arbiter_end.close()
            _run_child(config, child_end, arbiter)
        child_end.close()
        preflight = cls(child, arbiter_end, ANSWER_WITHIN_S + 2 * config.zookeeper_wait_s)
        try:
            preflight._read_line()
        except BaseException:
            preflight.close()
            raise
        return preflight

    def join(self, question: IdentityRequest) -> tuple[str, int]:
        """Return the cluster id and the broker id. Raises StartupError for a directory of another cluster or broker."""
        self._socket.sendall(msgspec.json.encode(question) + b"\n")
        reply = self._read_line()
        assert isinstance(reply, IdentityAnswer), reply
        self.left_s = reply.left_s
        return reply.cluster_id, reply.broker_id

    def close(self) -> None:
        """End the child, and reap it."""
        self._socket.close()
        deadline = time.monotonic() + END_WITHIN_S
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(self._child, os.WNOHANG) == (0, 0):
                if time.monotonic() > deadline:
                    os.kill(self._child, signal.SIGKILL)
                    os.waitpid(self._child, 0)
                    return
                time.sleep(POLL_S)

    def _read_line(self) -> Connected | IdentityAnswer:
        self._socket.settimeout(self._answer_within_s)
        try:
            raw = _read_line_from(self._socket)
        except TimeoutError:
            raw = b""
        if not raw:
            raise StartupError("the check of ZooKeeper ended without an answer", EX_SOFTWARE)
        reply: Reply = msgspec.json.decode(raw, type=Reply)
        if isinstance(reply, Refused):
            raise StartupError(reply.sentence, reply.exit_code)
        return reply


# --- the child -------------------------------------------------------------------------------------------------------


def _run_child(config: BrokerConfig, connection: socket.socket, arbiter: int) -> NoReturn:
    code = EX_SOFTWARE
    try:
        # The arbiter handles Ctrl-C; the child ends with it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        die_with(arbiter)
        # Errors are reported in the refusal.
        logging.disable(logging.ERROR)
        _answer_arbiter(config, connection)
        code = 0
    except BaseException as fault:  # noqa: BLE001 - the child must never go on as a second arbiter
        sys.excepthook(type(fault), fault, fault.__traceback__)
    finally:
        sys.stderr.flush()
        os._exit(code)


def _answer_arbiter(config: BrokerConfig, connection: socket.socket) -> None:
    from portalmq.control_plane.catalog import Catalog

    patience = patience_of(config)
    with contextlib.ExitStack() as stack:
        try:
            plane = patience(lambda: connected(config))
            stack.callback(plane.close)
            if config.zookeeper_auth:
                patience(lambda: close_tree(plane, patience_s=2 * config.session_timeout_ms / 1_000))
            _send(connection, Connected())
            raw = _read_line_from(connection)
            if not raw:
                return  # the arbiter could not start for another reason
            question = msgspec.json.decode(raw, type=IdentityRequest)
            # This child's own session is shorter than that of the broker that may have been killed.
            patience_s = 2 * max(plane.session_timeout_s, config.session_timeout_ms / 1_000)
            catalog = Catalog(plane)
            found = patience(lambda: joined(catalog, question, config.broker_id, patience_s=patience_s))
            _send(connection, msgspec.structs.replace(found, left_s=patience.left_s))
        except StartupError as refusal:
            _send(connection, Refused(str(refusal), refusal.exit_code))


def _send(connection: socket.socket, reply: Reply) -> None:
    connection.sendall(msgspec.json.encode(reply) + b"\n")


def _read_line_from(connection: socket.socket) -> bytes:
    """Return the line that the other side sent; b"" when it has ended."""
    with connection.makefile("rb") as lines:
        raw = lines.readline()
    return raw if raw.endswith(b"\n") else b""


def patience_of(config: BrokerConfig) -> RetryBudget:
    """Return a budget for waiting for ZooKeeper, which reports the wait once."""

    def tell(away: Exception, left_s: float) -> None:
        print(
            f"portalmq: {away}. Waiting for it, {left_s:.0f} s more (--zookeeper-wait-s)", file=sys.stderr, flush=True
        )

    def is_away(fault: Exception) -> bool:
        return isinstance(fault, StartupError) and fault.exit_code == EX_UNAVAILABLE

    return RetryBudget(config.zookeeper_wait_s, is_away, tell=tell)


def connected(config: BrokerConfig) -> ZooKeeper:
    """Open a session within 5 s. Raises StartupError with the exit code for the cause."""
    where = config.zookeeper.partition("/")[0]
    try:
        from portalmq.control_plane.plane import PlaneRefused, PlaneUnavailable

        plane = zookeeper_of(config, CONNECT_WITHIN_S / 2, closes=False)  # waits for twice this time
        plane.start()
    except ImportError as missing:
        raise StartupError(f"{missing.name} is not installed: `pip install 'portalmq[broker]'`", EX_USAGE) from None
    except ValueError as wrong:
        raise StartupError(str(wrong), EX_USAGE) from None
    except PlaneRefused as refused:
        raise not_admitted(refused) from None
    except PlaneUnavailable:
        raise StartupError(
            f"no ZooKeeper answers at {where}: start one with `portalmq zookeeper`, or name the one you have with "
            "--zookeeper HOST:PORT. `portalmq dev`, or `--zookeeper none`, runs one broker that needs none",
            EX_UNAVAILABLE,
        ) from None
    return plane


def not_admitted(refused: PlaneRefused) -> StartupError:
    """Return what to say to someone whose credentials ZooKeeper does not take, or who has shown none."""
    return StartupError(
        f"{refused}. Give --zookeeper-user and --zookeeper-password as its brokers do; for a cluster of `portalmq up`: "
        "--zookeeper-own-root --zookeeper-user portalmq --zookeeper-password @data/cluster/zookeeper.password "
        "(the file is in its --data-dir)",
        EX_USAGE,
    )


def zookeeper_of(config: BrokerConfig, session_timeout_s: float, *, closes: bool = True) -> ZooKeeper:
    """Return a session that is not started. Raises ValueError for wrong files of TLS."""
    from portalmq.control_plane.zookeeper import ZooKeeper
    from portalmq.control_plane.zookeeper.connection import Tls

    tls = Tls(config.zookeeper_tls_ca, config.zookeeper_tls_cert, config.zookeeper_tls_key)
    return ZooKeeper(
        config.zookeeper,
        session_timeout_s=session_timeout_s,
        auth=config.zookeeper_auth,
        tls=tls if any(tls) else None,
        owns_root=config.zookeeper_own_root,
        closes=closes,
    )


def close_tree(plane: ZooKeeper, *, patience_s: float) -> None:
    """Restrict an open tree to our user, and replace the secrets that others could read.

    Raises StartupError while brokers without credentials run, which would lose access: those of a tree whose top node
    is open. `patience_s` is for killed brokers, which stay registered until their sessions end.
    """
    from portalmq.control_plane.catalog import Catalog
    from portalmq.control_plane.state import BROKERS, CLUSTER_SECRET, RECEIPT_KEY

    deadline = time.monotonic() + patience_s
    with _startup_errors():
        while plane.is_open and (others := plane.children(BROKERS)):
            if time.monotonic() > deadline:
                raise StartupError(
                    f"ZooKeeper's nodes are open to everyone, and would be closed to the brokers that run without "
                    f"--zookeeper-user (ids {', '.join(others)}): stop all brokers, then start them all with it",
                    EX_USAGE,
                )
            time.sleep(TAKEN_POLL_S)
        catalog = Catalog(plane)
        catalog.note_exposed(plane.open_to_others(RECEIPT_KEY, CLUSTER_SECRET))
        plane.close_to_others()
        if not catalog.renew_exposed():
            print(
                "portalmq: others could read the cluster's secret in ZooKeeper, and running brokers use it: it is "
                "replaced when a broker starts while no other one runs",
                file=sys.stderr,
            )


def joined(catalog: Catalog, question: IdentityRequest, wanted: int | None, *, patience_s: float) -> IdentityAnswer:
    """Return the cluster and the broker id of a data directory. Raises StartupError on a mismatch.

    `patience_s` is for a killed broker, which stays registered until its session ends.
    """
    with _startup_errors():
        cluster_id = _cluster_of(catalog, question)
        held = question.held
        if held is not None and wanted not in (None, held.broker_id):
            raise StartupError(
                f"the data directory is of broker {held.broker_id}, and --broker-id says {wanted}: "
                "leave the option away, or choose another --data-dir",
                EX_CANTCREAT,
            )
        return IdentityAnswer(cluster_id, _claimed(catalog, question, held.broker_id if held else wanted, patience_s))


@contextlib.contextmanager
def _startup_errors() -> Iterator[None]:
    """Turn errors of the control plane into StartupError. Only EX_UNAVAILABLE is worth a retry."""
    from portalmq.control_plane.plane import PlaneError, PlaneRefused
    from portalmq.errors import Unavailable

    try:
        yield
    except PlaneRefused as refused:
        raise not_admitted(refused) from None
    except Unavailable as away:
        raise StartupError(f"ZooKeeper stopped answering: {away}", EX_UNAVAILABLE) from None
    except PlaneError as fault:
        raise StartupError(str(fault), EX_CANTCREAT) from None


def _cluster_of(catalog: Catalog, question: IdentityRequest) -> str:
    """Return the cluster id. A new directory joins ZooKeeper's cluster; one with an id must match it."""
    from portalmq.control_plane.locks import LockTable

    catalog.plane.sync()
    found, held = catalog.find_cluster_id(), question.held
    if found is not None:
        _check_adopted(found)
    if held is None:
        return found or _check_adopted(catalog.cluster_id())
    if found is None and question.in_use:
        raise StartupError(
            f"the data directory is in use in cluster {held.cluster_id}, and ZooKeeper knows no cluster at all. "
            "Was it wiped, or is it another one, or another chroot? Name the right one with --zookeeper; or, when what "
            "it held is lost, write it back from the data directories with `portalmq adopt`",
            EX_CANTCREAT,
        )
    if found is None:  # an emptied ZooKeeper may have given out numbers: they go on from the time, as in an adoption
        now_us = time.time_ns() // 1_000
        LockTable(catalog.plane).reserve_tokens(now_us // 1_000)
        catalog.reserve_producer_ids(now_us)
        found = _check_adopted(catalog.cluster_id(held.cluster_id))
    if found != held.cluster_id:
        raise StartupError(
            f"the data directory is of cluster {held.cluster_id}, and ZooKeeper of cluster {found}: name the right "
            "ZooKeeper, choose another --data-dir, or move the data into this cluster on purpose with `portalmq adopt`",
            EX_CANTCREAT,
        )
    return found


def _check_adopted(cluster_id: str) -> str:
    """Return the id that ZooKeeper has. Raises StartupError while an adoption is under way: it is none then."""
    from portalmq.control_plane.cluster import ADOPTING

    if cluster_id.startswith(ADOPTING):
        raise StartupError(
            "`portalmq adopt` is writing ZooKeeper's content back, or was interrupted: let it end, or repeat it, and "
            "start the brokers then",
            EX_CANTCREAT,
        )
    return cluster_id


def _claimed(catalog: Catalog, question: IdentityRequest, wanted: int | None, patience_s: float) -> int:
    from portalmq.control_plane.catalog import BrokerIdTaken

    deadline = time.monotonic() + patience_s
    waiting = False
    while True:
        try:
            return catalog.claim_broker_id(question.store_uuid, wanted)
        except BrokerIdTaken as taken:
            # No other broker can listen at this broker's own URL.
            if (taken.url != question.url and _answers(taken.url)) or time.monotonic() > deadline:
                raise StartupError(
                    f"{taken}: choose another --broker-id, or stop that broker first", EX_CANTCREAT
                ) from None
            if not waiting:
                print(f"portalmq: {taken}, and does not answer: waiting for its session to end", file=sys.stderr)
            waiting = True
        time.sleep(TAKEN_POLL_S)


def _answers(url: str) -> bool:
    parts = urlsplit(url)
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=PROBE_TIMEOUT_S)
    try:
        if parts.scheme == "https":
            connection.connect()  # a listening port counts as alive
        else:
            connection.request("GET", "/livez")
            connection.getresponse()
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()
    return True
