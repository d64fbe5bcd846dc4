"""Hooks and settings that all tests share."""

import functools
import gc
import re
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from support.zookeeper import zookeeper_server

__all__ = ["zookeeper_server"]

# The duration of an example depends on the load of the machine. The time limit of a test catches one that is too slow.
settings.register_profile("portalmq", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("portalmq")

# A shell starts background commands with SIGINT ignored. Every process below would inherit that, and so would the
# commands that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

STRETCHES_SHOWN = 5
NOT_UNIT = ("cluster", "spark", "checkout", "prove")


@functools.cache
def holds_units_alone(path: Path) -> bool:
    """Tell whether neither a file nor the conftest.py beside it names a mark of other tests."""
    mark = rf"\bmark\.({'|'.join(NOT_UNIT)})\b"
    beside = path.with_name("conftest.py")
    return not any(re.search(mark, file.read_text("utf-8")) for file in (path, beside) if file.is_file())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files of unit tests where these are not asked for: to import them takes 12 s in each process of the
    suite."""
    if "not unit" not in config.option.markexpr or not collection_path.match("test_*.py"):
        return None
    return holds_units_alone(collection_path) or None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark each test that needs nothing but the package and its libraries as `unit`."""
    if not any(item.get_closest_marker(name) for name in NOT_UNIT):
        item.add_marker(pytest.mark.unit)
    elif holds_units_alone(item.path):
        raise pytest.UsageError(f"{item.nodeid} has a mark that its file does not name: the suite would leave it out")


def pytest_collection_finish() -> None:
    """Leave what has been imported and collected out of later garbage collections: 7 % of the unit tests' time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Leave all that is alive to the end of the process: at its end pytest collects garbage five times, which took 13 s
    in each of four processes."""
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the longest stretches that tests have noted: processor time in ms, test, and stack if it was seen."""
    reports = [each for some in terminalreporter.stats.values() for each in some if isinstance(each, pytest.TestReport)]
    noted = [
        (*value, report.nodeid)
        for report in reports
        if report.when == "teardown"
        for name, value in report.user_properties
        if name == "stretch"
    ]
    if noted:
        terminalreporter.section("longest stretches of the event loop, in processor time")
    for ms, stack, test in sorted(noted, reverse=True)[:STRETCHES_SHOWN]:
        terminalreporter.write_line(f"{ms:6.1f} ms  {test}")
        if stack:
            terminalreporter.write_line(stack.rstrip())
