"""Every way of training that the table compares: how it is prepared, and what memory it will take until it is measured.

A row is prepared beside others (build, record, install the plan, warm up: memory is read here, it does not depend on
who else is there) and timed with the machine for itself (`networks.Training.measured`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import cases
import torch
from cases import Case
from compiled import Compiled
from networks import Alone, Training, checkpoint_blocks, fairscale_blocks

from outcore.cost.buffers import buffers_of
from outcore.cost.measured.saved_bytes import account
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.errors import PlanError
from outcore.graph import Graph
from outcore.graph.record.capture import arguments_as_called
from outcore.graph.record.keys import key_of
from outcore.memory.cuda_graphs.pool import give_back
from outcore.memory.saved_tensors import plan_call
from outcore.memory.saved_tensors.managed_forward import ManagedForward
from outcore.memory.saved_tensors.settings import Settings
from outcore.planner.memory.evaluate import StepModel
from outcore.program.policies import parse_policies

Row = dict[str, Any]
Enter = Callable[[], None]
PACKED = {"resnet50": 1.6, "vgg19": 1.9, "inception_v3": 2.2, "densenet121": 1.9, "unet": 1.5, "convnext_tiny": 1.4}
"""What `save_on_cpu` pins over the plain peak, about: it copies a value once for everyone who saves it, and torch
rounds what it pins up to a power of two."""

CHECKPOINTS = {"checkpoint per block": checkpoint_blocks, "fairscale offload": fairscale_blocks}
"""The second not for DenseNet, whose blocks take a list that grows, and not in bf16: it computes again in float16."""


@dataclass
class Prepared:
    """A case with all that its rows share."""

    case: Case
    plain_bytes: int
    """Predicted peak of the plain step."""
    keeping: StepModel | None = None
    """Its costs, with the link and the memory as they were measured without others."""
    plans: dict[str, Row] = field(default_factory=dict)
    turned: StepModel | None = None
    """Its costs with images turned inside the network."""
    graph: Graph | None = None
    graph_turned: bool = False
    plain_peak: int | None = None
    """As it was measured."""

    @property
    def ways(self) -> Iterator[str]:
        """What is measured, the most telling first."""
        yield "plain"
        yield "checkpoint per block"
        for norms in (False, True):
            yield from (way for way in self.plans if ("reassociated" in way) == norms)
        if self.case.name != "densenet121" and not self.case.bf16:
            yield "fairscale offload"
        yield "save_on_cpu"

    @property
    def warm(self) -> int:
        """Steps before the machine is asked for; a large one is warm after one."""
        return 2 if self.case.small else 1

    def gib(self, way: str) -> float:
        """About what a way will have reserved at most; half of it can be holes. A full device slows everyone down."""
        plain = self.plain_bytes / 2**30
        if way in self.plans:
            return min(1.8 * self.plans[way]["budget"] / 2**30, 1.3 * plain) + (1.5 if self.case.small else 1.0)
        return {"save_on_cpu": 0.6, "plain": 1.2}.get(way, 1.1) * plain + 1.0

    def host_gib(self, way: str) -> float:
        """What a way will pin."""
        if way == "save_on_cpu":
            return PACKED[self.case.name] * self.plain_bytes / 2**30
        if way == "fairscale offload":
            return 0.5 * self.plain_bytes / 2**30
        return 1.1 * self.plans[way]["offloaded"] / 2**30 if way in self.plans else 0.0

    def most(self, way: str) -> float:
        """What CUDA graphs may reserve; others are held against their budget in the table alone."""
        share = way.split()[1]
        if "graphs" not in way or share == "least":
            return float("inf")
        return float(share) * (self.plain_peak or self.plain_bytes)

    def measured(self, way: str, alone: Alone, aside: Alone, enter: Enter, caches: Path | None = None) -> Row:
        """One row of the table; `enter` waits until there is memory, `aside` lets others measure meanwhile."""
        if way.startswith("compile"):
            one = Compiled(self.case, float(way.split()[-1]), caches)
            if one.kept and not one.kept[0].exists():
                return {"skipped": "compiling took too long"}
            training, facts = one.ready(enter)
            return {**facts, **training.measured(alone, warm=1)}
        if way in self.plans and self.plans[way]["predicted_peak"] > self.plans[way]["budget"]:
            return {**self.plans[way], "policy": None, "error": "no plan was found within this budget"}
        if way == "plain":
            row = self.case.fresh().measured(alone, self.warm, enter=enter)
            self.plain_peak = row["peak"]
            return row
        if way in self.plans:
            return self.ours(way, alone, enter)
        self.graph = None  # its model would lie beside a peer's
        if way in CHECKPOINTS:
            training = self.case.fresh()
            CHECKPOINTS[way](self.case.name, training.model)
            return training.measured(alone, self.warm, least=1 if "offload" in way else 3, enter=enter)
        enter()
        return saved_on_cpu(self.case, alone, aside)

    def ours(self, way: str, alone: Alone, enter: Enter) -> Row:
        """Under outcore, by the plan that was found."""
        plan = self.plans[way]
        facts = {name: fact for name, fact in plan.items() if name != "policy"}
        training, turned = self.case.fresh(), "channels_last" in way
        if self.graph is None or self.graph_turned != turned:
            with self.case.precision():
                self.graph, self.graph_turned = self.case.graph(training.model, training.images, turned), turned
        training.model = self.graph.module.model  # what was recorded is what runs
        training.optimizer = torch.optim.SGD(training.model.parameters(), lr=1e-6)
        try:
            managed_forward = self.managed(training, dict(plan["policy"]), way)
        except PlanError:  # searched for without a device, where operations derive other things
            there = buffers_of(self.graph, account(self.graph))
            managed_forward = self.managed(training, {n: how for n, how in plan["policy"].items() if n in there}, way)
        (entry,) = managed_forward.admitted.values()
        entry.observer = None  # nobody times it while others run
        entry.idle = entry.idle and not turned  # else what was recorded would not run
        kinds: dict[str, int] = {}
        for policy in map(str, managed_forward.plan.policy.values()):
            kinds[policy] = kinds.get(policy, 0) + 1
        facts |= {
            "policies": kinds,
            "fused": len(entry.compiled.instead),
            "planned_peak": managed_forward.plan.peak_bytes,
        }
        try:
            return {**facts, **training.measured(alone, self.warm, most=self.most(way), enter=enter)}
        finally:
            del training.model.__dict__["forward"]

    def managed(self, training: Training, policy: dict[str, str], way: str) -> ManagedForward:
        """As `outcore.within`, with a plan that is there already; the table shows whether it keeps to its budget."""
        flags = {"graphs": "graphs" in way, "reassociated": "reassociated" in way}
        settings = Settings(None, OptimizerCost.of(0.0, cases.DEVICE), 0, parse_policies(policy), **flags)
        keeping = self.turned if self.graph_turned else self.keeping
        assert keeping is not None
        tier, rate = keeping.tier, keeping.memory_bytes_per_s
        managed_forward = ManagedForward(training.model, settings, keeping.costs)
        known = patch.multiple(plan_call, tier_below=lambda *_, **__: tier, memory_rate=lambda _: rate)
        with known, self.case.precision():  # others use the link now
            call = arguments_as_called(training.model, (training.images,))
            managed_forward.admit(key_of(training.model, *call), *call, graph=self.graph)
        training.model.__dict__["forward"] = managed_forward
        return managed_forward


def saved_on_cpu(case: Case, alone: Alone, aside: Alone) -> Row:
    """All that autograd saves, in pinned memory; one step, because on a large image it takes seconds.

    The first step would pin that memory piece by piece, for up to a minute. It is pinned before, `aside` from others,
    its pages mapped by several threads.
    """
    training = case.fresh()
    sizes: list[int] = []

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(noted, lambda tensor: tensor):
        training.step()
    if cases.DEVICE == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch._C._accelerator_setAllocatorSettings("pinned_use_cuda_host_register:True,pinned_num_register_threads:4")
        with aside():
            pinned = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
        del pinned  # torch keeps it for who asks next
    inner = training.step

    def step() -> None:
        with torch.autograd.graph.save_on_cpu(pin_memory=cases.DEVICE == "cuda"):
            inner()

    training.step = step  # type: ignore[method-assign]
    return {**training.measured(alone, warm=1, least=1), "pinned": sum(sizes)}


def clean() -> None:
    """Give back all memory that a row has left, of the device and of the host."""
    give_back()
    if cases.DEVICE == "cuda":
        torch._C._host_emptyCache()
