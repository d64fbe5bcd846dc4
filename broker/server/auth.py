"""Authentication by one of the broker's secrets.

A secret is sent as `Authorization: Bearer <secret>`, or bare. Neither the duration of an answer nor a log line reveals
anything about a secret.
"""

from __future__ import annotations

from collections.abc import Iterable

from portalmq.broker.api.sessions import Access, Sessions
from portalmq.broker.cluster.exits import UsageError
from portalmq.broker.server.config import BrokerConfig
from portalmq.tokens import Tokens, is_loopback, tokens_in

_BEARER = b"bearer "


class Auth(Tokens):
    """Checks the `Authorization` header, and the sessions of browsers. Without configured secrets every caller is
    allowed. `readers`: secrets whose holders may only read."""

    def __init__(self, tokens: Iterable[str] = (), readers: Iterable[str] = ()) -> None:
        super().__init__(tokens)
        self._readers = Tokens(readers)
        self.needed = self.needed or self._readers.needed
        access: list[tuple[bytes, Access]] = [(digest, "read") for digest in self._readers.digests]
        self.sessions = Sessions([*access, *((digest, "all") for digest in self.digests)])

    def allows(self, authorization: str | None) -> bool:
        """Return whether the header's value (bytes decoded as Latin-1, as in WSGI) holds a known secret."""
        return self.access(authorization) is not None

    def access(self, authorization: str | None) -> Access | None:
        """Return what the secret in the header's value allows; None without a known one."""
        if not self.needed:
            return "all"
        if authorization is None:
            return None
        shown = authorization.encode("latin-1", "replace").strip()
        if shown[: len(_BEARER)].lower() == _BEARER:
            shown = shown[len(_BEARER) :].strip()
        if self.include(shown):
            return "all"
        return "read" if self._readers.needed and self._readers.include(shown) else None


def has_open_zookeeper(config: BrokerConfig) -> bool:
    """Return whether every client that reaches this broker's ZooKeeper can read the secrets in it."""
    return config.is_clustered and config.zookeeper_user is None


def auth_from(config: BrokerConfig) -> Auth:
    """Return the authentication for the settings.

    Raises UsageError when a token file cannot be read or holds no secret, and when a broker reachable from the network
    would be open to everyone, directly or through its ZooKeeper.
    """
    secrets = [config.secret] if config.secret else []
    readers: list[str] = []
    for file, known in ((config.token_file, secrets), (config.read_token_file, readers)):
        if file is not None:
            try:
                known += tokens_in(file)
            except ValueError as fault:
                raise UsageError(str(fault)) from None
    if not (secrets or readers) and not config.insecure and not is_loopback(config.host):
        raise UsageError(
            f"without a token the broker listens on this machine only, and {config.host} is reachable from others: "
            "give --token-file FILE (or --secret), or --insecure if everyone who reaches it may do everything"
        )
    if (
        (secrets or readers)
        and has_open_zookeeper(config)
        and not config.zookeeper_is_local
        and not config.insecure_zookeeper
    ):
        raise UsageError(
            f"a token does not protect from clients that reach ZooKeeper at {config.zookeeper}: without a user, they "
            "can read the brokers' credentials there. Give --zookeeper-user and --zookeeper-password @FILE, the same "
            "for every broker (stop them all first), or --insecure-zookeeper if only brokers reach it"
        )
    return Auth(secrets, readers)
