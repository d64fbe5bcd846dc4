"""TCP proxies, one for each link, in a process of their own: `python -m chaos.links NAME=PORT …`.

The ports behind the links are given; those of the proxies are printed as one line of JSON. Each line on stdin then sets
one link: {"link": NAME, "state": {"hold": "in", …}}, answered by a line. The process ends with its stdin.

    hold    "in" (to the server) or "out": this direction's data waits, as on a network that drops packets
    lose    the data of both directions is lost, and the connections that lost some end when the state changes
    refuse  connections end, and new ones are refused
    slow_s  each piece of data is delayed
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

PIECE_BYTES = 1 << 18


class Link:
    def __init__(self, port: int) -> None:
        self.target = port
        self.state: dict[str, Any] = {}
        self.changed = asyncio.Event()
        self._open: set[asyncio.StreamWriter] = set()
        self._spoiled: set[asyncio.StreamWriter] = set()

    def set(self, state: dict[str, Any]) -> None:
        self.state = state
        for writer in tuple(self._open if state.get("refuse") else self._spoiled):
            writer.transport.abort()
        self.changed.set()
        self.changed = asyncio.Event()

    async def accept(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        if self.state.get("refuse"):
            to_client.transport.abort()
            return
        try:
            server, to_server = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            to_client.transport.abort()
            return
        writers = {to_client, to_server}
        self._open |= writers
        try:
            if self.state.get("refuse"):  # since then
                return
            carried = [self._carry("in", client, to_server), self._carry("out", server, to_client)]
            tasks = [asyncio.create_task(each) for each in carried]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            self._open -= writers
            self._spoiled -= writers
            for writer in writers:
                writer.transport.abort()

    async def _carry(self, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(PIECE_BYTES):
                while self.state.get("hold") == way:
                    await self.changed.wait()
                if self.state.get("lose"):
                    self._spoiled.add(writer)
                    continue
                if self.state.get("slow_s"):
                    await asyncio.sleep(self.state["slow_s"])
                writer.write(data)
                await writer.drain()
            await self._end_of(way)
            # What was written goes out before the connection ends.
            writer.close()
            await writer.wait_closed()

    async def _end_of(self, way: str) -> None:
        """Wait while the other side may not learn that the connection has ended."""
        while self.state.get("lose") or self.state.get("hold") == way:
            await self.changed.wait()


async def serve(targets: dict[str, int]) -> None:
    links = {name: Link(port) for name, port in targets.items()}
    servers = {name: await asyncio.start_server(link.accept, "127.0.0.1", 0) for name, link in links.items()}
    print(json.dumps({name: server.sockets[0].getsockname()[1] for name, server in servers.items()}), flush=True)
    orders = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    while line := await orders.readline():
        order = json.loads(line)
        links[order["link"]].set(order["state"])
        print("set", flush=True)


class Links:
    """The process of proxies, as its owner controls it. Links are named `client>1`, `2>1`, `1>zookeeper-1`."""

    def __init__(self, targets: dict[str, int], log: Path) -> None:
        command = [sys.executable, "-m", "chaos.links", *(f"{name}={port}" for name, port in targets.items())]
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=Path(__file__).resolve().parents[1],
            )
        self._lock = threading.Lock()
        self.ports: dict[str, int] = json.loads(self._answer())

    def set(self, link: str, **state: Any) -> None:
        """Set the state of a link; without a state it is whole again."""
        with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"link": link, "state": state}).encode() + b"\n")
            self._process.stdin.flush()
            assert self._answer() == b"set\n"

    def _answer(self) -> bytes:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


if __name__ == "__main__":
    named = (argument.rpartition("=") for argument in sys.argv[1:])
    asyncio.run(serve({name: int(port) for name, _, port in named}))
