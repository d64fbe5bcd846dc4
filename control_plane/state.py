"""The content of the control plane: the tree, its paths, and the state in each node.

    /
    |-- cluster_id                    text, created once
    |-- receipt_key                   32 random bytes, created once; receipts are signed with it
    |-- cluster_secret                32 random bytes, created once; brokers show it to each other
    |-- exposed_secrets               empty: other users could read these two; replaced once no broker uses them
    |-- brokers/ids/<broker id>       BrokerState, ephemeral
    |-- brokers/stores/<broker id>    StoreState: the data directory that has this id
    |-- controller                    ControllerState, ephemeral
    |-- controller_epoch              its version is the epoch: each election sets it once
    |-- topics/<topic>                TopicState
    |-- partitions/<topic id>         the topic's name
    |   `-- <partition>               PartitionState, changed only by compare-and-set of its version
    |-- deleted/<topic id>            Tombstone: the permission to remove the topic's files
    |   `-- <broker id>               empty: this broker has removed them
    |-- groups/<group>                GroupState
    |-- streams/<group id>            a stream group's membership, and copies of its offsets: stream_groups.py
    |-- producer_ids                  ProducerIds: the first id no broker has taken yet
    |-- producers/<producer name>     ProducerState
    |-- schedules/<schedule>          ScheduleState: schedules.py
    |-- locks/<lock>                  LockState: locks.py
    `-- lock_floor                    LockFloor: every fencing token up to this one has been issued

Partitions are under the topic's id, not its name: versions restart at 0 when a topic is deleted and created again, and
a late compare-and-set for the old topic must not match the new one.

No message body is stored here. All is readable JSON; decoding ignores fields that a newer broker added.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

import msgspec

from portalmq.errors import InvalidRequest
from portalmq.wire import GroupConfig, TopicConfig

CLUSTER_ID = "/cluster_id"
RECEIPT_KEY = "/receipt_key"
CLUSTER_SECRET = "/cluster_secret"
EXPOSED_SECRETS = "/exposed_secrets"
BROKERS = "/brokers/ids"
STORES = "/brokers/stores"
CONTROLLER = "/controller"
CONTROLLER_EPOCH = "/controller_epoch"
TOPICS = "/topics"
PARTITIONS = "/partitions"
DELETED = "/deleted"
GROUPS = "/groups"
PRODUCER_IDS = "/producer_ids"
PRODUCERS = "/producers"


def broker_path(broker_id: int) -> str:
    return f"{BROKERS}/{broker_id}"


def store_path(broker_id: int) -> str:
    return f"{STORES}/{broker_id}"


def topic_path(name: str) -> str:
    return f"{TOPICS}/{name}"


def topic_partitions_path(topic_id: str) -> str:
    return f"{PARTITIONS}/{topic_id}"


def partition_path(topic_id: str, partition: int) -> str:
    return f"{PARTITIONS}/{topic_id}/{partition}"


def tombstone_path(topic_id: str) -> str:
    return f"{DELETED}/{topic_id}"


def removed_path(topic_id: str, broker_id: int) -> str:
    return f"{DELETED}/{topic_id}/{broker_id}"


def group_path(name: str) -> str:
    return f"{GROUPS}/{name}"


def producer_path(name: str) -> str:
    return f"{PRODUCERS}/{name}"


class BrokerState(msgspec.Struct, frozen=True):
    """A broker that has a session. `incarnation` rises at each start, `store_uuid` names its data directory.

    `draining`: the broker is stopping, and others should lead its partitions.
    """

    url: str
    incarnation: int
    store_uuid: str
    draining: bool = False


class StoreState(msgspec.Struct, frozen=True):
    """The data directory that a broker id belongs to, and the broker's last incarnation.

    It is kept here as well as on disk, so that an emptied disk does not restart the count.
    """

    store_uuid: str
    incarnation: int = 0


class ControllerState(msgspec.Struct, frozen=True):
    """The broker that elects leaders, and the epoch that fences what an older controller still writes."""

    broker_id: int
    incarnation: int
    epoch: int


class TopicState(msgspec.Struct, frozen=True):
    """A topic. `first_partitions` is its number of partitions at creation: a retry by message id looks there first.

    Invariant: 1 <= first_partitions <= partitions.
    """

    name: str
    topic_id: str
    partitions: int
    first_partitions: int
    replication_factor: int
    config: TopicConfig


class PartitionState(msgspec.Struct, frozen=True):
    """The leader and the in-sync replicas. The leader epoch rises at every election, a re-election included.

    `store_uuids` and `incarnations` hold each replica's values at the time it was last added to the ISR; a replica that
    never was in sync is in neither. `unclean` are the leader epochs that an operator began with a replica out of sync.

    Invariant: the leader, if there is one, is in `isr`; `isr` is part of `replicas`.
    """

    leader: int | None
    leader_epoch: int
    isr: tuple[int, ...]
    replicas: tuple[int, ...]
    store_uuids: dict[int, str]
    incarnations: dict[int, int]
    unclean: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.leader is None or self.leader in self.isr, self
        assert set(self.isr) <= set(self.replicas), self


def min_insync(partition: PartitionState, configured: int | None) -> int:
    """Return how many replicas have to hold a record before it is acknowledged: as configured, else a majority, of
    those that were ever in sync. So an added replica raises the number only when it has caught up."""
    members = max(1, sum(replica in partition.store_uuids for replica in partition.replicas))
    return min(members, configured or members // 2 + 1)


def with_isr(
    partition: PartitionState,
    isr: frozenset[int],
    store_uuids: Mapping[int, str],
    incarnations: Mapping[int, int],
    *,
    resigning: int | None = None,
) -> PartitionState:
    """Return the partition with another ISR. The maps cover replicas that join. `resigning` no longer leads."""
    return msgspec.structs.replace(
        partition,
        leader=None if partition.leader == resigning else partition.leader,
        isr=tuple(replica for replica in partition.replicas if replica in isr),
        store_uuids={**partition.store_uuids, **store_uuids},
        incarnations={**partition.incarnations, **incarnations},
    )


class Tombstone(msgspec.Struct, frozen=True):
    """A deleted topic. `deleted_at_ms` is Unix time of the broker that deleted it."""

    name: str
    topic_id: str
    partitions: int
    deleted_at_ms: int


class PauseState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The last pause or resume of a queue group: since when, why, and who asked. `number` rises with each change."""

    number: int = 0
    paused: bool = False
    since_ms: int = 0
    reason: str = ""
    by: str = ""


