"""The structure of the repository: which layer may import which, what the wheel carries, what the documents promise.
Reads with `ast`, imports nothing.

The layers outside the broker; each may import those on its left:

    contract, network <- transport <- producers <- consumers <- streams <- client <- cli, demo_iot, spark
    contract          <- tree <- control_plane

The layers of the broker are in TOWER, the lowest first. A layer imports only lower ones, imports for type checkers
included.
"""

from __future__ import annotations

import ast
import configparser
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).parents[1]
# About 500 is the aim; a file may exceed it for a good reason, up to this limit.
LINES_MAX = 700

FOLDERS = {
    "broker": "portalmq.broker",
    "client_api": "portalmq",
    "control_plane": "portalmq.control_plane",
    "demo_iot": "portalmq.demo_iot",
    "spark": "portalmq.spark",
}

# The layers of the broker, the lowest first.
TOWER = (
    *("fold", "core.replica", "core.queue", "core.stream"),
    *("storage", "partition", "replication", "cluster", "messages", "queues", "streams", "schedules"),
    *("broker", "api", "protocols", "dashboard", "server", "ops", "bench"),
)

# The longest prefix counts.
ROOM_OF = {
    "portalmq": "client",
    "portalmq.errors": "contract",
    "portalmq.wire": "contract",
    "portalmq.contract": "contract",
    "portalmq.stream_wire": "contract",
    "portalmq.message_ids": "contract",
    "portalmq.message": "contract",
    "portalmq.compression": "contract",
    "portalmq.sql": "contract",  # which values are text in the files, and SQL on compressed ones
    "portalmq.closeable": "contract",
    "portalmq.java": "contract",  # for programs on Java: the development ZooKeeper, and Spark
    "portalmq.tokens": "contract",
    "portalmq.system": "contract",  # the differences between POSIX systems
    "portalmq.network": "network",  # connections, TLS files, forks: for clients and for brokers that call brokers
    "portalmq.transport": "transport",
    "portalmq.producers": "producers",
    "portalmq.consumers": "consumers",
    "portalmq.streams": "streams of clients",
    "portalmq.cli": "cli",
    "portalmq.worker": "worker",
    "portalmq.kombu": "kombu",
    "portalmq.django": "django",  # other frameworks' tasks, each on the public client
    "portalmq.dramatiq": "dramatiq",
    "portalmq.taskiq": "taskiq",
    "portalmq.zeromq": "alias",
    "portalmq.broker": "broker",
    "portalmq.broker.core": "core.stream",
    "portalmq.broker.core.replica": "core.replica",
    "portalmq.broker.core.queue": "core.queue",
    "portalmq.broker.core.fold": "fold",  # the aggregate of a log: the core computes it, the storage keeps it
    "portalmq.broker.core.queue.lanes": "fold",
    "portalmq.broker.storage": "storage",
    "portalmq.broker.partition": "partition",
    "portalmq.broker.replication": "replication",
    "portalmq.broker.cluster": "cluster",
    "portalmq.broker.messages": "messages",
    "portalmq.broker.queues": "queues",
    "portalmq.broker.streams": "streams",
    "portalmq.broker.schedules": "schedules",
    "portalmq.broker.api": "api",
    "portalmq.broker.protocols": "protocols",
    "portalmq.broker.protocols.zeromq": "zeromq",  # a server of its own, on the public client
    "portalmq.broker.dashboard": "dashboard",
    "portalmq.broker.server": "server",
    "portalmq.broker.verify": "verify",  # compares brokers from outside: on the public client, and on their files
    "portalmq.broker.ops": "ops",
    "portalmq.broker.bench": "bench",
    "portalmq.control_plane": "control_plane",
    "portalmq.control_plane.plane": "tree",
    "portalmq.control_plane.state": "tree",
    "portalmq.control_plane.assignment": "tree",
    "portalmq.demo_iot": "demo_iot",
    "portalmq.spark": "spark",
}

CORE = {"core.replica", "core.queue", "core.stream"}

