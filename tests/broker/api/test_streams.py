"""Stream groups over HTTP: each call is answered in the form of the contract, and invalid calls are refused."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from flask.testing import FlaskClient
from support.domain import Fixture, records, running

from portalmq import stream_wire as contract
from portalmq import wire
from portalmq.broker.api.app import create_app
from portalmq.broker.api.http_request import REQUEST, HttpRequest
from portalmq.broker.messages.metrics import Metrics
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.server.auth import Auth
from portalmq.broker.server.config import BrokerConfig

Problem = Callable[..., dict[str, Any]]


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[Fixture]:
    with running(tmp_path) as started:
        started.broker.create_topic("t", wire.CreateTopic(partitions=2))
        started.broker.produce("t", ProduceRequest(records("0", "1", "2"), partition=0))
        yield started


@pytest.fixture
def http(fixture: Fixture) -> FlaskClient:
    return create_app(fixture.broker, BrokerConfig(), Metrics("1.2.3"), Auth()).test_client()


def join(http: FlaskClient, **more: Any) -> dict[str, Any]:
    answer = http.post("/v1/groups/g/members", json={"topics": ["t"], "member_id": "a", **more})
    assert answer.status_code == 200, answer.get_data(as_text=True)
    return answer.get_json()  # type: ignore[no-any-return]


def test_the_lag_of_a_group_whose_members_have_just_left_is_shown(http: FlaskClient) -> None:
    """The lag needs no checkpoint, so members may leave at once."""
    generation = join(http)["generation"]
    offsets = [{"topic": "t", "partition": 0, "offset": 2}]
    http.put("/v1/groups/g/offsets", json={"member_id": "a", "generation": generation, "offsets": offsets})
    assert http.delete("/v1/groups/g/members/a").status_code == 204
    (first, second) = http.get("/v1/groups/g/offsets").get_json()["offsets"]
    assert (first["committed"], first["lag"], second["lag"]) == (2, 2, 0)
    assert http.get("/v1/groups/g").get_json()["lag"] == 2


def test_a_client_that_has_disconnected_does_not_join(http: FlaskClient) -> None:
    join(http)
    ours, theirs = socket.socketpair()
    with ours:
        theirs.close()
        body = b'{"topics": ["t"], "member_id": "a"}'
        request = HttpRequest("POST", "/", "", {}, len(body), received=body, client=SimpleNamespace(socket=ours))
        answer = http.post("/v1/groups/g/members", environ_overrides={REQUEST: request})
    assert (answer.status_code, answer.get_json()["outcome"]) == (503, "not_applied")
    assert http.post("/v1/groups/g/members/a/heartbeat", json={"generation": 2}).status_code == 200


def test_join_heartbeat_commit_and_leave(http: FlaskClient) -> None:
    member = join(http)
    assert member == {
        "member_id": "a",
        "generation": 2,
        "assignment": [
            {"topic": "t", "partition": 0, "offset": 0, "since": 2},
            {"topic": "t", "partition": 1, "offset": 0, "since": 2},
        ],
        "heartbeat_interval_ms": 2000,
    }
    assert http.post("/v1/groups/g/members/a/heartbeat", json={"generation": 2}).get_json() == member
    offsets = [{"topic": "t", "partition": 0, "offset": 2}]
    done = http.put("/v1/groups/g/offsets", json={"member_id": "a", "generation": 2, "offsets": offsets})
    assert done.get_json() == {"results": [{"topic": "t", "partition": 0, "offset": 2, "status": "ok"}]}
    (first, second) = http.get("/v1/groups/g/offsets").get_json()["offsets"]
    assert (first["committed"], first["lag"], second["lag"]) == (2, 2, 0)
    assert set(first) == {"topic", "partition", "committed", "high_watermark", "lag", "lag_ms"}
    shown = http.get("/v1/groups/g").get_json()
    assert (shown["mode"], shown["members"], shown["lag"]) == ("stream", ["a"], 2)
    assert [group["group"] for group in http.get("/v1/groups").get_json()["groups"]] == ["g"]
    assert http.delete("/v1/groups/g/members/a").status_code == 204
    assert http.delete("/v1/groups/g/members/a").status_code == 204
    assert http.delete("/v1/groups/g").status_code == 204


def test_a_seek_may_be_a_dry_run_and_then_moves(http: FlaskClient) -> None:
    join(http)
    look = http.post("/v1/groups/g/seek", json={"topic": "t", "to": "latest", "dry_run": True}).get_json()
    assert look["dry_run"]
    assert look["offsets"][0]["from"] == 0
    gone = http.post("/v1/groups/g/seek", json={"topic": "t", "to": {"offset": 2}, "partition": 0}).get_json()
    assert (gone["offsets"], gone["dry_run"]) == ([{"partition": 0, "from": 0, "to": 2}], False)
    back = http.post("/v1/groups/g/seek", json={"topic": "t", "to": {"at": "2000-01-01T00:00:00Z"}}).get_json()
    assert [each["to"] for each in back["offsets"]] == [0, 0]


def test_a_repeated_seek_with_the_same_key_moves_nothing(http: FlaskClient, problem_of: Problem) -> None:
    join(http)
    for key, to, expected in (("one", {"offset": 2}, 2), ("two", "earliest", 0), ("one", {"offset": 2}, 0)):
        asked = {"topic": "t", "to": to, "partition": 0}
        sought = http.post("/v1/groups/g/seek", json=asked, headers={"Idempotency-Key": key}).get_json()
        assert sought["offsets"][0]["to"] == expected
    unfit = http.post("/v1/groups/g/seek", json=asked, headers={"Idempotency-Key": "x" * 256})
    problem_of(unfit, 400, "invalid_request")


@pytest.mark.parametrize("to", ["middle", {}, {"offset": -1}, {"offset": "7"}, {"at": "noon"}, {"offset": 1, "at": 1}])
def test_an_invalid_seek_target_is_refused(http: FlaskClient, problem_of: Problem, to: Any) -> None:
    join(http)
    problem_of(http.post("/v1/groups/g/seek", json={"topic": "t", "to": to}), 400, "invalid_request")


@pytest.mark.parametrize(
    "body",
    [{}, {"topics": []}, {"topics": ["a b"]}, {"topics": ["t"], "member_id": "a b"}, {"topics": ["t"], "member_id": ""}]
    + [{"topics": ["t"], "session_timeout_ms": 1}, {"topics": ["t"], "sesion": 1}, {"topics": ["t"] * 101}, []],
    ids=str,
)
def test_a_wrong_join_is_refused(http: FlaskClient, problem_of: Problem, body: Any) -> None:
    problem_of(http.post("/v1/groups/g/members", json=body), 400, "invalid_request")


def test_calls_that_a_group_does_not_allow_are_refused(http: FlaskClient, problem_of: Problem) -> None:
    problem_of(http.post("/v1/groups/g/members/a/heartbeat", json={"generation": 1}), 404, "group_not_found")
    join(http)
    problem_of(http.post("/v1/groups/g/members/b/heartbeat", json={"generation": 2}), 409, "illegal_generation")
    problem_of(http.post("/v1/groups/g/members/a/heartbeat", json={"generation": 99}), 409, "illegal_generation")
    problem_of(http.post("/v1/groups/g/members/a/heartbeat", json={"generation": -1}), 400, "invalid_request")
    join(http)
    problem_of(http.post("/v1/groups/g/members/a/heartbeat", json={"generation": 2}), 409, "fenced")
    problem_of(http.post("/v1/groups/g/receive", json={"topics": ["t"]}), 409, "group_mode_mismatch")
    problem_of(http.put("/v1/groups/g", json={"mode": "queue"}), 409, "group_mode_mismatch")


def test_wrong_commits_are_refused(http: FlaskClient, problem_of: Problem) -> None:
    generation = join(http)["generation"]

    def commit(offset: int, **more: Any) -> Any:
        offsets = [{"topic": "t", "partition": 0, "offset": offset, **more}]
        return http.put("/v1/groups/g/offsets", json={"member_id": "a", "generation": generation, "offsets": offsets})

    assert commit(3).status_code == 200
    problem_of(commit(2), 416, "offset_out_of_range")
    problem_of(commit(99), 416, "offset_out_of_range")
    problem_of(commit(3, partition=9), 404, "partition_not_found")
    problem_of(commit(3, topic="nowhere"), 404, "topic_not_found")
    problem_of(commit(-1), 400, "invalid_request")
    generation -= 1
    problem_of(commit(4), 409, "illegal_generation")


def test_a_fetch_is_answered_with_frames(http: FlaskClient, problem_of: Problem) -> None:
    asked = [{"topic": "t", "partition": 0, "offset": 0}, {"topic": "gone", "partition": 0, "offset": 0}]
    answer = http.post("/v1/fetch", json={"partitions": asked})
    assert answer.content_type == contract.FRAMES_MSGPACK
    first, second = msgspec.msgpack.decode(answer.data, type=contract.FetchAnswer).partitions
    assert len(first.frames) == 1
    assert first.next_offset == first.high_watermark
    assert second.error is not None
    assert second.error["code"] == "topic_not_found"
    problem_of(http.post("/v1/fetch", json={"partitions": []}), 400, "invalid_request")
    problem_of(http.post("/v1/fetch", json={"partitions": asked, "max_bytes": 1 << 40}), 400, "invalid_request")


def test_a_commit_of_a_future_generation_is_refused(http: FlaskClient, problem_of: Problem) -> None:
    http.post("/v1/topics/t/messages", data=b"1")
    member = http.post("/v1/groups/g/members", json={"topics": ["t"], "member_id": "a"}).get_json()
    wanted = {
        "member_id": "a",
        "generation": member["generation"] + 1,
        "offsets": [{"topic": "t", "partition": 0, "offset": 2}],
    }
    problem_of(http.put("/v1/groups/g/offsets", json=wanted), 409, "illegal_generation")
    problem_of(http.post("/v1/groups/g/commit", json={**wanted, "publish": []}), 409, "illegal_generation")
    wanted["generation"] = member["generation"]
    assert http.post("/v1/groups/g/commit", json={**wanted, "publish": []}).status_code == 200
