from __future__ import annotations

import msgspec
import pytest

from portalmq.control_plane import state
from portalmq.wire import GroupConfig, TopicConfig

STATES: list[msgspec.Struct] = [
    state.BrokerState("http://localhost:5000", 3, "store-a"),
    state.TopicState("temp_1", "id", 4, 2, 3, TopicConfig(retention_ms=None, cleanup="compact")),
    state.PartitionState(1, 7, (1, 2), (1, 2, 3), {1: "store-a", 2: "store-b"}, {1: 3, 2: 9}),
    state.PartitionState(None, 7, (1,), (1,), {}, {}),
    state.Tombstone("temp_1", "id", 4, 1_700_000_000_000),
    state.GroupState("controllers", GroupConfig(retry_backoff_ms=(0, 100))),
    state.ProducerIds(1_001),
    state.ProducerState(5, 2),
]


@pytest.mark.parametrize("value", STATES, ids=lambda value: type(value).__name__)
def test_an_encoded_state_is_decoded_unchanged(value: msgspec.Struct) -> None:
    assert state.decode(state.encode(value), type(value)) == value


@pytest.mark.parametrize("value", STATES, ids=lambda value: type(value).__name__)
def test_fields_of_a_newer_broker_are_ignored(value: msgspec.Struct) -> None:
    newer = msgspec.json.decode(state.encode(value))
    newer["from_the_future"] = {"a": 1}
    if "config" in newer:
        newer["config"]["from_the_future"] = 1
    assert state.decode(msgspec.json.encode(newer), type(value)) == value


def test_settings_that_an_older_broker_did_not_know_get_their_defaults() -> None:
    older = b'{"name":"g","config":{"mode":"stream"}}'
    assert state.decode(older, state.GroupState) == state.GroupState("g", GroupConfig(mode="stream"))


@pytest.mark.parametrize("damaged", [b'"\xff"', b"{}", b"[]", b"1", b'{"config": 1}', b'{"config": {"a"'])
def test_whatever_is_not_a_state_is_a_decode_error(damaged: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        state.decode(damaged, state.TopicState)


def test_a_leader_outside_the_in_sync_replicas_is_refused() -> None:
    with pytest.raises(AssertionError):
        state.PartitionState(2, 1, (1,), (1, 2), {}, {})
