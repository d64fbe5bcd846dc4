"""Make a release of the commit that is checked out, and tag it: `make release VERSION=0.2.0`.

The wheel and the source distribution are built from the commit alone, checked, and each installed in an environment of
its own. They stay in dist/VERSION. Nothing is uploaded or pushed.
"""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

from packaging.version import InvalidVersion, Version


class ReleaseError(Exception):
    """A release that must not be made, and what to do first."""


def main(arguments: list[str], root: Path = Path(__file__).parents[1]) -> int:
    """Make the release named by the only argument. Return 1 if it is refused, 2 if no version is named."""
    if len(arguments) != 1:
        print("usage: release.py VERSION, for example 0.2.0", file=sys.stderr)
        return 2
    (version,) = arguments
    try:
        reasons = refusals(root, version)
        if reasons:
            raise ReleaseError("\n".join(f"- {reason}" for reason in reasons))
        files = make(root, version)
    except ReleaseError as error:
        print(f"No release of {version}:\n{error}", file=sys.stderr)
        return 1
    git(root, "tag", "--annotate", tag(version), "--message", f"PortalMQ {version}")
    print(f"Tagged {tag(version)}. Not uploaded, and not pushed:", *files, sep="\n  ")
    return 0


def tag(version: str) -> str:
    return f"v{version}"


def refusals(root: Path, version: str) -> list[str]:
    """Return every reason against a release of this version from this checkout."""
    try:
        wanted = Version(version)
    except InvalidVersion:
        return [f"{version} is no version: name one like 0.2.0 or 1.0.0rc1"]
    if str(wanted) != version or wanted.local or wanted.dev is not None:
        return [f"{version} is not the form of a released version: name one like 0.2.0 or 1.0.0rc1"]
    found = []
    changed = git(root, "status", "--porcelain")
    if changed:
        found.append(f"the checkout is not clean: commit or remove\n{changed}")
    written = setup_version(root)
    if written != version:
        found.append(f"setup.cfg says version = {written}: write {version} there")
    found += changelog_refusals((root / "CHANGELOG.md").read_text("utf-8"), version)
    tags = git(root, "tag", "--list", "v*").split()
    if tag(version) in tags:
        found.append(f"the tag {tag(version)} exists: choose a newer version")
    elif newer := [each for each in tags if is_version(each[1:]) and Version(each[1:]) > wanted]:
        found.append(f"the tag {max(newer, key=lambda each: Version(each[1:]))} is newer")
    return found


def changelog_refusals(changelog: str, version: str) -> list[str]:
    """Return what the changelog lacks: a dated section of this version with entries, and none left unreleased."""
    sections = dict(re.findall(r"^## \[([^]]+)\](.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL))
    found = []
    if version not in sections:
        found.append(f"CHANGELOG.md has no section ## [{version}] - YYYY-MM-DD: make it from ## [Unreleased]")
    else:
        if not re.match(r" - \d{4}-\d\d-\d\d\n", sections[version]):
            found.append(f"CHANGELOG.md has no date in ## [{version}]: write - YYYY-MM-DD behind it")
        if not re.search(r"^- ", sections[version], re.MULTILINE):
            found.append(f"CHANGELOG.md says nothing of {version}")
    if re.search(r"^- ", sections.get("Unreleased", ""), re.MULTILINE):
        found.append(f"CHANGELOG.md has entries under ## [Unreleased]: move them to ## [{version}]")
    return found


def make(root: Path, version: str) -> list[Path]:
    """Build and check the distributions in dist/VERSION. Raise ReleaseError if one is not as it should be."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        source, built = work / "source", work / "built"
        git(root, "worktree", "add", "--detach", str(source))
        try:
            run("the build", sys.executable, "-m", "build", "--outdir", str(built), str(source))
        finally:
            git(root, "worktree", "remove", "--force", str(source))
        files = sorted(built.iterdir())
        check_names(files, version)
        run("twine", sys.executable, "-m", "twine", "check", "--strict", *map(str, files))
        check_contents(files, set(git(root, "ls-files", "-z").split("\0")) - {""})
        for file in files:
            install(file, version, work / file.suffix[1:])
        target = root / "dist" / version
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(built, target)
    return sorted(target.iterdir())


def check_names(files: list[Path], version: str) -> None:
    names = {file.name for file in files}
    wanted = {f"portalmq-{version}.tar.gz", f"portalmq-{version}-py3-none-any.whl"}
    if names != wanted:
        raise ReleaseError(f"built {sorted(names)} instead of {sorted(wanted)}")


def check_contents(files: list[Path], tracked: set[str]) -> None:
    """Refuse a source distribution without a file of the repository: MANIFEST.in names them."""
    with tarfile.open(next(file for file in files if file.name.endswith(".tar.gz"))) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    if missing := sorted(tracked - held):
        raise ReleaseError(f"the source distribution lacks {', '.join(missing)}: name them in MANIFEST.in")


def install(file: Path, version: str, environment: Path) -> None:
    """Install a distribution without extras, and ask the command and the package for their version."""
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    run(f"pip with {file.name}", str(python), "-m", "pip", "install", "--quiet", str(file))
    for command in (
        [str(environment / "bin" / "portalmq"), "--version"],
        [str(python), "-c", "import portalmq; portalmq.Producer; print('portalmq', portalmq.__version__)"],
    ):
        said = run(file.name, *command, folder=environment).strip()
        if said != f"portalmq {version}":
            raise ReleaseError(f"{file.name} says {said!r} of itself")


def setup_version(root: Path) -> str:
    """Return the version in setup.cfg, the only place that says it."""
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(root / "setup.cfg", encoding="utf-8")
    return setup["metadata"]["version"]


def is_version(text: str) -> bool:
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def git(root: Path, *arguments: str) -> str:
    return run(f"git {arguments[0]}", "git", "-C", str(root), *arguments).strip()


def run(what: str, *command: str, folder: Path | None = None) -> str:
    """Return what a command printed. Raise ReleaseError if it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"{what} failed with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