# Imports that each layer may have besides itself and, in the broker, besides the layers from partition up to its own.
MAY_IMPORT = {
    "contract": set(),
    "network": {"contract"},
    "transport": {"contract", "network"},
    "producers": {"contract", "network", "transport"},
    "consumers": {"contract", "network", "transport", "producers"},
    "streams of clients": {"contract", "network", "transport", "producers", "consumers"},
    "client": {"contract", "network", "transport", "producers", "consumers", "streams of clients"},
    "worker": {"contract", "client", "network", "transport", "consumers"},
    "cli": {"contract", "client", "producers", "worker"},
    "kombu": {"contract", "client", "network", "transport", "producers", "consumers"},
    "django": {"contract", "client"},
    "dramatiq": {"contract", "client", "transport"},
    "taskiq": {"contract", "client", "transport"},
    "demo_iot": {"contract", "client"},
    "zeromq": {"contract", "client", "transport", "cli"},
    "verify": {"contract", "client", "cli", "storage", "tree"},
    "alias": {"zeromq"},
    "spark": {"contract", "client", "network", "transport"},
    "tree": {"contract"},
    "control_plane": {"contract", "network", "tree"},
    "fold": set(),
    "core.replica": {"contract", "fold"},
    "core.queue": {"contract", "fold", "core.replica"},
    "core.stream": {"contract", "fold", "core.replica", "core.queue"},
    "storage": {"contract", "fold"},
    "partition": {"contract", "fold", *CORE, "storage", "tree"},
    "replication": {"contract", "fold", *CORE, "storage", "tree"},
    "cluster": {"contract", "network", "fold", *CORE, "storage", "tree", "control_plane"},
    "messages": {"contract", "fold", *CORE, "storage", "tree", "control_plane"},
    "queues": {"contract", "fold", *CORE, "storage", "tree", "control_plane"},
    "streams": {"contract", "fold", *CORE, "storage", "tree", "control_plane"},
    "schedules": {"contract", "fold", *CORE, "storage", "tree", "control_plane"},
    "api": {"contract", "storage"},
    "protocols": {"contract", "storage"},
    "dashboard": {"contract", "core.queue", "tree"},
    "broker": {"contract", "storage", "tree", "control_plane"},
    "server": {"contract", "storage", "tree", "control_plane"},
    "ops": {"contract", "storage", "tree", "control_plane"},
    "bench": {"contract", "client", "producers", "zeromq", "spark", "storage"},
}

ONLY_IN = {
    "apsw": "portalmq.broker.storage",
    # Spark's reader knows SCHEMA.md and nothing else of the storage.
    "sqlite3": ("portalmq.sql", "portalmq.broker.storage", "portalmq.spark", "portalmq.broker.bench.spark_rivals"),
    "zmq": "portalmq.broker.protocols.zeromq",
    "django": "portalmq.django",
    "django_tasks": "portalmq.django",
    "dramatiq": "portalmq.dramatiq",
    "taskiq": "portalmq.taskiq",
    "pyspark": ("portalmq.spark", "portalmq.broker.bench"),
    "pyarrow": ("portalmq.spark", "portalmq.broker.bench"),
    # Clients read the brokers from ZooKeeper themselves: they import no broker layer, not even the control plane.
    "kazoo": ("portalmq.control_plane.zookeeper", "portalmq.transport.zookeeper_bootstrap"),
    "kombu": "portalmq.kombu",
    "celery": "portalmq.kombu",
    "flask": "portalmq.broker",
    "jinja2": "portalmq.broker.dashboard",
    "gunicorn": "portalmq.broker",
    "gevent": "portalmq.broker",
    "cronsim": "portalmq.broker.schedules",
}

# The core decides: time, randomness, disks, sockets and logs belong to its callers.
IMPURE = {
    *("asyncio", "concurrent", "datetime", "flask", "gevent", "http", "io", "logging", "multiprocessing", "os"),
    *("pathlib", "queue", "random", "requests", "secrets", "select", "shutil", "signal", "socket", "sqlite3", "ssl"),
    *("subprocess", "tempfile", "threading", "time", "urllib", "urllib3", "uuid", "apsw", "kazoo", "gunicorn"),
}


def module_name(file: Path) -> str:
    folder, *rest = file.relative_to(ROOT).with_suffix("").parts
    return ".".join([FOLDERS[folder], *(part for part in rest if part != "__init__")])


@cache
def modules() -> dict[str, Path]:
    """Every module of the product, by its import name."""
    files = (file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py")))
    return {module_name(file): file for file in files}


@cache
def nodes_of(file: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(file.read_text(), str(file))))


