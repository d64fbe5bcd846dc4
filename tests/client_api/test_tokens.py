"""The tokens that a server accepts."""

from __future__ import annotations

from pathlib import Path

import pytest

from portalmq.broker.protocols.zeromq.command import tokens_for
from portalmq.tokens import Tokens, is_loopback


def test_only_known_tokens_are_included():
    tokens = Tokens(["one", "zwö"])
    assert tokens.needed
    assert [tokens.include(each.encode()) for each in ("one", "zwö", "three", "")] == [True, True, False, False]
    assert not Tokens().needed


def test_a_file_of_tokens_has_one_a_line(tmp_path: Path):
    file = tmp_path / "tokens"
    file.write_text("# ours\n\n one \ntwo\n")
    tokens = tokens_for(file, "0.0.0.0", insecure=False)
    assert [tokens.include(each) for each in (b"one", b"two", b"# ours", b"")] == [True, True, False, False]
    file.write_text("# none\n")
    with pytest.raises(ValueError, match="holds no token"):
        tokens_for(file, "127.0.0.1", insecure=False)
    with pytest.raises(ValueError, match="cannot be read"):
        tokens_for(tmp_path / "missing", "127.0.0.1", insecure=False)


def test_the_network_is_admitted_with_a_token_or_insecure():
    assert not tokens_for(None, "127.0.0.1", insecure=False).needed
    assert not tokens_for(None, "0.0.0.0", insecure=True).needed
    with pytest.raises(ValueError, match="--require-token"):
        tokens_for(None, "0.0.0.0", insecure=False)
    assert [is_loopback(host) for host in ("localhost", "::1", "127.8.8.8", "10.0.0.1", "example.org")] == [
        *(True, True, True),
        *(False, False),
    ]
