"""A program written by a reader of MiniQ's text alone: pyzmq, JSON, three ports.

    python miniq_zeromq_program.py COMMANDS PRODUCERS CONSUMERS produce QUEUE NAME COUNT
    python miniq_zeromq_program.py COMMANDS PRODUCERS CONSUMERS consume QUEUE [CRASH_AFTER]

The text: "producer client connects to miniq, send command to create queue, generates messages and send it through zmq
protocol", "every incoming message from producer will be acknowledged by broker"; "consumer client connects to miniq,
send request to consume message, process message and notifies miniq to delete message". A producer prints the
acknowledged messages, a consumer the processed ones.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import zmq


class Client:
    def __init__(self, commands: int, producers: int, consumers: int) -> None:
        self.context = zmq.Context()
        self.commands = self.connect(commands)
        self.producers = self.connect(producers)
        self.consumers = self.connect(consumers)

    def connect(self, port: int) -> Any:
        socket = self.context.socket(zmq.REQ)
        socket.connect(f"tcp://127.0.0.1:{port}")
        return socket

    def ask(self, socket: Any, request: dict[str, Any]) -> dict[str, Any]:
        """Repeat the request until it is done: a temporary refusal is retried. A message that another consumer deleted,
        after its lease here ended, is gone."""
        while True:
            socket.send(json.dumps(request).encode())
            answer: dict[str, Any] = json.loads(socket.recv())
            if answer["status"] == "ok" or answer["code"] == "message_not_found":
                return answer
            print(answer["detail"], file=sys.stderr, flush=True)
            time.sleep(0.1)

    def command(self, kind: str, **payload: Any) -> dict[str, Any]:
        return self.ask(self.commands, {"type": kind, "payload": payload})

    def produce(self, queue: str, name: str, count: int) -> None:
        self.command("CREATE_QUEUE", queue=queue)
        self.command("PRODUCE_MSG", queue=queue)
        for number in range(count):
            message = f"{name}-{number}"
            self.ask(self.producers, {"queue": queue, "message": message})
            print(message, flush=True)

    def consume(self, queue: str, crash_after: int) -> None:
        self.command("CONSUME", queue=queue)
        taken = 0
        while True:
            answer = self.ask(self.consumers, {"queue": queue})
            if answer["id"] is None:
                time.sleep(0.02)  # "consumer polls miniq"
                continue
            taken += 1
            if taken == crash_after:
                os._exit(9)
            print(answer["message"], flush=True)
            self.command("DELETE_MSG", queue=queue, id=answer["id"])


def main(commands: str, producers: str, consumers: str, role: str, queue: str, *rest: str) -> None:
    client = Client(int(commands), int(producers), int(consumers))
    if role == "produce":
        client.produce(queue, rest[0], int(rest[1]))
    else:
        client.consume(queue, int(rest[0]) if rest else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
