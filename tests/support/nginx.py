"""nginx with the configuration of docs/deploy, on a free port, in front of servers at some ports of this machine."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from support.broker_process import REPOSITORY, Answer
from support.ports import kept_port, number_of

CONFIGURATION = REPOSITORY / "docs" / "deploy" / "nginx.conf"
PROGRAM = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
WITHIN_S = 15.0

# Debian: apt-get install nginx. In CI, where it is required, a missing program is a failure.
needs_nginx = pytest.mark.skipif(
    PROGRAM is None and "PORTALMQ_NGINX_REQUIRED" not in os.environ, reason="there is no nginx here"
)

AROUND = """
daemon off;
pid {directory}/nginx.pid;
worker_processes 1;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    include {directory}/portalmq.conf;
}}
"""


class Nginx:
    """`changes` are further (pattern, replacement) in the configuration; each pattern must match there."""

    def __init__(self, directory: Path, ports: list[int], *changes: tuple[str, str]) -> None:
        self.directory = directory
        self._place = kept_port()
        self.port = number_of(self._place)
        servers = "\n".join(f"    server 127.0.0.1:{port} max_fails=1 fail_timeout=2s;" for port in ports)
        lines = r"(    server 127\.0\.0\.1:500\d max_fails=1 fail_timeout=2s;\n?){3}"
        text = CONFIGURATION.read_text()
        for pattern, instead in (
            (lines, servers + "\n"),
            (r"listen 8080;", f"listen 127.0.0.1:{self.port};"),
            *changes,
        ):
            text, found = re.subn(pattern, instead, text)
            assert found == 1, f"{pattern} is in the configuration {found} times"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "portalmq.conf").write_text(text)
        (directory / "nginx.conf").write_text(AROUND.format(directory=directory))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Nginx:
        assert PROGRAM is not None, "nginx is missing: apt-get install nginx"
        command = [PROGRAM, "-p", str(self.directory), "-e", "stderr", "-c", str(self.directory / "nginx.conf")]
        with (self.directory / "log").open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + WITHIN_S
        while not self._listens():
            said = (self.directory / "log").read_text("utf-8", "replace")
            assert self._process.poll() is None, said
            assert time.monotonic() < deadline, said
            time.sleep(0.02)
        return self

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(WITHIN_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._place.close()

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=90)
        try:
            connection.request(method, path, body, headers or {})
            response: Any = connection.getresponse()
            return Answer(response.status, response.headers, response.read())
        finally:
            connection.close()
