import json
import re
import shutil
import subprocess
from importlib.resources import files

import pytest

from outcore.errors import OutcoreError
from outcore.graph.graph import Graph
from outcore.report import bundle, page
from outcore.report.page import SCRIPTS

from .graphs import Maker, stack, unet


def embedded_in(html: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="bundle">(.*?)</script>', html, re.DOTALL)
    assert found
    return dict(json.loads(found[1]))


def test_the_page_loads_nothing() -> None:
    html = page(bundle(unet()))
    outside = re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"'`]*", html)
    assert set(outside) <= {"http://www.w3.org/2000/svg"}  # a name, never loaded
    assert not re.search(r"<(?:link|img|iframe|script[^>]+src)|@import|url\(|fetch\(|XMLHttpRequest|import\(", html)
    assert "default-src 'none'" in html


def test_the_bundle_comes_back_out_of_the_page() -> None:
    given = bundle(unet(), title="a U-Net")
    assert embedded_in(page(given)) == json.loads(json.dumps(given))
    assert Graph.from_json(given["graph"]) == unet()


def test_names_cannot_break_out_of_the_page() -> None:
    make = Maker()
    evil = "</script><script>alert(1)</script><!--"
    html = page(bundle(make.graph(make.call("a", "x", type=evil)), title=evil))
    assert "alert(1)</script>" not in html
    assert html.count("<script") == html.count("</script>") == 2
    assert any(block["type"] == evil for block in embedded_in(html)["graph"]["blocks"])  # type: ignore[index]


def test_further_parts_travel_with_the_graph() -> None:
    assert bundle(unet(), costs={"step_s": 0.1})["costs"] == {"step_s": 0.1}


def test_a_wrapper_of_one_block_is_opened_at_the_start() -> None:
    assert bundle(unet())["start"] == {"depth": 1, "functions": True}
    assert bundle(stack(5))["start"] == {"depth": 2, "functions": True}


def test_functions_are_hidden_at_first_where_they_are_most_of_what_is_seen() -> None:
    make, value = Maker(), "x"
    for i in range(4):
        for j in range(3):
            value = make.call(f"view{j}_{i}()", value, type="view")
        value = make.call(f"linear{i}", value, type="Linear")
    assert bundle(make.graph(value))["start"] == {"depth": 1, "functions": False}


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(OutcoreError, match="format 7"):
        page({"format": 7, "title": ""})


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_scripts_are_valid_together() -> None:
    script = "\n".join((files("outcore.report") / "page" / name).read_text() for name in SCRIPTS)
    subprocess.run(["node", "--check", "-"], input=script, text=True, check=True, capture_output=True)


def test_the_legend_stands_below_the_picture_and_not_on_it() -> None:
    html = page(bundle(unet()))
    canvas = html[html.index('<div class="canvas"') :]
    inside = canvas[: canvas.index("</div>\n      <div")]
    assert 'class="legend"' not in inside and 'class="legend"' in canvas
    rule = re.search(r"\.legend \{([^}]*)\}", html)
    assert rule is not None and "absolute" not in rule[1]
