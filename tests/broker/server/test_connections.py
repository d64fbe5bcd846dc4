"""The limits on connections, and which connection is closed for a new one."""

from __future__ import annotations

import pytest

from portalmq.broker.server.connections import ClientConnection, Connections


class House:
    """Connections by name. `ended` lists the names of the closed ones in order."""

    def __init__(self, at_most: int = 1_000, per_address_max: int = 3, **more: bool) -> None:
        self.connections = Connections(at_most, per_address_max, **more)
        self.ended: list[str] = []
        self.held: dict[str, ClientConnection] = {}

    def enter(self, name: str, address: str = "192.0.2.1") -> bool:
        connection = self.held[name] = ClientConnection(address, lambda: self.ended.append(name))
        return self.connections.enter(connection)

    def busy(self, *names: str) -> None:
        for name in names:
            self.connections.busy(self.held[name])

    def idle(self, name: str) -> None:
        self.connections.idle(self.held[name])


def test_an_address_at_its_limit_loses_its_longest_idle_connection():
    house = House()
    assert all(house.enter(name) for name in "abc")
    house.busy("a", "b")
    house.idle("a")
    assert house.enter("d")
    assert house.ended == ["c"]
    assert house.enter("other", "192.0.2.2")
    assert house.ended == ["c"]


def test_an_address_whose_connections_are_all_busy_gets_no_more():
    house = House()
    for name in "abc":
        house.enter(name)
    house.busy(*"abc")
    assert not house.enter("d")
    assert house.ended == []
    house.connections.leave(house.held["a"])
    assert house.enter("e")


def test_a_closed_connection_is_not_counted_and_may_end_its_request():
    house = House()
    for name in "abcd":
        house.enter(name)
    assert house.ended == ["a"]
    house.busy("a")  # a request arrived at that moment
    house.idle("a")
    house.connections.leave(house.held["a"])
    assert len(house.connections) == 3
    assert house.enter("e")
    assert house.ended == ["a", "b"]


def test_other_brokers_may_have_as_many_as_they_make():
    house = House()
    for name in "abcdef":
        assert house.enter(name)
        house.connections.trust(house.held[name])
        house.busy(name)
    assert house.ended == []
    assert all(house.enter(name) for name in "xyz")
    house.busy(*"xyz")
    assert not house.enter("one more")


@pytest.mark.parametrize(("address", "with_loopback", "ended"), [("127.0.0.1", False, 0), ("::1", True, 1)])
def test_connections_of_this_machine_are_bounded_where_that_is_asked_for(address, with_loopback, ended):
    house = House(with_loopback=with_loopback)
    assert all(house.enter(name, address) for name in "abcd")
    assert len(house.ended) == ended


def test_an_address_may_be_left_unbounded():
    house = House(per_address_max=0)
    assert all(house.enter(str(number)) for number in range(50))
    assert house.ended == []


def test_near_the_limit_the_address_with_most_idle_connections_loses_one():
    house = House(at_most=10, per_address_max=0)
    house.enter("honest", "192.0.2.2")
    for number in range(8):
        house.enter(str(number))
    assert house.ended == []
    for number in range(50):
        assert house.enter(f"more {number}")
        assert len(house.connections) == 9
    assert "honest" not in house.ended
    assert house.ended[:3] == ["0", "1", "2"]


def test_no_connection_is_closed_when_all_are_busy():
    house = House(at_most=10, per_address_max=0)
    for number in range(9):
        house.enter(str(number))
        house.busy(str(number))
    assert house.enter("one more")
    house.busy("one more")
    assert not house.connections.make_room()
    assert house.ended == []
