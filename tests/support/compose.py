"""docker-compose.yml and the Dockerfile as plain data, and their services as plain processes.

Docker is not needed: a container is its command, its environment and its host names. The names become 127.0.0.1, each
port a free one, and the data directory one of the test's.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from support.ports import kept_port, number_of

ROOT = Path(__file__).parents[2]
DATA_DIR = "/var/lib/portalmq"
_PLACE = re.compile(r"\b((?:zk|broker)\d):(\d+)")


MINIQ = "docs/deploy/compose.miniq.yml"
_VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])((?:[^}$]|\$\$)*))?\}")


def compose(name: str = "docker-compose.yml") -> dict[str, Any]:
    return yaml.safe_load((ROOT / name).read_text())


class MissingVariable(Exception):
    """A variable that the compose file requires is not set; the message is the file's."""


def interpolated(text: str, environment: Mapping[str, str]) -> str:
    """Fill in `${NAME:-default}` and `${NAME:?sentence}` as Docker Compose does."""

    def value(found: re.Match[str]) -> str:
        name, kind, more = found.groups()
        if environment.get(name):
            return environment[name]
        if kind == "?":
            raise MissingVariable(more.replace("$$", "$"))
        return more or ""

    return _VARIABLE.sub(value, text)


@dataclass(frozen=True)
class Image:
    """The settings in a Dockerfile's last stage for the process in the container."""

    entrypoint: list[str]
    command: list[str]
    environment: dict[str, str]
    health: list[str]
    user: str


def image() -> Image:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.strip() for line in text[text.rindex("\nFROM ") :].splitlines()]
    told = {word: line.removeprefix(word).strip() for line in lines if (word := line.partition(" ")[0]).isupper()}
    health = told["HEALTHCHECK"].partition("CMD ")[2]
    environment = dict(pair.split("=", 1) for pair in shlex.split(told["ENV"]))
    return Image(json.loads(told["ENTRYPOINT"]), json.loads(told["CMD"]), environment, json.loads(health), told["USER"])


@dataclass
class Containers:
    """Services as processes. `places` maps host:port of the file to host:port on this machine."""

    directory: Path
    places: dict[str, str]
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    file: str = "docker-compose.yml"
    # The environment of `docker compose` itself: the values of ${...}.
    variables: dict[str, str] = field(default_factory=dict)

    def start(self, name: str) -> subprocess.Popen[bytes]:
        service, made = compose(self.file)["services"][name], image()
        arguments = [*service.get("entrypoint", made.entrypoint), *service.get("command", made.command)]
        with (self.directory / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*_here(arguments[0]), *arguments[1:]],
                env=self.environment(name),
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.running[name] = process
        return process

    def environment(self, name: str) -> dict[str, str]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("PORTALMQ_")}
        told = image().environment | compose(self.file)["services"][name].get("environment", {})
        mine = {key: self._moved(interpolated(value, self.variables), name) for key, value in told.items()}
        place = self.places.get(f"{name}:{told['PORTALMQ_PORT']}")
        if place is not None:
            mine["PORTALMQ_PORT"] = place.rpartition(":")[2]
        return inherited | mine

    def _moved(self, value: str, name: str) -> str:
        if value == DATA_DIR:
            return str(self.directory / name)
        return _PLACE.sub(lambda found: self.places[found[0]], value)

    def is_healthy(self, name: str) -> bool:
        """Run the image's health check next to the service, and return its result."""
        command = image().health
        checked = subprocess.run(
            [*_here(command[0]), *command[1:]], env=self.environment(name), capture_output=True, timeout=30, check=False
        )
        return checked.returncode == 0

    def said(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text("utf-8", "replace")


def _here(program: str) -> list[str]:
    """The command on this machine for a program of the image."""
    return {"portalmq": [sys.executable, "-m", "portalmq.cli.main"], "python": [sys.executable]}[program]


@contextmanager
def containers(
    directory: Path, zookeeper_ports: list[int], *, file: str = "docker-compose.yml", **variables: str
) -> Iterator[Containers]:
    """Yield containers of which none runs yet; all started ones end on exit."""
    services, default = compose(file)["services"], image().environment["PORTALMQ_PORT"]
    brokers = {
        name: service["environment"].get("PORTALMQ_PORT", default)
        for name, service in services.items()
        if "build" in service
    }
    places = {f"zk{number}:2181": f"127.0.0.1:{port}" for number, port in enumerate(zookeeper_ports, start=1)}
    with ExitStack() as held:
        for name, port in brokers.items():
            places[f"{name}:{port}"] = f"127.0.0.1:{number_of(held.enter_context(kept_port()))}"
        made = Containers(directory, places, file=file, variables=variables)
        try:
            yield made
        finally:
            for process in made.running.values():
                process.kill()
            for process in made.running.values():
                process.wait()
