"""The first stage on a grid of ranks: each computes with its part of the image (`outcore.spatial`).

What of the stage needs the whole image at once comes at its end. It runs on what was gathered: with gradients on the
first rank of the grid, which has the loss or hands the values on, and without on the others, whose buffers and random
numbers thereby stay those of the first. Where each rank streams its part in tiles, it runs on the first alone.

Where the network returns one map and the loss is over its pixels (`outcore.stream.PixelLoss`), a plan with ``"loss":
"parts"`` gathers nothing: each rank reads its part of the target, and takes its term of the loss and of the gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from outcore.errors import EngineError, PlanError
from outcore.ops.region import elements
from outcore.run.stage.stage_module import Part, RandomDraws, Values
from outcore.spatial.communicator import Communicator
from outcore.spatial.exchange import new_token
from outcore.spatial.execute import SplitRun, SplitState
from outcore.spatial.layout import SplitLayout
from outcore.spatial.parts import PartGrid, shape_of
from outcore.spatial.stage_layout import cuts_of, layout_of_stage
from outcore.spatial.tiles.run_tiles import loss_of_tiles, own_network, run_tiles
from outcore.spatial.tiles.tiled_stage import tiled_stage
from outcore.stream.execute.pixel_loss import pixel_loss_of, target_region
from outcore.stream.plan.prepared import PreparedStream
from outcore.stream.source import ImageRows, image_of

LOSS_TERM = "term of the loss"
"""Stands for this rank's term of the loss among the values of a stage."""


class SplitStage:
    """Runs a stage's part of the network on one rank of a grid."""

    def __init__(self, spatial: Mapping[str, Any], comm: Communicator, device: torch.device, loss: Any = None) -> None:
        self.spatial, self.comm, self.device = spatial, comm, device
        self.takes_loss = spatial.get("loss") == "parts"
        """Whether the loss is taken in parts."""
        self.loss = pixel_loss_of(loss)
        if self.takes_loss and self.loss is None:
            raise PlanError(
                "the plan takes the loss in parts (spatial.loss), which needs one that is a sum or mean over pixels; "
                "give loss=outcore.stream.PixelLoss(function), or leave out spatial.loss"
            )
        self._known: dict[tuple[int, bool], tuple[Part, SplitLayout, Part | None]] = {}
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
        layout, tail = self._prepared(part, whole=True)
        values, token = self._run_parts(layout, part, inputs, draws)
        if tail is not None:
            tail.place = part.place
            with torch.set_grad_enabled(self.is_first and torch.is_grad_enabled()):
                values |= tail.run(self._given(tail, values, inputs), draws)
        return {n: values[n] for n in part.outputs if n in values}, token

    def run_loss(
        self, part: Part, inputs: Mapping[str, torch.Tensor | ImageRows], target: Any, draws: RandomDraws
    ) -> tuple[Values, torch.Tensor | None]:
        """This rank's term of the loss, as a value of its own name, and the end of the chain of messages."""
        if not isinstance(target, torch.Tensor | ImageRows):
            raise EngineError(
                f"every rank of the grid takes the loss of its part, but rank {self.comm.rank} was given "
                f"{type(target).__name__} as the target; give it a tensor or a source with the pixels of the output"
            )
        assert self.loss is not None
        (name,) = part.graph.outputs
        image, shape = image_of(target), part.graph.values[name].shape
        assert shape is not None
        if image.shape[0] != shape[0] or tuple(image.shape[-(len(shape) - 2) :]) != tuple(shape[2:]):
            raise EngineError(
                f"the target has shape {image.shape}, but the output is {tuple(shape)}; pixels must agree"
            )
        term: torch.Tensor | None = None
        if "tile" in self.spatial:
            prepared, _ = self._tiles(part)
            given = {n: inputs[n] for n in part.inputs}
            token = new_token(self.device) if torch.is_grad_enabled() else None
            grid = self._grid(prepared)
            term, token = loss_of_tiles(prepared, grid, self.comm, given, self.device, token, self.loss, image)
            return {LOSS_TERM: term}, token
        layout, _ = self._prepared(part, whole=False)
        values, token = self._run_parts(layout, part, inputs, draws)
        if (own := layout.grid.own(layout.network, name, self.comm.rank)) is not None:
            part.place.call = "loss"
            region = target_region(image.shape, own)
            share = elements(region) / elements(tuple((0, n) for n in image.shape))
            wanted = image.prepare(image.read(region).to(self.device, non_blocking=True))
            term = self.loss.term(values[name], wanted, share)
        elif token is not None:
            term = token * 0  # depends on parameters as all terms do
        return {LOSS_TERM: torch.zeros((), device=self.device) if term is None else term}, token

    def _prepared(self, part: Part, *, whole: bool) -> tuple[SplitLayout, Part | None]:
        key = (id(part), whole)
        if key not in self._known:
            layout = layout_of_stage(part.graph, part.calls, self.spatial, whole=whole)
            rest = set(part.calls - layout.extent.calls)
            self._known[key] = part, layout, part.restricted(rest) if rest else None
        return self._known[key][1:]

    def _run_parts(
        self,
        layout: SplitLayout,
        part: Part,
        inputs: Mapping[str, torch.Tensor | ImageRows],
        draws: RandomDraws,
    ) -> tuple[Values, torch.Tensor | None]:
        """The values of the boundary, and the end of the chain of messages."""

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
            return run.run({n: inputs[n] for n in part.inputs}), run.token

    def _given(self, tail: Part, values: Values, inputs: Mapping[str, torch.Tensor | ImageRows]) -> Values:
        return {n: values[n] if n in values else inputs[n].to(self.device) for n in tail.inputs}

    def _run_tiles(
        self, part: Part, inputs: Mapping[str, torch.Tensor | ImageRows], draws: RandomDraws
    ) -> tuple[Values, torch.Tensor | None]:
        """The same where this rank streams its part; what follows the boundary runs on the first rank alone."""
        prepared, tail = self._tiles(part)
        grid = self._grid(prepared)
        token = new_token(self.device) if torch.is_grad_enabled() else None
        given = {n: inputs[n] for n in part.inputs}
        values, token = run_tiles(prepared, grid, self.comm, given, self.device, token)
        if tail is not None and self.is_first:
            tail.place = part.place
            values |= tail.run(self._given(tail, values, inputs), draws)
        return {n: values[n] for n in part.outputs if n in values}, token

    def _grid(self, prepared: PreparedStream) -> PartGrid:
        return PartGrid(shape_of(tuple(self.spatial["grid"]), prepared.network.rank), cuts_of(self.spatial))

    def _tiles(self, part: Part) -> tuple[PreparedStream, Part | None]:
        if id(part) not in self._tiled:
            self._tiled[id(part)] = (part, *self._prepare_tiles(part))
        return self._tiled[id(part)][1:]

    def _prepare_tiles(self, part: Part) -> tuple[PreparedStream, Part | None]:
        network = own_network(part.graph, part, part.recording())
        found = tiled_stage(
            network, part.calls, self.spatial["tile"], random=part.random_calls, in_parts=self.takes_loss
        )
        return found.prepared, part.restricted(set(found.rest)) if found.rest else None
