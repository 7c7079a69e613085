"""One step of the streamed part: forward over the tiles, and backward over them again.

Forward runs every tile without gradients and keeps only what leaves it: its piece of the boundary map, its terms of
the statistics. Backward runs every tile once more, with gradients on, hands it its slice of the gradients and adds up
what it sends to parameters and inputs. The tiles' graphs are freed one by one, so memory is that of one tile and of
the maps.

Sums over tiles are kept in float32 where the tensors are of half precision: hundreds of small terms are added.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from outcore.graph.recording import Context, Ref
from outcore.ops.region import Region
from outcore.stream.ahead import read_ahead
from outcore.stream.call import Given
from outcore.stream.globals import Globals
from outcore.stream.network import Network
from outcore.stream.rules.border import sliced
from outcore.stream.running import update_statistics
from outcore.stream.source import Image
from outcore.stream.stages import Stage, Streaming
from outcore.stream.store import Store
from outcore.stream.sums import Sums
from outcore.stream.tile_run import run_tile
from outcore.stream.tiles import Grid, TilePlan, plan_tile
from outcore.stream.twins import Family, Twins, colour, signature

__all__ = ["Counts", "Execution", "Options"]


@dataclass(frozen=True)
class Options:
    """How tiles are run."""

    workers: int = 0
    """Threads that read ahead; 0 to read when needed."""
    twins: bool = True
    """Compute tiles of equal, constant pixels once."""
    maps_on_host: bool = False
    """Keep maps in host memory."""


@dataclass
class Counts:
    """What was run."""

    forward: int = 0
    backward: int = 0
    reused: int = 0
    """Tiles that equal one computed before, forward and backward."""
    waited_s: float = 0.0
    """Time in which a tile was to be computed and its pixels were not there."""


@dataclass
class Execution:
    """The streamed part of one step."""

    network: Network
    streaming: Streaming
    grids: Sequence[Grid]
    images: Mapping[str, Image]
    """Streamed inputs."""
    others: Mapping[str, torch.Tensor]
    """Inputs that every tile gets whole."""
    wants: frozenset[str]
    """Inputs whose gradient is wanted."""
    device: torch.device
    context: Context
    seed: int
    options: Options = field(default_factory=Options)
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        homes = {}
        if self.options.maps_on_host:
            homes = {m: torch.device("cpu") for stage in self.streaming.stages for m in stage.maps}
        self.store = Store(self.device, homes, dict(self.others))
        self.given = Given(self.seed)
        self.states: dict[str, Any] = {}
        self.globals: list[Globals] = []
        self.twins = [Twins() for _ in self.streaming.stages]

    # Forward

    def forward(self) -> dict[str, torch.Tensor]:
        """The boundary values."""
        for index in range(len(self.streaming.stages)):
            self.forward_stage(index)
        return {v: self.store.values[v] for v in self.streaming.boundary}

    def output_tiles(self) -> Iterator[tuple[Region, torch.Tensor]]:
        """The parts of the one map that the last stage makes, one after the other."""
        last = len(self.streaming.stages) - 1
        for index in range(last):
            self.forward_stage(index)
        self.run_globals(last)
        stage = self.streaming.stages[last]
        state = self._state(stage)
        (name,) = stage.maps
        twins: dict[Hashable, torch.Tensor] = {}
        for plan, crops in self._read(stage, self.plans(last)):
            key = self._key(stage, plan, crops)
            part = twins.get(key)
            if part is None:
                prepared = self._prepared(stage, plan, crops)
                part = self._targets(stage, plan, run_tile(self.network, stage, plan, prepared, state, self.given))[
                    name
                ]
                self.counts.forward += 1
            else:
                self.counts.reused += 1
            if key is not None:
                twins[key] = part
            yield plan.targets[name], part

    def run_globals(self, index: int) -> None:
        """The small nodes before a pass."""
        done = Globals.run(self.network, self.streaming.stages[index].globals, self.store.values, self.wants)
        self.globals.append(done)
        self.store.values.update({name: t.detach() for name, t in done.outputs.items()})

    def forward_stage(self, index: int) -> None:
        """One pass, with the small nodes before it."""
        self.run_globals(index)
        with torch.no_grad():
            self._pass(index, self.streaming.stages[index])

    def plans(self, index: int) -> Iterator[TilePlan]:
        """The tiles of a stage."""
        for number in self.grids[index].tiles():
            plan = plan_tile(self.network, self.streaming.stages[index], self.grids[index], number)
            if plan is not None:
                yield plan

    def _pass(self, index: int, stage: Stage) -> None:
        state = self._state(stage)
        twins = self.twins[index]
        sums = {r.output: r.reduction.start() for r in stage.reductions if r.reduction is not None}
        for plan, crops in self._read(stage, self.plans(index)):
            key = self._key(stage, plan, crops)
            if (family := twins.find(key)) is not None and family.made is not None:
                made = family.made
                family.plans.append(plan)
                self.counts.reused += 1
            else:
                prepared = self._prepared(stage, plan, crops)
                made = self._targets(stage, plan, run_tile(self.network, stage, plan, prepared, state, self.given))
                del prepared
                twins.found(key, plan, made)
                self.counts.forward += 1
            for name, region in plan.targets.items():
                if name in stage.maps:
                    self.store.write(name, self.network.shapes[name], region, made[name])
                elif (reduction := self.network.nodes[name].reduction) is not None:
                    sums[name] = reduction.add(sums[name], made[name], region, 1)
            del made, crops, family  # a tile must be gone when the next one begins
        twins.forget()
        self.states.update(sums)
        for node in stage.reductions:
            assert node.reduction is not None
            self.store.values[node.output] = node.reduction.finish(sums[node.output])
            if node.norm is not None:
                update_statistics(node.norm, self.store.values[node.output], sums[node.output][0])

    # Backward

    def backward(self, gradients: Mapping[str, torch.Tensor | None]) -> tuple[Sums, dict[str, torch.Tensor]]:
        """Sums of the parameters' gradients, and the gradients of the inputs that want one.

        Args:
            gradients: of the boundary values.
        """
        sums = Sums()
        read = {v for stage in self.streaming.stages for v in (*stage.sources, *stage.smalls)}
        read |= {v for done in self.globals for v in done.inputs}
        self.store.gradients = {  # what is added to must be ours
            name: g.clone() if name in read else g for name, g in gradients.items() if g is not None
        }
        self.backward_stages(len(self.streaming.stages), sums)
        return sums, {name: self.store.gradients[name] for name in self.wants if name in self.store.gradients}

    def backward_stages(self, count: int, sums: Sums) -> None:
        """Send back through the first stages what has arrived at what they made."""
        with self.context.entered():
            for index in reversed(range(count)):
                self._backward_stage(index, self.streaming.stages[index], sums)
                self.globals[index].backward(self.store, sums)

    def _backward_stage(self, index: int, stage: Stage, sums: Sums) -> None:
        if not any(t in self.store.gradients for t in stage.targets):
            return
        state = self._state(stage)
        parameters = list({id(t): t for t in state.values() if t.requires_grad}.values())
        families = {id(f.plans[0]): f for f in self.twins[index].families}
        for plan, crops in self._read(stage, (f.plans[0] for f in self.twins[index].families)):
            family = families[id(plan)]
            prepared = self._prepared(stage, plan, crops)
            leaves = {name: crop.requires_grad_() for name, crop in prepared.items() if self._wants(name)}
            made = run_tile(self.network, stage, plan, prepared, state, self.given)
            outputs, received = self._received(stage, family, self._targets(stage, plan, made))
            self.counts.backward += 1
            self.counts.reused += len(family.plans) - 1
            del made, prepared, crops
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

    def _received(
        self, stage: Stage, family: Family, made: Mapping[str, torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What a tile gives, and the gradient of it; of twins, the sum of their gradients."""
        outputs: list[torch.Tensor] = []
        received: list[torch.Tensor] = []
        plan = family.plans[0]
        for name, region in plan.targets.items():
            gradient = self.store.gradient(name, region) if name in stage.maps else self.store.gradients.get(name)
            output = made[name]
            if gradient is None:
                continue
            if name in stage.maps:
                for twin in family.plans[1:]:
                    more = self.store.gradient(name, twin.targets[name])
                    gradient = gradient + more if more is not None else gradient
            else:
                reduction = self.network.nodes[name].reduction
                assert reduction is not None
                result = self.store.values[name]
                output = reduction.share(output, region, result, self.states[name], len(family.plans))
            if output.requires_grad:
                outputs.append(output)
                received.append(gradient.to(output.dtype))
        return outputs, received

    # Tiles

    def _read(self, stage: Stage, plans: Iterator[TilePlan]) -> Iterator[tuple[TilePlan, dict[str, torch.Tensor]]]:
        """Each tile with what its images hold there, read ahead."""
        images = [name for name in stage.sources if name in self.images]

        def read(plan: TilePlan) -> dict[str, torch.Tensor]:
            crops = {}
            for name in images:
                if name in plan.regions:
                    crop = self.images[name].read(plan.regions[name])
                    if self.device.type == "cuda" and crop.device.type == "cpu" and self.options.workers:
                        crop = crop.contiguous().pin_memory()
                    crops[name] = crop
            return crops

        return self._timed(read_ahead(plans, read, self.options.workers))

    def _timed(
        self, tiles: Iterator[tuple[TilePlan, dict[str, torch.Tensor]]]
    ) -> Iterator[tuple[TilePlan, dict[str, torch.Tensor]]]:
        """The same, with the waiting counted."""
        while True:
            start = time.perf_counter()
            tile = next(tiles, None)
            self.counts.waited_s += time.perf_counter() - start
            if tile is None:
                return
            yield tile
            del tile

    def _key(self, stage: Stage, plan: TilePlan, crops: Mapping[str, torch.Tensor]) -> Any:
        """What tiles must have in common to be twins; none for a tile that has no twin."""
        if not self.options.twins or set(stage.sources) - set(self.images) or self.wants:
            return None
        colours = []
        for name, crop in crops.items():
            if (found := colour(crop)) is None:
                return None
            colours.append((name, found))
        return tuple(colours), signature(stage, plan)

    def _prepared(self, stage: Stage, plan: TilePlan, crops: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """All that a tile reads, on the device."""
        found = {}
        for name in (*stage.sources, *stage.smalls):
            if (region := plan.regions.get(name)) is None:
                continue
            if name in crops:
                crop = crops[name]
                moved = crop.to(self.device, non_blocking=True) if crop.device != self.device else crop
                found[name] = self.images[name].prepare(moved).detach()
            else:
                found[name] = self.store.read(name, region).detach()
        return found

    def _targets(self, stage: Stage, plan: TilePlan, made: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Each target's part, cut to its tile."""
        return {
            name: sliced(made[stage.targets[name]], plan.regions[stage.targets[name]], region)
            for name, region in plan.targets.items()
        }

    def _state(self, stage: Stage) -> dict[Ref, torch.Tensor]:
        return {ref: self.network.state(ref) for n in stage.nodes for ref in n.operands if ref.kind != "value"}

    def _wants(self, name: str) -> bool:
        """Whether the gradient of a source or a global value is of use."""
        if name in self.network.graph.inputs:
            return name in self.wants
        return self.network.dtypes[name].is_floating_point
