"""A plan for one device is a script: checked by the rules of programs, timed by the simulator, read back by call."""

from __future__ import annotations

import pytest
from torch import nn

import outcore
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.rough import by_bytes
from outcore.errors import PlanError
from outcore.planner.memory.copy_schedule import OffloadTarget
from outcore.planner.memory.evaluate import StepModel
from outcore.planner.memory.script import emit, link_of, one_stage, stage_of
from outcore.program import Program, check, simulate
from outcore.program.policies import RECOMPUTE, Encode, Keep, Offload
from outcore.program.script import Recompute, Run, layout_of
from tests.memory.oracle import policies

MODES = ("keep", "recompute", "offload", "encode", *(f"mixture {seed}" for seed in range(6)))


def networks() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    convolutions = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.MaxPool2d(2)]
    return {
        "convolutions": (nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(8 * 14 * 14, 4)), (4, 3, 32, 32)),
        "dropout": (nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 8)), (16, 32)),
        "u-net": (outcore.models.UNet(width=4), (1, 3, 32, 32)),
        "chain": (nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(12))), (64, 16)),
    }


def step_model(name: str, target: OffloadTarget | None = None) -> StepModel:
    model, shape = networks()[name]
    graph = outcore.capture(model, [shape])
    return StepModel(graph, by_bytes(account(graph), 1e9), 0.0, target)


LINK = OffloadTarget(1e9, 1e9, least_bytes=1)


def assignment(model: StepModel, mode: str) -> dict[str, object]:
    kind, _, seed = mode.partition(" ")
    return policies(model, kind, int(seed or 0))  # type: ignore[return-value]


@pytest.mark.parametrize("name", networks())
@pytest.mark.parametrize("mode", MODES)
def test_a_script_keeps_the_rules_of_programs_and_survives_json(name: str, mode: str) -> None:
    model = step_model(name, LINK)
    program = one_stage(model, assignment(model, mode))  # type: ignore[arg-type]
    check(program, stage_of(model))
    assert Program.from_json(program.to_json()) == program


@pytest.mark.parametrize("name", networks())
@pytest.mark.parametrize("mode", MODES)
def test_the_layout_of_a_script_says_the_policies_it_was_made_from(name: str, mode: str) -> None:
    model = step_model(name, LINK)
    chosen = assignment(model, mode)
    found = layout_of(*emit(model, chosen)).policies  # type: ignore[arg-type]
    wanted = model.resolved(chosen)  # type: ignore[arg-type]
    plain = {n: Offload() if isinstance(how, Offload) else how for n, how in wanted.items()}
    assert found == {n: how for n, how in plain.items() if not isinstance(how, Keep)}


@pytest.mark.parametrize("name", networks())
@pytest.mark.parametrize("mode", MODES)
def test_the_simulator_finds_the_peak_and_the_time_that_were_evaluated(name: str, mode: str) -> None:
    """A value that is recomputed only to make another takes its room for a moment of its own."""
    model = step_model(name, LINK)
    chosen = assignment(model, mode)
    step = model.evaluate(chosen)  # type: ignore[arg-type]
    timeline = simulate(one_stage(model, chosen), stage_of(model), link_of(LINK))  # type: ignore[arg-type]
    assert timeline.memory[0].peak_bytes >= int(step.curve[model.forward_at].max())
    assert timeline.memory[0].peak_bytes <= (1.05 if name == "chain" else 1.001) * step.peak_bytes
    assert timeline.step_s == pytest.approx(step.time_s, rel=0.02 if step.transfers else 1e-9)


def test_every_call_runs_once_each_way_and_what_is_recomputed_comes_before_it_is_needed() -> None:
    model = step_model("convolutions")
    forward, backward = emit(model, policies(model, "recompute"))
    assert [a.calls[0] for a in forward if isinstance(a, Run)] == model.order
    assert [a.calls[0] for a in backward if isinstance(a, Run)] == [model.order[i] for i in model.differentiated][::-1]
    first, _ = model.needs(policies(model, "recompute"))
    seen: set[str] = set()
    for action in backward:
        if isinstance(action, Recompute):
            seen.add(action.value)
        elif isinstance(action, Run):
            position = model.order.index(action.calls[0])
            needed = {name for name, at in first.items() if at == position}
            assert needed & set(layout_of(forward, backward).policies) <= seen


def test_what_a_buffer_cannot_have_is_refused_by_name() -> None:
    model = step_model("convolutions")
    with pytest.raises(PlanError, match="no memory of"):
        emit(model, {"nowhere": RECOMPUTE})
    with pytest.raises(PlanError, match="needs all of it"):
        emit(model, {"0#0:out": Encode("sign")})