class GroupState(msgspec.Struct, frozen=True, omit_defaults=True):
    """A queue or stream group. `group_id` changes when a name is reused: receipts of the old group become invalid."""

    name: str
    config: GroupConfig
    group_id: str = ""
    pause: PauseState = PauseState()


class ProducerIds(msgspec.Struct, frozen=True):
    next: int


class ProducerState(msgspec.Struct, frozen=True):
    """A named producer. It keeps its id; each start raises the epoch, which fences the earlier instance. `instance` is
    the process that has the name now, if it gave an id."""

    id: int
    epoch: int
    instance: str = ""


StateT = TypeVar("StateT", bound=msgspec.Struct)

_encoder = msgspec.json.Encoder()


def encode(state: msgspec.Struct) -> bytes:
    return _encoder.encode(state)


def decode(data: bytes, kind: type[StateT]) -> StateT:
    """Decode a node's bytes as a `kind`. Raises msgspec.DecodeError when they are not one."""
    try:
        value = msgspec.json.decode(data)
        known = _known_settings(kind)
        if known:
            value["config"] = {name: setting for name, setting in value["config"].items() if name in known}
        return msgspec.convert(value, kind, str_keys=True)
    except (UnicodeDecodeError, KeyError, TypeError, AttributeError) as fault:
        raise msgspec.DecodeError(f"{type(fault).__name__}: {fault}") from fault


def decode_topic(data: bytes, folder: str) -> TopicState:
    """Decode the description of a topic in its folder, "NAME@ID". Raises msgspec.DecodeError when it is not one."""
    topic = decode(data, TopicState)
    if f"{topic.name}@{topic.topic_id}" != folder:
        raise msgspec.DecodeError(f"it describes {topic.name}@{topic.topic_id}")
    return topic


def topic_id_of(data: bytes) -> str:
    """Return the id in a topic node's bytes. Raises msgspec.DecodeError when there is none."""
    return _decode_identified(data).topic_id


class _Identified(msgspec.Struct):
    topic_id: str


_decode_identified = msgspec.json.Decoder(_Identified).decode


@cache
def _known_settings(kind: type[msgspec.Struct]) -> frozenset[str]:
    """Return the names in the state's `config`, if it has one.

    The config Structs of the HTTP contract reject unknown fields; a newer broker may have written some here.
    """
    configs = (field.type for field in msgspec.structs.fields(kind) if field.name == "config")
    return frozenset(field.encode_name for config in configs for field in msgspec.structs.fields(config))


ConfigT = TypeVar("ConfigT", TopicConfig, GroupConfig)


def patched(config: ConfigT, patch: dict[str, Any]) -> ConfigT:
    """Return `config` with the settings of `patch` replaced. Raises InvalidRequest for a wrong one."""
    try:
        return msgspec.convert({**msgspec.to_builtins(config), **patch}, type(config))
    except msgspec.ValidationError as fault:
        known = [field.encode_name for field in msgspec.structs.fields(config)]
        advice = "" if patch.keys() <= set(known) else f"; the settings are {', '.join(known)}"
        raise InvalidRequest(f"config: {fault}{advice}") from None
