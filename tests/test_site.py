"""The documentation's site, without building it: every page is in its menu, and every link and picture is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def listed(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for part in nav if isinstance(nav, list) else nav.values() if isinstance(nav, dict) else ():
        yield from listed(part)


def anchors(page: Path) -> set[str]:
    """The headings of a page as mkdocs names them."""
    heads = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", head).strip().lower()) for head in heads}


def test_every_page_is_in_the_menu_once() -> None:
    menu = list(listed(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(menu) == [str(page.relative_to(DOCS)) for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_links_and_pictures_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        if anchor and found.suffix == ".md":
            assert anchor in anchors(found), target


def test_every_picture_is_shown_somewhere() -> None:
    text = "".join(page.read_text() for page in (*PAGES, ROOT / "README.md"))
    assert [p.name for p in (DOCS / "pictures").iterdir() if p.name not in text] == []


def test_the_site_fetches_nothing_from_elsewhere() -> None:
    """It is read on machines without a network; the theme would fetch what colours code."""
    theme = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["theme"]
    assert theme["highlightjs"] is False
    page = (ROOT / theme["custom_dir"] / "main.html").read_text()
    assert "//" not in page and all(f'id="hljs-{mode}"' in page for mode in ("light", "dark"))
