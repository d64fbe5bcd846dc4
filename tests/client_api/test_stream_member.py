"""A member of a stream group whose turns a test decides."""

from __future__ import annotations

import pytest

from portalmq.errors import Fenced
from portalmq.stream import StreamMember


def member(member_id: str | None) -> StreamMember:
    return StreamMember(
        None,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        "g",
        ["t"],
        {},
        delivery="at_least_once",
        manual_ack=False,
        member_id=member_id,
        session_timeout_s=6.0,
        max_messages=10,
    )


@pytest.mark.parametrize(("member_id", "turns"), [(None, ["join", "join"]), ("mine", ["join"])])
def test_a_member_whose_name_was_made_up_joins_again_when_a_copy_of_its_own_join_fences_it(
    monkeypatch, member_id, turns
):
    it = member(member_id)
    taken: list[str] = []

    def turn() -> float:
        taken.append("heartbeat" if it._joined else "join")
        it._joined = True
        if len(taken) == 1:
            raise Fenced("another consumer joined")
        it.feeds.closed = True
        return 0.0

    monkeypatch.setattr(it, "_turn", turn)
    it._live()
    assert taken == turns
