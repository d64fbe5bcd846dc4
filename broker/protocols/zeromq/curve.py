"""Optional CURVE encryption, which admits only clients whose public keys are listed.

A client without a listed key fails in the handshake, before any frame is read. A key file is a certificate as
`zmq.auth.create_certificates` writes it (ZeroMQ's ZPL). The list is a directory of the clients' public keys, read at
start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

# The ZAP domain of requests for authentication.
DOMAIN = "portalmq"


class Curve:
    """The server's key and the clients' public keys."""

    def __init__(self, key_file: Path, clients: Path) -> None:
        """Raise ValueError for files without keys."""
        self._own = _own_keys(key_file)
        try:
            self.clients = len(zmq.auth.load_certificates(clients))
        except (OSError, ValueError) as fault:
            raise ValueError(f"the keys of clients in {clients} cannot be read: {fault}") from None
        if not self.clients:
            raise ValueError(f"{clients} holds no client's key: put the .key files of the allowed clients there")
        self._directory = clients
        self._authenticator: ThreadAuthenticator | None = None

    def start(self, context: zmq.Context[Any]) -> None:
        """Start to authenticate connections (ZAP) of this context."""
        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve(domain=DOMAIN, location=str(self._directory))
        self._authenticator = authenticator

    def secure(self, socket: zmq.Socket[bytes]) -> None:
        """Enable CURVE on a socket; call it before the socket is bound."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self._own
        socket.zap_domain = DOMAIN.encode()

    def stop(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None


class CurveClient:
    """A client's key, and the public key of the only server that it accepts."""

    def __init__(self, key_file: Path, server_key: Path) -> None:
        """Raise ValueError for files without keys."""
        self._own = _own_keys(key_file)
        self._server, _ = _keys_in(server_key)

    def secure(self, socket: zmq.Socket[bytes]) -> None:
        """Enable CURVE on a socket; call it before the socket is connected."""
        socket.curve_publickey, socket.curve_secretkey = self._own
        socket.curve_serverkey = self._server


def _own_keys(file: Path) -> tuple[bytes, bytes]:
    public, secret = _keys_in(file)
    if secret is None:
        raise ValueError(f"{file} holds only a public key: name the file that ends in .key_secret")
    return public, secret


def _keys_in(file: Path) -> tuple[bytes, bytes | None]:
    try:
        return zmq.auth.load_certificate(file)
    except (OSError, ValueError) as fault:
        raise ValueError(f"the key file {file} cannot be read: {fault}") from None
