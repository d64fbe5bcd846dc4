"""Pictures of the dashboard for its manual: the top of a page, as a window of 1,280 by 860 shows it.

cd tests && ../.venv/bin/python -m support.dashboard_pictures http://localhost:5000 ../docs/pictures NAME=/ui/PATH ...
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from support import chromium

WIDTH, HEIGHT = 1280, 860
SETTLED_S = 3.0


def main(url: str, folder: Path, pages: list[str]) -> None:
    program = chromium.find()
    if program is None:
        sys.exit("there is no Chromium here (on Debian: apt-get install chromium)")
    with tempfile.TemporaryDirectory() as profile, chromium.Chromium(program, Path(profile) / "chromium") as browser:
        for page in pages:
            name, _, path = page.partition("=")
            browser.open(url + path, width=WIDTH, height=HEIGHT)
            time.sleep(SETTLED_S)
            if path.startswith("/ui/sql"):
                browser.ask("document.querySelector('main form button').click()")
                time.sleep(SETTLED_S)
            file = folder / f"dashboard-{name}.png"
            file.write_bytes(browser.picture(clip=(0, 0, WIDTH, HEIGHT)))
            print(file, file.stat().st_size, "bytes")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
