"""Certificates for tests, and a TLS front of a server that speaks plain TCP.

with TlsFront(port, "server") as front:
    connect("localhost", front.port)      # as the server at `port`, by TLS
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
from pathlib import Path
from types import TracebackType

CERTIFICATES = Path(__file__).parent / "certificates"


def pem(name: str) -> Path:
    return CERTIFICATES / f"{name}.pem"


def key(name: str) -> Path:
    return CERTIFICATES / f"{name}.key"


class TlsFront:
    """Forwards the server's output in records of the maximum size, with several of its answers in one."""

    def __init__(self, port: int, certificate: str, *, asks_for_certificate: bool = False) -> None:
        self._target = port
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=pem("authority"))
        self._context.load_cert_chain(pem(certificate), key(certificate))
        self._context.verify_mode = ssl.CERT_REQUIRED if asks_for_certificate else ssl.CERT_NONE
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.names_shown: list[str] = []

    def __enter__(self) -> TlsFront:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        with contextlib.suppress(OSError), self._context.wrap_socket(plain, server_side=True) as client:
            for field in (client.getpeercert() or {}).get("subject", ()):
                self.names_shown += [value for _, value in field]
            with socket.create_connection(("127.0.0.1", self._target), timeout=30) as server:
                while True:
                    ready = [client] if client.pending() else select.select([client, server], [], [])[0]
                    for end in ready:
                        data = end.recv(65_536)
                        if not data:
                            return
                        (server if end is client else client).sendall(data)
