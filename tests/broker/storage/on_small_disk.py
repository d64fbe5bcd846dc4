"""Change a log on a disk that is full: `on_small_disk.py DIRECTORY` mounts a small file system there, so run it in a
mount namespace of its own. Print a line for each change that did not end as expected."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import test_every_step_fails as steps
from support.log_files import open_log, three_segments

from portalmq.broker.storage.errors import Shortage, StorageError, StorageFault

SIZE = 2 * 1024 * 1024
PAGE = 4096
SPARE_PAGES = range(0, 40, 2)


def fill(place: Path, spare_pages: int) -> None:
    with open(place / "filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(PAGE))
        except OSError as full:
            if full.errno != errno.ENOSPC:
                raise
        file.truncate(max(0, file.tell() // PAGE - spare_pages) * PAGE)


def main(place: Path) -> int:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "test", str(place)], check=True)
    log, sent = three_segments(place / "before")
    log.close()
    bad = done = refused = 0
    for name, (change, keeps) in steps.CHANGES.items():
        for spare in SPARE_PAGES:
            directory = place / "log"
            shutil.copytree(place / "before", directory)
            log = open_log(directory) if change else None
            fill(place, spare)
            failed = None
            try:
                if change:
                    change(log)
                else:
                    log = open_log(directory)
                done += 1
            except Shortage as error:
                failed = error
                refused += 1
            except StorageFault as error:
                failed = error
                print(f"{name}, {spare} pages left: {error}")
                bad += 1
            os.unlink(place / "filler")
            if log is None or isinstance(failed, StorageFault):
                log = open_log(directory)
            try:
                steps.goes_on_and_opens(log, directory, sent, keeps)
            except (AssertionError, StorageError) as error:
                print(f"{name}, {spare} pages left, after {failed}: {type(error).__name__}: {error}")
                bad += 1
            shutil.rmtree(directory)
    print(f"{done} done, {refused} refused, {bad} bad")
    return 1 if bad or not done or not refused else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
