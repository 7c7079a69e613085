"""The first stage on a grid of ranks: each computes with its part of the image (`outcore.spatial`).

What of the stage needs the whole image at once comes at its end. It runs on what was gathered: with gradients on the
first rank of the grid, which has the loss or hands the values on, and without on the others, whose buffers and random
numbers thereby stay those of the first. Where each rank streams its part in tiles, it runs on the first alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from outcore.errors import PlanError
from outcore.run.stage.random_draws import RandomDraws
from outcore.run.stage.stage_module import Part, Values
from outcore.spatial.communicator import Communicator
from outcore.spatial.exchange import new_token
from outcore.spatial.execute import SplitRun, SplitState
from outcore.spatial.layout import SplitLayout
from outcore.spatial.parts import PartGrid, shape_of
from outcore.spatial.stage_layout import cuts_of, layout_of_stage
from outcore.spatial.tiles import own_network, run_tiles
from outcore.stream.plan.prepared import PreparedStream, divided
from outcore.stream.source import ImageRows

__all__ = ["SplitStage"]


class SplitStage:
    """Runs a stage's part of the network on one rank of a grid."""

    def __init__(self, spatial: Mapping[str, Any], comm: Communicator, device: torch.device) -> None:
        self.spatial, self.comm, self.device = spatial, comm, device
        self._known: dict[int, tuple[Part, SplitLayout, Part | None]] = {}
        self._tiled: dict[int, tuple[Part, PreparedStream, Part | None]] = {}

    @property
    def is_first(self) -> bool:
        """Whether this rank has what the stage makes, whole and with gradients."""
        return self.comm.rank == 0

    def run(
        self, part: Part, inputs: Mapping[str, torch.Tensor | ImageRows], draws: RandomDraws
    ) -> tuple[Values, torch.Tensor | None]:
        """The values that the stage makes, and the end of the chain of messages that backward must follow."""
        if "tile" in self.spatial:
            return self._run_tiles(part, inputs, draws)
        if id(part) not in self._known:
            self._known[id(part)] = (part, *self._prepare(part))
        _, layout, tail = self._known[id(part)]

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
                values |= tail.run(self._given(tail, values, inputs), draws)
        return {n: values[n] for n in part.outputs if n in values}, run.token

    def _given(self, tail: Part, values: Values, inputs: Mapping[str, torch.Tensor | ImageRows]) -> Values:
        return {n: values[n] if n in values else inputs[n].to(self.device) for n in tail.inputs}

    def _prepare(self, part: Part) -> tuple[SplitLayout, Part | None]:
        layout = layout_of_stage(part.graph, part.calls, self.spatial)
        rest = set(part.calls - layout.extent.calls)
        return layout, part.restricted(rest) if rest else None

    def _run_tiles(
        self, part: Part, inputs: Mapping[str, torch.Tensor | ImageRows], draws: RandomDraws
    ) -> tuple[Values, torch.Tensor | None]:
        """The same where this rank streams its part; what follows the boundary runs on the first rank alone."""
        if id(part) not in self._tiled:
            self._tiled[id(part)] = (part, *self._prepare_tiles(part))
        _, prepared, tail = self._tiled[id(part)]
        network = prepared.network
        grid = PartGrid(shape_of(tuple(self.spatial["grid"]), network.rank), cuts_of(self.spatial))
        token = new_token(self.device) if torch.is_grad_enabled() else None
        given = {n: inputs[n] for n in part.inputs}
        values, token = run_tiles(prepared, grid, self.comm, given, self.device, token)
        if tail is not None and self.is_first:
            tail.place = part.place
            values |= tail.run(self._given(tail, values, inputs), draws)
        return {n: values[n] for n in part.outputs if n in values}, token

    def _prepare_tiles(self, part: Part) -> tuple[PreparedStream, Part | None]:
        network = own_network(part.graph, part, part.recording())
        prepared = divided(network, tile=self.spatial["tile"], statistics=True)
        streamed = frozenset(prepared.streaming.calls)
        if beyond := sorted(streamed - part.calls):
            raise PlanError(
                f"tiles reach {beyond[0]}, which is in a later stage; put all of the network into one stage"
            )
        if part.draws_in(streamed):
            raise PlanError("a layer draws random numbers in what ranks would stream in tiles; leave out spatial.tile")
        rest = set(part.calls - streamed)
        return prepared, part.restricted(rest) if rest else None
