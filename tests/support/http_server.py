"""A broker's HTTP on a port of this process: real sockets, a broker made of dictionaries."""

from __future__ import annotations

from typing import Any

import gevent
from gevent import socket
from gevent.server import StreamServer
from support.fake_broker import FakeBroker

from portalmq.broker.api.app import create_app
from portalmq.broker.messages.metrics import Metrics
from portalmq.broker.server.auth import Auth
from portalmq.broker.server.config import BrokerConfig
from portalmq.broker.server.connections import Connections
from portalmq.broker.server.http.connection import HttpServer

BODY_BYTES_MAX = 100_000
WITHIN_S = 60.0


class Served:
    """One server; `tls` are the options of its listener."""

    def __init__(self, **tls: Any) -> None:
        self.broker = FakeBroker()
        self.metrics = Metrics("0")
        self.config = BrokerConfig(body_bytes_max=BODY_BYTES_MAX)
        self.app = create_app(self.broker, self.config, self.metrics, Auth())
        self.connections = Connections(100, 0)
        self.http = HttpServer(self.app.wsgi_app, self.connections, keepalive_s=WITHIN_S, body_timeout_s=WITHIN_S)
        self.listener = StreamServer(("127.0.0.1", 0), self.http.handle, **tls)
        self.listener.start()

    def connect(self) -> Any:
        client = socket.create_connection(("127.0.0.1", self.listener.server_port))
        client.settimeout(WITHIN_S)
        return client

    def exchange(self, *pieces: bytes) -> bytes:
        """Send the pieces on a connection of their own, and return everything up to its end."""
        with self.connect() as client:
            for piece in pieces:
                client.sendall(piece)
                gevent.sleep(0)
            return rest_of(client)

    def close(self) -> None:
        self.listener.close()


def rest_of(client: Any) -> bytes:
    received = b""
    while data := client.recv(65_536):
        received += data
    return received
