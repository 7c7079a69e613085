"""Numbers of GPUs: sentences about points that are given, and intervals that stored measurements lie in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outcore.errors import WhatIfError
from outcore.machine import Device, parse
from outcore.whatif.links import parse_link
from outcore.whatif.scaling import scale_out
from outcore.whatif.scaling_table import SHARES, STRATEGIES, ScalingPoint, ScalingTable, helps
from outcore.whatif.tables import scaling_table
from tests.whatif.jobs import images

MIB = 1 << 20
LINKS = Path(__file__).parents[2] / "benchmarks" / "whatif-links" / "results"


def scaling(*rows: tuple[int, float, float], **more: Any) -> ScalingTable:
    """Points of so many GPUs with their samples per second and the share of the step that waits."""
    points = []
    for gpus, rate, waits in rows:
        step_s = 64 * gpus / rate
        points.append(
            ScalingPoint(
                gpus, "data_parallel", 64 * gpus, step_s, rate, rate / gpus / rows[0][1], step_s, 0.0, waits * step_s
            )
        )
    given = {"weight_bytes": 100 * MIB, "largest_block": ("head", 10 * MIB)} | more
    return ScalingTable("job", "v100", "25gbe", "weak", tuple(points), (), **given)


def test_what_is_hidden_says_how_efficient_it_is_and_whether_gpus_are_filled() -> None:
    said = scaling((1, 100.0, 0.0), (2, 199.0, 0.0), (4, 396.0, 0.01)).verdict()
    assert said == "up to 4 GPUs over 25gbe the all-reduce of 100.0 MiB of gradients is hidden: 99% efficiency."
    said = scaling((1, 100.0, 0.0), (4, 200.0, 0.0), largest_block=("head", 60 * MIB)).verdict()
    assert "gradients (60.0 MiB of them in head) is hidden, but 64 samples do not fill a GPU: 50% efficiency." in said
    assert "say nothing" in scaling((2, 1.0, 0.0)).verdict().replace("says", "say")


def test_what_is_not_hidden_says_from_where_on_and_whether_more_gpus_help() -> None:
    said = scaling((1, 100.0, 0.0), (2, 198.0, 0.0), (4, 300.0, 0.25), (8, 600.0, 0.3)).verdict()
    assert said.startswith(
        "beyond 2 GPUs over 25gbe the all-reduce of 100.0 MiB of gradients is no longer hidden: 4 wait"
    )
    assert said.endswith("; each GPU more still helps, at 75% efficiency with 8.")
    said = scaling((1, 100.0, 0.0), (2, 98.5, 0.5), (4, 90.0, 0.8), hidden_from=256).verdict()
    assert said.startswith("beyond 1 GPU over") and "; 2 GPUs train no faster than 1" in said
    assert said.endswith(". With a batch of 256 on each GPU it would be hidden.")
    assert "; 2 GPUs train slower than 1" in scaling((1, 100.0, 0.0), (2, 60.0, 0.5)).verdict()


def test_a_host_that_sets_the_pace_is_named_beside_the_link() -> None:
    rows = ((1, 100.0, 0.0), (2, 150.0, 0.3))
    without, bound = scaling(*rows).verdict(), scaling(*rows, launch_s=0.9).verdict()
    assert "host" not in without and bound.startswith(without)
    assert "the host sets the pace: it issues calls for 900 ms, the GPU works 640 ms of it" in bound
    job, link = images(2), parse_link("25gbe")
    small = scale_out(job, [1, 2], link, device=parse("h200").devices[0])
    assert small.launch_s == pytest.approx(small.of("data_parallel")[0].step_s, rel=0.2)
    cpu = scale_out(job, [1, 2], link, device=Device("a processor", "cpu", 8 << 30, 20e9, {"fp32": 1e11}))
    assert cpu.launch_s is None and "host" not in cpu.verdict()


def test_the_best_way_of_a_number_of_gpus_is_the_fastest() -> None:
    found = scaling((1, 100.0, 0.0), (2, 150.0, 0.0))
    faster = replace(found.points[1], strategy="gpipe", samples_per_s=160.0)
    both = replace(found, points=(*found.points, faster))
    assert both.best(2) is faster and [p.gpus for p in both.of("data_parallel")] == [1, 2]
    with pytest.raises(WhatIfError, match=r"8 GPUs were not asked for; known are \[1, 2\]"):
        both.best(8)
    assert found.helps() == {2: True} and scaling((1, 100.0, 0.0), (2, 80.0, 0.0)).helps() == {2: False}


def test_what_is_too_close_is_neither_a_yes_nor_a_no() -> None:
    found = scaling((1, 100.0, 0.0), (2, 106.0, 0.4), (4, 250.0, 0.4))
    assert found.helps() == {2: None, 4: True}
    assert found.verdict().endswith("; whether 2 GPUs train faster than 1 is too close to say.")
    low_s, high_s = found.points[1].interval_s
    assert low_s < found.points[1].step_s < high_s and found.points[0].interval_s == (found.points[0].step_s,) * 2
    assert found.to_json()["helps"] == {"data_parallel": {2: None, 4: True}}
    assert [helps(4, rate, rate) for rate in (1.14, 1.15, 1.16)] == [False, False, True]


def test_stages_are_not_said_to_wait_for_an_all_reduce() -> None:
    alone, more = scaling((1, 100.0, 0.0), (2, 190.0, 0.2)).points
    stages = tuple(replace(point, strategy="1f1b") for point in (alone, more))
    found = replace(scaling((1, 100.0, 0.0)), points=stages)
    said = found.verdict()
    assert said.startswith("1f1b over 25gbe: stages on 2 GPUs wait 135 ms of 674 ms for each other and for messages;")
    assert "all-reduce" not in said and said == found.verdict("1f1b")
    sharded = replace(found, points=tuple(replace(point, strategy="sharded") for point in (alone, more)))
    assert "the gathers and scatters of 100.0 MiB of weights are no longer hidden" in sharded.verdict()


def test_of_several_ways_the_fastest_is_named_and_what_may_be_as_fast() -> None:
    alone, more = scaling((1, 100.0, 0.0), (4, 390.0, 0.0)).points
    slow = replace(more, strategy="gems", step_s=2 * more.step_s)
    near = replace(more, strategy="sharded", step_s=1.05 * more.step_s)
    found = replace(scaling((1, 100.0, 0.0)), points=(alone, more, slow, near))
    assert found.verdict().endswith(
        " On 4 GPUs data_parallel is the fastest of these, 390.0 samples/s; sharded may be as fast."
    )
    assert replace(found, points=(alone, more, slow)).verdict().endswith("is the fastest of these, 390.0 samples/s.")
    assert "fastest" not in replace(found, points=(alone, more)).verdict() and "fastest" not in found.verdict("gems")


def test_one_gpu_is_one_row_however_many_ways_were_asked_for() -> None:
    from rich.console import Console

    found = scale_out(images(8), [1, 2], parse_link("25gbe"), device=parse("h200").devices[0], strategies=STRATEGIES)
    console = Console(width=160)
    with console.capture() as shown:
        console.print(scaling_table(found))
    rows = shown.get().splitlines()
    assert len([row for row in rows if " alone " in row]) == 1 and len([p for p in found.points if p.gpus == 1]) == 5
    for strategy in STRATEGIES:
        assert len([row for row in rows if row.strip().startswith(f"2  {strategy}")]) == 1


@pytest.mark.parametrize("strategies", [("data_parallel",), ("sharded",), ("1f1b", "gems")])
def test_eight_in_ten_of_the_steps_measured_over_links_lie_in_the_interval(strategies: tuple[str, ...]) -> None:
    """By the rows of every stored run whose predictions are those of the product."""
    kept = ("", "-16-cores", *(f"-pipelines-{name}" for name in (
        "cores", "public-first", "public-second", "link-probe", "cache-state", "16-cores"
    )))  # fmt: skip
    rows: list[dict[str, Any]] = []
    for name in kept:
        rows += json.loads((LINKS / f"2026-11-18{name}.json").read_text())["rows"]
    shares = {s: [r["measured_s"] / r["predicted_s"] for r in rows if r["strategy"] == s] for s in strategies}
    inside = [SHARES[s][0] <= share <= SHARES[s][1] for s in strategies for share in shares[s]]
    assert len(inside) >= 28 and 0.78 <= sum(inside) / len(inside) <= 0.92
