"""A network of 1,500 calls: the page draws what is in sight of it, opened and closed, and follows a selection."""

from __future__ import annotations

from pathlib import Path

import pytest

from outcore.explore.page import explore_page
from outcore.explore.parts import ExploreSettings, explore_bundle
from tests.explore.browser import Browser, browser, needs_browser
from tests.explore.jobs import write

pytestmark = [needs_browser(), pytest.mark.slow]

LARGE = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width, odd):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first = nn.Linear(width, 2 * width + odd)
        self.second = nn.Linear(2 * width + odd, width)

    def forward(self, x):
        y = self.norm(x)
        y = torch.relu(self.first(y))
        return x + self.second(y) * 0.5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.groups = nn.ModuleList(
            nn.ModuleList(Block(32, 10 * g + b) for b in range(10)) for g in range(25)
        )

    def forward(self, x):
        for group in self.groups:
            for block in group:
                x = block(x)
        return x


def model():
    return Net()


def batch(size):
    return torch.randn(size, 32), None
"""


def test_every_panel_of_a_large_network(tmp_path: Path) -> None:
    path = write(tmp_path, LARGE)
    made = explore_bundle(ExploreSettings(str(path), machine="v100", seconds=1.0, search_s=0.1))
    assert len(made["graph"]["calls"]) >= 1500
    file = tmp_path / "page.html"
    file.write_text(explore_page(made), encoding="utf-8")
    with browser() as page:
        page.driver.get(file.as_uri())
        page.until("document.querySelector('.figure') !== null")
        page.open("graph")
        click = "document.querySelector(\".network [data-do='{}']\").click()"
        page.driver.execute_async_script("requestIdleCallback(arguments[0], { timeout: 5000 })")
        for what in ("expand", "collapse", "expand", "fit", "in"):
            print(f"{what}: {milliseconds(page, click.format(what))}")
        page(click.format("expand"))
        part = "groups.24.9.second#0"
        assert 0 < page.count(".network .box") < 200 and page.count(f".network [data-part='{part}']") == 0
        page.press(".network .search input", "groups.24.9.second")
        page.press(".network .search input", "\ue007")
        assert page.ask("document.querySelector('.network .selected').dataset.part") == part
        assert page.count(".network .wire.lit") >= 2
        page(click.format("fit"))
        assert page.count(".network .box") == len(made["graph"]["calls"])  # all of them, as outlines
        assert page.count(".network .box text") == 0 and page.count(".network .wire") == 2
        for tab in ("code", "breakdown", "timeline", "plan", "overview"):
            chosen = f"document.getElementById('tab-{tab}').click()"
            print(f"{tab}: {milliseconds(page, chosen)}")
        page.open("code")
        assert page.count(".line.marked") >= 1
        page.open("breakdown")
        assert page.count(".shape") > 250
        assert page.complaints() == []


def milliseconds(page: Browser, act: str) -> str:
    """How long an action takes: its script, and until the next frame was drawn."""
    script, frame = page.driver.execute_async_script(
        f"""const done = arguments[0], begin = performance.now(); {act}; const script = performance.now() - begin;
        requestAnimationFrame(() => setTimeout(() => done([script, performance.now() - begin])));"""
    )
    return f"{script:.0f} ms, drawn after {frame:.0f} ms"
