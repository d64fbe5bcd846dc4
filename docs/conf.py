"""Sphinx's configuration of the documentation site: `make docs`.

The repository is the root of the sources, so that a link between two pages is the same on the site and in the checkout.
"""

from __future__ import annotations

import configparser
import re
import shutil
from pathlib import Path

from sphinx.application import Sphinx

_setup = configparser.ConfigParser(interpolation=None)
_setup.read(Path(__file__).parents[1] / "setup.cfg")

project = "PortalMQ"
version = release = _setup["metadata"]["version"]
author = _setup["metadata"]["author"]
html_title = f"{project} {version}"

extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/*.md", "broker/*/*.md", "spark/DESIGN.md"]
exclude_patterns = [".*", "build", "dist", "data", "tests"]
myst_heading_anchors = 4  # the anchors that GitHub gives headings

html_theme = "furo"
html_copy_source = False


def setup(app: Sphinx) -> None:
    """Register what makes a site of pages that are written for the checkout."""
    app.connect("source-read", _make_lists_of_the_index_navigation)
    app.connect("build-finished", _complete)


def _make_lists_of_the_index_navigation(app: Sphinx, page: str, text: list[str]) -> None:
    if page == root_doc:
        entries = re.sub(r"^- \[(.+)\]\((.+)\)$", r"\1 <\2>", text[0], flags=re.MULTILINE)
        tree = "```{toctree}\n:caption: \\1\n\n\\2```\n"
        text[0] = re.sub(r"^## (.+)\n\n((?:.+\n)+)", tree, entries, flags=re.MULTILINE)


def _complete(app: Sphinx, failure: Exception | None) -> None:
    """Add the pictures that pages show by HTML, and lead from the site's address to its first page."""
    if failure is None and app.builder.format == "html":
        shutil.copytree(app.srcdir / "docs/pictures", app.outdir / "docs/pictures", dirs_exist_ok=True)
        first = app.builder.get_target_uri(root_doc)
        (app.outdir / "index.html").write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={first}">\n')
