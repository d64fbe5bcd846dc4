"""Who may call: whoever shows one of the broker's secrets.

A secret comes as `Authorization: Bearer <secret>` or bare. Only digests of the secrets are kept, and every one of them
is compared in constant time, so neither an answer's duration nor a log line tells anything about a secret.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from portalmq.broker.cluster.exits import UsageError
from portalmq.broker.server.config import BrokerConfig, is_loopback

_BEARER = b"bearer "


class Auth:
    """Checks the `Authorization` header. Without any secret everyone is let in."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._digests = tuple(_digest(secret.encode("utf-8")) for secret in secrets)
        self.needed = bool(self._digests)

    def allows(self, authorization: str | None) -> bool:
        """True when the header's value (as WSGI gives it: bytes read as latin-1) shows a secret of ours."""
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
    """Whether whoever reaches this broker's ZooKeeper reads the secrets in it."""
    return config.is_clustered and config.zookeeper_user is None


def auth_from(config: BrokerConfig) -> Auth:
    """The check that the settings ask for.

    Raises UsageError when a token file cannot be read or holds no secret, and when a broker that the network can reach
    would be open to everyone, be it by way of its ZooKeeper.
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
            f"a token keeps nobody out who reaches ZooKeeper at {config.zookeeper}: without a user it shows everyone "
            "what brokers prove themselves with. Give --zookeeper-user and --zookeeper-password @FILE, the same for "
            "every broker (stop them all first), or --insecure-zookeeper if only brokers reach it"
        )
    return Auth(secrets)
