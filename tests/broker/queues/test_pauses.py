"""A paused group: nothing is delivered until it is resumed, whoever leads the partition."""

from __future__ import annotations

from types import SimpleNamespace

import gevent
import msgspec
import pytest
from support.domain import running
from support.outputs import partition_of, receive, send
from support.replicas import eventually

from portalmq import wire
from portalmq.broker.cluster.rpc.queues import PauseGroup
from portalmq.broker.queues.settle import SettleRequest
from portalmq.control_plane.state import PauseState
from portalmq.errors import GroupModeMismatch, GroupNotFound


@pytest.fixture
def fixture(tmp_path):
    with running(tmp_path) as started:
        started.broker.create_topic("in", wire.CreateTopic(partitions=1))
        started.broker.groups.put("g", {})
        yield started


def pause(fixture, reason="", by=""):
    fixture.broker.group_admin.pause("g", paused=True, reason=reason, by=by)


def resume(fixture):
    fixture.broker.group_admin.pause("g", paused=False)


def paused(fixture):
    return fixture.broker.describe_group("g").paused


def texts(messages):
    return [message.record.value.decode() for message in messages]


def settle(fixture, messages, verb):
    return fixture.broker.settlement.settle("g", [each.receipt for each in messages], SettleRequest(verb, 0))


def test_nothing_is_delivered_until_the_group_is_resumed(fixture):
    send(fixture, "a", "b")
    assert texts(receive(fixture, 1)) == ["a"]
    pause(fixture)
    assert receive(fixture) == []
    resume(fixture)
    assert texts(receive(fixture)) == ["b"]


def test_a_leader_that_is_told_of_a_pause_has_heard_of_it_before_the_control_plane_says_so(fixture):
    """Found by `make simulate-shell SEED=12927`: the group began afterwards, at a leader whose mirror was behind."""
    groups = fixture.broker.groups
    behind = groups.get("g")
    pause(fixture)
    change = groups.get("g").pause
    eventually(lambda: getattr(groups._mirror.groups.get("g"), "pause", None) == change)
    groups._mirror.groups["g"] = behind
    groups._own.clear()
    fixture.broker.group_admin.on_pause(PauseGroup("g", behind.group_id, change.number, 0, True, "", ""))
    send(fixture, "a")
    assert receive(fixture) == []
    groups._mirror.groups["g"] = msgspec.structs.replace(behind, config=wire.GroupConfig(max_deliveries=7))
    assert receive(fixture) == [], "a change from before the pause"
    resume(fixture)
    assert texts(receive(fixture)) == ["a"]


def test_the_broker_that_paused_a_group_knows_it_however_late_its_mirror_is(fixture, monkeypatch):
    groups = fixture.broker.groups
    behind = groups.get("g")
    monkeypatch.setattr(groups, "_mirror", SimpleNamespace(groups={"g": behind}))
    pause(fixture)
    assert groups.get("g").pause.paused
    groups._own.clear()  # it is remembered for two seconds
    send(fixture, "a")
    assert receive(fixture) == []


def test_the_state_shows_since_when_why_and_who_asked(fixture):
    since_ms = fixture.clock.wall_ms()
    pause(fixture, "the database moves", "eva")
    fixture.clock.advance(1_000)
    pause(fixture, "another reason", "max")
    assert paused(fixture) == wire.Paused(since_ms, "the database moves", "eva"), "a repeat changes nothing"
    assert fixture.broker.list_groups()[0].paused == paused(fixture)
    resume(fixture)
    resume(fixture)
    assert paused(fixture) is None


def test_a_resume_wakes_the_receives_that_wait(fixture):
    send(fixture, "a")
    pause(fixture)
    receive(fixture)
    request = wire.ReceiveRequest(["in"], max_messages=1, wait_ms=60_000)
    waiting = gevent.spawn(fixture.broker.receive_handler.receive, "g", request, None)
    eventually(lambda: fixture.broker.groups.long_polls.waiters)
    send(fixture, "b")
    gevent.idle()
    assert not waiting.ready()
    resume(fixture)
    assert texts(waiting.get(timeout=30)) == ["a"]


