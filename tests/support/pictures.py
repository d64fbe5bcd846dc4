"""Pictures of a report for the README: its top, down to the end of the first plot, light and dark.

make demo && cd tests && ../.venv/bin/python -m support.pictures ../build/demo-report/report.html ../docs/pictures
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from support import chromium

WIDTH, MARGIN = 1200, 24


def main(page: Path, folder: Path) -> None:
    program = chromium.find()
    if program is None:
        sys.exit("there is no Chromium here (on Debian: apt-get install chromium)")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile, chromium.Chromium(program, Path(profile) / "chromium") as browser:
        for name, dark in (("light", False), ("dark", True)):
            browser.open(page, width=WIDTH, dark=dark)
            bottom = browser.ask("document.querySelector('#throughput figure').getBoundingClientRect().bottom")
            path = folder / f"report-{name}.png"
            path.write_bytes(browser.picture(clip=(0, 0, WIDTH, bottom + MARGIN)))
            print(path, path.stat().st_size, "bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
