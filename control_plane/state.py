"""What stands in the control plane: the tree, its paths, and what each node holds.

    /
    |-- cluster_id                    text, made once
    |-- receipt_key                   32 random bytes, made once; receipts are signed with it
    |-- brokers/ids/<broker id>       BrokerState, ephemeral
    |-- topics/<topic>                TopicState
    |-- partitions/<topic id>         the topic's name
    |   `-- <partition>               PartitionState, changed only by compare-and-set of its version
    |-- deleted/<topic id>            Tombstone: the authority to remove the topic's files
    |-- groups/<group>                GroupState
    |-- producer_ids                  ProducerIds: the first id no broker has taken yet
    `-- producers/<producer name>     ProducerState

Partitions stand under the topic's id and not under its name: versions start at 0 again when a topic is deleted and
made anew, and a late compare-and-set meant for the old one must not fit the new one.

Never a message body. All is JSON that a person can read; fields that a newer broker added are ignored in decoding.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

import msgspec

from portalmq.wire import GroupConfig, TopicConfig

CLUSTER_ID = "/cluster_id"
RECEIPT_KEY = "/receipt_key"
BROKERS = "/brokers/ids"
TOPICS = "/topics"
PARTITIONS = "/partitions"
DELETED = "/deleted"
GROUPS = "/groups"
PRODUCER_IDS = "/producer_ids"
PRODUCERS = "/producers"


def broker_path(broker_id: int) -> str:
    return f"{BROKERS}/{broker_id}"


def topic_path(name: str) -> str:
    return f"{TOPICS}/{name}"


def topic_partitions_path(topic_id: str) -> str:
    return f"{PARTITIONS}/{topic_id}"


def partition_path(topic_id: str, partition: int) -> str:
    return f"{PARTITIONS}/{topic_id}/{partition}"


def tombstone_path(topic_id: str) -> str:
    return f"{DELETED}/{topic_id}"


def group_path(name: str) -> str:
    return f"{GROUPS}/{name}"


def producer_path(name: str) -> str:
    return f"{PRODUCERS}/{name}"


class BrokerState(msgspec.Struct, frozen=True):
    """A broker that has a session. `incarnation` rises at each start, `store_uuid` names its data directory."""

    url: str
    incarnation: int
    store_uuid: str


class TopicState(msgspec.Struct, frozen=True):
    """`first_partitions` is how many partitions the topic was made with: a retry by message id looks there first.

    Invariant: 1 <= first_partitions <= partitions.
    """

    name: str
    topic_id: str
    partitions: int
    first_partitions: int
    replication_factor: int
    config: TopicConfig


class PartitionState(msgspec.Struct, frozen=True):
    """Who leads and who is in sync. The leader epoch rises at every election, one of the same broker included.

    Invariant: the leader, if there is one, is in `isr`; `isr` is part of `replicas`.
    """

    leader: int | None
    leader_epoch: int
    isr: tuple[int, ...]
    replicas: tuple[int, ...]
    store_uuids: dict[int, str]
    incarnations: dict[int, int]

    def __post_init__(self) -> None:
        assert self.leader is None or self.leader in self.isr, self
        assert set(self.isr) <= set(self.replicas), self


class Tombstone(msgspec.Struct, frozen=True):
    """A topic that was deleted, at `deleted_at_ms` (Unix) of the broker that did it."""

    name: str
    topic_id: str
    partitions: int
    deleted_at_ms: int


class GroupState(msgspec.Struct, frozen=True):
    """`group_id` tells a group from an older one of the same name: a receipt of that one is worth nothing here."""

    name: str
    config: GroupConfig
    group_id: str = ""


class ProducerIds(msgspec.Struct, frozen=True):
    next: int


class ProducerState(msgspec.Struct, frozen=True):
    """A named producer keeps its id; each start of it raises the epoch, which fences its older self."""

    id: int
    epoch: int


StateT = TypeVar("StateT", bound=msgspec.Struct)

_encoder = msgspec.json.Encoder()


def encode(state: msgspec.Struct) -> bytes:
    return _encoder.encode(state)


def decode(data: bytes, kind: type[StateT]) -> StateT:
    """The node's bytes as a `kind`. Raises msgspec.DecodeError when they are none."""
    value = msgspec.json.decode(data)
    known = _known_settings(kind)
    if known:
        value["config"] = {name: setting for name, setting in value["config"].items() if name in known}
    return msgspec.convert(value, kind, str_keys=True)


@cache
def _known_settings(kind: type[msgspec.Struct]) -> frozenset[str]:
    """The names in the state's `config`, if it has one.

    The config Structs are the HTTP contract's, which refuses unknown fields; here they may be a newer broker's.
    """
    configs = (field.type for field in msgspec.structs.fields(kind) if field.name == "config")
    return frozenset(field.encode_name for config in configs for field in msgspec.structs.fields(config))


ConfigT = TypeVar("ConfigT", TopicConfig, GroupConfig)


def patched(config: ConfigT, patch: dict[str, Any]) -> ConfigT:
    """`config` with the settings of `patch` instead of its own. Raises msgspec.ValidationError for a wrong one."""
    return msgspec.convert({**msgspec.to_builtins(config), **patch}, type(config))
