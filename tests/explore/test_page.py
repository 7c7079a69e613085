"""The page as a file: nothing is loaded, one script runs, and names of modules stay text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path

from outcore.explore.page import SCRIPTS, SHARED, STYLES, explore_page
from outcore.explore.parts import ExploreSettings, explore_bundle
from tests.cli.command import outcore_command
from tests.explore.jobs import SMALL, write

ASSETS = Path(__file__).parents[2] / "src" / "outcore" / "explore" / "assets"


def test_only_the_page_s_own_script_may_run_and_nothing_may_be_loaded() -> None:
    html = explore_page({"title": "</title><script>alert(1)</script>"})
    policy = re.search(r'Content-Security-Policy"\s+content="([^"]+)"', html)
    assert policy is not None
    scripts = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy[1]
    assert "default-src 'none'" in policy[1] and "connect-src 'none'" in policy[1]
    assert "connect-src 'self'" in explore_page({}, live=True)
    assert not re.findall(r"(?:src|href)\s*=\s*[\"']?http", html)


def test_every_asset_is_on_the_page() -> None:
    assert {path.name for path in ASSETS.iterdir()} == {*SCRIPTS, *STYLES, "explore.html"}
    assert len(set(SCRIPTS + SHARED)) == len(SCRIPTS + SHARED)


def test_the_bundle_has_every_piece_and_can_be_read_back(tmp_path: Path) -> None:
    evil = SMALL.replace(
        "self.first = Block(3, 32)",
        'self.first = Block(3, 32); self.add_module("</script><img src=x onerror=alert(1)>", nn.ReLU())',
    )
    evil = evil.replace(
        "b = self.second(a)", 'b = self.second(getattr(self, "</script><img src=x onerror=alert(1)>")(a))'
    )
    path = write(tmp_path, evil)
    made = explore_bundle(ExploreSettings(str(path), machine="2xv100", devices=2, seconds=1.0, search_s=0.02))
    keys = {"about", "graph", "drawing", "costs", "step", "memory", "sources", "commands", "sizes", "plans", "pipeline"}
    assert keys <= set(made)
    assert made["plans"]["complete"] and made["pipeline"]["document"]["format"]
    assert made["sources"][0]["text"] == evil
    html = explore_page(made)
    assert html.count("</script>") == 2 and "<img" not in html
    inner = re.search(r'id="bundle">(.*?)</script>', html, re.DOTALL)
    assert inner is not None and json.loads(inner[1]) == json.loads(json.dumps(made))


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    path, page = write(tmp_path), tmp_path / "page.html"
    done = outcore_command("explore", str(path), "--on", "v100", "--seconds", "0", "--export", str(page))
    assert done.returncode == 0, done.stderr
    assert f"wrote {page}" in done.stderr and '"about"' in page.read_text()
