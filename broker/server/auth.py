"""Authentication by one of the broker's secrets.

A secret is sent as `Authorization: Bearer <secret>`, or bare. Only digests of the secrets are kept, and all are
compared in constant time, so neither the duration of an answer nor a log line reveals anything about a secret.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from portalmq.broker.cluster.exits import UsageError
from portalmq.broker.server.config import BrokerConfig, is_loopback

_BEARER = b"bearer "


class Auth:
    """Checks the `Authorization` header. Without configured secrets every caller is allowed."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._digests = tuple(_digest(secret.encode("utf-8")) for secret in secrets)
        self.needed = bool(self._digests)

    def allows(self, authorization: str | None) -> bool:
        """Return whether the header's value (bytes decoded as Latin-1, as in WSGI) holds a known secret."""
        if not self._digests:
            return True
        if authorization is None:
            return False
        shown = authorization.encode("latin-1", "replace").strip()
        if shown[: len(_BEARER)].lower() == _BEARER:
            shown = shown[len(_BEARER) :].strip()
        digest = _digest(shown)
        allowed = False
        for known in self._digests:
            allowed |= hmac.compare_digest(digest, known)
        return allowed


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def has_open_zookeeper(config: BrokerConfig) -> bool:
    """Return whether every client that reaches this broker's ZooKeeper can read the secrets in it."""
    return config.is_clustered and config.zookeeper_user is None


def auth_from(config: BrokerConfig) -> Auth:
    """Return the authentication for the settings.

    Raises UsageError when a token file cannot be read or holds no secret, and when a broker reachable from the network
    would be open to everyone, directly or through its ZooKeeper.
    """
    secrets = [config.secret] if config.secret else []
    if config.token_file is not None:
        try:
            lines = config.token_file.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as fault:
            raise UsageError(f"the token file {config.token_file} cannot be read: {fault}") from None
        listed = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not listed:
            raise UsageError(f"the token file {config.token_file} holds no secret: write one a line")
        secrets += listed
    if not secrets and not config.insecure and not is_loopback(config.host):
        raise UsageError(
            f"without a token the broker listens on this machine only, and {config.host} is reachable from others: "
            "give --token-file FILE (or --secret), or --insecure if everyone who reaches it may do everything"
        )
    if secrets and has_open_zookeeper(config) and not config.zookeeper_is_local and not config.insecure_zookeeper:
        raise UsageError(
            f"a token does not protect from clients that reach ZooKeeper at {config.zookeeper}: without a user, they "
            "can read the brokers' credentials there. Give --zookeeper-user and --zookeeper-password @FILE, the same "
            "for every broker (stop them all first), or --insecure-zookeeper if only brokers reach it"
        )
    return Auth(secrets)
