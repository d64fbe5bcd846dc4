"""The contract's Structs, used by several threads."""

from __future__ import annotations

import subprocess
import sys

# Each class is new to msgspec, and eight threads decode it concurrently.
HAMMER = """
import sys, threading, msgspec
from portalmq import wire
sys.setswitchinterval(1e-6)
source = '''
class Inner(msgspec.Struct, array_like=True):
    pairs: list[tuple[int, int]] = []
class Outer(msgspec.Struct):
    inner: list[Inner] = []
    named: dict[str, tuple[int, list[Inner]]] = {}
'''
data = msgspec.msgpack.encode({"inner": [[[[1, 2]]]], "named": {"k": [1, [[[[1, 2]]]]]}})
for _ in range(300):
    names = {"msgspec": msgspec}
    exec(source, names)
    wire.prepare(names["Outer"])
    together = threading.Barrier(8)
    def decode():
        together.wait()
        msgspec.msgpack.decode(data, type=names["Outer"])
    threads = [threading.Thread(target=decode) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""


def test_threads_may_decode_a_prepared_struct_first_and_concurrently() -> None:
    """msgspec 0.22 crashes the process here without the preparation."""
    done = subprocess.run([sys.executable, "-c", HAMMER], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
