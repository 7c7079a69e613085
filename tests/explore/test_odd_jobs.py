"""Jobs of every kind give a page: without loss, images, parameters or lines of their own, with many inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outcore.explore.page import explore_page
from outcore.explore.parts import ExploreSettings, explore_bundle
from tests.explore.browser import browser, needs_browser
from tests.explore.jobs import write

HEAD = "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n"
NET = "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        "
ODD = {
    "sequential": "def model(): return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))\n"
    "def batch(size): return torch.randn(size, 4), None\n",
    "one layer": "def model(): return nn.Conv2d(3, 4, 3)\ndef batch(size): return torch.randn(size, 3, 9, 9), None\n",
    "nothing to train": "def model(): return nn.ReLU()\ndef batch(size): return torch.randn(size, 3), None\n",
    "words": NET + "self.embed = nn.Embedding(50, 8); self.lstm = nn.LSTM(8, 8, batch_first=True)\n"
    "    def forward(self, ids):\n        return self.lstm(self.embed(ids))[0].mean(1)\n"
    "def model(): return Net()\n"
    "def batch(size): return torch.randint(50, (size, 7)), torch.randn(size, 8)\n"
    "def loss(output, target): return F.mse_loss(output, target)\n",
    "many in and out": NET + "self.one = nn.Linear(4, 4)\n"
    "    def forward(self, a, b):\n        return {'sum': self.one(a) + b, 'shared': self.one(b)}\n"
    "def model(): return Net()\n"
    "def batch(size): return {'a': torch.randn(size, 4), 'b': torch.randn(size, 4)}, None\n",
    "branches on data": NET + "self.one = nn.Linear(4, 4)\n"
    "    def forward(self, a):\n        return self.one(a) if a.sum() > 0 else self.one(a) * 2\n"
    "def model(): return Net()\ndef batch(size): return torch.ones(size, 4), None\n",
    "never called": NET + "self.one = nn.Linear(4, 4); self.spare = nn.Linear(4, 4)\n"
    "    def forward(self, a):\n        return self.one(a)\n"
    "def model(): return Net()\ndef batch(size): return torch.ones(size, 4), None\n",
    "one size of image": NET + "self.one = nn.Linear(3 * 16 * 16, 4)\n"
    "    def forward(self, a):\n        return self.one(a.flatten(1))\n"
    "def model(): return Net()\ndef batch(size): return torch.ones(size, 3, 16, 16), None\n",
    "volumes": "def model(): return nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.MaxPool3d(2), nn.Conv3d(4, 2, 1))\n"
    "def batch(size): return torch.randn(size, 1, 16, 16, 16), None\n",
    "names with signs": NET + "self.add_module('a\"b<i>#0', nn.Linear(4, 4)); self.add_module('ü ñ', nn.ReLU())\n"
    "    def forward(self, a):\n        return getattr(self, 'ü ñ')(getattr(self, 'a\"b<i>#0')(a))\n"
    "def model(): return Net()\ndef batch(size): return torch.ones(size, 4), None\n",
    "too large": "def model(): return nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 2, 1))\n"
    "def batch(size): return torch.randn(size, 3, 16384, 16384), None\n",
}  # fmt: skip


def bundle_of(name: str, folder: Path) -> dict[str, Any]:
    path = write(folder, HEAD + ODD[name])
    return explore_bundle(ExploreSettings(str(path), machine="v100", seconds=0.6, search_s=0.01))


QUICK = ("one layer", "words", "many in and out", "names with signs")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in ODD])
def test_a_page_of_it_is_made(name: str, tmp_path: Path) -> None:
    made = bundle_of(name, tmp_path)
    text = json.dumps(made, allow_nan=False)
    assert made["plans"]["complete"] and made["plans"]["points"][0]["plain"]
    rows = made["costs"]["blocks"]["rows"]
    assert set(rows) == {block["path"] for block in made["graph"]["blocks"]}
    assert made["plans"]["points"][0]["peak_bytes"] == made["memory"]["peak_bytes"]
    for point in made["plans"]["points"]:
        assert set(point["blocks"]) <= set(rows)
        assert all(isinstance(e[3], str) or e[3] < len(made["costs"]["calls"]) for e in point["timeline"]["events"])
    assert len(explore_page(made)) > len(text)


@needs_browser()
@pytest.mark.slow
def test_a_browser_shows_all_of_them(tmp_path: Path) -> None:
    with browser() as page:
        for i, name in enumerate(ODD):
            (folder := tmp_path / str(i)).mkdir()
            file = folder / "page.html"
            file.write_text(explore_page(bundle_of(name, folder)), encoding="utf-8")
            page.driver.get(file.as_uri())
            page.until("document.querySelector('.figure') !== null")
            for tab in ("code", "graph", "breakdown", "timeline", "plan", "overview"):
                page.open(tab)
                page.until(f"document.getElementById('panel-{tab}').childElementCount > 0")
            assert page.complaints() == [], name
