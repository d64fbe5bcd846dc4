"""The source of an installed package, whose own tests are run against PortalMQ."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path


def unpacked(package: str, version: str, directory: Path) -> Path:
    """Download a package's sdist from the index into `directory`, and return the folder that is unpacked from it."""
    # Without isolation pip would build it with what is installed here, which need not suffice.
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", package]
    subprocess.run([*command, "-d", str(directory), f"{package}=={version}"], check=True, timeout=300)
    (archive,) = directory.glob(f"{package}-*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(directory, filter="data")
    return archive.with_name(archive.name.removesuffix(".tar.gz"))
