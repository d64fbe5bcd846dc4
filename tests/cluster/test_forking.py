"""Programs that use a producer and then fork, as pre-forking servers and process pools do: every acknowledged message
is stored."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
from support.broker_process import BrokerProcess

from portalmq import Admin

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here"),
]

POOL = """
import multiprocessing, sys
from portalmq import Producer

producer = Producer(sys.argv[1])

def send(value):
    producer.send("t", value).result(120)
    return value

if __name__ == "__main__":
    print(send("before"))
    with multiprocessing.get_context("fork").Pool(4) as pool:
        for value in pool.imap_unordered(send, [f"child-{number}" for number in range(20)]):
            print(value)
    print(send("after"))
"""

# A request is answered when as many processes as there are workers hold one: so each worker holds one.
APPLICATION = """
import os, pathlib, sys, time
from portalmq import Producer

producer = Producer(os.environ["BROKER"])
producer.send("t", "preloaded").result(120)
seen = pathlib.Path("workers")
seen.mkdir(exist_ok=True)

def application(environ, start_response):
    (seen / str(os.getpid())).touch()
    while len(list(seen.iterdir())) < 2:
        time.sleep(0.01)
    value = environ["PATH_INFO"].strip("/")
    producer.send("t", value).result(120)
    start_response("202 Accepted", [("Content-Type", "text/plain")])
    return [value.encode()]
"""


def stored(broker: BrokerProcess) -> list[str]:
    with Admin(broker.url) as admin:
        return sorted(message.text for message in admin.peek("t", limit=1000))


def test_what_a_pool_of_processes_sends_by_its_parents_producer_is_stored(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(POOL)
    with BrokerProcess(tmp_path / "broker") as broker:
        done = subprocess.run(
            [sys.executable, str(program), broker.url], capture_output=True, text=True, timeout=300, check=True
        )
        acknowledged = done.stdout.split()
        assert len(acknowledged) == 22
        assert stored(broker) == sorted(acknowledged)


def test_what_preforked_workers_of_a_server_send_by_one_producer_is_stored(tmp_path: Path) -> None:
    (tmp_path / "application.py").write_text(APPLICATION)
    log = tmp_path / "log"
    with BrokerProcess(tmp_path / "broker") as broker, log.open("w") as stderr:
        server = subprocess.Popen(
            [sys.executable, "-m", "gunicorn", "--preload", "-w", "2", "--timeout", "0", "-b", "127.0.0.1:0"]
            + ["--no-control-socket", "application:application"],
            cwd=tmp_path,
            env=os.environ | {"BROKER": broker.url},
            stderr=stderr,
        )
        try:
            while (found := re.search(r"Listening at: (\S+)", log.read_text())) is None:
                assert server.poll() is None, log.read_text()
                threading.Event().wait(0.02)
            acknowledged = ["preloaded"]

            def ask(name: str) -> None:
                for number in range(10):
                    with urllib.request.urlopen(f"{found[1]}/{name}-{number}", timeout=300) as answer:
                        acknowledged.append(answer.read().decode())

            askers = [threading.Thread(target=ask, args=(name,)) for name in ("a", "b")]
            for asker in askers:
                asker.start()
            for asker in askers:
                asker.join()
        finally:
            server.terminate()
            server.wait(60)
        assert len(acknowledged) == 21
        assert stored(broker) == sorted(acknowledged)
