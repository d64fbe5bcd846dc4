"""The project of docs/DJANGO.md, made by its commands and files as they are pasted; and a worker that is killed."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytest.importorskip("django", reason="pip install 'portalmq[django]'")

import django
from support.broker_process import BrokerProcess

pytestmark = pytest.mark.cluster

TEXT = (Path(__file__).parents[3] / "docs" / "DJANGO.md").read_text()
HAS_TASKS = django.VERSION >= (6, 0)
WITHIN_S = 110


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("broker"), command=("dev",)) as broker:
        yield broker


class Shell:
    """Runs commands as a user in a folder, and ends what they leave running."""

    def __init__(self, folder: Path, broker: BrokerProcess) -> None:
        self.folder = folder
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, "PORTALMQ_URL": broker.url}
        self.processes: list[subprocess.Popen[str]] = []

    def run(self, command: str) -> str:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(self, command: str) -> subprocess.Popen[str]:
        """Start a worker, and wait until it says that it runs."""
        words = command.split()
        process = subprocess.Popen(
            words, cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.processes.append(process)
        assert process.stdout is not None
        for line in process.stdout:
            if "runs the tasks of" in line:
                return process
        raise AssertionError(f"{command} ended with {process.wait(WITHIN_S)}")

    def end(self) -> None:
        for process in self.processes:
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            for each in family:
                each.kill()
            process.wait(WITHIN_S)
            if process.stdout is not None:
                process.stdout.close()


@pytest.fixture
def shell(tmp_path: Path, broker: BrokerProcess) -> Iterator[Shell]:
    shell = Shell(tmp_path, broker)
    yield shell
    shell.end()


def files(broker: BrokerProcess) -> dict[str, str]:
    """Return the document's files by name; with an older Django, as the document says, with the package's names."""
    found = {}
    for name, text in re.findall(r"```python\n# (\S+\.py)\n(.*?)```", TEXT, re.DOTALL):
        text = text.replace("http://localhost:5000", broker.url)
        if not HAS_TASKS:
            text = text.replace("from django.tasks", "from django_tasks")
            text = text.replace('["portalmq.django"]', '["portalmq.django", "django_tasks"]')
        found[name] = text
    return found


def commands() -> list[str]:
    """Return the lines that a user types, from the first project on."""
    shown = re.findall(r"```console\n(.*?)```", TEXT.partition("## A project")[2], re.DOTALL)
    return [line.removeprefix("$ ") for block in shown for line in block.splitlines() if line.startswith("$ ")]


def test_who_gets_an_older_django_is_told_before_the_first_import() -> None:
    before = TEXT.partition("```python")[0]
    assert all(word in before for word in ("Python 3.11", "Django 5.2", "`django_tasks`", "INSTALLED_APPS"))


def test_the_project_of_the_document(shell: Shell, broker: BrokerProcess) -> None:
    startproject, check, work, attempt, listing, redrive, *_ = commands()
    shell.run(startproject)
    written = files(broker)
    settings = shell.folder / "shop" / "settings.py"
    settings.write_text(settings.read_text() + written["shop/settings.py"])
    (shell.folder / "shop" / "tasks.py").write_text(written["shop/tasks.py"])
    (shell.folder / "try_tasks.py").write_text(written["try_tasks.py"])
    assert "no issues" in shell.run(check)
    shell.start(work.removesuffix(" &"))
    answer = re.findall(rf"{re.escape(attempt)}\n(.*?)```", TEXT, re.DOTALL)[0]
    assert shell.run(attempt).endswith(answer)
    assert "ConnectionError: no mail server for order 7" in shell.run(listing)
    shell.run(redrive)


@pytest.mark.parametrize("option", ["--reload", "--no-reload"])
def test_a_worker_without_a_broker_says_so_and_ends(shell: Shell, broker: BrokerProcess, option: str) -> None:
    shell.run(commands()[0])
    settings = shell.folder / "shop" / "settings.py"
    with socket.socket() as taken:  # bound and not listening: it refuses connections, and nobody else gets the port
        taken.bind(("localhost", 0))
        nobody = f"http://localhost:{taken.getsockname()[1]}"
        settings.write_text(settings.read_text() + files(broker)["shop/settings.py"].replace(broker.url, nobody))
        shell.run(f"timeout 60 python manage.py portalmq_worker {option} 2>said || echo $? >code")
    assert (shell.folder / "code").read_text() == "1\n"
    *before, said = (shell.folder / "said").read_text().splitlines()
    assert said.startswith(f"CommandError: no broker answers at {nobody}")
    assert not any(line.startswith("Traceback") for line in before)


KILLED = """
import os, signal, time
from pathlib import Path
TASK_IMPORT

@task(takes_context=True)
def outlive(context, marker):
    if context.attempt == 1:
        Path(marker).write_text(str(os.getpid()))
        time.sleep(600)
    return context.attempt
"""

ENQUEUE = """
import sys, time
from shop.tasks import outlive
result = outlive.enqueue("marker")
Path = __import__("pathlib").Path
Path("id").write_text(result.id)
"""

AWAIT = """
import time
from pathlib import Path
from shop.tasks import outlive
result = outlive.get_result(Path("id").read_text())
while not result.is_finished:
    time.sleep(0.1)
    result.refresh()
print(result.status, result.return_value, len(set(result.worker_ids)))
"""


def test_a_task_of_a_worker_that_was_killed_runs_again(shell: Shell, broker: BrokerProcess) -> None:
    shell.run(commands()[0])
    settings = shell.folder / "shop" / "settings.py"
    options = '"OPTIONS": {"topic_prefix": "killed.", "group": "killed", "visibility_timeout_s": 1, '
    own = files(broker)["shop/settings.py"].replace('"OPTIONS": {', options)
    settings.write_text(settings.read_text() + own)
    module = "django.tasks" if HAS_TASKS else "django_tasks"
    (shell.folder / "shop" / "tasks.py").write_text(KILLED.replace("TASK_IMPORT", f"from {module} import task"))
    (shell.folder / "enqueue.py").write_text(ENQUEUE)
    (shell.folder / "await.py").write_text(AWAIT)
    shell.run("python manage.py shell < enqueue.py")
    worker = shell.start("python manage.py portalmq_worker --no-reload -c 2")
    shell.run("until [ -s marker ]; do sleep 0.05; done")
    worker.send_signal(signal.SIGKILL)
    worker.wait(WITHIN_S)
    shell.processes.remove(worker)
    again = shell.start("python manage.py portalmq_worker --no-reload -c 2")
    assert shell.run("python manage.py shell < await.py").endswith("SUCCESSFUL 2 2\n")
    again.send_signal(signal.SIGTERM)
    assert again.wait(WITHIN_S) == 0
    shell.processes.remove(again)
