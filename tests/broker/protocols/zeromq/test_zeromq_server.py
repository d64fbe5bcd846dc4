"""MiniQ's ports over sockets, and the service. The queues are in memory; there is no broker."""

from __future__ import annotations

import contextlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import zmq
from support.cluster import wait_until
from support.zeromq import Queues, ask, failing, service_at, serving, socket_to

from portalmq.broker.protocols.zeromq.server import PIPELINE_MAX, PortTaken, Server, ServerLimits
from portalmq.errors import (
    InvalidRequest,
    MessageNotFound,
    MessageTooLarge,
    NotEnoughReplicas,
    Unauthorized,
    Unavailable,
)
from portalmq.tokens import Tokens

WITHIN_S = 20.0


def test_a_message_goes_from_one_port_to_the_other_and_is_deleted_at_the_third():
    queues = Queues()
    with serving(queues) as server:
        ports = server.ports
        with socket_to(ports["producers"]) as producer:
            told = ask(producer, {"queue": "q", "message": {"n": 1}})
            assert told == {"status": "ok", "id": "0-0", "queue": "q", "timestamp": 17}
        with socket_to(ports["consumers"]) as consumer, socket_to(ports["commands"]) as commands:
            shown = ask(consumer, {"queue": "q"})
            assert (shown["status"], shown["id"], shown["message"]) == ("ok", "0-0", {"n": 1})
            assert ask(consumer, {"queue": "q"}) == {"status": "ok", "queue": "q", "id": None, "message": None}
            gone = {"type": "DELETE_MSG", "payload": {"queue": "q", "id": "0-0"}}
            assert ask(commands, gone) == {"status": "ok", "queue": "q", "id": "0-0"}
            assert ask(commands, gone)["status"] == "error"


def test_a_frame_that_is_no_object_is_about_the_default_queue():
    with (
        serving(Queues()) as server,
        socket_to(server.ports["producers"]) as producer,
        socket_to(server.ports["consumers"]) as consumer,
        socket_to(server.ports["commands"]) as commands,
    ):
        assert ask(producer, b"plain text")["queue"] == "default"
        assert ask(consumer, b"next")["message"] == "plain text"
        refused = ask(commands, b"QUEUE_SIZE")
        assert (refused["status"], refused["code"]) == ("error", "invalid_request")


def test_malformed_requests_are_answered_and_the_next_one_is_served():
    with serving(Queues()) as server, socket_to(server.ports["producers"]) as producer:
        for frames in ([b"a", b"b"], [b"{}"], [b'{"queue": "a/b", "message": 1}'], [b""] * 30):
            producer.send_multipart(frames)
            told = json.loads(producer.recv())
            assert told["status"] == "error", frames
            assert told["detail"]
        assert ask(producer, {"queue": "q", "message": 1})["status"] == "ok"


def test_a_client_may_send_a_bounded_number_of_requests_before_an_answer():
    queues = Queues()
    hold = threading.Event()
    queues.trouble = lambda call: (hold.wait(WITHIN_S), None)[1]
    with serving(queues) as server, socket_to(server.ports["consumers"], zmq.DEALER) as dealer:
        for _ in range(PIPELINE_MAX + 5):
            dealer.send_multipart([b"", b'{"queue": "q"}'])
        refused = [json.loads(dealer.recv_multipart()[-1]) for _ in range(5)]
        assert {each["code"] for each in refused} == {"backpressure"}
        with socket_to(server.ports["commands"]) as other:
            other.send(b"no command")
            assert json.loads(other.recv())["status"] == "error", "other clients are served"
        hold.set()
        answers = [json.loads(dealer.recv_multipart()[-1]) for _ in range(PIPELINE_MAX)]
        assert {each["status"] for each in answers} == {"ok"}


def test_a_dealer_without_the_empty_frame_is_answered_as_it_asked():
    with serving(Queues()) as server, socket_to(server.ports["producers"], zmq.DEALER) as dealer:
        dealer.send(b'{"queue": "q", "message": "x"}')
        (answer,) = dealer.recv_multipart()
        assert json.loads(answer)["status"] == "ok"


