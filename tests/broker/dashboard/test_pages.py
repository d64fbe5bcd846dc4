"""The shell of the dashboard and its files."""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from flask.testing import FlaskClient
from support.domain import running

from portalmq.broker.api.app import create_app
from portalmq.broker.dashboard import pages
from portalmq.broker.dashboard.routes import DASHBOARD_ROUTES
from portalmq.broker.server.auth import Auth
from portalmq.broker.server.config import BrokerConfig

# The files of others, as they were published: see vendor/LICENSES.txt.
VENDORED = {
    "preact-htm.js": "72284e8e9079c87817145df1110f74e8a2aa040b2fc384922e18dfcb46fc1fd7",
    "uplot.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uplot.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlaskClient]:
    with running(tmp_path_factory.mktemp("data")) as fixture:
        yield create_app(
            fixture.broker, BrokerConfig(), fixture.broker.metrics, Auth(), pages=DASHBOARD_ROUTES
        ).test_client()


@pytest.mark.parametrize("path", ["/ui", "/ui/", "/ui/topics", "/ui/topics/t/messages/0-17", "/ui/anything/else"])
def test_every_page_has_the_same_shell_under_a_strict_policy(client: FlaskClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    assert answer.headers["Cache-Control"] == "no-store"
    assert not re.search(r"<script>|<style|style=|\son\w+=", answer.text)


def test_all_that_the_shell_names_is_there(client: FlaskClient) -> None:
    for name in re.findall(r'(?:src|href)="([^"]+)"', client.get("/ui/").text):
        answer = client.get(name)
        assert (answer.status_code, "immutable" in answer.headers["Cache-Control"]) == (200, True), name


def test_static_files_are_compressed_for_those_who_can_read_that(client: FlaskClient) -> None:
    digest, files = pages.static_files()
    path, file = f"/ui/static/{digest}/vendor/preact-htm.js", files["vendor/preact-htm.js"]
    plain = client.get(path)
    packed = client.get(path, headers={"Accept-Encoding": "gzip, br"})
    assert plain.data == gzip.decompress(packed.data) == file.body
    assert packed.headers["Content-Encoding"] == "gzip"
    assert sum(len(each.compressed) for each in files.values()) < 150_000


@pytest.mark.parametrize("name", ["nothing.js", "../pages.py", "..%2fpages.py", "vendor", ""])
def test_nothing_else_is_served(client: FlaskClient, name: str) -> None:
    answer = client.get(f"/ui/static/{pages.static_files()[0]}/{name}")
    assert answer.status_code == 404 or b"<!doctype html>" in answer.data[:20]


def test_modules_import_only_what_is_there_and_nothing_from_outside() -> None:
    root = pages.HERE / "static"
    for file in root.rglob("*.js"):
        text = file.read_text()
        for name in re.findall(r'(?:from|import)\s*\(?"([^"]+)"', text):
            assert (file.parent / name).is_file(), f"{file.name} imports {name}"
        if "vendor" not in file.parts:
            assert not re.search(r"https?://(?!www\.w3\.org|\$)", text), file
            assert not re.search(r"\b(eval|Function|innerHTML|outerHTML|dangerouslySetInnerHTML)\b", text), file


def test_the_files_of_others_are_as_published() -> None:
    vendor = pages.HERE / "static" / "vendor"
    assert {each.name for each in vendor.iterdir()} == {*VENDORED, "LICENSES.txt"}
    licences = (vendor / "LICENSES.txt").read_text()
    for name, digest in VENDORED.items():
        assert hashlib.sha256((vendor / name).read_bytes()).hexdigest() == digest, name
        assert name in licences


def test_files_stay_readable() -> None:
    for file in Path(pages.HERE / "static").rglob("*.js"):
        assert "vendor" in file.parts or len(file.read_text().splitlines()) < 500, file
