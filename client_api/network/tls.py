"""The files of a connection by TLS: whose certificates are believed, and which one is shown. For clients, for commands
that call brokers, for Spark, and for all that call ZooKeeper."""

from __future__ import annotations

import os
import ssl
from typing import Any, NamedTuple

File = str | os.PathLike[str]


class TlsFiles(NamedTuple):
    """PEM files of a connection by TLS: whom to trust (None: the system's authorities), and what to show where a
    certificate is asked for. Without `key` its private key is in `cert`, too."""

    ca: File | None = None
    cert: File | None = None
    key: File | None = None

    def or_environment(self, ca: str, cert: str, key: str) -> TlsFiles:
        """With what is not named taken from these variables; a certificate and its key from one place only."""
        shown = (self.cert, self.key) if self.cert or self.key else (os.environ.get(cert), os.environ.get(key))
        return TlsFiles(self.ca if self.ca is not None else os.environ.get(ca), *shown)

    def context(self, names: tuple[str, str, str]) -> ssl.SSLContext | None:
        """What checks and shows certificates; None where no file is named. Raises ValueError with the one of `names`,
        which the user knows the files by, whose file cannot be used."""
        if not any(self):
            return None
        named_ca, named_cert, named_key = names
        if self.key and not self.cert:
            raise ValueError(f"{named_key} needs {named_cert}: the certificate of that key")
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
        except OSError as fault:  # ssl.SSLError is one
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
    """How connections to brokers are secured: by the files that are given, or those that the environment names; None
    for the system's authorities alone. Raises ValueError when a file cannot be used."""
    return given.or_environment(*(f"PORTALMQ_{name}".upper() for name in TLS_NAMES)).context(TLS_NAMES)


def secure_handler(handler: Any, context: ssl.SSLContext) -> None:
    """Have a handler of kazoo's connect to ZooKeeper by TLS, with the server's name checked.

    kazoo's own TLS trusts every public authority beside the given one, and checks no name. It also looks for news in
    the socket alone: an answer that came in the same TLS record as the one before would lie in the buffer unread.
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
