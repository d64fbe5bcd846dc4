"""A broker that starts on a full disk ends with the exit code of storage and a message."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import NoReturn

import pytest

from portalmq.broker.cluster.exits import EX_STORAGE
from portalmq.broker.server import composition as server
from portalmq.broker.server.auth import Auth
from portalmq.broker.server.config import BrokerConfig
from portalmq.broker.storage.disk import DataDirectory
from portalmq.control_plane import standalone


class Ended(Exception):
    pass


def end(code: int) -> NoReturn:
    raise Ended(code)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE, errno.EROFS], ids=errno.errorcode.get)
@pytest.mark.parametrize("step", ["incarnation", "journal"])
def test_a_start_that_cannot_write_ends_with_the_code_of_storage_and_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: str, number: int
) -> None:
    def refused(*_: object) -> NoReturn:
        raise OSError(number, os.strerror(number), str(tmp_path))

    monkeypatch.setattr(server, "_exit", end)
    if step == "incarnation":
        monkeypatch.setattr(server, "write_atomically", refused)
    else:
        monkeypatch.setattr(standalone, "open_locked", refused)
    directory = DataDirectory.open(tmp_path)
    config = BrokerConfig(data_dir=tmp_path, zookeeper="none", port=5000)
    try:
        with caplog.at_level(logging.CRITICAL), pytest.raises(Ended, match=str(EX_STORAGE)):
            server.BrokerProcess(config, Auth(), directory, announce=False).build()
    finally:
        directory.close()
    (told,) = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert os.strerror(number) in told.getMessage()
    assert told.exc_info is None, "a message without a trace"
