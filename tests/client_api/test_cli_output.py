"""Terminal output of messages that contain control characters."""

from __future__ import annotations

import pytest

from portalmq.cli import output
from portalmq.message import Message

VALUE = "a\x1b]0;owned\x07 ü\n\tb\x9b2J".encode() + b"\xff"


def shown(value: bytes) -> Message:
    return Message("t", 0, 1, None, value, {}, "text/plain", 0)


@pytest.mark.parametrize(
    ("on_terminal", "said"),
    [(False, VALUE + b"\n"), (True, "a\\x1b]0;owned\\x07 ü\n\tb\\x9b2J\\xff\n".encode())],
)
def test_a_terminal_shows_control_characters_escaped_and_a_file_gets_the_value(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], on_terminal: bool, said: bytes
) -> None:
    monkeypatch.setattr(output, "_on_terminal", lambda: on_terminal)
    output.show_value(shown(VALUE))
    assert capfdbinary.readouterr().out == said
