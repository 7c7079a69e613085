from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import outcore
from outcore.errors import PlanError
from outcore.graph import Graph
from outcore.program.plan.document import Plan, PredictedStep
from outcore.program.plan.stage_names import name_stages, place_calls


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 4)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.head(torch.cat([self.left(x), self.right(x)], dim=1))


@pytest.fixture(scope="module")
def graph() -> Graph:
    return outcore.capture(Small(), torch.ones(2, 4))


def plan(graph: Graph, *stages: tuple[str, ...], **options: object) -> Plan:
    return Plan(graph.fingerprint, stages, **options)  # type: ignore[arg-type]


def test_functions_between_blocks_go_where_their_inputs_are(graph: Graph) -> None:
    made = plan(graph, ("stem", "left"), ("right",), ("head",))
    made.validate(graph, ranks=3)
    assert made.calls(graph) == (("stem.0#0", "stem.1#0", "left#0"), ("right#0", "cat()#0"), ("head#0",))


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((("stem", "lft"), ("right", "head")), r"no block 'lft' in Small; did you mean left"),
        ((("stem", "left"), ("right",)), r"head is in no stage; add it"),
        ((("stem.0",), ("right", "head", "left")), r"stem\.1 is in no stage"),
        ((("stem", "left"), ("left", "right", "head")), r"left is in stages 0 and 1; name it once"),
        ((("stem", "stem.0", "left"), ("right", "head")), r"stem\.0 is in stage 0 twice \(as stem and as stem\.0\)"),
        ((("head", "left", "right"), ("stem",)), r"left is in stage 0 but reads stem\.1#0:out from stage 1"),
    ],
)
def test_messages_name_the_block(graph: Graph, stages: tuple[tuple[str, ...], ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan(graph, *stages).validate(graph)


def test_wrong_graph_ranks_and_numbers_are_refused(graph: Graph) -> None:
    good = plan(graph, ("stem",), ("left", "right", "head"), replicas=2)
    with pytest.raises(PlanError, match=r"needs 4 ranks \(2 replicas of 2\), but there are 3; start 4"):
        good.validate(graph, ranks=3)
    with pytest.raises(PlanError, match="made for graph 123, but this is Small with fingerprint"):
        Plan("123", good.stages).validate(graph)
    with pytest.raises(PlanError, match="micro_batches must be a whole number of at least 1, not 0"):
        plan(graph, ("stem",), micro_batches=0)
    with pytest.raises(PlanError, match="schedule 'zigzag' is not known; choose one of model_parallel"):
        plan(graph, ("stem",), schedule="zigzag")
    with pytest.raises(PlanError, match="policy 'burn' of v is not known"):
        plan(graph, ("stem",), policy={"v": "burn"})
    with pytest.raises(PlanError, match="policy names v, which is no value of Small"):
        plan(graph, ("stem", "left", "right", "head"), policy={"v": "offload"}).validate(graph)
    with pytest.raises(PlanError, match="placement names 1 ranks for 2 stages"):
        plan(graph, ("stem",), ("head",), placement=(0,))
    with pytest.raises(PlanError, match="leaves a rank without a stage"):
        plan(graph, ("stem",), ("head",), placement=(0, 2))


def test_a_hand_written_file_is_enough_and_is_read_back_equal(graph: Graph, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    document = {"format": 1, "graph": graph.fingerprint, "stages": ["stem", ["left", "right", "head"]]}
    path.write_text(json.dumps(document))
    made = Plan.load(path)
    made.validate(graph, ranks=2)
    assert (made.schedule, made.micro_batches, made.batch_norm, made.exactness) == (
        "gpipe",
        1,
        "micro_batch",
        "bitwise",
    )
    rich = Plan(
        graph.fingerprint,
        (("stem",), ("left",), ("right", "head")),
        "1f1b",
        4,
        placement=(0, 1, 0),
        policy={"stem.1#0:out": "encode:fp16"},
        tied={"w": (0, 1)},
        predicted=PredictedStep(0.5, (10, 20), 0.25),
        why=("chosen",),
    )
    rich.save(path)
    assert Plan.load(path) == rich
    assert '["right", "head"]' in path.read_text()


def test_documents_that_are_not_plans_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match='"format": None; this outcore reads format 1'):
        Plan.from_json({})
    with pytest.raises(PlanError, match="a plan has no field 'stage'"):
        Plan.from_json({"format": 1, "graph": "", "stage": []})
    with pytest.raises(PlanError, match="the plan has no field 'stages'"):
        Plan.from_json({"format": 1, "graph": ""})
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(PlanError, match="is not JSON"):
        Plan.load(tmp_path / "plan.json")


def test_diff_says_what_moved(graph: Graph) -> None:
    one = plan(graph, ("stem", "left"), ("right", "head"), micro_batches=2, predicted=PredictedStep(1.0, (5, 6), 0.1))
    two = plan(
        graph,
        ("stem",),
        ("left", "right", "head"),
        micro_batches=4,
        policy={"v": "offload"},
        predicted=PredictedStep(0.5, (5, 9), 0.1),
    )
    assert one.diff(one) == []
    assert one.diff(two) == [
        "left: stage 0 -> stage 1",
        "micro_batches: 2 -> 4",
        "policy of v: keep -> offload",
        "predicted time: 1 s -> 0.5 s",
        "predicted peak: 6 bytes -> 9 bytes",
    ]
    assert "stage 0 on rank 0" in str(one)


def test_stages_are_named_by_the_largest_blocks_in_them(graph: Graph) -> None:
    calls = [["stem.0#0", "stem.1#0", "left#0"], ["right#0", "cat()#0", "head#0"]]
    names = name_stages(graph, calls)
    assert names == (("stem", "left"), ("right", "cat()", "head"))
    placed = place_calls(graph, names)
    assert [[c for c in graph.calls if placed[c] == k] for k in range(2)] == calls
    assert name_stages(graph, [["stem.0#0"], [c for c in graph.calls if c != "stem.0#0"]])[0] == ("stem.0",)


def test_memory_written_in_place_is_not_torn() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            y[0].mul_(2)
            return self.b(y)

    graph = outcore.capture(Writes(), torch.ones(2, 4))
    stages = (("a",), ("getitem()", "mul_()"), ("b",))
    with pytest.raises(PlanError, match=r"mul_\(\) writes into the memory of .* which b reads afterwards"):
        Plan(graph.fingerprint, stages).validate(graph)


@pytest.mark.parametrize(("rest", "said"), [(1, "then 1 more stage"), (2, "then 2 more stages"), (0, "2 ranks")])
def test_stages_behind_a_grid_are_counted_in_words(rest: int, said: str) -> None:
    made = Plan("0", tuple((f"stage{k}",) for k in range(rest + 1)), spatial={"grid": [1, 2]})
    assert made.arrangement.endswith(said)


def test_a_plan_for_more_ranks_says_how_to_start_them(graph: Graph) -> None:
    made = plan(graph, ("stem", "left", "right"), ("head",))
    said = r"needs 2 ranks \(1 replica of 2\), but there is 1; start 2 \(outcore train --ranks 2\), or plan for 1"
    with pytest.raises(PlanError, match=said):
        made.validate(graph, ranks=1)


def test_names_to_choose_from_are_names_that_can_be_typed(graph: Graph) -> None:
    with pytest.raises(PlanError, match=r"no block 'zzz' in Small; known are stem, "):
        plan(graph, ("zzz",), ("head",)).validate(graph)
