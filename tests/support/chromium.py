"""A page in Chromium, for tests that check what a user sees.

The browser is driven by its DevTools protocol over a pair of pipes (--remote-debugging-pipe: JSON messages that end
with a zero byte, on descriptors 3 and 4), so it needs no port and no library.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ANSWER_WITHIN_S = 60.0
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update"),
    *("--disable-background-networking", "--disable-sync", "--disable-extensions", "--disable-dev-shm-usage"),
)
# Those of keys that do something by themselves.
_CODES = {"Tab": 9, "Enter": 13, "Escape": 27}


def find() -> str | None:
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


@dataclass
class Seen:
    """The events of a page while it loaded."""

    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    loader: str | None = None


class Chromium:
    """One browser with one page. On exit its processes have ended."""

    def __init__(self, program: str, profile: Path) -> None:
        self._profile = profile
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        # The shell moves the pipes to the descriptors that the browser expects, whatever descriptors they have here.
        command = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        arguments = [*_QUIET, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", command, program, *arguments],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.seen = Seen()

    def __enter__(self) -> Self:
        targets = self._call("Target.getTargets")["targetInfos"]
        page = next((target["targetId"] for target in targets if target["type"] == "page"), None)
        page = page or self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._write)  # a browser whose pipe closes ends
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait()
        os.close(self._read)
        shutil.rmtree(self._profile, ignore_errors=True)

    def open(self, page: Path | str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open a file, or a URL."""
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self.seen = Seen()
        url = page if isinstance(page, str) else page.absolute().as_uri()
        loader = self._call("Page.navigate", url=url)["loaderId"]
        deadline = time.monotonic() + ANSWER_WITHIN_S
        while self.seen.loader != loader:  # until then the previous page answers, or none
            self._note(self._next(deadline, "Page.navigate"))
        while self.ask("document.readyState") != "complete":
            assert time.monotonic() < deadline, f"{page} did not load"
        self.ask("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def resize(self, width: int, height: int) -> None:
        phone = width < 600
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def ask(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str, *, modifiers: int = 0) -> None:
        """Press a key, with the sum of 1 for Alt, 2 for Ctrl, 4 for Meta and 8 for Shift."""
        pressed: dict[str, Any] = {"key": key, "modifiers": modifiers, "windowsVirtualKeyCode": _CODES.get(key, 0)}
        typed = {"text": "\r" if key == "Enter" else key} if key == "Enter" or len(key) == 1 else {}
        self._call("Input.dispatchKeyEvent", type="keyDown", **pressed, **typed)
        self._call("Input.dispatchKeyEvent", type="keyUp", **pressed)

    def point(self, x: float, y: float) -> None:
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, *, whole: bool = False, clip: tuple[float, float, float, float] | None = None) -> bytes:
        """Return a PNG of the window, of the whole page, or of x, y, width, height in it."""
        options: dict[str, Any] = {"format": "png"}
        if clip or whole:
            size = self._call("Page.getLayoutMetrics")["cssContentSize"]
            x, y, width, height = clip or (0, 0, size["width"], size["height"])
            options["clip"] = {"x": x, "y": y, "width": width, "height": height, "scale": 1}
            options["captureBeyondViewport"] = True
        return base64.b64decode(self._call("Page.captureScreenshot", **options)["data"])

    def paper(self) -> bytes:
        """Return a PDF, as printed."""
        return base64.b64decode(self._call("Page.printToPDF", printBackground=True)["data"])

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + ANSWER_WITHIN_S
        while True:
            answer = self._next(deadline, method)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _next(self, deadline: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(deadline - time.monotonic(), 0))
            assert ready, f"Chromium did not answer {method} within {ANSWER_WITHIN_S:g} s"
            read = os.read(self._read, 1 << 20)
            assert read, f"Chromium ended before it answered {method}"
            self._rest += read
        one, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(one)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        name, told = event.get("method"), event.get("params", {})
        if name == "Network.requestWillBeSent":
            self.seen.requests.append(told["request"]["url"])
        elif name == "Page.frameNavigated":
            self.seen.loader = told["frame"]["loaderId"]
        elif name == "Runtime.exceptionThrown":
            self.seen.complaints.append(json.dumps(told["exceptionDetails"]))
        elif name == "Runtime.consoleAPICalled" and told["type"] in {"error", "warning", "assert"}:
            self.seen.complaints.append(json.dumps(told["args"]))
        elif name == "Log.entryAdded" and told["entry"]["level"] in {"error", "warning"}:
            self.seen.complaints.append(told["entry"]["text"])
