"""Connections of an event loop, over sockets that only pretend: what came, what was sent, and what that says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from portalmq.network.connection import Doubt, NoAnswer, NotSent, parse_address
from portalmq.network.http_answer import AnswerEnd, Arrived, BrokenAnswer, read_answer
from portalmq.network.loop_connection import LoopConnection, LoopPool

AN_HOUR_S = 3_600.0
HERE = parse_address("http://here:1")
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Wire(asyncio.Transport):
    """A socket that takes all that is written, or nothing of it."""

    def __init__(self, *, takes: bool = True) -> None:
        super().__init__()
        self.takes = takes
        self.written = b""
        self.is_closed = self.is_shut = self.is_tls = False
        self.connection = LoopConnection()
        self.connection.connection_made(self)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high == 0

    def write(self, data: Any) -> None:
        self.written += data
        if not self.takes:
            self.connection.pause_writing()

    def is_closing(self) -> bool:
        return self.is_closed

    def abort(self) -> None:
        self.is_closed = True

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self if self.is_tls else None

    def write_eof(self) -> None:
        assert not self.is_tls
        self.is_shut = True

    def shutdown(self, how: int) -> None:
        assert self.is_tls
        self.is_shut = True


class Network:
    """A pool whose connections are Wires."""

    def __init__(self, most: int = 64) -> None:
        self.pool = LoopPool(connections_per_host_max=most)
        self.wires: list[Wire] = []
        self.pool._connect = self._connect  # type: ignore[method-assign]

    async def _connect(self, *place: object) -> LoopConnection:
        self.wires.append(Wire())
        return self.wires[-1].connection

    def exchange(self, timeout_s: float = AN_HOUR_S) -> Coroutine[Any, Any, Any]:
        return self.pool.exchange(HERE, "POST", b"head", b"body", timeout_s)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


async def begun(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Return the task of work that runs until it waits."""
    task = asyncio.create_task(work)
    for _ in range(5):
        await asyncio.sleep(0)
    return task


ANSWERS = [
    OK,
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n4\r\n\r\n\r\n\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nTrailer: 1\r\n\r\n",
    b"HTTP/1.0 200 OK\nContent-Length: 1\n\nx",
]


@pytest.mark.parametrize("answer", ANSWERS)
def test_the_end_of_an_answer_is_found_wherever_its_pieces_end(answer: bytes) -> None:
    end = AnswerEnd("GET")
    assert [end.is_in(bytearray(answer[:size])) for size in range(1, len(answer))] == [False] * (len(answer) - 1)
    assert end.is_in(bytearray(answer))
    assert AnswerEnd("GET").is_in(bytearray(answer))
    assert read_answer(Arrived(b""), "GET", answer)[0].status in {200, 201, 204}


@pytest.mark.parametrize(
    "broken",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1, 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nmany\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 16,
    ],
)
def test_bytes_that_are_no_answer_are_not_waited_for(broken: bytes) -> None:
    assert AnswerEnd("GET").is_in(bytearray(broken))
    with pytest.raises(BrokenAnswer):
        read_answer(Arrived(b""), "GET", broken)


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    async def test() -> None:
        network = Network()
        asked = await begun(network.exchange())
        [wire] = network.wires
        wire.connection.data_received(b"HTTP/1.1 200 OK\r\n\r\nall ")
        wire.connection.data_received(b"of it")
        assert not asked.done()
        wire.connection.eof_received()
        assert (await asked).body == b"all of it"
        assert wire.is_closed, "it is not used again"

    run(test)


def test_a_kept_connection_is_used_again() -> None:
    async def test() -> None:
        network = Network()
        for _ in range(3):
            asked = await begun(network.exchange())
            network.wires[0].connection.data_received(OK[:30])
            network.wires[0].connection.data_received(OK[30:])
            assert (await asked).body == b"ok"
        [wire] = network.wires
        assert wire.written == b"headbody" * 3

    run(test)


@pytest.mark.parametrize("is_used", [False, True])
def test_a_connection_that_breaks_before_an_answer_leaves_the_outcome_open(is_used: bool) -> None:
    async def test() -> None:
        network = Network()
        if is_used:
            first = await begun(network.exchange())
            network.wires[0].connection.data_received(OK)
            await first
        asked = await begun(network.exchange())
        network.wires[0].connection.connection_lost(ConnectionResetError("reset"))
        with pytest.raises(NoAnswer, match="reset") as failed:
            await asked
        assert failed.value.stale == is_used

    run(test)


