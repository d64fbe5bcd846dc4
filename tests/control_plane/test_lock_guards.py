"""Who no longer holds a lock is told so, and why: each refusal on its own."""

from __future__ import annotations

import msgspec
import pytest

from portalmq.control_plane.locks import LockState, released, renewed
from portalmq.errors import Fenced

HELD = LockState(5, "a", 1_000)
FREE = msgspec.structs.replace(HELD, owner=None)


def test_a_release_is_repeated_under_its_own_token_alone() -> None:
    assert released(HELD, "a", 5) == FREE
    assert released(FREE, "a", 5) == FREE
    for token in (4, 6):
        with pytest.raises(Fenced, match="nobody holds the lock any more") as fenced:
            released(FREE, "a", token)
        assert fenced.value.extra == {"newest_token": 5}


@pytest.mark.parametrize(("lock", "owner", "token", "why", "outcome"), [
    (FREE, "a", 5, "nobody holds the lock any more", "unknown"),
    (FREE, "a", 6, "nobody holds the lock any more", "not_applied"),
    (HELD, "b", 5, "given to another owner", "not_applied"),
    (HELD, "a", 4, "passed on", "unknown"),
    (HELD, "b", 4, "passed on", "unknown"),
    (HELD, "a", 6, "passed on", "not_applied"),
])  # fmt: skip
def test_a_lease_that_is_over_is_not_renewed(lock: LockState, owner: str, token: int, why: str, outcome: str) -> None:
    """An earlier copy of the request may have come in time, under a token that was issued."""
    with pytest.raises(Fenced, match=why) as fenced:
        renewed(lock, owner, token, None)
    assert (fenced.value.extra, fenced.value.outcome) == ({"newest_token": 5}, outcome)
