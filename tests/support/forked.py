"""A child process for a test: forked from this one, with the state of its parent."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

import msgspec


def in_child(do: Callable[[], object]) -> object:
    """Return the result of `do` in a child of this process (through JSON). An exception in the child fails the test."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            try:
                said = b"=" + msgspec.json.encode(do())
            except BaseException:  # noqa: BLE001 - the parent reports it
                said = b"!" + traceback.format_exc().encode()
            os.write(writing, said)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    assert said.startswith(b"="), said[1:].decode() or "the child ended without an answer"
    return msgspec.json.decode(said[1:])