def test_a_request_of_which_a_part_never_left_was_not_sent() -> None:
    async def test() -> None:
        network = Network()
        first = await begun(network.exchange())
        [wire] = network.wires
        wire.connection.data_received(OK)
        await first
        wire.takes = False
        asked = await begun(network.exchange())
        wire.connection.connection_lost(ConnectionResetError("reset"))
        with pytest.raises(NotSent, match="reset"):
            await asked

    run(test)


def test_an_answer_to_a_part_of_a_request_counts_and_ends_the_connection() -> None:
    async def test() -> None:
        network = Network()
        first = await begun(network.exchange())
        [wire] = network.wires
        wire.connection.data_received(OK)
        await first
        wire.takes = False
        asked = await begun(network.exchange())
        wire.connection.data_received(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
        assert (await asked).status == 413
        assert wire.is_closed

    run(test)


def test_a_kept_connection_that_closes_unnoticed_is_replaced() -> None:
    async def test() -> None:
        network = Network()
        first = await begun(network.exchange())
        network.wires[0].connection.data_received(OK)
        await first
        network.wires[0].is_closed = True  # the loop has not said so yet
        asked = await begun(network.exchange())
        network.wires[1].connection.data_received(OK)
        assert (await asked).status == 200

    run(test)


def test_bytes_that_nobody_asked_for_end_an_idle_connection() -> None:
    async def test() -> None:
        network = Network()
        first = await begun(network.exchange())
        network.wires[0].connection.data_received(OK)
        await first
        network.wires[0].connection.data_received(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
        asked = await begun(network.exchange())
        network.wires[1].connection.data_received(OK)
        assert (await asked).status == 200

    run(test)


def test_a_silent_broker_is_given_up() -> None:
    async def test() -> None:
        network = Network()
        with pytest.raises(NoAnswer, match=r"no answer within 0.01 s"):
            await network.exchange(0.01)
        assert network.wires[0].is_closed

    run(test)


@pytest.mark.parametrize("gives_up", [False, True])
def test_doubts_are_followed_only_while_nothing_has_come(gives_up: bool) -> None:
    async def test() -> None:
        network = Network()
        asked_others = asyncio.Event()
        go_on = asyncio.Event()

        async def doubt() -> bool:
            asked_others.set()
            await go_on.wait()
            return True

        asked = await begun(network.pool.exchange(HERE, "GET", b"head", b"", AN_HOUR_S, Doubt(0.001, AN_HOUR_S, doubt)))
        await asked_others.wait()
        if not gives_up:
            network.wires[0].connection.data_received(OK)
        go_on.set()
        if gives_up:
            with pytest.raises(NoAnswer, match="silent"):
                await asked
        else:
            assert (await asked).status == 200

    run(test)


def test_a_cancelled_exchange_gives_its_connection_to_nobody() -> None:
    async def test() -> None:
        network = Network(most=1)
        asked = await begun(network.exchange())
        behind = await begun(network.exchange())
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await asyncio.sleep(0)
        assert network.wires[0].is_closed
        await begun(asyncio.sleep(0))
        network.wires[1].connection.data_received(OK)
        assert (await behind).status == 200

    run(test)


def test_a_full_pool_waits_for_a_free_connection_for_as_long_as_the_call_may() -> None:
    async def test() -> None:
        network = Network(most=2)
        taken = [await begun(network.exchange()) for _ in range(2)]
        with pytest.raises(NotSent, match="all 2 connections to here:1 are busy"):
            await network.exchange(0.01)
        gone, behind = await begun(network.exchange()), await begun(network.exchange())
        gone.cancel()
        network.wires[0].connection.data_received(OK)
        await taken[0]
        await begun(asyncio.sleep(0))
        network.wires[0].connection.data_received(OK)
        assert (await behind).status == 200
        assert len(network.wires) == 2
        await network.pool.close()
        with pytest.raises(NoAnswer):
            await taken[1]

    run(test)


@pytest.mark.parametrize("is_tls", [False, True])
def test_a_pool_that_hangs_up_still_reads_answers_and_takes_no_new_calls(is_tls: bool) -> None:
    async def test() -> None:
        network = Network()
        asked = await begun(network.exchange())
        network.wires[0].is_tls = is_tls
        closing = await begun(network.pool.close(AN_HOUR_S))
        assert network.wires[0].is_shut
        with pytest.raises(NotSent, match="this client is closed"):
            await network.exchange()
        network.wires[0].connection.data_received(OK)
        assert (await asked).status == 200
        await closing

    run(test)


def test_nobody_there_means_not_sent() -> None:
    async def test() -> None:
        with pytest.raises(NotSent):
            await LoopPool().exchange(parse_address("http://127.0.0.1:1"), "GET", b"head", b"", 5.0)

    run(test)
