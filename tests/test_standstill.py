"""The tool that pauses a command's processes."""

from __future__ import annotations

import subprocess
import sys

from support.standstill import main

SEES_A_GAP = """
import sys, time
last = time.monotonic()
while time.monotonic() - last < 0.2:
    last = time.monotonic()
    time.sleep(0.001)
sys.exit(7)
"""
ITS_CHILD_SEES_ONE = f"""
import subprocess, sys
sys.exit(subprocess.run([sys.executable, "-c", {SEES_A_GAP!r}]).returncode)
"""
# A child that stops itself again each time it is continued: three times are no coincidence.
STOPS_A_CHILD = """
import os, subprocess, sys
stops = "import os, signal; [os.kill(os.getpid(), signal.SIGSTOP) for _ in range(3)]"
child = subprocess.Popen([sys.executable, "-c", stops])
try:
    child.wait(3)
except subprocess.TimeoutExpired:
    child.kill()
    sys.exit(8)
"""
OFTEN = ("--shortest", "0.3", "--longest", "0.4", "--between", "0.01")


def test_a_command_is_stopped_for_a_moment_and_its_exit_status_stays():
    assert main([*OFTEN, "--", sys.executable, "-c", SEES_A_GAP]) == 7


def test_the_processes_that_a_command_starts_are_stopped_too():
    assert main([*OFTEN, "--", sys.executable, "-c", ITS_CHILD_SEES_ONE]) == 7


def test_what_the_command_has_stopped_stays_stopped():
    quick = ("--shortest", "0.01", "--longest", "0.02", "--between", "0.01")
    assert main([*quick, "--", sys.executable, "-c", STOPS_A_CHILD]) == 8


def test_it_runs_as_its_docstring_says():
    command = [sys.executable, "-m", "support.standstill", "--seed", "1", "--", sys.executable, "-c", "print('done')"]
    ended = subprocess.run(command, cwd=__file__.rpartition("/")[0], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "done\n")
