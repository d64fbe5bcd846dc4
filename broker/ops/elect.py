"""`portalmq elect`, `adopt` and `partitions`: manual operations, some of which may lose data.

This module is loaded for every `portalmq` command, so the imports for a run are inside the commands.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from portalmq.broker.cluster.exits import EX_UNAVAILABLE, EX_USAGE, StartupError, UsageError
from portalmq.broker.server.config import BrokerConfig, load_config

if TYPE_CHECKING:
    from portalmq.control_plane.catalog import Catalog

Command = TypeVar("Command", bound=Callable[..., Any])


def _in_zookeeper(command: Command) -> Command:
    """Add the options for ZooKeeper. Each may also be set in the environment and in portalmq.toml."""
    own_root = click.option(
        "--zookeeper-own-root", is_flag=True, default=None, help="the user owns the whole ZooKeeper, its root included"
    )
    command = own_root(command)
    for name, meaning in (
        ("zookeeper-tls-key", "private key of that certificate (PEM)"),
        ("zookeeper-tls-cert", "certificate chain (PEM) to show to ZooKeeper"),
        ("zookeeper-tls-ca", "authorities (PEM) to trust for ZooKeeper"),
        ("zookeeper-password", "password of the user that owns the nodes; @FILE reads it from a file"),
        ("zookeeper-user", "user that owns the nodes"),
        ("zookeeper", "host:port,host:port/chroot [PORTALMQ_ZOOKEEPER; default localhost:2181]"),
    ):
        command = click.option(f"--{name}", name.replace("-", "_"), help=meaning)(command)
    return command


@click.command(short_help="Elect a leader that is not in sync, and lose the records that it lacks.")
@click.argument("topic")
@click.argument("partition", type=click.IntRange(0))
@click.option("--unclean", is_flag=True, help="elect among replicas that are not in sync")
@click.option(
    "--i-accept-data-loss", "accepted", is_flag=True, help="records that only other replicas hold are lost for good"
)
@click.option("--broker", type=int, help="the new leader; default: the replica with most records")
@click.option("--cluster-secret-file", help="as the brokers' [PORTALMQ_CLUSTER_SECRET_FILE]")
@click.option("--tls-cert", help="the brokers' certificate, when they speak HTTPS [PORTALMQ_TLS_CERT]")
@click.option("--tls-key", help="its private key, where brokers ask for a certificate [PORTALMQ_TLS_KEY]")
@click.option("--tls-peer-ca", help="as the brokers', beside --tls-cert and --tls-key [PORTALMQ_TLS_PEER_CA]")
@_in_zookeeper
def elect(topic: str, partition: int, unclean: bool, accepted: bool, broker: int | None, **options: Any) -> None:
    """Make a replica that is not in sync the leader of a PARTITION of TOPIC that has none.

    Only when no in-sync replica will ever come back: records that the new leader does not hold are lost, acknowledged
    messages included. Refused while an in-sync replica is available.

    Example: portalmq elect orders 0 --unclean --i-accept-data-loss
    """
    with _reporting_errors():
        if not (unclean and accepted):
            raise UsageError(
                "this loses acknowledged messages. If no in-sync replica will come back, confirm it with "
                "--unclean --i-accept-data-loss"
            )
        # A certificate without its key is only trusted, not shown.
        alone = options.pop("tls_cert") if options["tls_key"] is None else None
        config = load_config(options)
        with _catalog(config) as catalog:
            _elect(catalog, config, Path(alone) if alone else None, topic, partition, broker)


def _elect(
    catalog: Catalog, config: BrokerConfig, tls_cert: Path | None, topic: str, partition: int, broker: int | None
) -> None:
    from portalmq.broker.cluster.peers import Peers, trusting_by_hand
    from portalmq.broker.cluster.unclean_election import elect as elect_unclean
    from portalmq.broker.server.config import cluster_secret_in
    from portalmq.control_plane.mirror import Mirror

    mirror = Mirror(catalog.plane)
    mirror.refresh()
    tls = trusting_by_hand(config, tls_cert)
    peers = Peers(lambda: mirror.brokers, cluster_secret_in(config) or catalog.cluster_secret(), tls=tls)
    try:
        elected = elect_unclean(catalog, peers, topic, partition, wanted=broker)
    finally:
        peers.close()
    for broker_id, log_end in sorted(elected.log_ends.items()):
        whole = f"damaged: {log_end.fault}" if log_end.fault else f"records up to {log_end.end}"
        click.echo(f"broker {broker_id}: {whole}, the last of epoch {log_end.last_epoch}", err=True)
    for broker_id, why in sorted(elected.silent.items()):
        click.echo(f"broker {broker_id}: {why}", err=True)
    click.echo(
        f"broker {elected.broker_id} leads {topic}/{partition} in epoch {elected.leader_epoch} with its records; "
        "records that only others had are lost"
    )


@click.command(short_help="Restore a lost ZooKeeper from the data directories.")
@click.option(
    "--data-dir",
    "directories",
    multiple=True,
    required=True,
    type=click.Path(path_type=Path),
    help="a broker's data directory; give those of all brokers",
)
@click.option("--replace-cluster", is_flag=True, help="take over a ZooKeeper that holds another, empty cluster")
@click.option("--i-accept-data-loss", "accepted", is_flag=True, help="go on although a directory is missing or damaged")
@_in_zookeeper
def adopt(directories: tuple[Path, ...], replace_cluster: bool, accepted: bool, **options: Any) -> None:
    """Write cluster, topics, partitions and schedules into an empty ZooKeeper, from the brokers' data directories.

    All brokers have to be stopped. With the directories of all of them no acknowledged message is lost. The names of
    producers were only in ZooKeeper: those that had been replaced are not fenced any more.

    Example: portalmq adopt --data-dir data/5000 --data-dir data/5001 --data-dir data/5002
    """
    with _reporting_errors():
        from portalmq.broker.server.adoption import write_back
        from portalmq.broker.server.adoption_reading import read_directories

        config = load_config(options)
        with ExitStack() as opened:
            adoption = read_directories(directories, opened)
            with _catalog(config) as catalog:
                messages = write_back(catalog, adoption, accept_loss=accepted, replace_cluster=replace_cluster)
        for sentence in messages:
            click.echo(sentence)
        click.echo("start the brokers again: they elect leaders among themselves", err=True)


@click.group()
def partitions() -> None:
    """Manage the partitions of a cluster."""


@partitions.command("rebalance")
@click.option("--dry-run", is_flag=True, help="show what would move, and change nothing")
@_in_zookeeper
def rebalance_leaders(dry_run: bool, **options: Any) -> None:
    """Spread leaders evenly over the brokers, for example after a returned broker is in sync again.

    Only leaders move, and only to in-sync replicas: no data is copied, and clients follow within a moment.

    Example: portalmq partitions rebalance --dry-run
    """
    with _reporting_errors():
        from portalmq.control_plane.controller import View, rebalance
        from portalmq.control_plane.mirror import Mirror
        from portalmq.control_plane.plane import Conflict

        with _catalog(load_config(options)) as catalog:
            mirror = Mirror(catalog.plane)
            mirror.refresh()
            moved = 0
            for change in rebalance(View(mirror.topics, mirror.partitions, mirror.brokers)):
                topic = mirror.topic_by_id(change.topic_id)
                before = mirror.partitions[change.topic_id, change.number].value.leader
                name = f"{topic.name if topic else change.topic_id}/{change.number}"
                try:
                    if not dry_run:
                        catalog.set_partition(change.topic_id, change.number, change.state, change.version)
                except Conflict:
                    click.echo(f"{name} has changed in the meantime, and is left unchanged", err=True)
                    continue
                moved += 1
                click.echo(f"{name}  broker {before} -> {change.state.leader}")
            click.echo(f"{moved} leaders {'would move' if dry_run else 'moved'}", err=True)


@contextmanager
def _reporting_errors() -> Iterator[None]:
    """Print errors as one sentence, and exit with their exit code."""
    from portalmq.errors import PortalMQError

    try:
        yield
    except StartupError as error:
        click.echo(f"portalmq: {error}", err=True)
        sys.exit(error.exit_code)
    except PortalMQError as error:
        click.echo(f"portalmq: {error}", err=True)
        sys.exit(EX_UNAVAILABLE if error.status == 503 else EX_USAGE)
    except ImportError as missing:
        click.echo(f"portalmq: {missing.name} is not installed: `pip install 'portalmq[broker]'`", err=True)
        sys.exit(EX_USAGE)


@contextmanager
def _catalog(config: BrokerConfig) -> Iterator[Catalog]:
    """Yield the catalog of the cluster in ZooKeeper."""
    if not config.is_clustered:
        raise UsageError("this command needs ZooKeeper: name it with --zookeeper HOST:PORT")
    from portalmq.broker.server.preflight import connected, not_admitted
    from portalmq.control_plane.catalog import Catalog
    from portalmq.control_plane.plane import PlaneRefused

    plane = connected(config)
    try:
        yield Catalog(plane)
    except PlaneRefused as refused:
        raise not_admitted(refused) from None
    finally:
        plane.close()
