"""The dispatcher: requests that wait for a queue become one call, and a failing queue delays no other."""

from __future__ import annotations

import json
import threading
from typing import Any

from support.cluster import wait_until
from support.zeromq import Queues, failing

from portalmq.broker.protocols.zeromq.dispatcher import Job, Reply, RequestDispatcher
from portalmq.broker.protocols.zeromq.protocol import CommandRequest, NextRequest, SendRequest
from portalmq.errors import Backpressure, NotEnoughReplicas, TopicNotFound, Unavailable

WITHIN_S = 20.0


class Answers:
    def __init__(self) -> None:
        self.replies: list[Reply] = []

    def __call__(self, reply: Reply) -> None:
        self.replies.append(reply)

    def wait(self, count: int) -> list[Any]:
        wait_until(lambda: len(self.replies) >= count, f"{count} answers", WITHIN_S)
        assert len(self.replies) == count, "one answer for each"
        return [json.loads(reply.body) for reply in self.replies]


class Time:
    """The time is `now`, and `then` after the next look, if that is set."""

    def __init__(self) -> None:
        self.now = 100.0
        self.then: float | None = None

    def __call__(self) -> float:
        now = self.now
        self.now, self.then = self.then or now, None
        return now


def dispatcher_at(queues: Queues, answers: Answers, **options: Any) -> RequestDispatcher:
    return RequestDispatcher(queues, answers, ports=lambda: {"commands": 1, "producers": 2, "consumers": 3}, **options)


def job(what: SendRequest | NextRequest | CommandRequest, deadline: float = 1e12) -> Job:
    return Job("commands", (b"me", b""), deadline, 10, what)


def post(queue: str, value: str, **options: Any) -> Job:
    return job(SendRequest(queue, value, None, None), **options)


def ask(queue: str, **options: Any) -> Job:
    return job(NextRequest(queue, None), **options)


def delete(queue: str, message_id: str) -> Job:
    return job(CommandRequest("DELETE_MSG", queue, message_id, b"", None))


class Gate:
    """A gate that holds the first call of a kind until it opens."""

    def __init__(self, kind: str, queue: str) -> None:
        self._first = (kind, queue)
        self.reached, self.split_frames = threading.Event(), threading.Event()

    def __call__(self, call: tuple[Any, ...]) -> None:
        if call[:2] == self._first and not self.reached.is_set():
            self.reached.set()
            assert self.split_frames.wait(WITHIN_S)


def test_consumers_that_arrive_during_a_call_share_the_next_one():
    queues, answers = Queues(), Answers()
    gate = queues.trouble = Gate("receive", "q")
    dispatcher = dispatcher_at(queues, answers)
    for number in range(3):
        queues.send("q", f"m{number}", None)
    dispatcher.submit(ask("q"))
    assert gate.reached.wait(WITHIN_S)
    for _ in range(3):
        dispatcher.submit(ask("q"))
    gate.split_frames.set()
    told = answers.wait(4)
    assert [each["message"] for each in told] == ["m0", "m1", "m2", None]
    assert [call for call in queues.calls if call[0] == "receive"] == [("receive", "q", 1), ("receive", "q", 3)]
    assert [reply.lease for reply in answers.replies] == [("q", "q/0"), ("q", "q/1"), ("q", "q/2"), None]
    dispatcher.close(WITHIN_S)


def test_a_queue_in_trouble_holds_up_no_other():
    queues, answers = Queues(), Answers()
    gate = queues.trouble = Gate("receive", "stuck")
    dispatcher = dispatcher_at(queues, answers)
    dispatcher.submit(ask("stuck"))
    assert gate.reached.wait(WITHIN_S)
    for number in range(20):
        dispatcher.submit(ask(f"q{number}"))
    answers.wait(20)
    gate.split_frames.set()
    answers.wait(21)
    dispatcher.close(WITHIN_S)


def test_deletions_are_carried_out_together_and_each_is_answered():
    queues, answers = Queues(), Answers()
    gate = queues.trouble = Gate("receive", "q")
    dispatcher = dispatcher_at(queues, answers)
    for number in range(3):
        queues.send("q", f"m{number}", None)
    dispatcher.submit(ask("q"))
    assert gate.reached.wait(WITHIN_S)
    gate.split_frames.set()
    answers.wait(1)
    gate = queues.trouble = Gate("delete", "q")
    dispatcher.submit(delete("q", "0-0"))
    assert gate.reached.wait(WITHIN_S)
    dispatcher.submit(delete("q", "0-9"))
    dispatcher.submit(delete("q", "0-8"))
    dispatcher.submit(delete("q", "5-0"))
    gate.split_frames.set()
    told = {each.get("id", each.get("detail")): each["status"] for each in answers.wait(5)[1:]}
    assert told["0-0"] == "ok"
    assert sorted(told.values()) == ["error", "error", "error", "ok"]
    calls = [call for call in queues.calls if call[0] == "delete"]
    assert ("delete", "q", 0, "0-9", "0-8") in calls
    assert ("delete", "q", 5, "5-0") in calls, "one call for each partition, as each has its own leader"
    dispatcher.close(WITHIN_S)


def test_a_message_for_a_known_queue_needs_no_worker_and_for_another_one_it_does():
    queues, answers = Queues(), Answers()
    dispatcher = dispatcher_at(queues, answers, workers_max=0)
    dispatcher.submit(post("q", "at once"))
    assert answers.wait(1)[0]["id"] == "0-0"
    dispatcher = dispatcher_at(queues, answers)
    queues.known = False
    dispatcher.submit(post("new", "later"))
    assert answers.wait(2)[1]["queue"] == "new"
    dispatcher.close(WITHIN_S)


