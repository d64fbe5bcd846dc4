"""Brokers from ZooKeeper: `zk://host:port,host:port/chroot` stands for a list of broker URLs.

ZooKeeper is read once, and again if no known broker answers; in between, the brokers themselves report the cluster.
Only this needs kazoo, so kazoo is imported here, when such a URL is used.

Options follow the chroot, with the names of the brokers' settings; @ reads a password from a file:

    zk://zk1:2281,zk2:2281/portalmq?zookeeper_tls_ca=FILE&zookeeper_tls_cert=FILE&zookeeper_tls_key=FILE
                                    &zookeeper_user=NAME&zookeeper_password=@FILE

PORTALMQ_ZOOKEEPER_TLS_CA, _CERT and _KEY may name the TLS files instead, as for brokers.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from portalmq.errors import Unavailable
from portalmq.network.tls import TlsFiles, secure_handler

SCHEME = "zk://"
BROKERS = "/brokers/ids"
CONNECT_WITHIN_S = 5.0
DEFAULT_PORT = 2181
TLS = ("zookeeper_tls_ca", "zookeeper_tls_cert", "zookeeper_tls_key")
USER, PASSWORD = "zookeeper_user", "zookeeper_password"

_PLACE = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:(?P<port>[0-9]{1,5}))?\Z")


class ZooKeeperBootstrap:
    """A `zk://` URL. `user:password@` before the hosts are digest credentials, for a tree that is closed to others."""

    def __init__(self, url: str) -> None:
        """Parse the URL. Raises ValueError if it names no server, or files that cannot be used."""
        text = url.strip()
        if not text.startswith(SCHEME):
            raise ValueError(f"{url!r} does not begin with {SCHEME}")
        # A password may contain a question mark, and a file name an @.
        text, mark, query = text.partition("?zookeeper_")
        credentials, _, place = text.removeprefix(SCHEME).rpartition("@")
        hosts, _, chroot = place.partition("/")
        servers = [server.strip() for server in hosts.split(",") if server.strip()]
        if not servers or not all(_PLACE.match(server) for server in servers):
            raise ValueError(
                f"{SCHEME}{place!r} names no ZooKeeper; write for instance {SCHEME}localhost:{DEFAULT_PORT}"
            )
        self.hosts = ",".join(_with_port(server) for server in servers)
        self.chroot = f"/{chroot.strip('/')}" if chroot.strip("/") else ""
        options = _options(f"zookeeper_{query}" if mark else "")
        self._credentials = _credentials(credentials, options)
        files = TlsFiles(*(options.get(name) for name in TLS))
        self._tls = files.or_environment(*(f"PORTALMQ_{name}".upper() for name in TLS)).context(TLS)

    @property
    def url(self) -> str:
        """The URL without credentials, for error messages."""
        return f"{SCHEME}{self.hosts}{self.chroot}"

    def broker_urls(self, timeout_s: float = CONNECT_WITHIN_S) -> list[str]:
        """Return the URLs of the brokers that have a session now.

        Raises Unavailable if no ZooKeeper answers or it has no broker; ImportError, which says what to install, without
        kazoo.
        """
        try:
            from kazoo.client import KazooClient
            from kazoo.exceptions import KazooException, NoAuthError, NoNodeError
            from kazoo.handlers.threading import KazooTimeoutError, SequentialThreadingHandler
        except ImportError:
            raise ImportError(
                f"{SCHEME} needs kazoo, which is not installed: `pip install kazoo`, or name the brokers by http://"
            ) from None
        auth = [("digest", self._credentials)] if self._credentials else None
        handler = SequentialThreadingHandler()
        if self._tls is not None:
            secure_handler(handler, self._tls)
        # Without a chroot, as kazoo would check that it exists, which a closed tree does not allow; its brokers are
        # readable.
        client = KazooClient(
            hosts=self.hosts, timeout=CONNECT_WITHIN_S, auth_data=auth, read_only=True, handler=handler
        )
        try:
            client.start(timeout=timeout_s)
            return self._registered(client, NoNodeError)
        except NoAuthError as fault:
            raise Unavailable(
                f"ZooKeeper at {self.url} shows its brokers to its user alone: give {USER} and {PASSWORD}, as in "
                f"{self.url}?{USER}=NAME&{PASSWORD}=@FILE"
            ) from fault
        except (KazooTimeoutError, KazooException) as fault:
            raise Unavailable(
                f"no ZooKeeper answers at {self.url} {self._transport_text}: {str(fault) or type(fault).__name__}",
                zookeeper=self.url,
            ) from fault
        finally:
            client.stop()
            client.close()

    @property
    def _transport_text(self) -> str:
        if self._tls is not None:
            return "by TLS (is it a secureClientPort, and are the certificates the right ones?)"
        return f"without TLS (for a secureClientPort name its authority: PORTALMQ_{TLS[0].upper()}, or ?{TLS[0]}=FILE)"

    def _registered(self, client: Any, missing: type[Exception]) -> list[str]:
        urls: list[str] = []
        try:
            brokers = f"{self.chroot}{BROKERS}"
            for broker_id in sorted(client.get_children(brokers), key=int):
                try:
                    urls.append(json.loads(client.get(f"{brokers}/{broker_id}")[0])["url"])
                except missing:
                    continue  # its session has just ended
        except missing:
            urls = []
        if not urls:
            raise Unavailable(
                f"no broker is registered in the ZooKeeper at {self.url}: start one, or check the chroot",
                zookeeper=self.url,
            )
        return urls


def _with_port(server: str) -> str:
    return server if _PLACE.match(server) and server.rpartition(":")[2].isdigit() else f"{server}:{DEFAULT_PORT}"


def _options(query: str) -> dict[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    known = (*TLS, USER, PASSWORD)
    for name, value in options.items():
        if name not in known or not value:
            raise ValueError(f"{name!r} behind a {SCHEME} URL has no meaning, or no value: it takes {', '.join(known)}")
    return options


def _credentials(in_front: str, options: dict[str, str]) -> str:
    user, password = options.get(USER), options.get(PASSWORD)
    if (user is None) != (password is None) or (user is not None and in_front):
        raise ValueError(
            f"{USER} and {PASSWORD} go together, or user:password@ in front of the hosts: give one of them"
        )
    if user is None or password is None:
        return in_front
    if password.startswith("@"):
        try:
            password = Path(password[1:]).read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as fault:
            raise ValueError(f"{PASSWORD}: {password[1:]} cannot be read: {fault}") from None
    return f"{user}:{password}"
