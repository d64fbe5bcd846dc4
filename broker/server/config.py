"""The settings of a broker, with units, defaults and sources.

The sources of a setting, in this order: command-line option, `PORTALMQ_<NAME>` in the environment, `portalmq.toml` in
the working directory (or `--config FILE`), default. All four are derived from the fields of `BrokerConfig`, so a new
setting is one new field. This module is imported before the fork and stays light.
"""

# ruff: noqa: RUF009 - `_setting` makes a dataclasses.field
from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from portalmq.broker.cluster.exits import UsageError
from portalmq.tokens import is_loopback

ENVIRONMENT_PREFIX = "PORTALMQ_"
CONFIG_FILE = "portalmq.toml"
MIB = 1024 * 1024
SECRET_LENGTH_MIN = 16

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


def _setting(default: Any, meaning: str, *, at_least: float | None = None, secret: bool = False) -> Any:
    if secret:
        meaning += "; @FILE reads it from a file: options are visible to every user in the list of processes"
    return field(default=default, repr=not secret, metadata={"help": meaning, "at_least": at_least})


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """Settings of one broker process. Units are in the names; a size is in bytes, a count has no unit."""

    host: str = _setting("127.0.0.1", "address to listen on")
    port: int = _setting(5000, "port to listen on; 0 takes a free one", at_least=0)
    data_dir: Path = _setting(Path("data/{port}"), "directory of the messages; {port} is replaced by the port")
    zookeeper: str = _setting(
        "localhost:2181", "ZooKeeper as host:port,host:port/chroot, or 'none' for a single broker"
    )
    zookeeper_wait_s: float = _setting(
        20.0, "how long a starting broker waits for ZooKeeper in all; then it ends with exit code 69", at_least=0
    )
    zookeeper_user: str | None = _setting(
        None, "user that alone may access ZooKeeper's nodes; needs a chroot, or zookeeper_own_root"
    )
    zookeeper_password: str | None = _setting(None, "password of that user", secret=True)
    zookeeper_own_root: bool = _setting(False, "that user owns the whole ZooKeeper, its root included")
    zookeeper_tls_ca: Path | None = _setting(None, "authorities (PEM) to trust for ZooKeeper; enables TLS to it")
    zookeeper_tls_cert: Path | None = _setting(None, "certificate chain (PEM) to show to ZooKeeper")
    zookeeper_tls_key: Path | None = _setting(None, "private key of that certificate (PEM)")
    insecure_zookeeper: bool = _setting(
        False, "allow tokens although every client that reaches ZooKeeper can read the cluster's secret"
    )
    session_timeout_ms: int = _setting(
        6_000, "how long ZooKeeper considers a silent broker alive; see replica_lag_ms", at_least=1_000
    )
    broker_id: int | None = _setting(
        None, "number of this broker, kept in the data directory; default: the smallest free one", at_least=0
    )
    advertised_url: str | None = _setting(None, "URL that clients reach this broker at (default http://HOST:PORT)")
    allowed_hosts: str | None = _setting(
        None, "further host names, separated by commas, by which clients may call a broker without a token"
    )
    token_file: Path | None = _setting(None, "file with one secret per line; calls must carry one of them")
    read_token_file: Path | None = _setting(
        None, "file with one secret per line, whose holders may read everything and change nothing"
    )
    secret: str | None = _setting(None, "one secret, instead of a token file", secret=True)
    no_confirm: bool = _setting(False, "MiniQ's GET /message removes the message from the queue without a confirmation")
    insecure: bool = _setting(False, "allow an address other than loopback without a token")
    cluster_secret_file: Path | None = _setting(
        None, "file with the secret that brokers show to each other; default: one generated and kept in ZooKeeper"
    )
    tls_cert: Path | None = _setting(None, "certificate chain (PEM); enables HTTPS")
    tls_key: Path | None = _setting(None, "private key of the certificate (PEM)")
    tls_client_ca: Path | None = _setting(None, "authorities (PEM) of which every client must show a certificate")
    tls_peer_ca: Path | None = _setting(
        None, "authorities (PEM) of other brokers' certificates; default: those in tls_cert"
    )
    log_format: LogFormat = _setting("text", "format of the log on stderr")
    log_level: LogLevel = _setting("info", "least severity that is logged")

    auto_create_topics: bool = _setting(True, "create a topic when it is first used")
    default_replication_factor: int = _setting(3, "replicas of a topic created without a number", at_least=1)

    topics_max: int = _setting(10_000, "most topics of the cluster; more are refused with 429", at_least=1)
    partitions_max: int = _setting(
        4_000, "most replicas of partitions for each broker, on average; more are refused with 429", at_least=1
    )
    groups_max: int = _setting(10_000, "most groups of the cluster; more are refused with 429", at_least=1)

    replica_lag_ms: int = _setting(3_000, "how long a replica may lag before it is out of sync", at_least=500)
    fetch_wait_ms: int = _setting(500, "how long a follower's fetch waits for new records", at_least=10)
    fetch_bytes_max: int = _setting(4 * MIB, "most bytes of one fetch, over all partitions", at_least=64 * 1024)

    body_bytes_max: int = _setting(8 * MIB, "largest request body", at_least=1024)
    body_bytes_in_flight_max: int = _setting(
        64 * MIB, "most bytes of all bodies being read or processed; beyond that 429", at_least=64 * 1024
    )
    answer_bytes_in_flight_max: int = _setting(
        64 * MIB, "most bytes of all answers with messages not sent yet; beyond that 429", at_least=64 * 1024
    )
    body_timeout_s: float = _setting(
        30.0,
        "longest pause of a client within a request or an answer; a body may take as long, plus 1 s for each 64 KiB",
        at_least=0.1,
    )
    keepalive_s: int = _setting(75, "how long an idle connection is kept", at_least=1)
    worker_connections: int = _setting(10_000, "most connections at a time", at_least=10)
    connections_per_address_max: int = _setting(
        6_000, "most connections of one address at a time; 0 for no limit", at_least=0
    )
    connections_per_address_loopback: bool = _setting(
        False, "limit this machine's own connections too; not with a proxy on it"
    )
    parked_receives_max: int = _setting(5_000, "most waiting calls at a time; more are answered 429", at_least=1)
    drain_timeout_s: float = _setting(10.0, "how long running calls may take after SIGTERM", at_least=0.1)

    storage_threads: int = _setting(4, "native threads that write to disk", at_least=1)
    disk_low_water_bytes: int = _setting(256 * MIB, "free space below which produce is answered 507", at_least=0)

    def __post_init__(self) -> None:
        for each in fields(self):
            least, value = each.metadata["at_least"], getattr(self, each.name)
            if least is not None and value is not None and value < least:
                raise UsageError(f"{each.name} is {value}, but must be at least {least:g}")
        if self.port > 65_535:
            raise UsageError(f"port is {self.port}, but must be at most 65535")
        for name, other in (
            ("tls_cert", "tls_key"),
            ("zookeeper_user", "zookeeper_password"),
            ("zookeeper_tls_cert", "zookeeper_tls_key"),
        ):
            if (getattr(self, name) is None) != (getattr(self, other) is None):
                raise UsageError(f"{name} and {other} go together: give both, or neither")
        if self.tls_cert is None and (self.tls_client_ca or self.tls_peer_ca):
            raise UsageError("tls_client_ca and tls_peer_ca need tls_cert and tls_key: there is no TLS without them")
        if self.is_clustered:
            needs_chroot = self.zookeeper_user is not None and not self.zookeeper_own_root
            check_zookeeper_hosts(self.zookeeper, needs_chroot=needs_chroot)
        if self.advertised_url is not None:
            check_url(self.advertised_url)
        if self.parked_receives_max >= self.worker_connections:
            raise UsageError(
                "parked_receives_max must be below worker_connections, or waiting calls shut out all others"
            )

    @property
    def is_clustered(self) -> bool:
        """True when this broker is part of a cluster, with ZooKeeper."""
        return self.zookeeper.strip().lower() != "none"

    @property
    def names_allowed(self) -> list[str]:
        """The names in `allowed_hosts`."""
        return [name.strip() for name in (self.allowed_hosts or "").split(",") if name.strip()]

    @property
    def zookeeper_auth(self) -> tuple[str, str] | None:
        if self.zookeeper_user is None or self.zookeeper_password is None:
            return None
        return self.zookeeper_user, self.zookeeper_password

    @property
    def shown_to_brokers(self) -> tuple[Path, Path] | None:
        """The certificate and key that this broker shows to other brokers that ask for one. They may ask before it asks
        itself, while the setting is changed one broker at a time."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return self.tls_cert, self.tls_key

    @property
    def zookeeper_is_local(self) -> bool:
        """True when all ZooKeeper servers are reachable from this machine only."""
        places = self.zookeeper.partition("/")[0].split(",")
        return all(is_loopback(place.strip().rpartition(":")[0].strip("[]")) for place in places)

    @property
    def url(self) -> str:
        """The URL at which clients reach this broker."""
        if self.advertised_url:
            return self.advertised_url.rstrip("/")
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls_cert else 'http'}://{host}:{self.port}"

    @property
    def data_directory(self) -> Path:
        """`data_dir` with {port} replaced."""
        return Path(str(self.data_dir).replace("{port}", str(self.port)))


def check_zookeeper_hosts(hosts: str, *, needs_chroot: bool = False) -> None:
    """Raise UsageError when `hosts` is not an address of ZooKeeper."""
    places, slash, chroot = hosts.partition("/")
    for place in places.split(","):
        host, _, port = place.strip().rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65_536:
            raise UsageError(f"zookeeper is {hosts!r}, but must be HOST:PORT,HOST:PORT/CHROOT, or 'none'")
    if slash and not all(chroot.split("/")):
        raise UsageError(f"zookeeper is {hosts!r}: the chroot behind the hosts must be a path like /portalmq")
    if needs_chroot and not chroot:
        raise UsageError(f"zookeeper_user protects a chroot: write --zookeeper {hosts.rstrip('/')}/portalmq")


def check_url(url: str) -> None:
    """Raise UsageError when `url` is not a plain URL of a broker."""
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise UsageError("advertised_url must have no user, password, query or fragment: secrets go into a token file")
    try:
        named = bool(parts.hostname) and parts.port != 0
    except ValueError:
        named = False
    if parts.scheme not in {"http", "https"} or not named or any(character.isspace() for character in url):
        raise UsageError(f"advertised_url is {url!r}, but must be like http://broker-1.example:5000")


def cluster_secret_in(config: BrokerConfig) -> str | None:
    """Return the secret in `cluster_secret_file`, None without the setting. Raises UsageError for a bad file."""
    if config.cluster_secret_file is None:
        return None
    secret = _text_in(config.cluster_secret_file, f"the cluster's secret in {config.cluster_secret_file}")
    if len(secret) < SECRET_LENGTH_MIN:
        raise UsageError(
            f"the cluster's secret in {config.cluster_secret_file} has {len(secret)} characters, and needs"
            f" {SECRET_LENGTH_MIN} at least: use the output of `openssl rand -hex 32`, for instance, on every broker"
        )
    return secret


def _text_in(file: Path, what: str) -> str:
    """Return the text of a file. Raises UsageError that names `what`."""
    try:
        return file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as fault:
        raise UsageError(f"{what} cannot be read: {fault}") from None


def _one_of(words: tuple[str, ...]) -> tuple[Callable[[str], Any], str]:
    return {word: word for word in words}.__getitem__, " or ".join(words)


_BOOLEANS = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)

# By the annotation of a field: the parser of its text, which raises ValueError or KeyError, and what the text must be.
READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "str": (str, "a text"),
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "bool": (lambda text: _BOOLEANS[text.strip().lower()], "true or false"),
    "Path": (Path, "a path"),
    "LogFormat": _one_of(get_args(LogFormat)),
    "LogLevel": _one_of(get_args(LogLevel)),
}

SETTINGS = {each.name: each for each in fields(BrokerConfig)}


def read_setting(name: str, value: Any, source: str) -> Any:
    """Return the value of a setting in its type. Text is parsed; a TOML value must have the right type already. Raises
    UsageError."""
    read, wanted = READERS[str(SETTINGS[name].type).removesuffix(" | None")]
    try:
        if not isinstance(value, str | int | float):
            raise ValueError  # a list or a date of TOML
        return read(str(value))
    except (KeyError, ValueError):
        raise UsageError(f"{source}: {name} is {value!r}, but must be {wanted}") from None


def load_config(
    options: Mapping[str, Any], *, environ: Mapping[str, str] | None = None, file: Path | None = None
) -> BrokerConfig:
    """Return the settings from `options` (None: not given), the environment, the file and the defaults, in this order.

    Raises UsageError with the name and the source of a wrong setting.
    """
    environ = os.environ if environ is None else environ
    values = _from_file(file)
    for name in SETTINGS:
        variable = ENVIRONMENT_PREFIX + name.upper()
        if environ.get(variable):
            values[name] = read_setting(name, environ[variable], variable)
    for name, value in options.items():
        if value is not None:
            option = "PORT" if name == "port" else "--" + name.replace("_", "-")
            if isinstance(value, str) and not SETTINGS[name].repr:
                if not value:
                    raise UsageError(f"{option} is empty: give the secret, or @FILE, or leave {option} out")
                if value.startswith("@"):
                    value = _secret_in(Path(value[1:]), option)
            values[name] = read_setting(name, value, option) if isinstance(value, str) else value
    return BrokerConfig(**values)


def _secret_in(file: Path, option: str) -> str:
    """Return the only line of the file. Raises UsageError."""
    secret = _text_in(file, f"{option}: {file}")
    if not secret or "\n" in secret:
        raise UsageError(f"{option}: {file} must hold one line, the secret")
    return secret


def _from_file(file: Path | None) -> dict[str, Any]:
    path = file or Path(CONFIG_FILE)
    if file is None and not path.exists():
        return {}
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as fault:
        raise UsageError(f"{path} cannot be read as TOML: {fault}") from None
    values = {}
    for key, value in document.items():
        if isinstance(value, dict):  # a table belongs to another command
            continue
        name = key.replace("-", "_")
        if name not in SETTINGS:
            near = difflib.get_close_matches(name, SETTINGS, n=1)
            raise UsageError(f"{path}: there is no setting {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        values[name] = read_setting(name, value, str(path))
    return values