def test_a_refusal_is_sent_to_the_client():
    queues, answers = Queues(), Answers()
    queues.trouble = failing(NotEnoughReplicas("too few", outcome="unknown"), "send")
    dispatcher = dispatcher_at(queues, answers)
    dispatcher.submit(post("q", "x"))
    (told,) = answers.wait(1)
    assert (told["status"], told["code"], told["outcome"]) == ("error", "not_enough_replicas", "unknown")
    queues.trouble = failing(TopicNotFound("no such queue"), "command")
    dispatcher.submit(job(CommandRequest("QUEUE_SIZE", "q", None, b"{}", None)))
    assert answers.wait(2)[1]["detail"] == "no such queue"
    dispatcher.close(WITHIN_S)


def test_the_reply_to_an_opening_command_has_the_port():
    queues, answers = Queues(), Answers()
    dispatcher = dispatcher_at(queues, answers)
    for kind in ("PRODUCE_MSG", "CONSUME", "CREATE_QUEUE"):
        dispatcher.submit(job(CommandRequest(kind, "q", None, json.dumps({"type": kind}).encode(), None)))
    told = {each["told"]["type"]: each.get("port") for each in answers.wait(3)}
    assert told == {"PRODUCE_MSG": 2, "CONSUME": 3, "CREATE_QUEUE": None}
    dispatcher.close(WITHIN_S)


def test_a_failed_call_is_repeated_for_requests_with_time_left():
    queues, answers, now = Queues(), Answers(), Time()
    dispatcher = dispatcher_at(queues, answers, clock=now)
    gate = Gate("receive", "q")
    failures = [Unavailable("no leader"), Unavailable("no leader")]

    def trouble(call: tuple[Any, ...]) -> None:
        gate(call)
        if failures and call[2] == 2:
            now.now = 110.0
            raise failures.pop()

    queues.trouble = trouble
    dispatcher.submit(ask("q"))
    assert gate.reached.wait(WITHIN_S)
    dispatcher.submit(ask("q", deadline=105.0))
    dispatcher.submit(ask("q", deadline=200.0))
    gate.split_frames.set()
    told = answers.wait(3)
    assert [each["status"] for each in told] == ["ok", "error", "ok"]
    assert [call[2] for call in queues.calls] == [1, 2, 1]
    dispatcher.close(WITHIN_S)


def test_a_refusal_that_is_final_is_not_tried_again():
    queues, answers = Queues(), Answers()
    queues.trouble = failing(TopicNotFound("no such queue"), "receive")
    dispatcher = dispatcher_at(queues, answers)
    dispatcher.submit(ask("q"))
    assert answers.wait(1)[0]["code"] == "topic_not_found"
    assert len(queues.calls) == 1
    dispatcher.close(WITHIN_S)


def test_a_request_that_waited_too_long_is_refused_without_a_call():
    queues, answers, now = Queues(), Answers(), Time()
    dispatcher = dispatcher_at(queues, answers, clock=now)
    dispatcher.submit(ask("q", deadline=99.0))
    (told,) = answers.wait(1)
    assert (told["status"], told["retryable"], told["outcome"]) == ("error", True, "not_applied")
    assert queues.calls == []
    dispatcher.close(WITHIN_S)


def test_a_request_stays_unknown_when_no_time_is_left_after_an_unknown_try():
    queues, answers, now = Queues(), Answers(), Time()
    dispatcher = dispatcher_at(queues, answers, clock=now)

    def trouble(call: tuple[Any, ...]) -> None:
        # The next look at the clock still leaves time for a try, the one after it none.
        now.then = 200.0
        raise Unavailable("no answer", outcome="unknown")

    queues.trouble = trouble
    dispatcher.submit(job(CommandRequest("CREATE_QUEUE", "q", None, b"{}", None), deadline=105.0))
    (told,) = answers.wait(1)
    assert "could not be asked in time" in told["detail"]
    assert told["outcome"] == "unknown"
    dispatcher.close(WITHIN_S)


def test_a_deletion_that_finds_nothing_after_an_unknown_try_is_unknown():
    queues, answers = Queues(), Answers()
    failures = [Unavailable("no answer", outcome="unknown")]

    def carry_out(call: tuple[Any, ...]) -> None:
        if failures:
            raise failures.pop()

    queues.trouble = carry_out
    dispatcher = dispatcher_at(queues, answers)
    dispatcher.submit(delete("q", "0-0"))
    (told,) = answers.wait(1)
    assert (told["code"], told["outcome"]) == ("message_not_found", "unknown")
    dispatcher.close(WITHIN_S)


def test_a_worker_survives_any_error():
    queues, answers = Queues(), Answers()

    def trouble(call: tuple[Any, ...]) -> None:
        if call[1] == "bad":
            raise ZeroDivisionError("ours")

    queues.trouble = trouble
    dispatcher = dispatcher_at(queues, answers, workers_max=1)
    dispatcher.submit(ask("bad"))
    dispatcher.submit(ask("good"))
    told = answers.wait(2)
    assert [each["status"] for each in told] == ["error", "ok"]
    assert "ZeroDivisionError" in told[0]["detail"]
    dispatcher.close(WITHIN_S)


def test_an_undelivered_message_is_released_and_the_release_may_fail():
    queues, answers = Queues(), Answers()
    dispatcher = dispatcher_at(queues, answers)
    queues.send("q", "m", None)
    dispatcher.submit(ask("q"))
    answers.wait(1)
    queues.trouble = failing(Backpressure("later"), "give_back")
    dispatcher.give_back("q", "q/0")
    wait_until(lambda: ("give_back", "q/0") in queues.calls, "it was tried", WITHIN_S)
    queues.trouble = lambda call: None
    dispatcher.give_back("q", "q/0")
    wait_until(lambda: queues.waiting["q"], "it is back", WITHIN_S)
    dispatcher.close(WITHIN_S)
