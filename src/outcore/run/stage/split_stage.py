"""The first stage on a grid of ranks: each computes with its part of the image (`outcore.spatial`).

What of the stage needs the whole image at once comes at its end. It runs on what was gathered: with gradients on the
first rank of the grid, which has the loss or hands the values on, and without on the others, whose buffers and random
numbers thereby stay those of the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from outcore.run.stage.random_draws import RandomDraws
from outcore.run.stage.stage_module import Part, Values
from outcore.spatial.communicator import Communicator
from outcore.spatial.execute import SplitRun, SplitState
from outcore.spatial.layout import SplitLayout
from outcore.spatial.stage_layout import layout_of_stage
from outcore.stream.source import ImageRows

__all__ = ["SplitStage"]


class SplitStage:
    """Runs a stage's part of the network on one rank of a grid."""

    def __init__(self, spatial: Mapping[str, Any], comm: Communicator, device: torch.device) -> None:
        self.spatial, self.comm, self.device = spatial, comm, device
        self._known: dict[int, tuple[Part, SplitLayout, Part | None]] = {}

    @property
    def is_first(self) -> bool:
        """Whether this rank has what the stage makes, whole and with gradients."""
        return self.comm.rank == 0

    def run(
        self, part: Part, inputs: Mapping[str, torch.Tensor | ImageRows], draws: RandomDraws
    ) -> tuple[Values, torch.Tensor | None]:
        """The values that the stage makes, and the end of the chain of messages that backward must follow."""
        if id(part) not in self._known:
            self._known[id(part)] = (part, *self._prepare(part))
        _, layout, tail = self._known[id(part)]
        inputs = dict(inputs)

        def before(call: str) -> None:
            part.place.call = call
            if part.draws_in((call,)):
                draws.seed(call)

        steps = part.recording()
        state = SplitState(
            self.comm,
            self.device,
            part,
            steps.constants,
            {step.name: step for step in steps.steps},
            steps.ambient,
            before,
        )
        run = SplitRun(layout, state)
        with draws.aside():
            values = run.run({n: inputs[n] for n in part.inputs})
        if tail is not None:
            tail.place = part.place
            with torch.set_grad_enabled(self.is_first and torch.is_grad_enabled()):
                given = {n: values[n] if n in values else inputs[n].to(self.device) for n in tail.inputs}
                values |= tail.run(given, draws)
        return {n: values[n] for n in part.outputs if n in values}, run.token

    def _prepare(self, part: Part) -> tuple[SplitLayout, Part | None]:
        layout = layout_of_stage(part.graph, part.calls, self.spatial)
        rest = set(part.calls - layout.extent.calls)
        return layout, part.restricted(rest) if rest else None
