"""A kill at any step of a change of files: the run ends there, and the files are copied as they are."""

from __future__ import annotations

import os

from support.log_files import crash_image

from portalmq.broker.storage import manifest as manifest_module
from portalmq.broker.storage.segment import Segment

STEPS = [
    *((os, name) for name in ("rename", "replace", "unlink", "chmod", "fsync")),
    *((Segment, name) for name in ("open_live", "set_log_start", "settle", "checkpoint", "cut", "remove", "close")),
    (manifest_module.Manifest, "_write"),
    *((manifest_module, name) for name in ("write_atomically", "sha256_of")),
]


class Killed(BaseException):
    """The process ended here."""


class Killer:
    """Copies the files and ends the run at the `at`-th step, counted before and after every call in STEPS."""

    def __init__(self, monkeypatch, directory, image, at):
        self.steps, self.at, self.directory, self.image = 0, at, directory, image
        self.patch = monkeypatch
        for owner, name in STEPS:
            monkeypatch.setattr(owner, name, self.wrapped(getattr(owner, name)))

    def wrapped(self, function):
        def call(*arguments, **keywords):
            self.step()
            result = function(*arguments, **keywords)
            self.step()
            return result

        return call

    def step(self):
        self.steps += 1
        if self.steps == self.at:
            self.patch.undo()
            crash_image(self.directory, self.image)
            raise Killed