def test_leases_can_be_settled_and_run_out(fixture):
    fixture.broker.groups.put("g", {"max_deliveries": 1})
    send(fixture, "acked", "nacked", "expires")
    messages = receive(fixture)
    pause(fixture)
    assert settle(fixture, messages[:1], "ack") == [True]
    assert settle(fixture, messages[1:2], "nack") == [True]
    fixture.clock.advance(30_001)
    fixture.broker.groups.attached("g")[0]._on_timer()
    described = fixture.broker.describe_group("g")
    assert (described.in_flight, described.dead, described.lag) == (0, 2, 0)


def test_a_repeated_receive_gets_its_own_lease_again(fixture):
    send(fixture, "a", "b")
    request = wire.ReceiveRequest(["in"], max_messages=1, attempt_id="first")
    first = fixture.broker.receive_handler.receive("g", request, None)
    pause(fixture)
    assert fixture.broker.receive_handler.receive("g", request, None) == first


def test_the_log_alone_keeps_the_group_paused(fixture):
    """A new leader may not have read the control plane yet."""
    send(fixture, "a")
    assert texts(receive(fixture)) == ["a"]
    pause(fixture)
    send(fixture, "b")
    attached = fixture.broker.groups.attached("g")[0]
    told = fixture.broker.groups.get("g")
    attached._now = lambda: told.__class__(told.name, told.config, told.group_id, PauseState())
    assert receive(fixture) == []
    attached._now = lambda: told
    resume(fixture)
    assert texts(receive(fixture)) == ["b"], "nor is an old pause of the control plane taken for news"


def test_a_pause_that_only_the_log_knows_is_shown(fixture, monkeypatch):
    """The control plane may have lost it."""
    send(fixture, "a")
    receive(fixture)
    pause(fixture, "why", "eva")
    since = paused(fixture)
    told = fixture.broker.groups.get("g")
    forgot = told.__class__(told.name, told.config, told.group_id, PauseState())
    with monkeypatch.context() as patched:
        patched.setattr(fixture.broker.groups, "find", lambda name: forgot)
        assert paused(fixture) == since == fixture.broker.list_groups()[0].paused
    resume(fixture)
    assert paused(fixture) is None


def test_a_pause_survives_a_restart(tmp_path):
    with running(tmp_path) as before:
        send(before, "a")
        receive(before)
        pause(before, "why")
        send(before, "b")
    with running(tmp_path, before.clock) as after:
        assert partition_of(after).delivery["g"].pause.reason == "why"
        assert receive(after) == []
        assert paused(after).reason == "why"
        resume(after)
        assert texts(receive(after)) == ["b"]


def test_a_topic_that_the_group_reads_later_is_paused_too(fixture):
    pause(fixture)
    send(fixture, "a", topic="later")
    assert receive(fixture, topic="later") == []
    resume(fixture)
    assert texts(receive(fixture, topic="later")) == ["a"]


def test_a_group_made_anew_is_not_paused(fixture):
    send(fixture, "a")
    receive(fixture)
    pause(fixture)
    fixture.broker.group_admin.delete("g")
    assert texts(receive(fixture)) == ["a"]


def test_settings_change_while_it_is_paused(fixture):
    pause(fixture)
    fixture.broker.groups.put("g", {"max_deliveries": 9})
    assert paused(fixture) is not None


def test_other_groups_go_on(fixture):
    send(fixture, "a")
    pause(fixture)
    assert texts(receive(fixture, group="other")) == ["a"]


def test_only_a_queue_group_that_exists_is_paused(fixture):
    fixture.broker.groups.put("s", {"mode": "stream"})
    for name, error in (("missing", GroupNotFound), ("s", GroupModeMismatch)):
        with pytest.raises(error):
            fixture.broker.group_admin.pause(name, paused=True)
