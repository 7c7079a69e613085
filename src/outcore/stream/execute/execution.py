"""One step of the streamed part: forward over the tiles, and backward over them again.

Forward runs every tile without gradients and keeps only its results: its piece of the boundary map, its terms of the
statistics. Backward runs every tile once more, with gradients on, passes it its slice of the gradients and adds up the
gradients of parameters and inputs. The tiles' graphs are freed one by one, so memory is that of one tile and of the
maps. What comes when is in the compiled script of the step (`outcore.stream.execute.tile_schedule`).

Sums over tiles are kept in float32 where the tensors are of half precision: hundreds of small terms are added.

Between passes, global nodes run once, as they were recorded, with their graph kept for backward: squeeze-excite's two
layers on the pooled channels, noise that whole samples share, weights made from other weights, folded batch norms. They
use the user's own modules and parameters; backward is autograd's.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from outcore.graph.record.recording import Tape
from outcore.ops.region import Region, whole
from outcore.stream.execute.gradient_sums import GradientSums
from outcore.stream.execute.map_store import MapStore
from outcore.stream.execute.step_context import StepContext
from outcore.stream.execute.tile_dedup import IdenticalTiles, TileDedup
from outcore.stream.execute.tile_schedule import GlobalsStep, PassStep
from outcore.stream.network import RegionNetwork, RegionNode
from outcore.stream.plan.passes import TilePass
from outcore.stream.rules.normalise import Norm


@dataclass
class Execution(StepContext):
    """The streamed part of one step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.states: dict[str, Any] = {}
        self.globals: dict[int, GlobalNodes] = {}
        self.duplicates = [TileDedup() for _ in self.streaming.stages]

    # Forward

    def forward(self) -> dict[str, torch.Tensor]:
        """The boundary values."""
        for step in self.schedule.forward:
            self.run_step(step)
        made = {v: self.store.here(v) for v in self.streaming.boundary}
        for name in self.streaming.passing:  # the rest has it, and lets it go when it can
            del self.store.values[name]
        return made

    def gradients_of(
        self, tensors: Sequence[torch.Tensor], inputs: Mapping[str, torch.Tensor], sums: GradientSums
    ) -> list[torch.Tensor | None]:
        """The gradients of what a node of autograd was given: the inputs that want one, then parameters."""
        first = [inputs.get(name) for name in self.network.graph.inputs if name in self.wants]
        return [*first, *(sums.of(t) for t in tensors[len(first) :])]

    def boundary(self, ctx: Any) -> tuple[torch.Tensor, ...]:
        """Forward in a node of autograd: the boundary values, cut off from the tiles' own graphs."""
        ctx.set_materialize_grads(False)
        with torch.enable_grad():
            values = self.forward()
        made = tuple(values[v].detach() for v in self.streaming.boundary)
        ctx.mark_non_differentiable(*(t for t in made if not t.is_floating_point()))
        return made

    def output_tiles(self, skip: Collection[Region] = ()) -> Iterator[tuple[Region, torch.Tensor]]:
        """The parts of the one map that the last pass makes, one after the other, without those in `skip`."""
        step = self.run_before_last()
        stage = self.streaming.stages[step.index]
        state = self.state_of(stage)
        (name,) = stage.maps
        duplicates: dict[Hashable, torch.Tensor] = {}
        """The latest part of one colour; one of every colour and kind would be more than the budget counts."""
        wanted = (plan for plan in self.plans(step) if plan.targets[name] not in skip)
        for plan, pixels in self.read(step, wanted):
            key = self.duplicate_key(stage, plan, pixels)
            part = duplicates.get(key)
            if part is None:
                loaded = self.load(stage, plan, pixels)
                part = self.compute(stage, plan, loaded, state)[name]
                self.counts.forward += 1
            else:
                self.counts.reused += 1
            if key is not None:
                duplicates = {key: part}
            yield plan.targets[name], part

    def run_before_last(self) -> PassStep:
        """Run everything before the last pass over the tiles, and say which that is."""
        *before, last = self.schedule.forward
        for step in before:
            self.run_step(step)
        assert isinstance(last, PassStep)
        return last

    def run_step(self, step: GlobalsStep | PassStep) -> None:
        """Run one step of the forward: a pass over the tiles, or the global nodes before one."""
        if isinstance(step, PassStep):
            with torch.no_grad():
                self._pass(step)
            return
        nodes = self.streaming.stages[step.index].globals
        done = GlobalNodes.run(self.network, nodes, self.store.values, self.wants)
        self.globals[step.index] = done
        self.store.values.update({name: t.detach() for name, t in done.outputs.items()})

    def _pass(self, step: PassStep) -> None:
        index, stage = step.index, self.streaming.stages[step.index]
        state = self.state_of(stage)
        duplicates = self.duplicates[index]
        sums = {r.output: r.reduction.start() for r in stage.reductions if r.reduction is not None}
        for plan, pixels in self.read(step, self.plans(step)):
            key = self.duplicate_key(stage, plan, pixels)
            if (identical := duplicates.find(key)) is not None and identical.made is not None:
                made = identical.made
                identical.plans.append(plan)
                self.counts.reused += 1
            else:
                loaded = self.load(stage, plan, pixels)
                made = self.compute(stage, plan, loaded, state)
                del loaded
                duplicates.found(key, plan, made)
                self.counts.forward += 1
            for name, region in plan.targets.items():
                if name in stage.maps:
                    self.store.write(name, self.network.shapes[name], region, made[name])
                elif (reduction := self.network.nodes[name].reduction) is not None:
                    sums[name] = reduction.add(sums[name], made[name], region, 1)
            del made, pixels, identical  # a tile must be gone when the next one begins
        duplicates.forget()
        self.finish_pass(step, sums)

    def finish_pass(self, step: PassStep, sums: dict[str, Any]) -> None:
        """Finish the reductions of a pass whose tiles are all done, from what they added up."""
        stage = self.streaming.stages[step.index]
        self.states.update(sums)
        for node in stage.reductions:
            assert node.reduction is not None
            self.store.values[node.output] = node.reduction.finish(sums[node.output])
            if node.norm is not None:
                update_statistics(node.norm, self.store.values[node.output], sums[node.output][0])

    # Backward

    def backward(self, gradients: Mapping[str, torch.Tensor | None]) -> tuple[GradientSums, dict[str, torch.Tensor]]:
        """Sums of the parameters' gradients, and the gradients of the inputs that want one.

        Args:
            gradients: of the boundary values.
        """
        sums = GradientSums()
        read = {v for stage in self.streaming.stages for v in (*stage.sources, *stage.smalls)}
        read |= {v for done in self.globals.values() for v in done.inputs}
        self.store.gradients = {  # what is added to must be ours
            name: g.clone() if name in read else g for name, g in gradients.items() if g is not None
        }
        self.send_back(sums)
        return sums, {name: self.store.gradients[name] for name in self.wants if name in self.store.gradients}

    def send_back(self, sums: GradientSums) -> None:
        """Run the steps of the backward, with the gradients that the store has."""
        with self.context.entered():
            for step in self.schedule.backward:
                if isinstance(step, PassStep):
                    self.backward_pass(step, sums)
                else:
                    self.backward_globals(step, sums)

    def backward_globals(self, step: GlobalsStep, sums: GradientSums) -> None:
        """Send gradients back through the global nodes before a pass."""
        self.globals[step.index].backward(self.store, sums)

    def backward_pass(self, step: PassStep, sums: GradientSums) -> None:
        """Run the tiles of a pass once more, and send back the gradients of what they made."""
        stage = self.streaming.stages[step.index]
        if not any(t in self.store.gradients for t in stage.targets):
            return
        state = self.state_of(stage)
        parameters = list({id(t): t for t in state.values() if t.requires_grad}.values())
        groups = {f.plans[0].index: f for f in self.duplicates[step.index].groups}
        firsts = (groups[tile].plans[0] for tile in step.tiles if tile in groups)
        for plan, pixels in self.read(step, firsts):
            identical = groups[plan.index]
            loaded = self.load(stage, plan, pixels)
            leaves = {name: crop.requires_grad_() for name, crop in loaded.items() if self.is_wanted(name)}
            made = self.compute(stage, plan, loaded, state)
            outputs, received = self._received(stage, identical, made)
            self.counts.backward += 1
            self.counts.reused += len(identical.plans) - 1
            del made, loaded, pixels
            wanted = [*leaves.values(), *parameters]
            if not outputs or not wanted:
                continue
            found = torch.autograd.grad(outputs, wanted, received, allow_unused=True)
            del outputs, received
            for name, part in zip(leaves, found, strict=False):
                if part is not None:
                    self.store.add_gradient(name, self.network.shapes[name], plan.regions[name], part)
            sums.add(parameters, found[len(leaves) :])
            del found, leaves, wanted
            torch.clear_autocast_cache()  # else it keeps what every tile's global weights were cast to

    def _received(
        self, stage: TilePass, identical: IdenticalTiles, made: Mapping[str, torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The targets of a tile and their gradients; of duplicate tiles, the sum of their gradients."""
        outputs: list[torch.Tensor] = []
        received: list[torch.Tensor] = []
        plan = identical.plans[0]
        for name, region in plan.targets.items():
            gradient = self.store.gradient(name, region) if name in stage.maps else self.store.gradients.get(name)
            output = made[name]
            if gradient is None:
                continue
            if name in stage.maps:
                for duplicate in identical.plans[1:]:
                    more = self.store.gradient(name, duplicate.targets[name])
                    gradient = gradient + more if more is not None else gradient
            else:
                reduction = self.network.nodes[name].reduction
                assert reduction is not None
                result = self.store.values[name]
                output = reduction.share(output, region, result, self.states[name], len(identical.plans))
            if output.requires_grad:
                outputs.append(output)
                received.append(gradient.to(output.dtype))
        return outputs, received


@dataclass
class GlobalNodes:
    """What ran between two passes."""

    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    parameters: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def run(
        cls,
        network: RegionNetwork,
        nodes: Sequence[RegionNode],
        values: Mapping[str, torch.Tensor],
        wants: Collection[str],
    ) -> GlobalNodes:
        """Run global nodes on finished values, with gradients where the caller has them on."""
        made = {n.output for n in nodes}
        done = cls()
        for name in dict.fromkeys(v for n in nodes for v in n.values if v not in made):
            value = values[name].detach()
            mine = name in wants or name not in network.graph.inputs
            done.inputs[name] = value.requires_grad_() if value.is_floating_point() and mine else value
        tape = Tape(network.model, network.recording.constants, dict(done.inputs))
        steps = {s.name: s for s in network.recording.steps}
        finished: set[str] = set()
        for node in nodes:
            if node.function is not None:
                tensors = [tape.values[r.name] if r.kind == "value" else network.state(r) for r in node.operands]
                tape.values[node.output] = node.function(*tensors)
            elif node.call not in finished:
                finished.add(node.call)
                drop, steps[node.call].drop = steps[node.call].drop, ()
                try:
                    tape.run([steps[node.call]], network.recording.ambient)
                finally:
                    steps[node.call].drop = drop
        done.outputs = {n.output: tape.values[n.output] for n in nodes}
        names = {p for n in nodes if n.function is None for p in network.graph.calls[n.call].parameters}
        found: list[torch.Tensor] = [network.model.get_parameter(p) for p in names if _is_parameter(network, p)]
        found += [network.state(r) for n in nodes if n.function is not None for r in n.operands if r.kind == "state"]
        done.parameters = list({id(p): p for p in found if p.requires_grad}.values())
        return done

    def backward(self, store: MapStore, sums: GradientSums) -> None:
        """Backward from the gradients of the outputs to those of the inputs and parameters."""
        outputs = [(t, store.gradients[n]) for n, t in self.outputs.items() if n in store.gradients and t.requires_grad]
        leaves = {n: t for n, t in self.inputs.items() if t.requires_grad}
        wanted = [*leaves.values(), *self.parameters]
        if not outputs or not wanted:
            return
        found = torch.autograd.grad(
            [t for t, _ in outputs],
            wanted,
            [g.to(t.dtype) for t, g in outputs],
            allow_unused=True,
            retain_graph=True,
        )
        for (name, leaf), part in zip(leaves.items(), found, strict=False):
            if part is not None:
                store.add_gradient(name, tuple(leaf.shape), whole(leaf.shape), part)
        sums.add(self.parameters, found[len(leaves) :])


def _is_parameter(network: RegionNetwork, name: str) -> bool:
    holder, _, last = name.rpartition(".")
    return last in network.model.get_submodule(holder)._parameters


@torch.no_grad()
def update_statistics(norm: Norm, moments: torch.Tensor, count: int) -> None:
    """Update the running mean and (unbiased) variance of a batch norm with those of this step."""
    m: Any = norm.module
    if m is None or not m.training or not m.track_running_stats or m.running_mean is None:
        return
    if m.num_batches_tracked is not None:
        m.num_batches_tracked.add_(1)
    factor = 1.0 / float(m.num_batches_tracked) if m.momentum is None else m.momentum
    mean, variance = moments[0].flatten(), moments[1].flatten() * (count / max(1, count - 1))
    m.running_mean.mul_(1 - factor).add_(mean.to(m.running_mean.dtype), alpha=factor)
    m.running_var.mul_(1 - factor).add_(variance.to(m.running_var.dtype), alpha=factor)
