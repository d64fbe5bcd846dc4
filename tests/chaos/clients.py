"""The clients of a run: `python -m chaos.clients ROLE NAME LIFE DIRECTORY SEED URLS`, each role a process.

A file `phase` in the directory says what all of them do: run, drain (send nothing new, finish what there is), stop.
"""

from __future__ import annotations

import random
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from chaos.history import History

RUN, DRAIN, STOP = "run", "drain", "stop"


class Client:
    """What all actors of a process share."""

    def __init__(self, name: str, life: str, directory: Path, seed: str, urls: list[str]) -> None:
        self.name = name
        self.life = life
        self.urls = urls
        self.history = History(directory / f"{name}.{life}.history")
        self._phase = directory / "phase"
        self._seed = seed
        self._threads: list[threading.Thread] = []

    @property
    def phase(self) -> str:
        return self._phase.read_text()

    def pause(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))

    def actor(self, name: str, act: Callable[..., None], *arguments: object) -> None:
        """Run `act(client, actor, chance, …)` in a thread. What an actor sends has its name and its life in it."""
        actor = f"{self.name}.{self.life}/{name}"

        def run() -> None:
            try:
                act(self, actor, random.Random(f"{self._seed}/{actor}"), *arguments)
            except BaseException:
                self.history.note(actor, f"failed: {traceback.format_exc()[-2_000:]}")
                raise

        self._threads.append(threading.Thread(target=run, name=actor))

    def run(self) -> None:
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join()


def main(role: str, name: str, life: str, directory: str, seed: str, urls: str) -> None:
    from chaos import consuming, locking, producing

    client = Client(name, life, Path(directory), seed, urls.split(","))
    roles = {
        "producers": producing.producers,
        "senders": producing.senders,
        "queue": consuming.queue,
        "stream": consuming.stream,
        "locks": locking.locks,
    }
    roles[role](client)
    client.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
