"""What .ci/release.py refuses, and a release."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).parents[1]
CHANGELOG = (
    "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2026-01-31\n\n### Added\n\n- A thing.\n\n## [0.1.0]\n\n- It.\n"
)


@pytest.fixture(scope="module")
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def git(root: Path, *arguments: str) -> str:
    who = ("-c", "user.name=A", "-c", "user.email=a@example.com", "-c", "tag.gpgSign=false")
    return subprocess.run(
        ["git", "-C", root, *who, *arguments], check=True, capture_output=True, text=True, timeout=60
    ).stdout


@pytest.fixture
def ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository from which 0.2.0 may be released."""
    for variable in ("GIT_AUTHOR", "GIT_COMMITTER"):
        monkeypatch.setenv(f"{variable}_NAME", "A")
        monkeypatch.setenv(f"{variable}_EMAIL", "a@example.com")
    (tmp_path / "setup.cfg").write_text("[metadata]\nname = portalmq\nversion = 0.2.0\n")
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "all: begin")
    git(tmp_path, "tag", "v0.1.0")
    git(tmp_path, "tag", "value")  # no version
    return tmp_path


def test_a_clean_checkout_that_says_the_version_everywhere_may_be_released(release: ModuleType, ready: Path) -> None:
    assert release.refusals(ready, "0.2.0") == []


@pytest.mark.parametrize("version", ["0.2.0 ", "v0.2.0", "0.2.0.dev1", "0.2.0+here", "00.2.0", "next", ""])
def test_what_is_no_version_of_a_release_is_refused(release: ModuleType, ready: Path, version: str) -> None:
    (reason,) = release.refusals(ready, version)
    assert "name one like 0.2.0" in reason


@pytest.mark.parametrize("name", ["new.py", "setup.cfg"])
def test_a_changed_checkout_is_refused(release: ModuleType, ready: Path, name: str) -> None:
    with (ready / name).open("a") as file:
        file.write("# changed\n")
    (reason,) = release.refusals(ready, "0.2.0")
    assert "not clean" in reason
    assert name in reason


def test_another_version_in_setup_cfg_is_refused(release: ModuleType, ready: Path) -> None:
    reasons = release.refusals(ready, "0.3.0")
    assert [reason.split()[0] for reason in reasons] == ["setup.cfg", "CHANGELOG.md"]
    assert "version = 0.2.0" in reasons[0]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("## [0.2.0] - 2026-01-31", "## [0.2.1] - 2026-01-31", r"no section ## \[0.2.0\]"),
        (" - 2026-01-31", "", "no date"),
        ("- A thing.", "", "says nothing of 0.2.0"),
        ("## [Unreleased]\n", "## [Unreleased]\n\n- Another thing.\n", "under ## \\[Unreleased\\]: move them"),
    ],
)
def test_a_changelog_that_is_not_ready_is_refused(release: ModuleType, old: str, new: str, reason: str) -> None:
    assert release.changelog_refusals(CHANGELOG, "0.2.0") == []
    (told,) = release.changelog_refusals(CHANGELOG.replace(old, new), "0.2.0")
    assert re.search(reason, told)


@pytest.mark.parametrize(("tag", "reason"), [("v0.2.0", "v0.2.0 exists"), ("v0.10.0", "v0.10.0 is newer")])
def test_a_version_that_is_not_the_newest_is_refused(release: ModuleType, ready: Path, tag: str, reason: str) -> None:
    git(ready, "tag", tag)
    (told,) = release.refusals(ready, "0.2.0")
    assert reason in told


def test_a_refusal_builds_and_tags_nothing(
    release: ModuleType, ready: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "make", lambda *_: pytest.fail("built"))
    (ready / "new.py").touch()
    assert release.main(["0.2.0"], ready) == 1
    assert "new.py" in capsys.readouterr().err
    assert git(ready, "tag").split() == ["v0.1.0", "value"]
    assert release.main([], ready) == 2


def test_a_build_that_fails_is_not_tagged(
    release: ModuleType, ready: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = release.run

    def run_all_but_the_build(what: str, *command: str, folder: Path | None = None) -> str:
        return run(what, *(("false",) if what == "the build" else command), folder=folder)

    monkeypatch.setattr(release, "run", run_all_but_the_build)
    assert release.main(["0.2.0"], ready) == 1
    assert "the build failed with 1" in capsys.readouterr().err
    assert git(ready, "tag").split() == ["v0.1.0", "value"]
    assert git(ready, "worktree", "list").count("\n") == 1
    assert git(ready, "status", "--porcelain", "--ignored") == ""


def test_a_source_distribution_without_a_file_of_the_repository_is_refused(release: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "portalmq-1").mkdir()
    (tmp_path / "portalmq-1" / "setup.cfg").touch()
    archive = Path(shutil.make_archive(str(tmp_path / "portalmq-1"), "gztar", tmp_path, "portalmq-1"))
    release.check_contents([archive], {"setup.cfg"})
    with pytest.raises(release.ReleaseError, match=r"lacks docs/API\.md: name them in MANIFEST\.in"):
        release.check_contents([archive], {"setup.cfg", "docs/API.md"})


@pytest.mark.prove
def test_this_checkout_can_be_released(ready: Path, tmp_path: Path) -> None:
    pytest.importorskip("twine", reason="pip install 'portalmq[release]'")
    root = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, root], check=True, timeout=60)
    for tag in git(root, "tag").split():
        git(root, "tag", "--delete", tag)
    setup = (root / "setup.cfg").read_text()
    (root / "setup.cfg").write_text(setup.replace("\nversion = ", "\nversion = 9.", 1))
    version = setup.partition("\nversion = ")[2].partition("\n")[0]
    (root / "CHANGELOG.md").write_text(CHANGELOG.replace("0.2.0", f"9.{version}"))
    git(root, "commit", "--quiet", "--all", "--message", "all: release")
    program = [sys.executable, root / ".ci" / "release.py", f"9.{version}"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert git(root, "tag").split() == [f"v9.{version}"]
    assert {file.suffix for file in (root / "dist" / f"9.{version}").iterdir()} == {".whl", ".gz"}
    assert git(root, "status", "--porcelain") == ""