def imports_of(file: Path, *, types: bool = False) -> Iterator[str]:
    """Yield the absolute names of a file's imports; imports for type checkers alone count with `types`."""
    skipped: set[int] = set()
    for node in nodes_of(file):
        if isinstance(node, ast.If) and not types and "TYPE_CHECKING" in ast.dump(node.test):
            skipped |= {id(inner) for statement in node.body for inner in ast.walk(statement)}
    for node in nodes_of(file):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: write imports as `portalmq.…`"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in modules() else node.module or ""


def room_of(module: str) -> str:
    while module not in ROOM_OF:
        module = module.rpartition(".")[0]
    return ROOM_OF[module]


def every_import(*, types: bool = False) -> Iterator[tuple[str, str]]:
    for module, file in modules().items():
        for imported in imports_of(file, types=types):
            yield module, imported


def setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def test_all_layers_have_modules() -> None:
    assert len(modules()) > 20
    assert ("portalmq.control_plane.standalone", "portalmq.control_plane.plane") in set(every_import())


def may_see(room: str) -> set[str]:
    """Return the layers that modules of `room` may import."""
    floors = TOWER[TOWER.index("partition") : TOWER.index(room)] if room in TOWER else ()
    return {room, *MAY_IMPORT[room], *floors}


# Private words of this project, as identifiers, with or without a leading underscore. A word with another meaning
# elsewhere is matched by its capital.
PRIVATE_WORDS = {
    *(
        "Office",
        "Vigil",
        "Atlas",
        "Errands",
        "Agenda",
        "InSync",
        "Bell",
        "ParkingLot",
        "Pulse",
        "Upkeep",
        "Housekeeping",
    ),
    *("Fences", "Turns", "Tally", "Census", "Committing", "Settling", "Finishing", "Supply", "Desk", "Way", "Standing"),
    *("Heard", "Room", "Rooms", "Doors", "Door", "AddressBook", "Feed", "Feeds", "Told", "Deposed"),
    *("office", "vigil", "atlas", "errand", "errands", "agenda", "insync", "bell", "bells", "pulse", "upkeep"),
    *("housekeeping", "fences", "tally", "census", "handing", "supply", "settling", "finishing", "committing"),
    *("hear", "way", "door", "doors", "feed", "feeds", "rooms", "deposed"),
}
# A protocol and its one implementation, which share a name; names that other frameworks look for or tell users.
SHARED_NAMES = {"ClusterClient", "Portion", "Transport", "PortalMQBroker"}


def identifiers_of(file: Path) -> Iterator[str]:
    """Yield the names that a file defines or uses, those of modules apart."""
    for node in nodes_of(file):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.keyword):
            yield node.arg or ""
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name


def test_no_private_words_are_used() -> None:
    wrong = {
        f"{module}: {name}"
        for module, file in modules().items()
        for name in identifiers_of(file)
        if name.removeprefix("_") in PRIVATE_WORDS
    }
    assert wrong == set()


def test_no_two_classes_share_a_name() -> None:
    homes: dict[str, list[str]] = {}
    for module, file in modules().items():
        for node in nodes_of(file):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(module)
    assert {name: found for name, found in homes.items() if len(found) > 1 and name not in SHARED_NAMES} == {}


def test_imports_run_one_way() -> None:
    # `portalmq` itself is the public namespace: it imports a client module only when one of its names is used.
    wrong = [
        f"{module} ({room_of(module)}) imports {imported} ({room_of(imported)})"
        for module, imported in every_import(types=True)
        if imported.startswith("portalmq.") and room_of(imported) not in may_see(room_of(module))
        if module != "portalmq"
    ]
    assert wrong == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    imported = {module: set[str]() for module in modules()}
    for module, other in every_import(types=True):
        if other in imported and other != module:
            imported[module].add(other)
    while free := {module for module, others in imported.items() if not others}:  # their imports are all resolved
        imported = {module: others - free for module, others in imported.items() if module not in free}
    assert sorted(imported) == []


def may_import(module: str, homes: str | tuple[str, ...]) -> bool:
    homes = (homes,) if isinstance(homes, str) else homes
    return any(f"{module}.".startswith(f"{home}.") for home in homes)


