"""What a notebook shows of graphs, costs, plans and timelines: the figures, escaped, and drawn by a browser."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import outcore
from outcore.machine.units import format_bytes, format_time
from outcore.program import Stages, Timeline, compile_program, simulate
from outcore.program.plan.document import Plan
from tests.explore.browser import browser, needs_browser

NAME = "<b onclick=hurt()>"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.add_module(NAME, nn.Linear(8, 8))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(getattr(self, NAME)(x))


def timeline() -> Timeline:
    chain = Stages.uniform(3)
    return simulate(compile_program(chain, "gpipe", micro_batches=4), chain)


def test_costs_have_their_figures_and_names_are_escaped() -> None:
    graph = outcore.capture(Net(), [(4, 8)])
    costs = outcore.estimate(graph, machine="v100")
    shown = costs._repr_html_()
    assert format_time(costs.total("head").forward_s) in shown and format_bytes(costs.total().saved_bytes) in shown
    assert NAME not in shown and "&lt;b onclick=hurt()&gt;" in shown


def test_a_plan_has_its_stages_and_reasons() -> None:
    plan = Plan("0", (("stem", "layer1"), (NAME,)), micro_batches=4, policy={"stem#0:out": "recompute"}, why=("a < b",))
    shown = plan._repr_html_()
    facts = {"arrangement": plan.arrangement, "schedule": "gpipe, 4 micro-batches", "exactness": "bitwise"}
    assert all(f">{name}<" in shown and f">{text}<" in shown for name, text in facts.items())
    assert "stem … layer1" in shown and "recompute 1" in shown and "a &lt; b" in shown and NAME not in shown


def test_a_timeline_is_a_picture_and_a_long_one_a_table() -> None:
    assert timeline()._repr_html_().count("<svg") == 1
    chain = Stages.uniform(80)
    long = simulate(compile_program(chain, "gpipe", micro_batches=1), chain)
    assert "<svg" not in long._repr_html_() and "80 ranks" in long._repr_html_()


@needs_browser()
@pytest.mark.slow
def test_a_browser_shows_them_without_complaint(tmp_path: Path) -> None:
    graph = outcore.capture(Net(), [(4, 8)])
    shown = [graph, outcore.estimate(graph, machine="v100"), Plan("0", (("a",), ("b",))), timeline()]
    file = tmp_path / "notebook.html"
    file.write_text("<!doctype html><meta charset=utf-8>" + "".join(value._repr_html_() for value in shown))
    with browser() as page:
        page.driver.get(file.as_uri())
        page.driver.switch_to.frame(0)
        page.until("document.querySelectorAll('.box').length === 2")
        page.driver.switch_to.default_content()
        assert page.count("table") == 3 and page.count("svg") == 1
        assert page.complaints() == []
