"""The dashboard in a browser, as a test uses it: by what is seen, and by waiting for it."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import pytest
from support.chromium import Chromium, find

WITHIN_S = 30.0

_UNTIL = """
new Promise((done, fail) => {
  const ends = Date.now() + %d;
  const look = () => {
    let found = null;
    try { found = %s; } catch (fault) { found = null; }
    if (found) done(found);
    else if (Date.now() > ends) fail(new Error("not seen: " + %s + "\\n" + document.body.innerText.slice(0, 3000)));
    else setTimeout(look, 40);
  };
  look();
})
"""
_NAMED = "[...document.querySelectorAll(%s)].find((each) => each.offsetParent && each.innerText.trim() === %s)"


def chromium_program() -> str:
    """Return the path of a browser. Skip the test where there is none, unless one is required."""
    program = find()
    if program is None:
        told = "there is no Chromium here (on Debian: apt-get install chromium)"
        assert os.environ.get("PORTALMQ_CHROMIUM_REQUIRED") != "1", told
        pytest.skip(told)
    return program


class Pages:
    """The pages of one broker."""

    def __init__(self, browser: Chromium, url: str) -> None:
        self.browser = browser
        self.url = url

    def open(self, path: str, **more: Any) -> None:
        self.browser.open(self.url + path, **more)

    def ask(self, expression: str) -> Any:
        return self.browser.ask(expression)

    def until(self, expression: str) -> Any:
        """Return the value of a JavaScript expression once it is true."""
        return self.browser.ask(_UNTIL % (WITHIN_S * 1000, expression, json.dumps(expression)))

    def see(self, text: str) -> None:
        """Wait until a text is on the page."""
        self.until(f"document.body.innerText.includes({json.dumps(text)})")

    def press(self, name: str, within: str = "") -> None:
        """Press the button with this text, once it is there and not disabled."""
        found = _NAMED % (json.dumps(f"{within} button".strip()), json.dumps(name))
        self.until(f"(() => {{ const it = {found}; if (it && !it.disabled) {{ it.click(); return true; }} }})()")

    def press_part(self, text: str, within: str) -> None:
        """Press the button that has this in its text."""
        buttons = f"[...document.querySelectorAll({json.dumps(f'{within} button')})]"
        found = f"{buttons}.find((each) => each.innerText.includes({json.dumps(text)}))"
        self.until(f"(() => {{ const it = {found}; it?.click(); return !!it; }})()")

    def follow(self, path: str) -> None:
        """Follow the link to a path."""
        found = f"document.querySelector({json.dumps(f'main a[href={json.dumps(path)}]')})"
        self.until(f"(() => {{ const it = {found}; it?.click(); return !!it; }})()")

    def fill(self, selector: str, text: str) -> None:
        """Type a text into a field, in place of what is there."""
        self.until(
            f"""(() => {{
              const it = document.querySelector({json.dumps(selector)});
              if (!it || it.disabled) return false;
              const of = it instanceof HTMLTextAreaElement ? HTMLTextAreaElement
                : it instanceof HTMLSelectElement ? HTMLSelectElement : HTMLInputElement;
              Object.getOwnPropertyDescriptor(of.prototype, "value").set.call(it, {json.dumps(text)});
              it.dispatchEvent(new Event("input", {{ bubbles: true }}));
              it.dispatchEvent(new Event("change", {{ bubbles: true }}));
              return true;
            }})()"""
        )

    def wait_at(self, path: str) -> None:
        """Wait until the browser is at a path, which it may reach by loading another page."""
        ends_at = time.monotonic() + WITHIN_S
        while True:
            try:
                at = self.ask("document.readyState === 'complete' && location.pathname + location.search")
            except AssertionError:  # the page that was asked is gone
                at = None
            if at == path:
                return
            assert time.monotonic() < ends_at, f"at {at} instead of {path}"
            time.sleep(0.05)
