"""A child process for a test: forked from this one, with all that its parent has used."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

import msgspec


def in_child(do: Callable[[], object]) -> object:
    """What `do` answers in a child of this process (as JSON can say it). Its exception is this one's failure."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            try:
                said = b"=" + msgspec.json.encode(do())
            except BaseException:  # noqa: BLE001 - the parent tells
                said = b"!" + traceback.format_exc().encode()
            os.write(writing, said)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    assert said.startswith(b"="), said[1:].decode() or "the child ended without a word"
    return msgspec.json.decode(said[1:])
