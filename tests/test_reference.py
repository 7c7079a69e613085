"""The reference pages in docs are those that the docstrings make."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

import outcore

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "docs" / "make_reference.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_reference_pages_are_current(maker: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert maker.main(["--check"]) == 0, capsys.readouterr().out


def test_a_page_that_is_not_current_is_named(
    maker: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(maker.PAGES, "run", ("outcore.run", ("Engine",)))
    assert maker.main(["--check"]) == 1
    assert "docs/reference/run.md is not current; run: python docs/make_reference.py" in capsys.readouterr().out


def test_everything_public_is_described(maker: ModuleType) -> None:
    public = {n for n in dir(outcore) if not n.startswith("_") and not inspect.ismodule(getattr(outcore, n))}
    errors = {name for name in public if name.endswith("Error")}
    headings = set(re.findall(r"^## outcore\.(?:run\.)?(\w+)$", "\n".join(map(maker.page, maker.PAGES)), re.MULTILINE))
    assert public - errors <= headings


def test_pages_can_be_read_where_markdown_is_shown(maker: ModuleType) -> None:
    for name in maker.PAGES:
        page = maker.page(name)
        assert page.count("```") % 2 == 0 and " at 0x" not in page and ":::" not in page
        outside = "".join(page.split("```")[::2])
        assert ">>>" not in outside and not re.search(r"^Args:|^Raises:", outside, re.MULTILINE)