def test_each_external_library_is_imported_in_its_layer() -> None:
    wrong = [
        f"{module} imports {imported}: only {ONLY_IN[top]} may"
        for module, imported in every_import()
        if (top := imported.partition(".")[0]) in ONLY_IN and not may_import(module, ONLY_IN[top])
    ]
    assert wrong == []


def test_the_core_is_pure() -> None:
    wrong = [
        f"{module} imports {imported}"
        for module, imported in every_import()
        if room_of(module) in {"fold", *CORE} and imported.partition(".")[0] in IMPURE
    ]
    assert wrong == []


def test_locks_and_threads_are_looked_up_when_they_are_made() -> None:
    """A broker imports many modules before gevent has patched `threading`. A lock of the operating system, taken by a
    name that was imported then, stops all greenlets when two of them want it."""
    wrong = [
        f"{name} imports {', '.join(each.name for each in node.names)} from threading"
        for name, file in modules().items()
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module == "threading"
    ]
    assert wrong == []


def test_no_file_imports_the_folders_by_their_bare_names() -> None:
    """`broker.x` and `portalmq.broker.x` would be two modules with two sets of classes."""
    tests = {str(file): file for file in sorted((ROOT / "tests").rglob("*.py"))}
    wrong = [
        f"{name} imports {imported}"
        for name, file in {**modules(), **tests}.items()
        for imported in imports_of(file)
        if imported.partition(".")[0] in FOLDERS
    ]
    assert wrong == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_module_hides_the_standard_library_from_a_script_beside_it(folder: str) -> None:
    """`python sensor.py` puts its folder first on the path: a `queue.py` beside it would hide the real one."""
    names = {file.stem for file in (ROOT / folder).glob("*.py")} | {
        package.parent.name for package in (ROOT / folder).glob("*/__init__.py")
    }
    assert names & sys.stdlib_module_names == set()


def test_the_root_hides_no_standard_library_module_either() -> None:
    names = {file.stem for file in ROOT.glob("*.py")} | {*FOLDERS}
    assert names & sys.stdlib_module_names == set()


def test_every_package_is_listed_or_it_would_be_silently_missing_from_the_wheel() -> None:
    options = setup()["options"]
    listed = set(options["packages"].split())
    homes = dict(line.split(" = ") for line in options["package_dir"].strip().splitlines())
    found = {name: str(file.parent.relative_to(ROOT)) for name, file in modules().items() if file.name == "__init__.py"}
    in_no_package = {str(file.parent) for file in modules().values() if not (file.parent / "__init__.py").exists()}
    assert in_no_package == set()
    assert listed == set(found)
    assert homes == found


def test_data_files_that_the_code_reads_are_packaged() -> None:
    packaged = setup()["options.package_data"]
    homes = {name: file.parent for name, file in modules().items() if file.name == "__init__.py"}
    for package, patterns in packaged.items():
        for pattern in patterns.split():
            assert list(homes[package].glob(pattern)), f"{package}: nothing matches {pattern}"
    assert "data/*.csv" in packaged["portalmq.demo_iot"]
    described = {name for name, home in homes.items() if (home / "DESIGN.md").exists()}
    assert described == {name for name in packaged if "*.md" in packaged[name].split()}


def test_files_stay_readable() -> None:
    long = {
        str(file.relative_to(ROOT)): lines
        for file in [*modules().values(), *(ROOT / "tests").rglob("*.py")]
        if (lines := len(file.read_text().splitlines())) > LINES_MAX
    }
    assert long == {}


def test_no_file_names_a_place_that_is_only_on_one_machine() -> None:
    homes = ("/home" + "/", "/Users" + "/", "/root" + "/", str(Path.home()) + "/")
    suffixes = {".py", ".md", ".cfg", ".toml", ".yml", ".yaml", ".sh", ""}
    named = [
        str(file.relative_to(ROOT))
        for file in tracked_files()
        if file.suffix in suffixes and any(home in file.read_text(errors="replace") for home in homes)
    ]
    assert named == []


def tracked_files() -> Iterator[Path]:
    for entry in sorted(ROOT.iterdir()):
        if entry.name in {*FOLDERS, "docs", "tests", ".ci"}:
            yield from (file for file in sorted(entry.rglob("*")) if file.is_file() and "__pycache__" not in file.parts)
        elif entry.is_file() and entry.name != "LICENSE":
            yield entry


