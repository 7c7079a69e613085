"""A streamed step, written as a `Script`: what is checked, timed and run is this, and nothing else.

`emit` writes down what streaming a network by a boundary, tiles and kept maps means. Forward goes through the passes:
small global nodes first, then every tile, whose pixels are read ahead; then what follows the boundary, untiled.
Backward is the other direction, and runs every tile again:

    forward   [Run(globals)] Pass(pass 0) Tile(0) Tile(1) …  [Run(globals)] Pass(pass 1) Tile(0) …  Run(tail)
    backward  Run(tail)  Pass(pass 1, gradient) Tile(0) Tile(1) … [Run(globals)]  Pass(pass 0, gradient) …

Where a loss over pixels is taken tile by tile, the last pass has its gradients in forward, and only those before it are
in the backward. The static checks of `outcore.program` run on the result, the simulator times it and follows its
memory, and `outcore.stream.execute.tile_schedule` compiles from it what is executed.

What parts of the step take (`StepFigures`) may be left out: the order is the same then, and all figures are zero. With
them, the simulated peak is the planned one (`StreamBytes.peak`), since both add up the same parts.

`StreamedProgram` is such a step as a program of one stage, with what the checker and the simulator need beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from outcore.graph import Graph
from outcore.program import Backward, Forward, Instruction, Links, OptimizerStep, Program, Stage, Stages, Timeline
from outcore.program import check as check_program
from outcore.program import simulate as simulate_program
from outcore.program.script import Action, Pass, Run, Script, Tile
from outcore.stream.network import RegionNode
from outcore.stream.plan.prepared import PreparedStream, StreamMode
from outcore.stream.plan.step_figures import StepFigures, TileCost
from outcore.stream.plan.tile_memory import StreamBytes


def pass_name(index: int) -> str:
    """The name of a pass in a script."""
    return f"pass {index}"


def emit(prepared: PreparedStream, mode: StreamMode, figures: StepFigures | None = None) -> tuple[Script, Script]:
    """The scripts of a streamed step's forward and backward.

    Args:
        prepared: the network in passes and tiles.
        mode: how it is run.
        figures: what its parts take.
    """
    return _Writer(prepared, mode, figures).scripts()


class _Writer:
    """Writes the two scripts of one step."""

    def __init__(self, prepared: PreparedStream, mode: StreamMode, figures: StepFigures | None) -> None:
        self.prepared, self.mode, self.figures = prepared, mode, figures
        self.network, self.stages = prepared.network, prepared.streaming.stages
        self.inputs = set(self.network.graph.inputs)
        self.kept = set(prepared.streaming.kept)
        named = {c for stage in self.stages for c in _calls((*stage.globals, *stage.nodes, *stage.reductions))}
        self.unnamed = tuple(c for c in self.network.graph.calls if c in prepared.streaming.calls and c not in named)
        """Calls that no node of any pass is left of: what they make is a shape, or read through another name."""

    def scripts(self) -> tuple[Script, Script]:
        """Both scripts."""
        forward: list[Action] = []
        backward: list[Action] = []
        last = len(self.stages) - 1
        for index in range(len(self.stages)):
            at_once = self.mode.training and self.mode.dense and index == last
            forward += self.globals(index, gradient=False)
            forward += self.tiles(index, gradient=at_once, forward=True)
        tail = self.tail()
        forward += tail[0]
        if not self.mode.training:
            return tuple(forward), ()
        backward += tail[1]
        for index in reversed(range(len(self.stages))):
            if not (self.mode.dense and index == last):
                backward += self.tiles(index, gradient=True, forward=False)
            backward += self.globals(index, gradient=True)
        return tuple(forward), tuple(backward)

    def globals(self, index: int, *, gradient: bool) -> Script:
        """The global nodes before a pass, run once."""
        nodes = self.stages[index].globals
        if not nodes:
            return ()
        makes = tuple(n.output for n in nodes)
        reads = dict.fromkeys(v for n in nodes for v in n.values if v not in makes and v not in self.inputs)
        saves = 0 if gradient else self.held(makes)
        beside = self.figures.beside_bytes if self.figures is not None else 0
        return (Run(_calls(nodes), 0.0, saves, beside, tuple(reads), makes),)

    def tiles(self, index: int, *, gradient: bool, forward: bool) -> Script:
        """One pass over the tiles."""
        stage, kinds = self.stages[index], self.prepared.kinds[index]
        if not stage.makes:  # only global nodes
            return ()
        begin = Pass(
            pass_name(index),
            len(kinds.numbers),
            _calls((*stage.nodes, *stage.reductions)) + (self.unnamed if index == 0 else ()),
            reads=tuple(v for v in (*stage.sources, *stage.smalls) if v not in self.inputs),
            makes=stage.makes,
            on_host=tuple(v for v in stage.maps if v in self.kept) if self.prepared.on_host else (),
            ahead=self.mode.ahead,
            gradient=gradient,
            saves=self.held(stage.makes) if forward else 0,
        )
        costs = self.figures.tiles(index) if self.figures is not None else None
        cheap = TileCost(0)
        tiles = []
        for place, number in enumerate(kinds.numbers):
            cost = cheap if costs is None else costs[kinds.size(number)]
            again_s = 0.0 if forward else cost.forward_s
            seconds = cost.forward_s + (cost.backward_s if gradient else 0.0)
            held = cost.backward_bytes if gradient else cost.forward_bytes
            tiles.append(Tile(begin.name, place, cost.kind, seconds, again_s, held))
        return (begin, *tiles)

    def tail(self) -> tuple[Script, Script]:
        """What follows the boundary."""
        calls = tuple(step.name for step in self.prepared.tail if step.name in self.network.graph.calls)
        if not calls:
            return (), ()
        boundary = self.prepared.streaming.boundary
        if self.figures is None:
            whole: Script = (Run(calls, reads=boundary),)
            return whole, whole
        # The boundary is read once, for all calls of the tail; what follows may be a script of its own.
        forward, backward = self.figures.tail_scripts()
        return (_whole(calls, boundary, forward), *forward), (_whole(calls, boundary, backward), *backward)

    def held(self, values: Iterable[str]) -> int:
        """Bytes on the device of the values that are put together and stay."""
        if self.figures is None:
            return 0
        boundary = set() if self.mode.dense else set(self.prepared.streaming.boundary)
        stay = boundary - self.kept if self.prepared.on_host else boundary | self.kept
        network = self.network
        return sum(math.prod(network.shapes[v]) * network.dtypes[v].itemsize for v in values if v in stay)


def _whole(calls: tuple[str, ...], boundary: tuple[str, ...], script: Script) -> Run:
    """The run that stands for all calls of the tail, before the script that says how they are held."""
    first = next((action.bytes for action in script if isinstance(action, Run)), 0)
    return Run(calls, 0.0, 0, first, reads=boundary)


def _calls(nodes: Iterable[RegionNode]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(c for n in nodes for c in (n.call, *n.absorbed)))


@dataclass(frozen=True)
class StreamedProgram:
    """The scripts of a streamed step, and the memory that is held around them."""

    forward: Script
    backward: Script
    calls: tuple[str, ...]
    """Of the network."""
    bytes: StreamBytes
    shapes: tuple[tuple[int, ...], ...]
    """Of its inputs."""
    mode: StreamMode
    links: Links | None = None
    """The link below the device, where the untiled tail copies over it."""

    def is_for(self, graph: Graph, mode: StreamMode) -> bool:
        """Whether it is a step of this graph, at its size."""
        shapes = tuple(graph.values[name].shape for name in graph.inputs)
        return (self.calls, self.shapes, self.mode) == (tuple(graph.calls), shapes, mode)

    @property
    def program(self) -> Program:
        """One forward; in training one backward and, where there are gradients, one update."""
        instructions: list[Instruction] = [Forward(0, 0, script=self.forward)]
        if self.bytes.training:
            instructions.append(Backward(0, 0, script=self.backward))
            if self.bytes.gradients:
                instructions.append(OptimizerStep(0))
        return Program("stream", (tuple(instructions),))

    def stages(self, reserved_bytes: int = 0) -> Stages:
        """The stage of that program.

        Args:
            reserved_bytes: what is held throughout beside the network: the optimizer's state, the loss.
        """
        held = self.bytes
        whole = Stage(self.calls, 0.0, 0.0, 0, 0, held.parameters, held.gradients, reserved_bytes)
        return Stages((whole,), ())

    def simulate(self, reserved_bytes: int = 0) -> Timeline:
        """The timeline of a step, tile by tile, with its memory; a program that breaks a rule has none."""
        self.check()
        return simulate_program(self.program, self.stages(reserved_bytes), self.links)

    def check(self) -> None:
        """Raise `ProgramError` if the program breaks a rule."""
        check_program(self.program, self.stages(), links=self.links)
