"""docs/PRODUCING.md: its commands run unchanged and do what the document says."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.broker_process import REPOSITORY, BrokerProcess

pytestmark = pytest.mark.cluster

BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """The blocks for the second terminal, without the address."""
    text = (REPOSITORY / "docs" / "PRODUCING.md").read_text(encoding="utf-8")
    blocks = BLOCK.findall(text)
    return [block for block in blocks if not block.startswith(("portalmq dev", "export URL"))]


@pytest.mark.skipif(shutil.which("curl") is None, reason="the document uses curl")
def test_the_commands_of_the_document_do_what_it_says(tmp_path: Path):
    with BrokerProcess(tmp_path) as broker:
        shell = subprocess.run(
            ["bash", "-e", "-c", "\necho; echo '=== next'\n".join(commands())],
            env={"PATH": "/usr/bin:/bin", "URL": broker.url},
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
    assert shell.returncode == 0, shell.stderr
    said = [part.strip() for part in shell.stdout.split("=== next")]
    print("\n--\n".join(said))
    plain, options, scheduled, taken_back, keys, in_batches, named, full, *_ = said
    assert plain.count('"offset"') == 5
    assert options.count('"id"') == 3
    assert scheduled.count('"deliver_at_ms"') == 2
    assert taken_back.startswith("204")
    assert '"code":"message_not_found"' in taken_back
    first, again, other = keys.replace("}{", "}\n{").splitlines()
    assert first == again
    assert '"code":"idempotency_key_reused"' in other
    once, twice = in_batches.replace("}{", "}\n{").splitlines()
    assert once == twice
    assert once.count('"offset"') == 2
    assert re.findall(r'"epoch":(\d)', named) == ["0", "1"]
    assert full.endswith("200\n200\n429")
    assert "problem" not in "".join((plain, options, scheduled, named, *said[8:]))
