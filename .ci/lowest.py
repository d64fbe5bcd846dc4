"""Prints pip's constraints for the lowest versions that setup.cfg allows: `python .ci/lowest.py setup.cfg`.

A lower bound that nobody has tried is a guess. Only what setup.cfg names is held down; the rest is pip's choice.
"""

from __future__ import annotations

import configparser
import re
import sys


def lowest(setup_cfg: str) -> list[str]:
    """`name==version` for every requirement with a lower bound, the install's and the extras'."""
    setup = configparser.ConfigParser(interpolation=None)
    with open(setup_cfg, encoding="utf-8") as file:
        setup.read_file(file)
    named = [setup["options"]["install_requires"], *setup["options.extras_require"].values()]
    bounds = re.findall(r"^([A-Za-z0-9._-]+)>=([0-9][0-9.]*)(?:;.*)?$", "\n".join(named), re.MULTILINE)
    return sorted({f"{name}=={version}" for name, version in bounds})


if __name__ == "__main__":
    print("\n".join(lowest(sys.argv[1])))
