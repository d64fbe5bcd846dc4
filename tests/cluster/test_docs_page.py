"""The page at /docs in Chromium, on a broker with a token."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.broker_process import BrokerProcess
from support.chromium import Chromium
from support.pages import Pages, chromium_program

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SHADOW = "document.querySelector('openapi-explorer').shadowRoot"


def press(pages: Pages, selector: str, text: str) -> None:
    found = f"[...{SHADOW}.querySelectorAll('{selector}')].find((each) => each.textContent.trim() === '{text}')"
    pages.until(f"(() => {{ const it = {found}; it?.click(); return !!it; }})()")


def test_the_description_is_shown_after_the_sign_in_and_tries_a_call(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret")
    options = ("--token-file", str(tmp_path / "token"))
    with (
        Chromium(chromium_program(), tmp_path / "chromium") as browser,
        BrokerProcess(tmp_path, *options, command=("dev",)) as broker,
    ):
        pages = Pages(browser, broker.url)
        pages.open("/docs")
        pages.wait_at("/ui/login?next=/docs")
        pages.fill("#token", "s3cret")
        pages.ask("document.querySelector('form').submit()")
        pages.wait_at("/docs")
        press(pages, ".nav-bar-path", "List the topics")
        press(pages, "button", "EXECUTE")
        pages.until(f"{SHADOW}.textContent.includes('Response Status') && {SHADOW}.textContent.includes('(200)')")
        assert browser.seen.complaints == []
        assert [each for each in browser.seen.requests if not each.startswith((broker.url, "data:"))] == []
