"""The TLS files of a connection: trusted authorities, and the certificate to show. For clients, for commands that call
brokers, for Spark, and for every connection to ZooKeeper."""

from __future__ import annotations

import os
import ssl
from typing import Any, NamedTuple

File = str | os.PathLike[str]


class TlsFiles(NamedTuple):
    """PEM files of a TLS connection: the trusted authorities (None: the system's), and the certificate to show when
    asked. Without `key`, `cert` also holds the private key."""

    ca: File | None = None
    cert: File | None = None
    key: File | None = None

    def or_environment(self, ca: str, cert: str, key: str) -> TlsFiles:
        """Return a copy with missing files taken from these variables; a certificate and its key come from one source
        only."""
        shown = (self.cert, self.key) if self.cert or self.key else (os.environ.get(cert), os.environ.get(key))
        return TlsFiles(self.ca if self.ca is not None else os.environ.get(ca), *shown)

    def context(self, names: tuple[str, str, str]) -> ssl.SSLContext | None:
        """Return a context that checks and shows certificates; None if no file is given. Raises ValueError with the one
        of `names`, by which the user knows the files, whose file cannot be used."""
        if not any(self):
            return None
        named_ca, named_cert, named_key = names
        if self.key and not self.cert:
            raise ValueError(f"{named_key} needs {named_cert}: the certificate of that key")
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
        except OSError as fault:  # ssl.SSLError is a subclass
            raise ValueError(f"{named_ca}: {self.ca} is no file with certificates (PEM): {fault}") from None
        if self.cert:
            try:
                context.load_cert_chain(self.cert, self.key or None, _no_password)
            except (OSError, ValueError) as fault:
                named = ", ".join(str(file) for file in (self.cert, self.key) if file)
                raise ValueError(
                    f"{named_cert}: {named} is no certificate with its private key (PEM, {named_key}): {fault}"
                ) from None
        return context


def _no_password() -> str:
    raise ValueError("the private key asks for a password: give one that has none, readable for its user alone")


NO_FILES = TlsFiles()
TLS_NAMES = ("tls_ca", "tls_client_cert", "tls_client_key")


def context_of(given: TlsFiles) -> ssl.SSLContext | None:
    """Return the TLS context for connections to brokers, from the files given or named in the environment; None means
    the system's authorities alone. Raises ValueError if a file cannot be used."""
    return given.or_environment(*(f"PORTALMQ_{name}".upper() for name in TLS_NAMES)).context(TLS_NAMES)


def secure_handler(handler: Any, context: ssl.SSLContext) -> None:
    """Make a kazoo handler connect to ZooKeeper by TLS, with the server's name checked.

    kazoo's own TLS trusts every public authority beside the given one, and checks no name. It also polls the socket
    alone: an answer that arrived in the same TLS record as the previous one would stay unread in the buffer.
    """
    connect, select = handler.create_connection, handler.select

    def secured(*, address: tuple[str, int], hostname: str, timeout: float, **kazoos_own: Any) -> Any:
        plain = connect(address=address, timeout=timeout)
        try:
            plain.settimeout(timeout)
            return context.wrap_socket(plain, server_hostname=hostname)
        except BaseException:
            plain.close()
            raise

    def select_buffered(readers: list[Any], writers: list[Any], errors: list[Any], timeout: float | None = None) -> Any:
        buffered = [each for each in readers if isinstance(each, ssl.SSLSocket) and each.pending()]
        readable, writable, failed = select(readers, writers, errors, 0 if buffered else timeout)
        return readable + [each for each in buffered if each not in readable], writable, failed

    handler.create_connection, handler.select = secured, select_buffered
