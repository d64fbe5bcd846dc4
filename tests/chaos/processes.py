"""The processes of the clients: started, killed, stopped, and started again under a new life."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

from chaos.clients import RUN
from chaos.workload import PROCESSES

ENDED_WITHIN_S = 240.0


class Processes:
    def __init__(self, directory: Path, seed: int, urls: list[str]) -> None:
        self.directory = directory
        self.mortal = [name for name, (_, is_mortal) in PROCESSES.items() if is_mortal]
        self._seed = seed
        self._urls = urls
        self._lives: Counter[str] = Counter()
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def set_phase(self, phase: str) -> None:
        """Take effect at once for everyone: a file is replaced, never seen half written."""
        draft = self.directory / "phase.draft"
        draft.write_text(phase)
        draft.rename(self.directory / "phase")

    def start_all(self) -> None:
        self.set_phase(RUN)
        for name in PROCESSES:
            self.start(name)

    def start(self, name: str) -> None:
        self._lives[name] += 1
        command = [sys.executable, "-m", "chaos.clients", PROCESSES[name][0], name, str(self._lives[name])]
        with (self.directory / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                [*command, str(self.directory), str(self._seed), ",".join(self._urls)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=Path(__file__).resolve().parents[1],
            )

    def kill(self, name: str) -> None:
        self._running[name].kill()
        self._running[name].wait()

    def signal(self, name: str, number: int) -> None:
        self._running[name].send_signal(number)

    def wait(self, within_s: float = ENDED_WITHIN_S) -> list[str]:
        """Wait until all have ended. Return what is wrong: those that do not end, or end with an error."""
        wrong = []
        for name, process in self._running.items():
            try:
                if process.wait(within_s) != 0:
                    wrong.append(f"{name} ended with {process.returncode}")
            except subprocess.TimeoutExpired:
                wrong.append(f"{name} does not end")
                self.kill(name)
        return wrong

    def end(self) -> None:
        for name, process in self._running.items():
            if process.poll() is None:
                self.kill(name)
