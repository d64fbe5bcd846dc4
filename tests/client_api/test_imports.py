"""What a program pays to import the client."""

from __future__ import annotations

import subprocess
import sys

import pytest

NAMES = ("Producer", "Consumer", "AsyncProducer", "AsyncConsumer", "Admin", "Lock")


@pytest.mark.parametrize("name", NAMES)
def test_a_client_loads_no_package_but_msgspec(name: str) -> None:
    """Where they are installed, a codec of compressed values is loaded too, and msgspec loads typing_extensions."""
    program = f"""
import sys
before = set(sys.modules)
from portalmq import {name}
loaded = {{module.partition(".")[0] for module in set(sys.modules) - before}}
print(sorted(loaded - sys.stdlib_module_names - {{"portalmq", "backports", "typing_extensions"}}))
print(sorted({{"importlib.metadata", "email", "http.client", "portalmq.broker"}} & set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["['msgspec']", "[]"]


def test_the_version_is_still_known() -> None:
    import portalmq

    assert portalmq.__version__[0].isdigit()
