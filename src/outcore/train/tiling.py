"""A network in tiles: planned once for a run, kept in its folder, and taken from there when the run goes on.

Planning for a large slide takes a while and depends on what is known of the device; a run that goes on must do bitwise
what it would have done, so it takes the tiles it had. The same document may be given by hand (``plan.file``).

Much of a slide is glass, and tiles of one colour are computed once. How many there are is seen on the coarsest level of
the first slide, so that the time that is expected is that of the tissue.

On a GPU the channels of images come last. With pixels last an H200 took 9.9 GiB at once in the backward of one tile: by
the sizes beside it cuDNN's workspace for a convolution of 16 channels, which it turns around; no prediction knows it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outcore.cost.estimate import estimate
from outcore.cost.optimizer import OptimizerCost
from outcore.data import Batch
from outcore.data.slide import SlideLevel
from outcore.errors import PlanError
from outcore.graph import capture
from outcore.job import Job
from outcore.machine.units import format_bytes
from outcore.plan_document import Plan, Predicted
from outcore.stream import plan_tiles, stream
from outcore.stream.streamed import Streamed
from outcore.train.config import Config
from outcore.train.precision import computing
from outcore.train.schedules import make_optimizer
from outcore.train.start import Forecast, device_here, duration

__all__ = ["apply_tiles", "arranged", "computed_share", "plan_stream", "readers"]

_FOUND_S = 1.5e-4
"""Host time to find a tile and to tell that it is glass and was computed before: 0.08 s for 576 of them."""
_KINDS_OF_GLASS = 9
"""Tiles of one colour that are computed nevertheless: one in the middle, at each edge and in each corner."""


def plan_stream(model: nn.Module, job: Job, config: Config, expected: Forecast, inputs: Any, budget: int) -> Plan:
    """Boundary and tiles for a budget; the optimizer's state is counted too.

    Raises:
        PlanError: the budget is too small; names the smallest that works.
        StreamError: nothing can be streamed.
    """
    name, device = device_here(config.train.device)
    model = arranged(model)
    trained = {n: p.numel() * p.element_size() for n, p in model.named_parameters() if p.requires_grad}
    state = OptimizerCost.of(make_optimizer(config.optimizer, job)).state_bytes(trained)
    with computing(config.train.precision, torch.device(name).type):
        graph = capture(model, list(expected.shapes))
        costs = estimate(graph, device)
        try:
            found = plan_tiles(graph, memory=max(1, budget - state), costs=costs, statistics=config.plan.statistics)
        except PlanError as error:
            if error.least_bytes is None:
                raise
            least, beside = format_bytes(error.least_bytes + state), format_bytes(state)
            said = f"streaming needs at least {least}, {beside} of it for the optimizer's state; give at least that"
            raise PlanError(said) from None
    share = computed_share(inputs, found.tile, found.overlap)
    step_s = found.time_s * share + found.passes * found.tiles * _FOUND_S
    said = str(found)
    if share < 1:
        said += f", about {100 * share:.0f} % of it tissue"
    recorded = expected.graph if expected.graph is not None else graph
    return Plan(
        recorded.fingerprint,
        (("",),),
        exactness="reassociated",
        stream=found.document(),
        memory_bytes=budget,
        predicted=Predicted(step_s, (found.peak_bytes + state,), 0.0, "estimate"),
        why=(f"{said}, {duration(step_s)} a step",),
    )


def apply_tiles(model: nn.Module, plan: Plan) -> Streamed:
    """The model, streamed as a plan says."""
    assert plan.stream is not None
    boundary = plan.stream.get("boundary")
    return stream(
        arranged(model),
        tile=tuple(plan.stream["tile"]),
        boundary=None if boundary is None else tuple(boundary),
        statistics=bool(plan.stream.get("statistics", False)),
        workers=readers(model),
    )


def readers(model: nn.Module) -> int:
    """Threads that read the tiles of a slide ahead: a GPU leaves the host's cores free for it."""
    return 4 if any(p.is_cuda for p in model.parameters()) else 2


def arranged(model: nn.Module) -> nn.Module:
    """The model itself, its weights in the layout in which its device convolves images."""
    on_gpu = any(p.is_cuda for p in model.parameters())
    return model.to(memory_format=torch.channels_last) if on_gpu else model  # type: ignore[call-overload]


def computed_share(inputs: Any, tile: tuple[int, ...], overlap: float = 1.0) -> float:
    """The share of a slide's tiles that are not of one colour, by its coarsest level; 1 where there is none.

    Args:
        inputs: what a step is given.
        tile: pixels of a tile along each dimension.
        overlap: numbers that all tiles compute over those of the whole: how far tiles reach beyond themselves.
    """
    given = inputs[0] if isinstance(inputs, (tuple, list)) and inputs else inputs
    if not isinstance(given, Batch) or len(given.sources) != 1 or not isinstance(given.sources[0], SlideLevel):
        return 1.0
    here = given.sources[0]
    coarse = here.slide.at(level=len(here.slide.levels) - 1)
    if len(tile) != 2 or coarse.shape == here.shape:
        return 1.0
    pixels = coarse.read([(0, n) for n in coarse.shape]).float()
    by = [large / small for large, small in zip(here.shape[1:], coarse.shape[1:], strict=True)]
    changes = _changes(pixels)
    reach = math.sqrt(overlap) - 1  # layers reach ever less far; the first, twice what they do on average
    counts = [-(-n // t) for n, t in zip(here.shape[1:], tile, strict=True)]
    drawn = 0
    for row in range(counts[0]):
        for column in range(counts[1]):
            window = [
                slice(max(0, math.floor((k - reach) * t / b)), math.ceil((k + 1 + reach) * t / b))
                for k, t, b in zip((row, column), tile, by, strict=True)
            ]
            drawn += bool(changes[window[0], window[1]].any())
    whole = counts[0] * counts[1]
    return min(1.0, (drawn + min(_KINDS_OF_GLASS, whole - drawn)) / whole)


def _changes(pixels: Tensor) -> Tensor:
    """Where a pixel differs from a neighbour."""
    around = F.max_pool2d(pixels[None], 3, 1, 1)[0] != -F.max_pool2d(-pixels[None], 3, 1, 1)[0]
    return around.any(0)
