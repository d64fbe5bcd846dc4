"""Finding the brokers by ZooKeeper: `zk://host:port,host:port/chroot` stands for a list of broker URLs.

Read once, and again when none of the brokers known answers any more; in between, the brokers themselves tell who is
there. kazoo is needed for this alone, so it is imported here, and only when such a URL is used.
"""

from __future__ import annotations

import json
import re
from typing import Any

from portalmq.errors import Unavailable

SCHEME = "zk://"
BROKERS = "/brokers/ids"
CONNECT_WITHIN_S = 5.0
DEFAULT_PORT = 2181

_PLACE = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:(?P<port>[0-9]{1,5}))?\Z")


class ZooKeeperBootstrap:
    """A `zk://` URL. `user:password@` in front of the hosts are digest credentials, if the tree is closed to others."""

    def __init__(self, url: str) -> None:
        """Raises ValueError for one that names no server."""
        text = url.strip()
        if not text.startswith(SCHEME):
            raise ValueError(f"{url!r} does not begin with {SCHEME}")
        credentials, _, place = text.removeprefix(SCHEME).rpartition("@")
        hosts, _, chroot = place.partition("/")
        servers = [server.strip() for server in hosts.split(",") if server.strip()]
        if not servers or not all(_PLACE.match(server) for server in servers):
            raise ValueError(
                f"{SCHEME}{place!r} names no ZooKeeper; write for instance {SCHEME}localhost:{DEFAULT_PORT}"
            )
        self.hosts = ",".join(_with_port(server) for server in servers)
        self.chroot = f"/{chroot.strip('/')}" if chroot.strip("/") else ""
        self._credentials = credentials

    @property
    def url(self) -> str:
        """Without the credentials: it stands in errors."""
        return f"{SCHEME}{self.hosts}{self.chroot}"

    def broker_urls(self, timeout_s: float = CONNECT_WITHIN_S) -> list[str]:
        """The URLs of the brokers that have a session now.

        Raises Unavailable when no ZooKeeper answers, or knows no broker; ImportError, with what to do, without kazoo.
        """
        try:
            from kazoo.client import KazooClient
            from kazoo.exceptions import KazooException, NoNodeError
            from kazoo.handlers.threading import KazooTimeoutError
        except ImportError:
            raise ImportError(
                f"{SCHEME} needs kazoo, which is not installed: `pip install kazoo`, or name the brokers by http://"
            ) from None
        auth = [("digest", self._credentials)] if self._credentials else None
        # kazoo would look for a chroot first, which a closed tree shows to nobody; its brokers may be read.
        client = KazooClient(hosts=self.hosts, timeout=CONNECT_WITHIN_S, auth_data=auth, read_only=True)
        try:
            client.start(timeout=timeout_s)
            return self._registered(client, NoNodeError)
        except (KazooTimeoutError, KazooException) as fault:
            raise Unavailable(f"no ZooKeeper answers at {self.url}: {str(fault) or type(fault).__name__}") from fault
        finally:
            client.stop()
            client.close()

    def _registered(self, client: Any, missing: type[Exception]) -> list[str]:
        urls: list[str] = []
        try:
            brokers = f"{self.chroot}{BROKERS}"
            for broker_id in sorted(client.get_children(brokers), key=int):
                try:
                    urls.append(json.loads(client.get(f"{brokers}/{broker_id}")[0])["url"])
                except missing:
                    continue  # it went just now
        except missing:
            urls = []
        if not urls:
            raise Unavailable(f"no broker is registered in the ZooKeeper at {self.url}: start one, or check the chroot")
        return urls


def _with_port(server: str) -> str:
    return server if _PLACE.match(server) and server.rpartition(":")[2].isdigit() else f"{server}:{DEFAULT_PORT}"
