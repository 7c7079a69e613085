"""A network of 1,500 calls: the page draws all of it, opened and closed, and follows a selection."""

from __future__ import annotations

from pathlib import Path

import pytest

from outcore.explore.page import explore_page
from outcore.explore.parts import ExploreSettings, explore_bundle
from tests.explore.browser import browser, needs_browser
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
        timed = "const t = performance.now(); {}; return performance.now() - t"
        click = "document.querySelector(\".network [data-do='{}']\").click()"
        for what in ("expand", "collapse"):
            print(f"{what}: {page(timed.format(click.format(what))):.0f} ms")
        page(click.format("expand"))
        assert page.count(".network .box") >= 1250
        part = "groups.24.9.second#0"
        page.press(".network .search input", "groups.24.9.second")
        page.press(".network .search input", "\ue007")
        assert page.ask("document.querySelector('.network .selected').dataset.part") == part
        for tab in ("code", "breakdown", "timeline", "plan", "overview"):
            print(f"{tab}: {page(timed.format(f'''document.getElementById('tab-{tab}').click()''')):.0f} ms")
        page.open("code")
        assert page.count(".line.marked") >= 1
        page.open("breakdown")
        assert page.count(".shape") > 250
        assert page.complaints() == []
