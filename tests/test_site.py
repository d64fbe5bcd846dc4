"""The documentation as a site: each page is in its index, and links and pictures lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    file
    for pattern in ("*.md", "docs/*.md", "broker/*/*.md", "spark/DESIGN.md")  # those of docs/conf.py
    for file in ROOT.glob(pattern)
)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def prose(page: Path) -> str:
    """Return a page's text without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_index_lists_every_page_once() -> None:
    index = ROOT / "docs" / "index.md"
    listed = [(index.parent / link).resolve() for link in re.findall(r"^- \[.+\]\((.+)\)$", prose(index), re.MULTILINE)]
    assert sorted(listed) == [page for page in PAGES if page != index]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_link_to_a_heading_finds_it(page: Path) -> None:
    links = [link.partition("#") for link in LINK.findall(prose(page)) if "#" in link and "://" not in link]
    lost = [f"{path}#{name}" for path, _, name in links if name not in anchors(page.parent / path if path else page)]
    assert lost == []


@pytest.mark.prove
def test_the_site_is_built_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    for package in ("furo", "myst_parser", "sphinx"):
        pytest.importorskip(package, reason="pip install 'portalmq[docs]'")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", "-c", "docs", ".", site]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    loaded = {
        f"{page.relative_to(site)}: {address}"
        for page in site.rglob("*.html")
        for tag in re.findall(r"<(?:link|script|img|source|iframe)\b[^>]*>", page.read_text("utf-8"))
        for address in re.findall(r"\b(?:href|src|srcset)=\"([^\"]+)\"", tag)
        if re.match(r"(?:https?:)?//", address) or not (page.parent / re.split(r"[?#]", address)[0]).exists()
    }
    assert loaded == set()
    styles = [file.read_text("utf-8") for file in site.rglob("*.css")]
    assert not [style for style in styles if re.search(r"@import|url\(['\"]?(?:https?:)?//", style)]