def test_every_command_is_in_the_table_of_commands() -> None:
    from portalmq.cli.main import main

    table = (ROOT / "docs" / "COMMANDS.md").read_text()
    context = main.make_context("portalmq", [], resilient_parsing=True)
    missing = [name for name in main.list_commands(context) if f"`portalmq {name}" not in table]
    assert missing == []


def test_every_make_target_is_phony_and_explained() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = next(line for line in makefile.splitlines() if line.startswith(".PHONY:")).split()[1:]
    for target in ("demo", "test", "up", "bench", "lint", "types"):
        assert target in phony
        assert f"\n{target}:" in makefile
        assert f"make {target}" in (ROOT / "CONTRIBUTING.md").read_text()


def test_docs_that_should_be_there_are() -> None:
    for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"):
        assert (ROOT / name).stat().st_size > 200, name
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert f"[{setup()['metadata']['version']}]" in (ROOT / "CHANGELOG.md").read_text()


def test_every_route_is_in_the_table_of_routes() -> None:
    from portalmq.broker.api.routes import ROUTES

    rows = re.findall(r"^\| (`[A-Z` ]+`) \| `(/[^`]+)` \|", (ROOT / "docs" / "API.md").read_text(), re.MULTILINE)
    listed = {(method, path) for methods, path in rows for method in methods.replace("`", "").split()}
    assert listed == {(route.method, route.path.replace("<", "{").replace(">", "}")) for route in ROUTES}


def test_every_route_says_what_it_answers() -> None:
    """tests/broker/api/test_openapi.py checks the rest of the description."""
    from portalmq.broker.api.routes import ROUTES

    assert [route.path for route in ROUTES if not route.answers] == []


@pytest.mark.parametrize(("document", "lines"), [("README.md", 200), ("ARCHITECTURE.md", 300)])
def test_a_first_look_is_short(document: str, lines: int) -> None:
    assert len((ROOT / document).read_text().splitlines()) <= lines


DOCUMENTS_OF_THE_CODE = [
    *("ARCHITECTURE.md", "CONTRIBUTING.md"),
    *(str(file.relative_to(ROOT)) for file in tracked_files() if file.name == "DESIGN.md"),
]


@pytest.mark.parametrize("document", DOCUMENTS_OF_THE_CODE)
def test_each_file_that_a_document_of_the_code_names_exists(document: str) -> None:
    named = re.findall(r"`((?:[\w.]+/)+(?:[\w.]+\.(?:py|md|csv|yml|conf))?)[:`]", (ROOT / document).read_text())
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_map_of_changes_names_a_place_for_each() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("## To change X, go to Y")[2].partition("\n## ")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 10
    assert [row[0] for row in rows if not re.search(r"`[\w/]+\.py`", row[1])] == []


@pytest.mark.parametrize("document", ["docs/GUARANTEES.md", "docs/PROOF.md", "docs/SEEDS.md", "docs/NOTES.md"])
def test_each_feature_in_a_table_names_a_test_that_exists(document: str) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::([\w:]+))?`", (ROOT / document).read_text())
    assert len(named) > 30
    for path, name in named:
        assert (ROOT / path).is_file(), path
        assert not name or f"def {name.split('::')[-1]}(" in (ROOT / path).read_text(), f"{path}::{name}"


def test_each_guarantee_names_what_it_rests_on_and_a_test() -> None:
    promises = (ROOT / "docs" / "GUARANTEES.md").read_text().partition("\n## Run the proof")[0]
    rows = [line.split(" | ") for line in promises.splitlines() if line.startswith("| ") and "shown by" not in line]
    assert len(rows) > 50
    assert [row[0] for row in rows if len(row) != 3 or "`tests/" not in row[2]] == []


@pytest.mark.parametrize("document", [str(file.relative_to(ROOT)) for file in tracked_files() if file.suffix == ".md"])
def test_what_a_document_links_to_is_there(document: str) -> None:
    file = ROOT / document
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", file.read_text())
    missing = [link for link in links if "://" not in link and not (file.parent / link).exists()]
    assert missing == []
