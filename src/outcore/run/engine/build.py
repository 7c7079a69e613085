"""How an engine is built: from a job and a plan to this rank's part of both.

The model is built and recorded, the plan checked against the recording and against all other ranks, the program
compiled. The rank keeps the stages the program gives it, on its device; it joins the ranks that hold copies of the same
stages or of tied parameters in one process group each, and all copies start from the weights of the first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from outcore.errors import EngineError
from outcore.graph import Graph
from outcore.job import Job
from outcore.program.plan.document import Plan
from outcore.run.checkpoint.restore import find_checkpoint
from outcore.run.engine.settings import EngineSettings
from outcore.run.engine.setup import agree, build, example_of, first_graph, materialise, strip
from outcore.run.engine.step_programs import StepPrograms
from outcore.run.ranks.world import World
from outcore.run.stage.batch_norm_statistics import RunningStatistics, make_equal
from outcore.run.stage.parameter_owners import ParameterOwners
from outcore.run.stage.recorded_stages import RecordedStages, RecordedStagesByShape


class EngineParts:
    """What an engine runs, on one rank."""

    def __init__(
        self,
        world: World,
        device: torch.device,
        source: Job | nn.Module,
        plan: Plan | None,
        settings: EngineSettings,
    ) -> None:
        weights = settings.weights
        self.world, self.device, self.rank = world, device, world.rank
        pieces = plan.micro_batches * plan.batches * plan.replicas if plan is not None else 1
        inputs = example_of(source, settings.example, pieces)
        self.model, skeleton = build(source, seed=settings.seed, lean=world.size > 1, bare=weights is not None)
        if world.size > 1:
            take_own_memory(self.model)
        graph = self._record(skeleton, plan, settings.autocast, inputs, bare=weights is not None)
        if plan is None:
            if world.size > 1:
                raise EngineError(f"{world.size} ranks need a plan; make one with outcore.plan(...)")
            plan = Plan(graph.fingerprint, (("",),))
        self.plan = self.forms.plan = plan
        agree(world, plan, graph)
        self.step_programs = StepPrograms(plan, self.forms.first(graph), settings.program)
        self.stages = self.forms.own = tuple(sorted({c.stage for c in self.step_programs.training.computes(self.rank)}))
        """The stages this rank holds."""
        self.owners = ParameterOwners.of(self.model, graph, self.forms.stage_of, self.step_programs.training)
        self.recorded = self._keep_own_stages(graph, bare=weights is not None)
        """The stages recorded with the first batch shape; their parts hold this rank's weights."""
        self.forms.keep(self.recorded, inputs)
        every = dict(self.model.named_parameters())
        self.parameters = {name: every[name] for name in self.owners.on(self.rank)}
        """The parameters this rank holds, by name."""
        if weights is not None:
            find_checkpoint(world, weights).load_weights(self.local_state())
        self._meet(settings.timeout_s)

    def _record(
        self, skeleton: nn.Module, plan: Plan | None, autocast: torch.dtype | None, inputs: Any, *, bare: bool
    ) -> Graph:
        """The first recording: of the skeleton if that can be run with real weights, else of the model."""
        for recorded in (skeleton, self.model):
            forms = self.forms = RecordedStagesByShape(self.model, recorded, plan, self.device, autocast)  # type: ignore[arg-type]
            graph = first_graph(recorded, self.model, lambda forms=forms: forms.record(inputs))  # type: ignore[misc]
            if graph is not None:
                return graph
            if bare:
                raise EngineError("this model makes tensors that no checkpoint holds; leave weights= out, and load")
        raise EngineError("this model cannot be recorded")

    def _keep_own_stages(self, graph: Graph, *, bare: bool) -> RecordedStages:
        """Keep this rank's stages, on its device, and drop the others where the engine built the model."""
        state = self.model.state_dict(keep_vars=True)
        used = {id(state[n]) for call in graph.calls.values() for n in call.parameters if n in state}
        self.unclaimed = {n for n, t in state.items() if id(t) not in used}
        """Weights that no call reads; rank 0 keeps them."""
        form = RecordedStages(graph, self.model, self.forms.stage_of, self.stages, self.device, len(self.plan.stages))
        if bare:
            materialise(form.parts.values(), self.device)
        for part in form.parts.values():
            part.to(self.device)
            for name, buffer in part.named_buffers():
                # A buffer that functions read is moved as a copy; the model must have that one too.
                holder, _, leaf = name.rpartition(".")
                self.model.get_submodule(holder)._buffers[leaf] = buffer
        if self.forms.skeleton is not self.model:
            rest = [state[n] for n in self.unclaimed] if self.rank == 0 else []
            strip(self.model, (t for m in form.parts.values() for t in (*m.parameters(), *m.buffers(), *rest)))
        return form

    def _meet(self, timeout_s: float) -> None:
        """Join the other ranks that hold the same stages or parameters, and start from the same weights."""
        holders = self.step_programs.training.holders()
        members: dict[tuple[int, ...], tuple[int, ...]] = {(stage,): ranks for stage, ranks in holders.items()}
        members |= {share.stages: share.ranks for share in self.owners.shares}
        shared = [(key, ranks) for key, ranks in sorted(members.items()) if len(ranks) > 1]
        self.groups = {key: self.world.new_group(ranks, timeout_s) for key, ranks in shared}
        """Stages -> the ranks that hold a copy of them, or of what ties them."""
        self.first_holders = {stage: ranks[0] for stage, ranks in holders.items()}
        copies = {stage: len(ranks) // (self.plan.parts if stage == 0 else 1) for stage, ranks in holders.items()}
        self.statistics = RunningStatistics(self.plan, copies, self.groups, self.world.watched_wait)
        for key, ranks in shared:
            if self.rank in ranks:
                names = sorted({n for share in self.owners.shares if share.stages == key for n in share.names})
                tensors = [self.parameters[n].data for n in names]
                if len(key) == 1:
                    tensors += [b for _, b in sorted(self.recorded.parts[key[0]].named_buffers())]
                make_equal(tensors, ranks[0], self.groups[key], self.world.watched_wait)

    @property
    def grid_rank(self) -> int | None:
        """This rank's number among those that share an image; None if it is not one of them. One rank is a grid as well
        where it streams the image in tiles."""
        at, spatial = self.rank % self.plan.ranks_per_replica, self.plan.spatial
        shared = self.plan.parts > 1 or (spatial is not None and "tile" in spatial)
        return at if at < self.plan.parts and shared else None

    def stage_state(self, stage: int) -> dict[str, torch.Tensor]:
        """Weights and buffers of one of this rank's stages under the model's own names."""
        state: dict[str, torch.Tensor] = self.recorded.parts[stage].state_dict()
        return state

    def local_state(self) -> dict[str, torch.Tensor]:
        """Weights and buffers this rank holds, with those that no stage has on rank 0."""
        found = {name: t for stage in self.stages for name, t in self.stage_state(stage).items()}
        if self.rank == 0:
            every = self.model.state_dict()
            found |= {n: t for n, t in every.items() if n in self.unclaimed and not t.is_meta}
        return found

    def close(self) -> None:
        """Close all connections."""
        self.groups = {}
        self.statistics.close()


def take_own_memory(model: nn.Module) -> None:
    """Move what lies in memory that processes share, as torch.multiprocessing hands models over: each rank updates its
    parameters, and what several ranks hold would be updated several times."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu" and tensor.is_shared():
            tensor.data = tensor.data.clone()
