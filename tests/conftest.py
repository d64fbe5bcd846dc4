"""Hooks and settings that all tests share."""

import signal

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


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark each test that needs nothing but the package and its libraries as `unit`."""
    if not any(item.get_closest_marker(name) for name in NOT_UNIT):
        item.add_marker(pytest.mark.unit)


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
