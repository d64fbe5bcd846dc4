"""Errors that end a command, each with its exit code. Commands of brokers and of operators share them."""

from __future__ import annotations

EX_USAGE = 2
EX_UNAVAILABLE = 69
EX_SOFTWARE = 70
EX_CANTCREAT = 73
EX_STORAGE = 74


class StartupError(Exception):
    """The broker cannot start. The message says what to do; the exit code says what kind of fault it is."""

    def __init__(self, sentence: str, exit_code: int) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


class UsageError(StartupError):
    """A setting is wrong (exit 2)."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, EX_USAGE)
