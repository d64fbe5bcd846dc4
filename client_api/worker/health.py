"""The worker's port for an orchestrator: /healthz, /readyz and /metrics, for all its processes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec

from portalmq.closeable import Closeable
from portalmq.worker.counts import ProcessState, prometheus

log = logging.getLogger("portalmq.worker")

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
REQUEST_TIMEOUT_S = 10.0

# The states of the processes that run, and how many should.
States = Callable[[], tuple[Sequence[ProcessState], int]]


def answer(path: str, states: Sequence[ProcessState], expected: int) -> tuple[int, str, bytes]:
    """Return status, content type and body. /healthz is 200 while every process runs, /readyz while each of them also
    receives the messages of all its handlers."""
    match path.partition("?")[0]:
        case "/metrics":
            return 200, METRICS_TYPE, prometheus(states).encode()
        case "/healthz":
            good = len(states) >= expected
        case "/readyz":
            good = len(states) >= expected and all(state.is_ready for state in states)
        case _:
            return 404, "text/plain", b"the worker serves /healthz, /readyz and /metrics\n"
    faults = sorted({fault for state in states for fault in state.faults})
    body = {"ok": good, "processes": len(states), "expected": expected, "faults": faults}
    return 200 if good else 503, "application/json", msgspec.json.encode(body) + b"\n"


class HealthServer(Closeable):
    """Serves until close(), and logs where. Raises OSError when the port is taken."""

    def __init__(self, host: str, port: int, states: States) -> None:
        class HealthRequest(BaseHTTPRequestHandler):
            timeout = REQUEST_TIMEOUT_S

            def do_GET(self) -> None:
                status, content_type, body = answer(self.path, *states())
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, format: str, *arguments: object) -> None:
                """Log nothing: probes come every few seconds."""

        self._server = ThreadingHTTPServer((host, port), HealthRequest)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="portalmq-worker-health", daemon=True)
        self._thread.start()
        log.info("health and metrics at http://%s:%d/metrics", host, self.port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
