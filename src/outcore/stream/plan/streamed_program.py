"""A streamed step as a program of one stage, with what the checker and the simulator need beside it."""

from __future__ import annotations

from dataclasses import dataclass

from outcore.graph import Graph
from outcore.program import Backward, Forward, Instruction, Links, OptimizerStep, Program, Stage, Stages, Timeline
from outcore.program import check as check_program
from outcore.program import simulate as simulate_program
from outcore.program.script import Script
from outcore.stream.plan.prepared import StreamMode
from outcore.stream.plan.tile_memory import StreamBytes

__all__ = ["StreamedProgram"]


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