def test_pending_requests_are_bounded_in_number_and_bytes():
    queues = Queues()
    hold, reached = threading.Event(), threading.Event()

    def trouble(call: tuple[Any, ...]) -> None:
        reached.set()
        hold.wait(WITHIN_S)

    queues.trouble = trouble
    with (
        serving(queues, limits=ServerLimits(requests_max=2, request_bytes_max=1_000)) as server,
        socket_to(server.ports["consumers"]) as first,
        socket_to(server.ports["consumers"]) as second,
        socket_to(server.ports["consumers"]) as third,
        socket_to(server.ports["producers"]) as large,
    ):
        first.send(b'{"queue": "q"}')
        assert reached.wait(WITHIN_S)
        assert ask(large, {"queue": "q", "message": "x" * 2_000})["code"] == "backpressure"
        second.send(b'{"queue": "q"}')
        third.send(b'{"queue": "q"}')
        refused = first_with_an_answer(second, third)
        assert json.loads(refused.recv())["code"] == "backpressure"
        hold.set()
        assert json.loads(first.recv())["status"] == "ok"
        assert ask(refused, {"queue": "q"})["status"] == "ok", "there is room again"


def first_with_an_answer(*sockets: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    poller = zmq.Poller()
    for socket in sockets:
        poller.register(socket, zmq.POLLIN)
    ((answered, _),) = poller.poll(WITHIN_S * 1000)
    return answered


def test_a_message_that_is_too_large_is_refused():
    with serving(Queues(), limits=ServerLimits(message_bytes_max=1_000)) as server, service_at(server.ports) as miniq:
        with pytest.raises(MessageTooLarge, match="1000 at most"):
            miniq.produce("q", "x" * 1_001)
        assert miniq.produce("q", "x" * 1_000) == "0-0"


def test_a_frame_far_beyond_the_limit_cuts_its_own_connection_and_no_other():
    with (
        serving(Queues(), limits=ServerLimits(message_bytes_max=1_000)) as server,
        socket_to(server.ports["producers"], RCVTIMEO=300) as flood,
        socket_to(server.ports["producers"]) as other,
    ):
        flood.send(b"x" * 1_000_000)
        with pytest.raises(zmq.Again):
            flood.recv()
        assert ask(other, {"message": 1})["status"] == "ok"


def test_a_message_for_a_client_that_is_gone_is_released():
    queues = Queues()
    queues.send("q", "precious", None)
    server = Server(queues, Tokens(), ports={"commands": 0, "producers": 0, "consumers": 0})
    # A request of a client that left before the answer. libzmq decides when it notices the disconnect.
    server._accept("consumers", [b"gone", b"", b'{"queue": "q"}'])
    server.stop()
    server.run()
    wait_until(lambda: ("give_back", "q/0") in queues.calls, "it is given back", WITHIN_S)
    assert [message.id for message in queues.waiting["q"]] == ["0-0"]


def test_with_tokens_every_request_has_to_carry_one():
    with serving(Queues(), "secret") as server:
        with service_at(server.ports, token="secret") as miniq:
            miniq.create_queue("q")
            assert miniq.produce("q", "x") == "0-0"
            assert miniq.consume("q") is not None
        for wrong in (None, "guess"):
            with service_at(server.ports, token=wrong) as stranger:
                for call in (stranger.create_queue, stranger.consume, lambda: stranger.produce("q", "x")):
                    with pytest.raises(Unauthorized):
                        call()
        for door in ("commands", "producers", "consumers"):
            with socket_to(server.ports[door]) as plain:
                assert ask(plain, b"no object")["status"] == "error", "a frame without a token is refused"


def test_a_port_that_is_taken_is_named():
    with serving(Queues()) as server:
        taken = {"commands": server.ports["commands"], "producers": 0, "consumers": 0}
        with pytest.raises(PortTaken, match="commands"), serving(Queues(), ports=taken):
            pass


def test_pending_requests_are_answered_before_the_server_stops():
    queues = Queues()
    hold, reached = threading.Event(), threading.Event()

    def trouble(call: tuple[Any, ...]) -> None:
        reached.set()
        hold.wait(WITHIN_S)

    queues.trouble = trouble
    queues.known = False
    with serving(queues) as server, socket_to(server.ports["producers"]) as producer:
        producer.send(b'{"queue": "q", "message": "x"}')
        assert reached.wait(WITHIN_S)
        server.stop()
        hold.set()
        assert json.loads(producer.recv())["status"] == "ok"


# --- the service -----------------------------------------------------------------------------------------------------


def test_the_service_speaks_of_queues_and_messages_and_not_of_sockets():
    queues = Queues()
    with serving(queues) as server, service_at(server.ports) as miniq:
        assert miniq.open_producers("q") == server.ports["producers"]
        assert miniq.open_consumers("q") == server.ports["consumers"]
        assert [miniq.produce("q", value) for value in ("a", {"n": 1}, None)] == ["0-0", "0-1", "0-2"]
        messages = [miniq.consume("q") for _ in range(4)]
        assert [message and message.message for message in messages] == ["a", {"n": 1}, None, None]
        assert messages[2] is not None, "null is a message"
        assert messages[3] is None
        miniq.delete(messages[0])
        miniq.delete("0-1", "q")
        with pytest.raises(MessageNotFound):
            miniq.delete("0-1", "q")
        told = miniq.command("ANY_OTHER", {"queue": "q", "x": 1})["told"]
        assert told == {"type": "ANY_OTHER", "payload": {"queue": "q", "x": 1}}


def test_many_clients_are_served_at_a_time():
    queues = Queues()
    with serving(queues) as server:

        def produce(number: int) -> list[str]:
            with service_at(server.ports) as miniq:
                return [miniq.produce(f"q{number % 4}", f"{number}-{index}") for index in range(20)]

        with ThreadPoolExecutor(16) as threads:
            ids = [each for some in threads.map(produce, range(16)) for each in some]
        assert len(ids) == 320
        assert sum(len(queues.waiting[f"q{number}"]) for number in range(4)) == 320


def test_a_transient_error_is_retried_and_a_lasting_one_is_raised():
    queues = Queues()
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            queues.trouble = lambda call: None

    queues.trouble = failing(NotEnoughReplicas("electing"), "send")
    with serving(queues) as server:
        with service_at(server.ports, pause=pause) as miniq:
            assert miniq.produce("q", "x") == "0-0"
            assert len(pauses) == 2
        queues.trouble = failing(NotEnoughReplicas("electing"), "send")
        now = iter(range(0, 1_000, 7))
        hurried = service_at(server.ports, pause=lambda _: None, clock=lambda: next(now))
        with hurried as miniq, pytest.raises(NotEnoughReplicas):
            miniq.produce("q", "x")
        queues.trouble = failing(InvalidRequest("no"), "command")
        with service_at(server.ports) as miniq, pytest.raises(InvalidRequest):
            miniq.queue_size("q")


def test_an_error_after_one_with_an_unknown_outcome_is_unknown_too():
    queues = Queues()
    queues.trouble = failing(NotEnoughReplicas("electing", outcome="unknown"), "send")

    def pause(seconds: float) -> None:
        queues.trouble = failing(InvalidRequest("no"), "send")

    with serving(queues) as server, service_at(server.ports, pause=pause) as miniq:
        with pytest.raises(InvalidRequest) as refused:
            miniq.produce("q", "x")
        assert refused.value.outcome == "unknown"
        with pytest.raises(InvalidRequest) as refused:
            miniq.produce("q", "x")
        assert refused.value.outcome == "not_applied"


def test_a_silent_server_is_asked_again_on_a_new_socket():
    """A REQ socket whose answer is lost is stuck. The server here drops the first request and answers the second."""
    seen: list[list[bytes]] = []
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")

        answered = threading.Event()

        def serve() -> None:
            router.setsockopt(zmq.RCVTIMEO, 100)
            while not answered.is_set():
                with contextlib.suppress(zmq.Again):
                    seen.append(router.recv_multipart())
                    if len(seen) > 1:
                        router.send_multipart([*seen[-1][:2], b'{"status": "ok", "id": "0-7"}'])

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            # Retry without a limit: a machine that pauses for 0.3 s is silent too.
            with service_at({"commands": 1, "producers": port, "consumers": 1}, timeout_s=0.3, tries=50) as miniq:
                assert miniq.produce("q", "x") == "0-7"
        finally:
            answered.set()
            thread.join(WITHIN_S)
    assert seen[0][0] != seen[1][0], "the second request comes from another socket"
    assert seen[0][-1] == seen[1][-1]


def test_a_missing_server_is_reported_after_all_tries():
    miniq = service_at({"commands": 1, "producers": 1, "consumers": 1}, timeout_s=0.1)
    with miniq, pytest.raises(Unavailable, match="3 times") as caught:
        miniq.produce("q", "x")
    assert caught.value.outcome == "unknown"


def test_the_service_refuses_what_it_cannot_send():
    miniq = service_at({"commands": 1, "producers": 1, "consumers": 1})
    with miniq, pytest.raises(TypeError, match="no bytes"):
        miniq.produce("q", b"x")
    with pytest.raises(RuntimeError, match="closed"):
        miniq.consume()
    with pytest.raises(ValueError, match="tries"):
        service_at({"commands": 1, "producers": 1, "consumers": 1}, tries=0)
