"""docs/PYTHON.md and docs/SETTINGS.md are generated from the code and are up to date."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", DOCS / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["PYTHON.md", "SETTINGS.md"])
def test_a_page_is_up_to_date_with_the_code(reference: ModuleType, name: str) -> None:
    assert (DOCS / name).read_text("utf-8") == reference.PAGES[name](), "run python docs/reference.py"


def test_a_setting_without_a_comment_is_refused(reference: ModuleType) -> None:
    class Config(msgspec.Struct):
        """A structure of this test."""

        told: int = 1  # said behind it
        # said above it
        above: int = 2
        silent: int = 3

    assert reference._meanings(Config) == {"told": "said behind it", "above": "said above it"}
    with pytest.raises(KeyError, match="silent"):
        list(reference._table(Config))
