"""Plans against their graph: a random one that is right is accepted, with one thing changed it is refused by name."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outcore
from outcore.errors import PlanError
from outcore.graph import Graph
from outcore.program.plan.document import Plan


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 4)
        self.shared = nn.Linear(4, 4)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.shared(self.stem(x))
        return self.head(torch.cat([self.left(x), self.shared(self.right(x))], dim=1))


@pytest.fixture(scope="module")
def graph() -> Graph:
    return outcore.capture(Tied(), torch.ones(2, 4))


def valid(graph: Graph, drawn: random.Random) -> dict[str, Any]:
    """A plan of some shape that fits the graph."""
    calls = list(graph.calls)
    cuts = sorted(drawn.sample(range(1, len(calls)), drawn.randint(0, 3)))
    stages = [calls[a:b] for a, b in zip([0, *cuts], [*cuts, len(calls)], strict=True)]
    stage_of = {call: k for k, names in enumerate(stages) for call in names}
    users = sorted({stage_of[c] for c in calls if "shared.weight" in graph.calls[c].parameters})
    values = [v for v in graph.values if v not in graph.inputs]
    policies = ["keep", "offload", "offload:early", "recompute", "encode:half", "encode:bf16+offload"]
    document: dict[str, Any] = {"format": 1, "graph": graph.fingerprint, "stages": stages}
    document["schedule"] = drawn.choice(["model_parallel", "gpipe", "1f1b", "gems"])
    document["exactness"] = drawn.choice(["bitwise", "reassociated", "lossy"])
    document["batch_norm"] = drawn.choice(["micro_batch", "deferred", "synchronised"])
    for name in ("micro_batches", "batches", "replicas"):
        document[name] = drawn.randint(1, 8)
    if drawn.random() < 0.5:
        document["placement"] = [k % drawn.randint(1, len(stages)) for k in range(len(stages))]
        if set(document["placement"]) != set(range(max(document["placement"]) + 1)):
            document["placement"] = list(range(len(stages)))
    ranks = max(document.get("placement", range(len(stages)))) + 1
    document["policy"] = {v: drawn.choice(policies) for v in drawn.sample(values, drawn.randint(1, 4))}
    document["tied"] = {"shared.weight": users}
    document["state"] = {"optimizer": drawn.choice(["keep", "offload"])}
    document["memory_bytes"] = drawn.randint(1, 2**40)
    peaks = [drawn.randint(0, 2**30) for _ in range(ranks)]
    document["predicted"] = {"time_s": drawn.random(), "peak_bytes": peaks, "bubble": drawn.random()}
    document["why"] = ["because"]
    return document


Change = Callable[[dict[str, Any], random.Random], str]


def number(name: str) -> Change:
    def change(document: dict[str, Any], drawn: random.Random) -> str:
        document[name] = drawn.choice([0, -1, 10**6, 1.5, "4", None, True, [], {}, float("nan")])
        return name

    return change


def word(name: str) -> Change:
    def change(document: dict[str, Any], drawn: random.Random) -> str:
        document[name] = drawn.choice(["zigzag", "", 3, None, [], {}, True])
        return name

    return change


def unknown(document: dict[str, Any], drawn: random.Random) -> str:
    document["micro_batch"] = 4
    return "micro_batch"


def lost_call(document: dict[str, Any], drawn: random.Random) -> str:
    stage = drawn.choice([s for s in document["stages"] if len(s) > 1] or document["stages"])
    gone = drawn.choice([c for c in stage if "()" not in c] or stage)  # functions are placed by themselves
    if "()" in gone:
        stage.append("nowhere")
        return "nowhere"
    stage.remove(gone)
    return gone.partition("#")[0] if stage else "stage"


def twice(document: dict[str, Any], drawn: random.Random) -> str:
    again = drawn.choice([c for s in document["stages"] for c in s])
    drawn.choice(document["stages"]).append(again)
    return again.partition("#")[0]


def misspelt(document: dict[str, Any], drawn: random.Random) -> str:
    drawn.choice(document["stages"]).append("lfet")
    return "lfet"


def stages(document: dict[str, Any], drawn: random.Random) -> str:
    document["stages"] = drawn.choice([None, 3, "x" * 3, [], [[]], [[1]], {}, [None]])
    return "stage|no block"


def placement(document: dict[str, Any], drawn: random.Random) -> str:
    count = len(document["stages"])
    wrong = [[-1] * count, [0] * (count + 1), [count + 3] * count, ["0"] * count, "0", {}, [10**9] * count]
    document["placement"] = drawn.choice(wrong)
    return "placement"


def policy(document: dict[str, Any], drawn: random.Random) -> str:
    name = drawn.choice(list(document["policy"]))
    document["policy"][name] = drawn.choice(
        ["burn", "keepsake", "offload:", "encode:", "encode:fp12", 3, None, ["keep"]]
    )
    return "policy"


def policy_of(document: dict[str, Any], drawn: random.Random) -> str:
    document["policy"]["no#0:out"] = "keep"
    return "no#0:out"


def tied(document: dict[str, Any], drawn: random.Random) -> str:
    wrong = [
        {"shared.weight": [99]},
        {"shared.weight": [-1]},
        {"shared.weight": []},
        {"w": [0]},
        {"shared.weight": [0, 0]},
    ]
    document["tied"] = drawn.choice([*wrong, {"shared.weight": "0"}, {"shared.weight": 0}, [], {"left.weight": [7]}])
    return "tied"


def state(document: dict[str, Any], drawn: random.Random) -> str:
    document["state"] = drawn.choice([{"optimiser": "keep"}, {"optimizer": "away"}, [], {"stage_bytes": -1}, 3])
    return "state"


def predicted(document: dict[str, Any], drawn: random.Random) -> str:
    few = document["predicted"]["peak_bytes"]
    wrong: list[Any] = [
        {"time_s": -1},
        {"bubble": 2},
        {"peak_bytes": [*few, 1]},
        {"peak_bytes": [-1]},
        {"peak_bytes": 3},
    ]
    change = drawn.choice([*wrong, {"time_s": float("nan")}, {"time_s": "1"}, {"tmie_s": 1}])
    document["predicted"] |= change
    return "predicted"


def stream(document: dict[str, Any], drawn: random.Random) -> str:
    wrong: list[Any] = [{}, {"tile": 0}, {"tile": []}, {"tile": [2, -2]}, {"tile": "64"}, {"tile": [8, 8], "titel": 1}]
    document["stream"] = drawn.choice([*wrong, {"tile": 8, "boundary": ["nowhere"]}, 3, []])
    return "stream"


def memory(document: dict[str, Any], drawn: random.Random) -> str:
    document["memory_bytes"] = drawn.choice([0, -5, 2**80, "8GiB", 1.5, []])
    return "memory_bytes"


def why(document: dict[str, Any], drawn: random.Random) -> str:
    document["why"] = drawn.choice(["text", [1], {}, 3])
    return "why"


def fingerprint(document: dict[str, Any], drawn: random.Random) -> str:
    document["graph"] = drawn.choice(["0" * 16, "", 3, None, []])
    return "graph"


CHANGES = [
    *(number(name) for name in ("micro_batches", "batches", "replicas")),
    *(word(name) for name in ("schedule", "exactness", "batch_norm", "memory_order")),
    *(unknown, lost_call, twice, misspelt, stages, placement, policy, policy_of, tied, state, predicted, stream),
    *(memory, why, fingerprint),
]


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_with_one_thing_wrong_is_refused_by_its_name(graph: Graph, tmp_path: Path, seed: int) -> None:
    drawn = random.Random(seed)
    path = tmp_path / "plan.json"
    for change in CHANGES:
        good = valid(graph, drawn)
        path.write_text(json.dumps(good))
        Plan.load(path).validate(graph)
        bad = json.loads(json.dumps(good))
        name = change(bad, drawn)
        if name == "memory_order" and bad[name] is None:
            continue
        path.write_text(json.dumps(bad))
        with pytest.raises(PlanError) as refused:
            Plan.load(path).validate(graph)
        assert any(part in str(refused.value) for part in name.split("|")), (bad, str(refused.value))


def test_the_policies_of_a_stream_s_rest_are_checked(graph: Graph, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    document = {"format": 1, "graph": graph.fingerprint, "stages": [[""]], "stream": {"tile": 8}}
    value = next(iter(graph.values))
    for how, good in (("recompute", True), ("forget", False)):
        path.write_text(json.dumps(document | {"stream": {"tile": 8, "rest": {value: how}}}))
        if good:
            Plan.load(path).validate(graph)
        else:
            with pytest.raises(PlanError, match="forget"):
                Plan.load(path).validate(graph)
