"""An order that a plan carries: read, kept, and refused where it is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from outcore import Plan
from outcore.errors import PlanError
from outcore.program.plan.order import check_order, read_row

STAGES = (("a",), ("b",))
EARLY = ("F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2")


def test_a_plan_keeps_its_order(tmp_path: Path) -> None:
    plan = Plan("0", STAGES, micro_batches=3, order=EARLY)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert "order of its own" in plan.arrangement
    assert Plan("0", STAGES, micro_batches=3).diff(plan) == [f"order: () -> {EARLY}"]


def test_inverted_replicas_take_micro_batches_in_turn() -> None:
    """What each of the two does ascends; a rank may mix them."""
    rows = ("F1 F0 B0 B1", "F0 F1 B1 B0")
    check_order(rows, 2, 2, inverted=True)
    with pytest.raises(PlanError, match=r"row 0 of the order has the forwards 1, 0; needed 0, 1"):
        check_order(rows, 2, 2)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (("F0 B0",), "the order has 1 rows; needed one for each of 2 ranks"),
        (("F0 B0", "F0 F0 B0"), "row 1 of the order has the forwards 0, 0; needed 0, in this order"),
        (("F0 B0", "F0"), "row 1 of the order has the backwards none; needed 0"),
        (("B0 F0", "F0 B0"), "row 0 of the order has B0 before F0"),
        (("F0 B0", "F0 X0"), "row 1 of the order has 'X0'; needed words like F0 and B0"),
        (("F0 B0 F1 B1", "F0 B0"), "row 0 of the order has the forwards 0, 1; needed 0"),
    ],
)
def test_what_is_no_order_is_refused(rows: tuple[str, ...], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        Plan("0", STAGES, order=rows)


def test_an_order_leaves_no_other_placement() -> None:
    with pytest.raises(PlanError, match="leave out the placement"):
        Plan("0", STAGES, micro_batches=3, placement=(1, 0), order=EARLY)
    with pytest.raises(PlanError, match="1 micro-batch in each"):
        Plan("0", STAGES, "gems", micro_batches=3, order=EARLY)
    with pytest.raises(PlanError, match="order"):
        Plan.from_json({"format": 1, "graph": "0", "stages": [["a"], ["b"]], "order": "F0 B0"})
    assert read_row("F12 B3", 0) == [("F", 12), ("B", 3)]
